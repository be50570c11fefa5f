//! Ceilings measured around each arm, where they wander: what its floors and shares are set beside, and what a reader must
//! know of them.
//!
//! The memory of a shared host gives a virtual machine now twice what it gives then, for seconds or minutes, so that a
//! ceiling measured as a run starts says nothing of an arm that runs later: shares of 116 % have been read. An arm is judged
//! by the better of what was measured right before and right after its measured pass (after its warm-up; a traced pass likewise, and with a block
//! of its own model's size), figure by figure: a ceiling is the most that anything could have reached meanwhile, and of two
//! readings the lower one may be of a state that began or ended at its edge. An arm across which the memory slowed down
//! is thus given too low a share rather than too high a one. What happens between both readings only is not seen:
//! a share beyond 1 then says so, and is marked.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::quantile::quantile;
use super::rows::CheckRow;
use super::summary::Summary;
use crate::engine::account::Ceilings;

/// Ceilings that moved by more than this make shares of the arm, or figures of arms, uncertain by as much.
const MOVED: f64 = 0.10;
/// A share this far beyond 1 is more than the noise of its two readings.
const BEYOND: f64 = 0.05;

/// Start of the warnings that [`warnings`] gives.
pub const WARNING: &str = "ceilings: ";

/// What was measured around one repeat of an arm.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ArmCeilings {
    pub arm: String,
    pub repeat: u32,
    pub before: Ceilings,
    pub after: Ceilings,
}

impl ArmCeilings {
    /// What the arm's floors and shares are set beside.
    pub fn best(&self) -> Ceilings {
        self.before.best_of(&self.after)
    }

    /// Rows of checks.csv: how far the ceilings moved, and whether a share of `summary` went beyond 1.
    pub fn check_rows(&self, summary: &Summary) -> Vec<CheckRow> {
        let row = |check: &str, value: f64, ok: bool, note: String| CheckRow {
            arm: self.arm.clone(),
            repeat: self.repeat,
            check: check.to_string(),
            value: Some(value),
            status: if ok { "ok" } else { "warning" }.to_string(),
            note,
        };
        let (before, after) = (&self.before, &self.after);
        let moved = |before: f64, after: f64| if before > 0.0 { after / before - 1.0 } else { 0.0 };
        let read = moved(before.read_bytes_per_s, after.read_bytes_per_s);
        let rate = moved(before.flops_per_s, after.flops_per_s);
        let share = summary.bandwidth_fraction.unwrap_or(0.0).max(summary.flops_fraction.unwrap_or(0.0));
        vec![
            row(
                "read_ceiling_change",
                read,
                !far(before.read_bytes_per_s, after.read_bytes_per_s),
                format!(
                    "the memory gave {:.1} GB/s right before the arm and {:.1} right after it; shares are of the better",
                    before.read_bytes_per_s / 1e9,
                    after.read_bytes_per_s / 1e9
                ),
            ),
            row(
                "rate_ceiling_change",
                rate,
                !far(before.flops_per_s, after.flops_per_s),
                format!(
                    "multiply-adds ran at {:.0} GFLOP/s right before the arm and {:.0} right after it",
                    before.flops_per_s / 1e9,
                    after.flops_per_s / 1e9
                ),
            ),
            row(
                "share_of_ceiling",
                share,
                share <= 1.0 + BEYOND,
                "the larger of bandwidth_fraction and flops_fraction; beyond 1 the machine was faster during the arm than \
                 right before and after it"
                    .to_string(),
            ),
        ]
    }
}

/// Whether two readings differ by more than a tenth of the lower one.
pub fn far(one: f64, other: f64) -> bool {
    one.max(other) > (1.0 + MOVED) * one.min(other)
}

/// Median of what arms were judged by, figure by figure; `None` without any.
pub fn typical<'a>(all: impl Iterator<Item = &'a ArmCeilings>) -> Option<Ceilings> {
    let all: Vec<Ceilings> = all.map(ArmCeilings::best).collect();
    let first = all.first()?;
    let median = |figure: fn(&Ceilings) -> f64| {
        let mut figures: Vec<f64> = all.iter().map(figure).collect();
        figures.sort_by(f64::total_cmp);
        quantile(&figures, 0.5).unwrap_or(figure(first))
    };
    Some(Ceilings {
        read_bytes_per_s: median(|ceilings| ceilings.read_bytes_per_s),
        copy_bytes_per_s: median(|ceilings| ceilings.copy_bytes_per_s),
        flops_per_s: median(|ceilings| ceilings.flops_per_s),
        launch_s: median(|ceilings| ceilings.launch_s),
        measured: first.measured,
    })
}

