// A step's metadata as kernels of several files read it: one block in device memory, laid out by batch.rs, at addresses that a
// captured step of the same counts finds again.
#pragma once
#include "half.cuh"

// Where the step's sampled tokens go, an offset in words into ring and host; and the width of its block table, which changes
// from step to step while the captured launches do not.
struct Header {
    u32 ring_offset, table_pitch, unused[6];
};

// `count` new tokens of a sequence at row `start`, after `context` ones that are already in state and window; `slot` < 0 marks
// padding. `pending` of the context's tokens are not in the stored state yet; 1 in `write` puts them there and stores it,
// before the new ones (both of delta_stream.cu).
struct __align__(16) Sequence {
    int slot, context, start, count;
    int pending, write, unused[2];
};

// A chunk of a prompt: its rows in q, and where its keys are.
struct Chunk {
    int first_row, new_tokens, context_tokens, table;
};
