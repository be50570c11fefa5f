//! Storage with stable small integer keys, so that queues hold keys and requests stay where they are.

use std::ops::{Index, IndexMut};

#[derive(Debug)]
pub struct Slab<T> {
    items: Vec<Option<T>>,
    free: Vec<usize>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { items: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    pub fn insert(&mut self, item: T) -> usize {
        if let Some(key) = self.free.pop() {
            self.items[key] = Some(item);
            return key;
        }
        self.items.push(Some(item));
        self.items.len() - 1
    }

    pub fn remove(&mut self, key: usize) {
        if self.items[key].take().is_some() {
            self.free.push(key);
        }
    }

    pub fn contains(&self, key: usize) -> bool {
        self.items.get(key).is_some_and(Option::is_some)
    }

    pub fn get_mut(&mut self, key: usize) -> Option<&mut T> {
        self.items.get_mut(key).and_then(Option::as_mut)
    }
}

/// # Panics
/// On a key that was removed: the scheduler's queues hold keys of live requests only.
impl<T> Index<usize> for Slab<T> {
    type Output = T;

    fn index(&self, key: usize) -> &T {
        self.items[key].as_ref().expect("a key in a queue names a live item")
    }
}

/// # Panics
/// As [`Index`].
impl<T> IndexMut<usize> for Slab<T> {
    fn index_mut(&mut self, key: usize) -> &mut T {
        self.items[key].as_mut().expect("a key in a queue names a live item")
    }
}
