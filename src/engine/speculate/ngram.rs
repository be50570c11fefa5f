//! N-gram proposer (prompt lookup): the request's own text is the draft model.
//!
//! Of the suffixes of the text with a length in [`min`, `max`], take the longest that also occurs earlier, at its
//! earliest occurrence, and propose the tokens that followed it there. That is what vLLM's proposer does with a KMP
//! table over the whole text in each step; here an index of n-grams grows with the text instead, so a step costs a
//! few lookups however long the text is.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Where each n-gram of a text first occurs. Grows with the text, which is only ever appended to.
#[derive(Debug, Clone)]
pub struct NgramIndex {
    min: usize,
    max: usize,
    /// Start of the first occurrence, by a hash of length and tokens. A match is compared before it is used.
    first: HashMap<u64, u32, BuildHasherDefault<IdentityHasher>>,
    /// Tokens of the text that are indexed.
    indexed: usize,
}

impl NgramIndex {
    /// An index of `prompt`, with room for a text of `longest` tokens, so that it neither works through the prompt nor
    /// grows during a step. The caller has checked that 1 <= `min` <= `max`.
    pub fn new(min: usize, max: usize, prompt: &[u32], longest: usize) -> Self {
        let mut first = HashMap::default();
        first.reserve(longest * (max.min(longest) + 1).saturating_sub(min));
        let mut index = Self { min, max, first, indexed: 0 };
        index.index_up_to(prompt, prompt.len().saturating_sub(1));
        index
    }

    /// Up to `most` tokens that may follow `text`, appended to `drafts`.
    pub fn propose(&mut self, text: &[u32], most: usize, drafts: &mut Vec<u32>) {
        if most == 0 {
            return;
        }
        // N-grams that end with the last token are left out: a suffix must not find itself.
        self.index_up_to(text, text.len().saturating_sub(1));
        let longest = self.max.min(text.len().saturating_sub(1));
        for length in (self.min..=longest).rev() {
            let suffix = &text[text.len() - length..];
            let Some(&start) = self.first.get(&hash(suffix)) else { continue };
            let start = start as usize;
            if text[start..start + length] == *suffix {
                let follow = &text[start + length..];
                drafts.extend_from_slice(&follow[..most.min(follow.len())]);
                return;
            }
        }
    }

    /// Adds every n-gram that ends within the first `end` tokens.
    fn index_up_to(&mut self, text: &[u32], end: usize) {
        for last in self.indexed..end {
            for length in self.min..=self.max.min(last + 1) {
                let start = last + 1 - length;
                self.first.entry(hash(&text[start..=last])).or_insert(start as u32);
            }
        }
        self.indexed = self.indexed.max(end);
    }
}

fn hash(tokens: &[u32]) -> u64 {
    tokens.iter().fold(0x9e37_79b9_7f4a_7c15 ^ tokens.len() as u64, |hash, &token| {
        let mixed = (hash ^ u64::from(token)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        mixed ^ mixed >> 32
    })
}

/// Keys are hashes already.
#[derive(Debug, Default, Clone)]
struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are u64");
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition, by brute force.
    fn by_definition(text: &[u32], min: usize, max: usize, most: usize) -> Vec<u32> {
        for length in (min..=max.min(text.len().saturating_sub(1))).rev() {
            let suffix = &text[text.len() - length..];
            if let Some(start) =
                (0..text.len() - length).find(|&start| text[start..start + length] == *suffix)
            {
                let follow = &text[start + length..];
                return follow[..most.min(follow.len())].to_vec();
            }
        }
        Vec::new()
    }

    #[test]
    fn takes_the_earliest_of_the_longest_matches() {
        let propose = |text: &[u32], min, max, most| {
            let mut drafts = Vec::new();
            NgramIndex::new(min, max, &[], 0).propose(text, most, &mut drafts);
            drafts
        };
        assert_eq!(propose(&[1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], 2, 4, 5), [9, 1, 2, 3, 8]);
        assert_eq!(propose(&[7, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], 2, 4, 2), [8, 1]);
        // A match may overlap the suffix itself.
        assert_eq!(propose(&[5, 5, 5, 5], 2, 4, 3), [5]);
        assert!(propose(&[1, 2, 3, 4], 2, 4, 3).is_empty());
        assert!(propose(&[1], 1, 4, 3).is_empty());
        assert!(propose(&[1, 1], 1, 4, 0).is_empty());
    }

    proptest! {
        #[test]
        fn growing_with_the_text_equals_looking_at_all_of_it(
            text in prop::collection::vec(0u32..4, 1..80),
            min in 1usize..4,
            span in 0usize..4,
            most in 1usize..7,
        ) {
            let mut index = NgramIndex::new(min, min + span, &text[..text.len().min(5)], 0);
            for end in text.len().min(5)..=text.len() {
                let mut drafts = Vec::new();
                index.propose(&text[..end], most, &mut drafts);
                prop_assert_eq!(drafts, by_definition(&text[..end], min, min + span, most));
            }
        }
    }
}