/// What a reader must know before comparing arms of this run. Readings are compared where `alike` says the same of two arms: another
/// model, arithmetic or number of threads has other ceilings.
pub fn warnings(all: &[ArmCeilings], alike: impl Fn(&str) -> String) -> Vec<String> {
    let mut groups: BTreeMap<String, Vec<&ArmCeilings>> = BTreeMap::new();
    for arm in all {
        groups.entry(alike(&arm.arm)).or_default().push(arm);
    }
    // Of the group whose readings are furthest apart.
    let range = |figure: fn(&Ceilings) -> f64| {
        let of_group = |arms: &Vec<&ArmCeilings>| {
            let figures = || arms.iter().flat_map(|arm| [figure(&arm.before), figure(&arm.after)]);
            (figures().fold(f64::INFINITY, f64::min), figures().fold(0.0, f64::max))
        };
        let ratio = |(least, most): &(f64, f64)| most / least;
        let ranges = groups.values().map(of_group);
        ranges.max_by(|one, other| ratio(one).total_cmp(&ratio(other))).unwrap_or_default()
    };
    let mut warnings = Vec::new();
    let (least, most) = range(|ceilings| ceilings.read_bytes_per_s);
    if !all.is_empty() && far(least, most) {
        warnings.push(format!(
            "{WARNING}the memory gave between {:.1} and {:.1} GB/s in the course of the run: times of arms differ by that \
             too, shares are of what was measured around each arm (run.json: arm_ceilings)",
            least / 1e9,
            most / 1e9
        ));
    }
    let (least, most) = range(|ceilings| ceilings.flops_per_s);
    if !all.is_empty() && far(least, most) {
        warnings.push(format!(
            "{WARNING}multiply-adds ran at {:.0} to {:.0} GFLOP/s in the course of the run: other work had a part of the \
             cores, or their clock moved",
            least / 1e9,
            most / 1e9
        ));
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ceilings(read: f64, flops: f64) -> Ceilings {
        Ceilings {
            read_bytes_per_s: read,
            copy_bytes_per_s: read,
            flops_per_s: flops,
            launch_s: 0.0,
            measured: true,
        }
    }

    fn arm(repeat: u32, before: Ceilings, after: Ceilings) -> ArmCeilings {
        ArmCeilings { arm: "a".to_string(), repeat, before, after }
    }

    /// A machine whose memory changes at given moments; time passes by reading.
    struct Machine {
        now_s: f64,
        /// (from when, bytes a second)
        states: Vec<(f64, f64)>,
    }

    impl Machine {
        fn rate(&self) -> f64 {
            self.states.iter().rev().find(|(from_s, _)| *from_s <= self.now_s).unwrap().1
        }

        /// Reads at `share` of what the memory gives, in small parts; seconds.
        fn read(&mut self, bytes: f64, share: f64) -> f64 {
            let start_s = self.now_s;
            (0..1000).for_each(|_| self.now_s += bytes / 1000.0 / (share * self.rate()));
            self.now_s - start_s
        }

        fn ceilings(&mut self) -> Ceilings {
            ceilings(1e9 / self.read(1e9, 1.0), 1e12)
        }
    }

    #[test]
    fn no_share_passes_one_wherever_the_memory_changes_once() {
        for (from, to) in [(46e9, 92e9), (92e9, 46e9)] {
            for hundredths in 0..150 {
                let states = vec![(0.0, from), (f64::from(hundredths) * 0.01, to)];
                let mut machine = Machine { now_s: 0.0, states };
                let at_start = machine.ceilings();
                for repeat in 0..3 {
                    let before = machine.ceilings();
                    let bytes = 20e9;
                    let took_s = machine.read(bytes, 0.95);
                    let arm = arm(repeat, before, machine.ceilings());
                    let share = bytes / took_s / arm.best().read_bytes_per_s;
                    assert!((0.47..=0.951).contains(&share), "{from} to {to} at {hundredths}: {share}");
                    // The fault this mends: the memory sped up after the first measurement and before the last arm.
                    let stale = bytes / took_s / at_start.read_bytes_per_s;
                    let sped_up = to > from && (3..50).contains(&hundredths) && repeat == 2;
                    assert!(!sped_up || stale > 1.8, "{from} to {to} at {hundredths}: {stale}");
                }
            }
        }
    }

    #[test]
    fn an_arm_is_judged_by_the_better_reading_of_each_kind() {
        let arm = arm(0, ceilings(30e9, 190e9), ceilings(46e9, 180e9));
        assert_eq!(arm.best(), ceilings(46e9, 190e9));
        let rows = arm.check_rows(&Summary { bandwidth_fraction: Some(0.9), ..Summary::default() });
        let status: Vec<_> = rows.iter().map(|row| (row.check.as_str(), row.status.as_str())).collect();
        assert_eq!(
            status,
            [("read_ceiling_change", "warning"), ("rate_ceiling_change", "ok"), ("share_of_ceiling", "ok")]
        );
        let beyond = arm.check_rows(&Summary { bandwidth_fraction: Some(1.16), ..Summary::default() });
        assert_eq!(beyond[2].status, "warning");
    }

    fn same(_: &str) -> String {
        String::new()
    }

    #[test]
    fn a_run_whose_memory_moved_says_between_what() {
        let level = [arm(0, ceilings(46e9, 190e9), ceilings(47e9, 191e9))];
        assert!(warnings(&level, same).is_empty() && warnings(&[], same).is_empty());
        let moved = [level[0].clone(), arm(1, ceilings(46e9, 190e9), ceilings(85e9, 150e9))];
        // Arms that nobody would compare say nothing of each other.
        let other =
            ArmCeilings { arm: "other".into(), ..arm(1, ceilings(85e9, 400e9), ceilings(86e9, 401e9)) };
        let two = [level[0].clone(), other];
        assert!(warnings(&two, str::to_string).is_empty());
        assert_eq!(warnings(&two, same).len(), 2);
        let warnings = warnings(&moved, same);
        assert!(warnings[0].contains("between 46.0 and 85.0 GB/s"), "{warnings:?}");
        assert!(warnings[1].contains("150 to 191 GFLOP/s"), "{warnings:?}");
        assert!(warnings.iter().all(|warning| warning.starts_with(WARNING)));
    }

    #[test]
    fn what_is_typical_is_the_median_of_what_arms_were_judged_by() {
        let all = [46e9, 47e9, 85e9].map(|read| arm(0, ceilings(read, 190e9), ceilings(30e9, 190e9)));
        assert_eq!(typical(all.iter()).unwrap().read_bytes_per_s, 47e9);
        assert_eq!(typical([].iter()), None);
    }
}
