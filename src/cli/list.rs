//! `inferwall list`: the experiments there are.

use clap::Args;
use serde_json::json;

use super::flags::ExperimentsFlag;
use super::output;
use crate::Result;
use crate::experiment::spec::{self, ExperimentSpec};
use crate::report::format::Format;
use crate::report::table;

#[derive(Debug, Args)]
pub struct ListFlags {
    #[command(flatten)]
    experiments: ExperimentsFlag,

    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

impl ListFlags {
    /// # Errors
    /// A file of experiments that cannot be read.
    pub fn run(self) -> Result<()> {
        let experiments = spec::load(self.experiments.experiments.as_deref())?;
        let rows: Vec<[String; 4]> = experiments
            .iter()
            .map(|(name, spec)| {
                let knob = spec.knob.clone().unwrap_or_default();
                [name.clone(), spec.question.clone(), knob, values(spec)]
            })
            .collect();
        let header = ["name", "question", "knob", "values"];
        if self.format == Format::Json {
            let objects: Vec<_> = rows
                .iter()
                .map(|[name, question, knob, values]| {
                    json!({"name": name, "question": question, "knob": knob, "values": values})
                })
                .collect();
            return output::data(&(serde_json::to_string_pretty(&objects).unwrap_or_default() + "\n"));
        }
        let rows: Vec<Vec<String>> = rows.into_iter().map(Vec::from).collect();
        output::data(&table::render(self.format, &header, &rows, &[])?)
    }
}

/// `1, 4, 16`; for an experiment made of arms, the first of their names and how many there are.
fn values(spec: &ExperimentSpec) -> String {
    const SHOWN: usize = 9;
    let plain = |value: &toml::Value| value.to_string().trim_matches('"').to_string();
    let mut texts: Vec<String> = spec.values.iter().map(plain).collect();
    for arm in &spec.arms {
        let name = arm.name.clone().unwrap_or_default();
        match arm.values.as_slice() {
            [] => texts.push(name),
            values => texts.extend(values.iter().map(|value| name.replace("{value}", &plain(value)))),
        }
    }
    if texts.len() <= SHOWN {
        return texts.join(", ");
    }
    format!("{}, ... ({} arms)", texts[..3].join(", "), texts.len())
}
