//! Progress on stderr: a bar on a terminal, else one line an arm.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::output;
use crate::run::progress::Progress;

pub struct Bar {
    bar: Option<ProgressBar>,
}

impl Bar {
    pub fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(8));
            let style = ProgressStyle::with_template("{prefix} {wide_msg} [{bar:24}] {pos}/{len} {elapsed}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
            bar
        });
        Self { bar }
    }
}

impl Default for Bar {
    fn default() -> Self {
        Self::new()
    }
}

impl Progress for Bar {
    fn begin(&mut self, position: usize, of: usize, what: &str, total: u64) {
        if let Some(bar) = &self.bar {
            bar.set_prefix(format!("[{position}/{of}]"));
            bar.set_message(what.to_string());
            bar.set_length(total);
            bar.set_position(0);
        }
    }

    fn advance(&mut self, done: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(done);
        }
    }

    fn line(&mut self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| output::note(text)),
            None => output::note(text),
        }
    }

    fn warning(&mut self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| output::warning(text)),
            None => output::warning(text),
        }
    }

    fn end(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
