//! A pool of equal blocks: who owns each, and which free one is handed out next.
//!
//! Free blocks form a queue threaded through two arrays, so that taking, returning and pulling one out of the middle
//! (a prefix-cache hit) cost the same few writes. The queue is least recently freed first, which is what makes cached
//! prefixes survive as long as possible.
//!
//! Invariant: a block is in the queue if and only if it has no owner. A block has more than one owner only when
//! requests share a prefix.

/// Ids are `first..first + usable`; `first` is 1 where block 0 is the null block.
#[derive(Debug)]
pub struct BlockPool {
    /// Neighbours in the queue; index 0 is the block with id `first`, the last index is the sentinel that joins both ends.
    next: Vec<u32>,
    previous: Vec<u32>,
    owners: Vec<u32>,
    first: u32,
    free: usize,
}

impl BlockPool {
    /// A pool of `blocks` blocks, of which the null block (id 0), if there is one, is never handed out.
    pub fn new(blocks: usize, null_block: bool) -> Self {
        let first = u32::from(null_block);
        let usable = blocks.saturating_sub(first as usize);
        let nodes = usable as u32 + 1;
        Self {
            next: (0..nodes).map(|node| (node + 1) % nodes).collect(),
            previous: (0..nodes).map(|node| (node + nodes - 1) % nodes).collect(),
            owners: vec![0; usable],
            first,
            free: usable,
        }
    }

    /// Blocks that can be handed out at all.
    pub fn usable(&self) -> usize {
        self.owners.len()
    }

    pub fn free(&self) -> usize {
        self.free
    }

    pub fn used(&self) -> usize {
        self.usable() - self.free
    }

    pub fn owners(&self, block: u32) -> u32 {
        self.owners[self.node(block)]
    }

    /// The least recently freed block, now owned once. `None` when all are owned.
    pub fn take(&mut self) -> Option<u32> {
        let node = self.next[self.sentinel()] as usize;
        if node == self.sentinel() {
            return None;
        }
        self.unlink(node);
        self.owners[node] = 1;
        Some(node as u32 + self.first)
    }

    /// Adds an owner to a block that may be free (a prefix-cache hit).
    pub fn share(&mut self, block: u32) {
        let node = self.node(block);
        if self.owners[node] == 0 {
            self.unlink(node);
        }
        self.owners[node] += 1;
    }

    /// Takes one owner away; the block joins the end of the queue when it was the last.
    pub fn give_back(&mut self, block: u32) {
        let node = self.node(block);
        debug_assert!(self.owners[node] > 0, "block {block} given back more often than taken");
        self.owners[node] -= 1;
        if self.owners[node] == 0 {
            self.link_last(node);
        }
    }

    fn node(&self, block: u32) -> usize {
        (block - self.first) as usize
    }

    fn sentinel(&self) -> usize {
        self.owners.len()
    }

    fn unlink(&mut self, node: usize) {
        let (before, after) = (self.previous[node], self.next[node]);
        self.next[before as usize] = after;
        self.previous[after as usize] = before;
        self.free -= 1;
    }

    fn link_last(&mut self, node: usize) {
        let sentinel = self.sentinel();
        let last = self.previous[sentinel];
        self.next[last as usize] = node as u32;
        self.previous[node] = last;
        self.next[node] = sentinel as u32;
        self.previous[sentinel] = node as u32;
        self.free += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hands_out_every_block_once_and_reuses_the_least_recently_freed() {
        let mut pool = BlockPool::new(4, true);
        assert_eq!((pool.usable(), pool.free()), (3, 3));
        assert_eq!([pool.take(), pool.take(), pool.take(), pool.take()], [Some(1), Some(2), Some(3), None]);
        pool.give_back(2);
        pool.give_back(1);
        assert_eq!((pool.take(), pool.take(), pool.take()), (Some(2), Some(1), None));
    }

    #[test]
    fn a_shared_block_returns_with_its_last_owner() {
        let mut pool = BlockPool::new(2, false);
        let block = pool.take().unwrap();
        pool.share(block);
        pool.give_back(block);
        assert_eq!((pool.owners(block), pool.free()), (1, 1));
        pool.give_back(block);
        assert_eq!((pool.owners(block), pool.free()), (0, 2));
        // Sharing a free block pulls it out of the queue, wherever it stands.
        pool.share(block);
        assert_eq!((pool.take(), pool.take()), (Some(1), None));
    }

    #[test]
    fn an_empty_pool_has_nothing() {
        assert_eq!(BlockPool::new(1, true).take(), None);
        assert_eq!(BlockPool::new(0, false).take(), None);
    }
}
