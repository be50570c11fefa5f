//! Part 2's probe: victims that decode in a loop, and injectors that put long prompts beside them.
//!
//! Each victim streams one short request after another. After a while all injectors send one long prompt at the same
//! moment. When the last of them is answered the victims go on for `drain_s`, then stop after their current request.
//! The *injection window* is from the injection to the last injected answer.

use serde::{Deserialize, Serialize};

use super::spec::{MOST_PROMPT_TOKENS, MOST_REQUESTS, MOST_TOKENS};
use crate::{Error, Result};

/// A wait longer than this is a mistake rather than a probe, and victims ask all the while.
const LONGEST_WAIT_S: f64 = 3600.0;

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Probe {
    pub victims: usize,
    /// Tokens of a victim's prompt and answer.
    pub victim_input_len: usize,
    pub victim_output_len: usize,
    /// Seconds from the end of a victim's answer until it asks again. They count in the latency of that request, as in
    /// the series, whose clock started before the client connected.
    pub victim_restart_s: f64,
    pub injectors: usize,
    pub injector_input_len: usize,
    pub injector_output_len: usize,
    /// Seconds from the start to the earliest moment of injection.
    pub inject_after_s: f64,
    /// Then wait until the first victim has received this many tokens of its current answer: it pins the phase, on
    /// which the longest gaps depend. None: inject at `inject_after_s` whatever the victims do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inject_at_token: Option<usize>,
    /// Seconds the victims go on after the last injected answer.
    pub drain_s: f64,
    /// Every injected prompt has the same tokens, as the series had it.
    pub identical_prompts: bool,
}

impl Default for Probe {
    /// The heavy injection of the series.
    fn default() -> Self {
        Self {
            victims: 6,
            victim_input_len: 8,
            victim_output_len: 64,
            victim_restart_s: 0.0,
            injectors: 12,
            injector_input_len: 5408,
            injector_output_len: 32,
            inject_after_s: 3.0,
            inject_at_token: None,
            drain_s: 2.0,
            identical_prompts: true,
        }
    }
}

impl Probe {
    /// Checks the bounds that the types let pass.
    ///
    /// # Errors
    /// A count or time out of bounds, naming its key.
    pub fn validate(&self) -> Result<()> {
        let counts = [
            ("probe.victims", self.victims, MOST_REQUESTS),
            ("probe.victim_input_len", self.victim_input_len, MOST_TOKENS),
            ("probe.victim_output_len", self.victim_output_len, MOST_TOKENS),
            ("probe.injectors", self.injectors, MOST_REQUESTS),
            ("probe.injector_input_len", self.injector_input_len, MOST_TOKENS),
            ("probe.injector_output_len", self.injector_output_len, MOST_TOKENS),
        ];
        for (key, value, most) in counts {
            if !(1..=most).contains(&value) {
                return Err(Error::invalid(
                    format!("{key} = {value} is out of bounds"),
                    format!("{key} must be 1 to {most}"),
                ));
            }
        }
        let tokens = self.victims * self.victim_input_len + self.injectors * self.injector_input_len;
        if tokens > MOST_PROMPT_TOKENS {
            return Err(Error::invalid(
                format!("the probe's prompts have {tokens} tokens, which do not fit in memory"),
                format!("{MOST_PROMPT_TOKENS} at most: fewer victims and injectors, or shorter prompts"),
            ));
        }
        let seconds = [
            ("probe.victim_restart_s", self.victim_restart_s),
            ("probe.inject_after_s", self.inject_after_s),
            ("probe.drain_s", self.drain_s),
        ];
        for (key, seconds) in seconds {
            if !(0.0..=LONGEST_WAIT_S).contains(&seconds) {
                return Err(Error::invalid(
                    format!("{key} = {seconds} is out of bounds"),
                    format!("{key} must be 0 to {LONGEST_WAIT_S} seconds"),
                ));
            }
        }
        match self.inject_at_token {
            Some(token) if token == 0 || token > self.victim_output_len => Err(Error::invalid(
                format!("probe.inject_at_token = {token} never happens"),
                format!("a victim's answer has {} tokens", self.victim_output_len),
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_and_counts_have_bounds() {
        let wrong = |change: fn(&mut Probe)| {
            let mut probe = Probe::default();
            change(&mut probe);
            probe.validate().unwrap_err().to_string()
        };
        assert!(wrong(|probe| probe.inject_after_s = 1e18).contains("probe.inject_after_s"));
        assert!(wrong(|probe| probe.drain_s = f64::NAN).contains("probe.drain_s"));
        assert!(wrong(|probe| probe.victims = 1 << 40).contains("probe.victims = 1099511627776"));
        assert!(wrong(|probe| probe.injectors = 1 << 20).contains("tokens"));
        Probe::default().validate().unwrap();
    }
}
