use super::*;
use crate::engine::device::{SequenceStep, Ticket};
use crate::engine::request::{RequestId, SamplingParams};

fn sequence<'a>(
    id: u64,
    context: usize,
    input: Input<'a>,
    blocks: &'a [u32],
    want: Want<'a>,
) -> SequenceStep<'a> {
    SequenceStep {
        request: RequestId(id),
        state_slot: Some(id as u32),
        blocks,
        context_tokens: context,
        input,
        drafts: &[],
        want,
    }
}

#[test]
fn short_sequences_come_first_and_outputs_follow_their_rows() {
    let prompt: Vec<u32> = (0..20).collect();
    let sample = Want::Sample { seed: 1, position: 20, params: SamplingParams::default() };
    let sampled_by = Input::SampledBy { ticket: Ticket(3), sequence: 1 };
    let step = Step {
        sequences: vec![
            sequence(0, 0, Input::Known(&prompt), &[5, 6], sample),
            sequence(1, 33, sampled_by, &[7, 8, 9], sample),
            sequence(2, 4, Input::Known(&prompt[..3]), &[4], Want::LogProbOf { targets: &[1, 2, 3] }),
            sequence(3, 0, Input::Known(&prompt), &[1, 2], Want::Logits { rows: 2 }),
        ],
        trace: false,
    };
    let batch = Batch::new(&step, |ticket, sequence| Some((10 * ticket) as u32 + sequence as u32)).unwrap();
    assert_eq!((batch.short_rows, batch.short_sequences, batch.rows.len()), (4, 2, 44));
    assert_eq!(batch.tokens[0], FROM_RING | 31);
    assert_eq!(batch.rows[0], AttentionRow { sequence: 0, position: 33 });
    assert_eq!(batch.rows[4], AttentionRow { sequence: 2, position: 0 });
    assert_eq!(
        batch.sequences[2],
        DeltaSequence { slot: 0, context: 0, start: 4, count: 20, ..DeltaSequence::default() }
    );
    assert_eq!(batch.table[..9], [7, 8, 9, 4, 0, 0, 5, 6, 0]);
    // Sampled rows in step order, then the logits' two, then the log probabilities' three.
    assert_eq!(batch.select, [23, 0, 42, 43, 1, 2, 3]);
    assert_eq!(batch.wanted[0], Wanted::Token(0));
    assert_eq!(batch.wanted[2], Wanted::LogProbs(0..3));
    assert_eq!(batch.wanted[3], Wanted::Logits(0..2));
    assert_eq!(batch.short_context, 34 + 5 + 6 + 7);
    assert!(!batch.is_plain_decode());
}

#[test]
fn a_narrowed_batch_counts_its_outputs_among_the_last_rows() {
    let prompt: Vec<u32> = (0..20).collect();
    let sample = Want::Sample { seed: 1, position: 20, params: SamplingParams::default() };
    let step = |first, second| Step {
        sequences: vec![
            sequence(0, 3, Input::Known(&prompt), &[5, 6], first),
            sequence(1, 33, Input::Known(&[7]), &[7, 8, 9], second),
        ],
        trace: false,
    };
    let mut batch = Batch::new(&step(sample, sample), |_, _| None).unwrap();
    batch.narrow(2);
    assert!(batch.narrowed);
    // The decode token is row 0, and the prompt's last is row 20.
    assert_eq!((batch.select.as_slice(), batch.last.as_slice()), (&[0, 1][..], &[20, 0][..]));
    assert_eq!(batch.last_context, 23 + 34);
    let offsets = Offsets::new(&batch.counts(0));
    let mut bytes = vec![0; Offsets::capacity(32, 4, 4)];
    batch.write(&offsets, 0, &[], &mut bytes);
    assert_eq!(bytes[offsets.last_rows..][..16], [1, 0, 0, 0, 22, 0, 0, 0, 0, 0, 0, 0, 33, 0, 0, 0]);

    let untouched = |step: &Step, most| {
        let mut batch = Batch::new(step, |_, _| None).unwrap();
        let select = batch.select.clone();
        batch.narrow(most);
        !batch.narrowed && batch.select == select && batch.last.is_empty()
    };
    assert!(untouched(&step(sample, sample), 1), "no room");
    assert!(untouched(&step(Want::Logits { rows: 11 }, sample), 64), "most rows are wanted");
    let mut batch = Batch::new(&step(Want::Nothing, Want::Nothing), |_, _| None).unwrap();
    batch.narrow(64);
    assert!(batch.narrowed && batch.last.is_empty(), "a chunk in the middle of a prompt");
}

