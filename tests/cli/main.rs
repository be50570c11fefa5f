//! The command line, as a user meets it. Everything runs on `sim:fixed` (a fixed cost a step on a virtual clock), so
//! that output is the same on every machine.

mod diff;
mod env;
mod errors;
mod listing;
mod loads;
mod models;
mod resume;
mod runs;
mod said;
mod sweeps;
