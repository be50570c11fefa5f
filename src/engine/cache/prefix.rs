//! Prefix caching for dense models: full KV blocks are known by a hash of all tokens up to their end, so a request
//! whose prompt starts like an earlier one takes those blocks over instead of computing them again.
//!
//! A block keeps its name after its owner gave it back, until the pool hands it to somebody else; the pool's queue is
//! least recently freed first, so the names that live longest are the most recently used.

use std::collections::HashMap;

/// Hash of a sequence's first tokens, a whole number of blocks of them. 128 bits: a collision would serve wrong text.
type PrefixHash = u128;

/// How far a request's tokens have been hashed and published.
#[derive(Debug, Default)]
pub struct Chain {
    /// `hashes[i]` names the prefix of `i + 1` full blocks.
    hashes: Vec<PrefixHash>,
    published_blocks: usize,
}

impl Chain {
    /// The first `blocks` blocks came from the cache: they have their names.
    pub(super) fn skip(&mut self, blocks: usize) {
        self.published_blocks = blocks;
    }

    /// The blocks are gone; the hashes of the tokens stay right.
    pub(super) fn rewind(&mut self) {
        self.published_blocks = 0;
    }

    fn extend(&mut self, tokens: &[u32], block_tokens: usize) {
        let full = tokens.len() / block_tokens;
        while self.hashes.len() < full {
            let start = self.hashes.len() * block_tokens;
            let parent = self.hashes.last().copied().unwrap_or(0);
            self.hashes.push(hash_block(parent, &tokens[start..start + block_tokens]));
        }
    }
}

#[derive(Debug)]
pub struct PrefixCache {
    by_hash: HashMap<PrefixHash, u32>,
    /// Name of each block, if it has one.
    name: Vec<Option<PrefixHash>>,
    block_tokens: usize,
}

impl PrefixCache {
    pub fn new(blocks: usize, block_tokens: usize) -> Self {
        Self { by_hash: HashMap::new(), name: vec![None; blocks], block_tokens }
    }

    /// Blocks that hold the longest known prefix of `tokens`. At least the last token is left out, since its logits
    /// are needed.
    pub fn find(&self, chain: &mut Chain, tokens: &[u32], found: &mut Vec<u32>) {
        chain.extend(tokens, self.block_tokens);
        let most = tokens.len().saturating_sub(1) / self.block_tokens;
        let known = chain.hashes.iter().take(most).map_while(|hash| self.by_hash.get(hash));
        found.extend(known);
    }

    /// Names the full blocks that `tokens` fill. A prefix that already has a block keeps that one.
    pub fn publish(&mut self, chain: &mut Chain, tokens: &[u32], blocks: &[u32]) {
        chain.extend(tokens, self.block_tokens);
        let full = tokens.len() / self.block_tokens;
        let named = chain.hashes.iter().zip(blocks).take(full).skip(chain.published_blocks);
        for (&hash, &block) in named {
            if let std::collections::hash_map::Entry::Vacant(entry) = self.by_hash.entry(hash) {
                entry.insert(block);
                self.name[block as usize] = Some(hash);
            }
        }
        chain.published_blocks = chain.published_blocks.max(full);
    }

    /// The block is handed out to be overwritten.
    pub fn forget(&mut self, block: u32) {
        if let Some(hash) = self.name[block as usize].take() {
            self.by_hash.remove(&hash);
        }
    }
}

fn hash_block(parent: PrefixHash, tokens: &[u32]) -> PrefixHash {
    let mut low = parent as u64 ^ 0x9e37_79b9_7f4a_7c15;
    let mut high = (parent >> 64) as u64 ^ 0xd1b5_4a32_d192_ed03;
    for &token in tokens {
        low = (low ^ u64::from(token)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        low ^= low >> 32;
        high = (high.rotate_left(23) ^ u64::from(token)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
        high ^= high >> 29;
    }
    PrefixHash::from(high) << 64 | PrefixHash::from(low)
}
