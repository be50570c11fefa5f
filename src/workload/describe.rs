//! A load in a few words, for tables and the `load` column. Rows are compared where these words are equal, so whatever
//! changes what is asked of the engine is in them.

use super::replay;
use super::spec::{Arrivals, Lengths, LoadSpec, PromptKind, RampShape, Replay};

impl LoadSpec {
    /// For example `flood 256/128 x48`: arrivals, input and output tokens, requests at this number of seats; then what is
    /// not as it is by default.
    pub fn describe(&self, seats: usize) -> String {
        if let Some(probe) = &self.probe {
            let words = format!(
                "probe: {} victims {}/{}, {} injected {}/{}",
                probe.victims,
                probe.victim_input_len,
                probe.victim_output_len,
                probe.injectors,
                probe.injector_input_len,
                probe.injector_output_len,
            );
            return words + &self.sampled();
        }
        let (what, count) = match &self.replay {
            Some(replay) => (self.replayed(replay), self.rows(replay, seats)),
            None => (
                format!("{} {}/{}{}", self.arriving(), self.input_len, self.output_len, self.spread()),
                format!("x{}", self.requests(seats)),
            ),
        };
        format!("{what}{} {count}{}{}{}", self.kind(), self.paced(), self.shared(), self.sampled())
    }

    fn arriving(&self) -> String {
        if self.request_rate.is_flood() {
            return self.concurrency.map_or("flood".to_string(), |clients| format!("{clients} clients"));
        }
        let ramp = self.ramp.map_or(String::new(), |ramp| {
            let shape = match ramp.shape {
                RampShape::Linear => "linear",
                RampShape::Exponential => "exponential",
            };
            format!(" to {}/s {shape}", ramp.to)
        });
        let gaps = match self.arrivals {
            Arrivals::Constant => " constant".to_string(),
            Arrivals::Gamma | Arrivals::NumpyGamma if self.burstiness == 1.0 => String::new(),
            Arrivals::Gamma | Arrivals::NumpyGamma => format!(" burstiness {}", self.burstiness),
        };
        format!("{}/s{ramp}{gaps}", self.request_rate)
    }

    fn replayed(&self, replay: &Replay) -> String {
        let pace = match replay.speedup {
            _ if !self.request_rate.is_flood() => format!(" at {}/s", self.request_rate),
            1.0 => String::new(),
            times => format!(" sped up {times} times"),
        };
        format!("replay of {}{pace}", name(&replay.file))
    }

    /// `x3`; of a part of the trace `x3 of 8 rows`. What cannot be read is said when the run begins.
    fn rows(&self, replay: &Replay, seats: usize) -> String {
        let Ok(trace) = replay::read(&replay.file) else {
            return "of a trace that cannot be read".to_string();
        };
        let (count, rows) = (self.requests(seats), trace.rows.len());
        let part = if count < rows { format!("x{count} of {rows} rows") } else { format!("x{rows}") };
        let skipped = match trace.skipped {
            0 => String::new(),
            skipped => format!(" ({skipped} without input or answer left out)"),
        };
        part + &skipped
    }

    fn spread(&self) -> String {
        match &self.lengths {
            Lengths::Fixed => String::new(),
            Lengths::Uniform { ratio } | Lengths::NumpyUniform { ratio } => {
                format!(" ±{:.0}%", ratio * 100.0)
            }
            Lengths::LogNormal { sigma } => format!(" log-normal {sigma}"),
            Lengths::File { file } => format!(" lengths of {}", name(file)),
        }
    }

    fn kind(&self) -> String {
        match &self.prompt {
            PromptKind::Random => String::new(),
            PromptKind::Text { file: None } => " text".to_string(),
            PromptKind::Text { file: Some(file) } => format!(" text of {}", name(file)),
            PromptKind::Repeat { period } => format!(" repeating {period}"),
        }
    }

    /// Pauses of a closed loop, or the limit of what is in flight at a rate.
    fn paced(&self) -> String {
        let open = self.replay.is_some() || !self.request_rate.is_flood();
        match self.concurrency {
            Some(most) if open => format!(", {most} in flight at most"),
            Some(_) if self.think_time_s > 0.0 => format!(", thinking {} s", self.think_time_s),
            _ => String::new(),
        }
    }

    fn shared(&self) -> String {
        match (self.prefix_len, self.prefix_count) {
            (0, _) => String::new(),
            (tokens, 1) => format!(", prefix {tokens}"),
            (tokens, count) => format!(", {count} prefixes {tokens}"),
        }
    }

    fn sampled(&self) -> String {
        let mut words = String::new();
        if self.temperature > 0.0 {
            words += &format!(", temperature {}", self.temperature);
            if self.top_k > 0 {
                words += &format!(", top_k {}", self.top_k);
            }
            if self.top_p < 1.0 {
                words += &format!(", top_p {}", self.top_p);
            }
        }
        if !self.ignore_eos {
            words += ", ends at a stop token";
        }
        words
    }
}

fn name(file: &std::path::Path) -> String {
    file.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::spec::Count;

    fn described(toml: &str) -> String {
        toml::from_str::<LoadSpec>(toml).unwrap().describe(1)
    }

    #[test]
    fn loads_in_words() {
        assert_eq!(described(""), "flood 256/128 x200");
        assert_eq!(described("request_rate = 2.5"), "2.5/s 256/128 x200");
        assert_eq!(
            described("concurrency = 4\nthink_time_s = 0.5"),
            "4 clients 256/128 x200, thinking 0.5 s"
        );
        assert_eq!(
            described("request_rate = 1\nconcurrency = 4\nramp = { shape = \"linear\", to = 8 }"),
            "1/s to 8/s linear 256/128 x200, 4 in flight at most"
        );
        assert_eq!(
            described(
                "prefix_len = 64\nprefix_count = 3\ntemperature = 0.8\ntop_k = 5\ntop_p = 0.9\nignore_eos = false"
            ),
            "flood 256/128 x200, 3 prefixes 64, temperature 0.8, top_k 5, top_p 0.9, ends at a stop token"
        );
    }

    #[test]
    fn a_replay_says_how_much_of_the_trace_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("trace.csv");
        std::fs::write(&file, "arrival_s,input_tokens,output_tokens\n0,5,2\n1,6,0\n2,6,3\n4,7,4\n").unwrap();
        let replay = |prompts, speedup| {
            let replay = Some(Replay { file: file.clone(), speedup });
            LoadSpec { replay, prompts: Count::Exact(prompts), ..LoadSpec::default() }.describe(1)
        };
        assert_eq!(replay(8, 1.0), "replay of trace.csv x3 (1 without input or answer left out)");
        assert_eq!(
            replay(2, 2.0),
            "replay of trace.csv sped up 2 times x2 of 3 rows (1 without input or answer left out)"
        );
    }
}
