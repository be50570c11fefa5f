//! A load in a few words, for tables and the `load` column.

use super::spec::{Arrivals, Lengths, LoadSpec, PromptKind};

impl LoadSpec {
    /// For example `flood 256/128 x48`: arrivals, input and output tokens, requests at this number of seats.
    pub fn describe(&self, seats: usize) -> String {
        if let Some(probe) = &self.probe {
            return format!(
                "probe: {} victims {}/{}, {} injected {}/{}",
                probe.victims,
                probe.victim_input_len,
                probe.victim_output_len,
                probe.injectors,
                probe.injector_input_len,
                probe.injector_output_len,
            );
        }
        let count = self.prompts.resolve(seats);
        if let Some(replay) = &self.replay {
            let name =
                replay.file.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
            return format!("replay of {name} x{count}");
        }
        let arrivals = match (self.request_rate.finite(), self.concurrency) {
            (None, Some(clients)) => format!("{clients} clients"),
            (None, None) => "flood".to_string(),
            (Some(per_s), _) => match self.arrivals {
                Arrivals::Constant => format!("{per_s}/s constant"),
                Arrivals::Gamma | Arrivals::NumpyGamma if self.burstiness == 1.0 => format!("{per_s}/s"),
                Arrivals::Gamma | Arrivals::NumpyGamma => format!("{per_s}/s burstiness {}", self.burstiness),
            },
        };
        let spread = match self.lengths {
            Lengths::Fixed => String::new(),
            Lengths::Uniform { ratio } | Lengths::NumpyUniform { ratio } => {
                format!(" ±{:.0}%", ratio * 100.0)
            }
            Lengths::LogNormal { sigma } => format!(" log-normal {sigma}"),
            Lengths::File { .. } => " from a file".to_string(),
        };
        let kind = match self.prompt {
            PromptKind::Random => String::new(),
            PromptKind::Text { .. } => " text".to_string(),
            PromptKind::Repeat { period } => format!(" repeating {period}"),
        };
        format!("{arrivals} {}/{}{spread}{kind} x{count}", self.input_len, self.output_len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::rate::Rate;

    #[test]
    fn loads_in_words() {
        assert_eq!(LoadSpec::default().describe(1), "flood 256/128 x200");
        let rate = LoadSpec { request_rate: Rate::new(2.5).unwrap(), ..Default::default() };
        assert_eq!(rate.describe(1), "2.5/s 256/128 x200");
    }
}
