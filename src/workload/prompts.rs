//! Prompts: token ids of a given length, of the kind a load asks for.
//!
//! Prompt i of a seed starts the same whatever its length and however many there are.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::schedule::ScheduleContext;
use super::seeds::{Purpose, request_seed, stream};
use super::spec::PromptKind;
use crate::{Error, Result};

/// What prompts of text are cut from when no file is given.
/// English prose that comes with the program.
pub const PASSAGE: &str = include_str!("passage.txt");

pub struct Prompts<'a> {
    context: ScheduleContext<'a>,
    /// Special ids below the vocabulary's end, ascending.
    special: Vec<u32>,
    kind: PromptKind,
    /// The whole text's tokens, for prompts of text.
    text: Vec<u32>,
    prefix_len: usize,
    prefix_count: usize,
}

impl<'a> Prompts<'a> {
    /// # Errors
    /// A text that cannot be read or gives no tokens; a vocabulary with nothing to draw from.
    pub fn new(
        kind: &PromptKind,
        prefix_len: usize,
        prefix_count: usize,
        context: ScheduleContext<'a>,
    ) -> Result<Self> {
        let mut special: Vec<u32> =
            context.special_tokens.iter().copied().filter(|&id| (id as usize) < context.vocab_size).collect();
        special.sort_unstable();
        special.dedup();
        if context.vocab_size <= special.len() {
            return Err(Error::invalid(
                format!("a vocabulary of {} tokens leaves none for random prompts", context.vocab_size),
                "check vocab_size in the model's config.json and its special tokens",
            ));
        }
        let text = match kind {
            PromptKind::Text { file } => read_text(file.as_deref(), &context)?,
            PromptKind::Random | PromptKind::Repeat { .. } => Vec::new(),
        };
        Ok(Self { context, special, kind: kind.clone(), text, prefix_len, prefix_count })
    }

    /// The prompt of request `index`, `len` tokens.
    pub fn prompt(&self, index: usize, len: usize) -> Vec<u32> {
        let shared = self.prefix_len.min(len);
        let mut tokens = Vec::with_capacity(len);
        if shared > 0 {
            // A prefix's own stream: numbered from the top, so that no request has it.
            let mut random = self.stream(usize::MAX - index % self.prefix_count);
            tokens.extend((0..shared).map(|_| self.token(&mut random)));
        }
        let own = len - shared;
        let mut random = self.stream(index);
        match self.kind {
            PromptKind::Random => tokens.extend((0..own).map(|_| self.token(&mut random))),
            PromptKind::Repeat { period } => {
                let cycle: Vec<u32> = (0..period).map(|_| self.token(&mut random)).collect();
                tokens.extend(cycle.iter().cycle().take(own));
            }
            PromptKind::Text { .. } => {
                let start = random.random_range(0..self.text.len());
                tokens.extend(self.text.iter().cycle().skip(start).take(own));
            }
        }
        tokens
    }

    fn stream(&self, index: usize) -> ChaCha8Rng {
        stream(request_seed(self.context.seed, index), Purpose::Prompts)
    }

    /// Evenly from the ids that are not special.
    fn token(&self, random: &mut ChaCha8Rng) -> u32 {
        let ordinary = self.context.vocab_size - self.special.len();
        let mut id = random.random_range(0..ordinary) as u32;
        // The nth ordinary id: step over each special one at or below it.
        for &special in &self.special {
            if special > id {
                break;
            }
            id += 1;
        }
        id
    }
}

fn read_text(file: Option<&std::path::Path>, context: &ScheduleContext) -> Result<Vec<u32>> {
    let Some(encode) = context.encode else {
        return Err(Error::invalid(
            "prompt kind `text` needs a tokenizer, and this model has none",
            "use a model with a tokenizer.json, or prompt = { kind = \"random\" }",
        ));
    };
    let text = match file {
        Some(file) => std::fs::read_to_string(file).map_err(|error| Error::read(file, &error))?,
        None => PASSAGE.to_string(),
    };
    let tokens = encode(&text)?;
    if tokens.is_empty() {
        return Err(Error::invalid("the text of the prompts gives no tokens", "give a file with text in it"));
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(special_tokens: &[u32]) -> ScheduleContext<'_> {
        ScheduleContext { vocab_size: 50, special_tokens, stop_tokens: &[], seats: 1, seed: 3, encode: None }
    }

    fn prompts<'a>(kind: PromptKind, special: &'a [u32]) -> Prompts<'a> {
        Prompts::new(&kind, 0, 1, context(special)).unwrap()
    }

    #[test]
    fn random_prompts_cover_the_vocabulary_and_miss_special_tokens() {
        let special = [0, 1, 7, 49, 900];
        let prompts = prompts(PromptKind::Random, &special);
        let seen: std::collections::BTreeSet<u32> =
            (0..40).flat_map(|index| prompts.prompt(index, 50)).collect();
        let expected: std::collections::BTreeSet<u32> = (0..50).filter(|id| !special.contains(id)).collect();
        assert_eq!(seen, expected);
    }

    #[test]
    fn a_prompt_depends_on_its_seed_and_index_only() {
        let one = prompts(PromptKind::Random, &[]);
        assert_eq!(one.prompt(5, 20), one.prompt(5, 30)[..20]);
        assert_ne!(one.prompt(5, 20), one.prompt(6, 20));
        let other =
            Prompts::new(&PromptKind::Random, 0, 1, ScheduleContext { seed: 4, ..context(&[]) }).unwrap();
        assert_ne!(one.prompt(5, 20), other.prompt(5, 20));
    }

    #[test]
    fn repeats_have_their_period() {
        let prompt = prompts(PromptKind::Repeat { period: 6 }, &[]).prompt(0, 40);
        assert!(prompt.windows(7).all(|window| window[0] == window[6]));
    }

    #[test]
    fn shared_prefixes_are_taken_in_turn() {
        let prompts = Prompts::new(&PromptKind::Random, 16, 3, context(&[])).unwrap();
        let prompt = |index| prompts.prompt(index, 24);
        assert_eq!(prompt(1)[..16], prompt(4)[..16]);
        assert_ne!(prompt(1)[..16], prompt(2)[..16]);
        assert_ne!(prompt(1)[16..], prompt(4)[16..]);
        assert_eq!(prompts.prompt(0, 8).len(), 8);
    }

    #[test]
    fn text_is_cut_from_the_passage_and_needs_a_tokenizer() {
        let encode = |text: &str| Ok(text.bytes().map(u32::from).collect());
        let with = ScheduleContext { encode: Some(&encode), ..context(&[]) };
        let kind = PromptKind::Text { file: None };
        let prompt = Prompts::new(&kind, 0, 1, with).unwrap().prompt(0, 40);
        let text: String = prompt.iter().map(|&byte| char::from(byte as u8)).collect();
        assert!([PASSAGE, PASSAGE].concat().contains(&text), "{text}");
        assert!(Prompts::new(&kind, 0, 1, context(&[])).err().unwrap().to_string().contains("tokenizer"));
    }
}
