//! What a run tells whoever waits for it.

/// How a run tells of its progress. Nothing of it is data.
pub trait Progress {
    /// The `position`th of `of` cells begins: `total` answers are expected.
    fn begin(&mut self, position: usize, of: usize, what: &str, total: u64);
    fn advance(&mut self, done: u64);
    fn line(&mut self, text: &str);
    fn warning(&mut self, text: &str);
    fn end(&mut self);
}
