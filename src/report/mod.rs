//! What a run says: one exporter a file. All of them read the same [`crate::results::RunResults`], so a report can be made
//! again from a folder at any time.

pub mod chrome_trace;
pub mod compare;
pub mod consumers;
pub mod export;
pub mod format;
pub mod html;
pub mod json;
pub mod markdown;
pub mod overview;
pub mod plots;
pub mod saturate;
pub mod service;
pub mod step_model;
pub mod table;
pub mod why;
