//! Speculation: guess the next tokens cheaply, and let the device verify them all in one step.

mod ngram;

pub use ngram::NgramIndex;
