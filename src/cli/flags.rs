//! Flags that several commands share, as typed; and their first resolution into [`PlanOptions`].

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use clap::builder::NonEmptyStringValueParser;

use crate::experiment::plan::PlanOptions;
use crate::report::format::Format;
use crate::{Error, Result};

/// Where experiments are read from.
#[derive(Debug, Clone, Args)]
pub struct ExperimentsFlag {
    /// A file of experiments, in place of those built in
    #[arg(long, value_name = "FILE")]
    pub experiments: Option<PathBuf>,
}

/// What shapes a plan.
#[derive(Debug, Clone, Args)]
pub struct PlanFlags {
    /// auto, cpu, cuda, cuda:N, sim:GPU, sim:series or sim:fixed[:MS]
    #[arg(long, value_name = "DEVICE", value_parser = NonEmptyStringValueParser::new())]
    pub device: Option<String>,

    /// A folder, a hub id, or synthetic:PRESET; in place of every arm's model
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,

    /// Requests of each arm that has no number of its own; of a replay, its first rows
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub prompts: Option<usize>,

    /// Set a knob in every arm
    #[arg(long, value_name = "KNOB=VALUE")]
    pub set: Vec<String>,

    /// Set a key of every arm's load that is no knob, in TOML: 'replay = { file = "trace.csv" }', 'arrivals = "constant"'
    #[arg(long, value_name = "KEY=TOML")]
    pub load: Vec<String>,

    /// Run every arm this often, arms inside repeats
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub repeats: Option<usize>,

    /// Seed of arrivals, lengths, prompts, sampling and synthetic weights
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub seed: Option<u64>,

    /// A smaller load that still shows the shape
    #[arg(long)]
    pub quick: bool,
}

/// Which part of a plan is run.
#[derive(Debug, Clone, Args)]
pub struct PartFlags {
    /// Only the arms of these names, `*` for any letters: '4b-decode-*'
    #[arg(long, value_name = "A,B,C", value_delimiter = ',')]
    arms: Vec<String>,

    /// Run the i-th of n parts of the plan; `merge` joins them
    #[arg(long, value_name = "I/N")]
    shard: Option<String>,
}

impl PartFlags {
    /// Lays the flags that were given over `options`.
    ///
    /// # Errors
    /// A `--shard` that is none.
    pub fn lay_over(&self, options: &mut PlanOptions) -> Result<()> {
        if !self.arms.is_empty() {
            options.arms.clone_from(&self.arms);
        }
        if let Some(shard) = &self.shard {
            options.shard = Some(shard.parse()?);
        }
        Ok(())
    }
}

impl PlanFlags {
    /// Lays the flags that were given over `options` (the defaults, or those recorded by a run that is resumed).
    pub fn lay_over(&self, options: &mut PlanOptions) {
        if let Some(device) = &self.device {
            options.device.clone_from(device);
        }
        if options.device.is_empty() {
            options.device = "auto".to_string();
        }
        options.model = self.model.clone().or(options.model.take());
        options.prompts = self.prompts.or(options.prompts);
        if !self.set.is_empty() {
            options.set.clone_from(&self.set);
        }
        if !self.load.is_empty() {
            options.load.clone_from(&self.load);
        }
        options.repeats = self.repeats.or(options.repeats);
        options.seed = self.seed.or(options.seed);
        options.quick |= self.quick;
    }
}

/// What a run does besides its plan.
#[derive(Debug, Clone, Args)]
pub struct RunOutputFlags {
    /// Folder that results go under
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,

    /// Continue the run in this folder
    #[arg(long, value_name = "RUN")]
    pub resume: Option<PathBuf>,

    /// Resume although plan, build, device or weights differ; the result is marked
    #[arg(long)]
    pub force: bool,

    /// What goes to stdout
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub format: Format,

    /// One more, unmeasured pass of each arm that writes trace.json.gz (Perfetto)
    #[arg(long)]
    pub trace: bool,

    /// Set each arm beside its simulation on the device's profile or ceilings (done by default for a GPU in the table)
    #[arg(long)]
    pub compare_sim: bool,

    /// Exit with 1 if a claim does not hold, with 3 if none could be compared
    #[arg(long)]
    pub check: bool,

    /// Begin no further arm after this many minutes; --resume goes on
    #[arg(long, value_name = "MINUTES", allow_negative_numbers = true)]
    pub budget: Option<f64>,
}

impl RunOutputFlags {
    /// When no further arm is begun; `None` without `--budget`.
    ///
    /// # Errors
    /// A `--budget` that is no time.
    pub fn deadline(&self) -> Result<Option<Instant>> {
        match self.budget {
            None => Ok(None),
            Some(minutes) if minutes > 0.0 && minutes <= 1e6 => {
                Ok(Some(Instant::now() + Duration::from_secs_f64(minutes * 60.0)))
            }
            Some(minutes) => {
                Err(Error::invalid(format!("--budget {minutes} is out of bounds"), "give minutes above 0"))
            }
        }
    }
}