#[test]
fn a_padded_decode_step_has_the_layout_of_its_size() {
    let sample = Want::Sample { seed: 1, position: 9, params: SamplingParams::default() };
    let step = Step {
        sequences: (0..9).map(|id| sequence(id, 8, Input::Known(&[2]), &[3], sample)).collect(),
        trace: false,
    };
    let mut batch = Batch::new(&step, |_, _| None).unwrap();
    assert!(batch.is_plain_decode());
    let size = graph_size(9, 256);
    batch.pad(size);
    assert_eq!(size, 12);
    assert_eq!(batch.counts(0), Counts { rows: 12, sequences: 12, outputs: 12, ..Counts::default() });
    assert_eq!(
        batch.sequences[11],
        DeltaSequence { slot: -1, start: 11, count: 1, ..DeltaSequence::default() }
    );
    let offsets = Offsets::new(&batch.counts(0));
    let mut bytes = vec![0; Offsets::capacity(16, 16, 4)];
    assert!(batch.write(&offsets, 7, &[], &mut bytes) <= bytes.len());
    assert_eq!(bytes[..8], [7, 0, 0, 0, 1, 0, 0, 0]);
}

#[test]
fn graph_sizes_cover_every_batch_and_never_exceed_the_most() {
    for most in [1, 5, 16, 100, 256] {
        for sequences in 1..=most {
            let size = graph_size(sequences, most);
            assert!(size >= sequences && size <= most, "{sequences} of {most}: {size}");
        }
    }
}

#[test]
fn states_take_turns_to_be_written_and_chunks_find_them_settled() {
    let short = |slot, context| DeltaSequence { slot, context, count: 1, ..DeltaSequence::default() };
    let mut stored = vec![0; 6];
    let mut writes = [0; 6];
    for step in 0..48 {
        let mut batch = Batch { short_sequences: 6, ..Batch::default() };
        batch.sequences = (0..6).map(|slot| short(slot, step)).collect();
        batch.place_states(&mut stored, 4, 8).unwrap();
        assert_eq!(batch.settle_from, None);
        let written: Vec<_> = batch.sequences.iter().filter(|sequence| sequence.write == 1).collect();
        assert!(step < 4 || (1..=2).contains(&written.len()), "step {step}: {}", written.len());
        for sequence in &batch.sequences {
            assert!((0..=4).contains(&sequence.pending) && sequence.pending <= sequence.context);
            writes[sequence.slot as usize] += sequence.write;
        }
    }
    assert!(writes.iter().all(|&count| (11..=12).contains(&count)), "{writes:?}");

    // Slot 2 goes on with a chunk, slot 3 starts anew, slot 0 decodes on: only the chunks' states are settled.
    let mut batch = Batch { short_sequences: 1, ..Batch::default() };
    batch.sequences = vec![short(0, 48), short(2, 48), short(3, 0)];
    batch.place_states(&mut stored, 4, 8).unwrap();
    assert_eq!((batch.settle_from, stored[2], stored[3]), (Some(1), 49, 1));
    assert!(batch.sequences[1].pending > 0 && batch.sequences[2].pending == 0);

    // A state further behind than there is room for, and one that is ahead.
    for context in [60, 40] {
        let mut batch = Batch { short_sequences: 1, sequences: vec![short(0, context)], ..Batch::default() };
        let error = batch.place_states(&mut stored, 4, 8).unwrap_err().to_string();
        assert!(error.contains(&format!("a step asks for {context}")), "{error}");
    }
}
