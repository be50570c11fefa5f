//! Why a cell may differ, and which of the series' known artefacts the simulation predicts by which mechanism.

/// Reasons by the key that cells.csv uses.
const REASONS: [(&str, &str); 14] = [
    (
        "dip",
        "the fall from rate 8 to 10 is an accident of one arrival trace: other seeds at the same rates often show none (see the mechanisms below); the valley against the flood is not",
    ),
    (
        "knee",
        "at the knee a queue just begins to form, and its length is the difference of two near-equal rates: 2 % of throughput is 15 to 30 % of a tail",
    ),
    (
        "edge",
        "this percentile sits on the edge between steps with a prefill and steps without: a fraction of a percent of the samples moves it from one population to the other",
    ),
    (
        "seats",
        "block arithmetic alone: a request holds ceil(tokens/528) attention blocks and three state blocks (times 1 + k with k drafts), one block is the null block",
    ),
    (
        "phase",
        "counts and medians of the injection window depend on where the victims were when the prompts came, which differs from run to run by the token counts of the server's logs; it is pinned here",
    ),
    (
        "restart",
        "the 19th largest of 1,920: the longest time to first token outside the stall. After each answer one victim's prompt runs alone, and the other five come one, two or three steps after it, as their clients are quick or slow to ask again: 64, 84 or 104 ms. By the token counts of the server's logs all three happened; the published value is that of three. When they did in this run was not recorded: here clients take 5 ms, which always makes it two (89 ms at the start of the run; see the mechanisms below)",
    ),
    (
        "bucket",
        "the best second of a run: one second among hundreds, on which few tokens more or less decide",
    ),
    ("client", "only a constant of 5 ms stands for HTTP and tokenising"),
    (
        "stall",
        "every latency of this arm is late by one constant of 10 to 11 s: one cold stall before the first step, taken from these cells",
    ),
    (
        "brittle",
        "19, 38 or 0 preemptions, depending on which prompts are there at the first step: printed, not judged",
    ),
    (
        "intake",
        "forty short prompts in one flood: the time is the server's intake of requests, of which only a constant is modelled",
    ),
    (
        "bytes",
        "the fixed term follows streamed bytes (8.94 against 8.41 GB: 1.06, not the 1.30 of loaded bytes); the larger per-sequence term is GEMM work (15.9 against 8.4 GFLOP a token), not weight bytes",
    ),
    (
        "bimodal",
        "gaps fall into two groups (steps with and without a draft or prefill), and the median jumps between them",
    ),
    ("derived", "derived from the block arithmetic by readers, not published: a prediction to check"),
];

/// The text of a reason.
pub fn text(key: &str) -> Option<&'static str> {
    REASONS.iter().find(|(known, _)| *known == key).map(|(_, text)| *text)
}

/// Known artefacts of a part's figures, and what the simulation says of each.
pub fn artefacts(part: u32) -> &'static [&'static str] {
    match part {
        1 => &[
            "Plateau of the flood: 146 sequences is the pool of 586 blocks (585 usable over 4 a request), a memory cap; the text's \"never comes near filling the cache\" does not hold for the flood. Predicted by the unified layout.",
            "Throughput at 8 to 12 requests/s is below the flood's: nearly every step carries a small prefill and pays for its states 4.5 times. Predicted by the state factor of mixed steps; with a factor of 1 rate 10 completes 8 requests/s (see the mechanisms below).",
            "Rate 1 of the first pass (TTFT p99 29 s) is a cold start; the table mixes first and warm passes. Not simulated: a simulation is always warm.",
            "Completed requests/s include the drain: 200 prompts at rate 6 complete 5.4/s, 400 come closer. Predicted by the finite run.",
        ],
        2 => &[
            "The light run's p99 over all tokens makes unchunked look better (103 against 325 ms): 18 stalled samples are 0.94 % of 1,920, just outside the top 1 %. Predicted by the populations; the 103 ms is the TTFT of victims that waited three steps.",
            "The 2.4x is 5,408 to 2,048 tokens a step: chunking bounds the gap, the stalled time in all is the same (12 x 830 ms against 32 x 345 ms).",
            "34x more launches, 13,905 kernels and the 39 ms heartbeat are artefacts of a cold autotuner and of clustering kernels by gaps: no mechanism of a step makes them, so they are not simulated.",
        ],
        3 => &[
            "Caps above 146 add nothing, because 146 is the pool's seat count. Predicted by the unified layout; see what a larger pool does below.",
            "\"0.9 ms a sequence-token, unchanged from 64\" is 1/throughput and so restates the plateau.",
        ],
        5 => &[
            "104 running, then 97: five blocks at admission (1,024 tokens), six past 1,056 tokens, 585 usable. Predicted by the block arithmetic.",
            "Zero preemptions in the logs were a dead log line: the counter gives 17, 60, 41, 173, 205. Predicted by the scheduler.",
            "Recomputed tokens, which the rig cannot count, are counted here.",
        ],
        6 => &[
            "\"The per-sequence term follows weight bytes (1.26 for 1.30)\" is a coincidence: the state traffic a sequence is the same in both models, and what grew is GEMM work.",
            "103 seats: 413 blocks less the null block, over four a request.",
        ],
        7 => &[
            "Seats 146 -> 28: a request holds 1 + 3 (1 + 5) = 19 blocks of 542. Predicted by the unified layout; it is what costs throughput in the flood.",
            "Drafts are rare on random text (0.025 a sequence-step), so verification cannot be what slows the flood; seats, host time and lost graphs are.",
        ],
        _ => &[],
    }
}
