//! Kernels of traced steps: CUPTI's records, matched with the launches that declared bytes and FLOPs.
//!
//! On one stream kernels run in the order of their launches, whether launched one by one or by a graph, so the records of
//! a pass are the launches of its steps, one after the other, and names tell whether they are. A library's call may be
//! several kernels of names that nobody knows: it takes all those between its neighbours.

use std::collections::HashSet;

use super::cupti::{Collected, KernelTime, Tracer};
use super::launch::Launched;
use crate::engine::clock::Clock;
use crate::engine::device::{KernelRecord, Ticket, TraceEnd};

/// How the kernels of a traced pass are timed.
pub enum Timing {
    /// By CUPTI: steps run as ever, and records come at the end.
    Cupti { tracer: Tracer, steps: Vec<(Ticket, Vec<Launched>)> },
    /// By events around each launch, without graphs and without overlap; and why.
    Events { because: String },
}

impl Timing {
    pub fn start(driver: (i32, i32)) -> Self {
        match Tracer::start(driver) {
            Ok(tracer) => Self::Cupti { tracer, steps: Vec::new() },
            Err(because) => Self::Events { because },
        }
    }

    /// Ends a pass whose work is done. What is to time the next one, if kernels were lost, comes with it.
    pub fn finish(self, clock: &Clock) -> (TraceEnd, Option<Self>) {
        let (tracer, steps) = match self {
            Self::Cupti { tracer, steps } => (tracer, steps),
            Self::Events { because } => {
                let note = format!(
                    "kernels are timed by CUDA events, one launch after the other without graphs or overlap ({because})"
                );
                return (TraceEnd { notes: vec![note], ..TraceEnd::default() }, None);
            }
        };
        let found = tracer.moment(clock).and_then(|moment| {
            let collected = tracer.finish();
            let launches: Vec<&[Launched]> = steps.iter().map(|(_, launches)| launches.as_slice()).collect();
            kernels(&launches, &collected, moment)
        });
        match found {
            Ok(kernels) => {
                let kernels = steps.into_iter().map(|(ticket, _)| ticket).zip(kernels).collect();
                (TraceEnd { kernels, ..TraceEnd::default() }, None)
            }
            Err(because) => (TraceEnd { again: true, ..TraceEnd::default() }, Some(Self::Events { because })),
        }
    }
}

/// What a trace calls a launch.
pub fn name(launched: &Launched) -> String {
    if launched.role.is_empty() {
        launched.name.to_string()
    } else {
        format!("{}: {}", launched.role, launched.name)
    }
}

/// The kernels of each step. `moment`: one moment on CUPTI's clock (ns) and on the session's (s).
///
/// # Errors
/// In words, where records and launches part.
fn kernels(
    steps: &[&[Launched]],
    collected: &Collected,
    moment: (u64, f64),
) -> Result<Vec<Vec<KernelRecord>>, String> {
    if collected.dropped > 0 {
        return Err(format!("CUPTI dropped {} records", collected.dropped));
    }
    let launches = || steps.iter().flat_map(|launches| launches.iter());
    let own: HashSet<&str> =
        launches().filter(|launched| !launched.library).map(|launched| launched.name).collect();
    let seconds = |at_ns: u64| moment.1 + (at_ns as i64).wrapping_sub(moment.0 as i64) as f64 * 1e-9;
    let record = |launched: &Launched, first: &KernelTime, last: &KernelTime| KernelRecord {
        name: name(launched),
        start_s: seconds(first.start_ns),
        end_s: seconds(first.end_ns.max(last.end_ns)),
        bytes: launched.cost.bytes,
        flops: launched.cost.flops,
    };
    let mut rest = collected.kernels.as_slice();
    let mut all = Vec::with_capacity(steps.len());
    for (index, launches) in steps.iter().enumerate() {
        let mut records = Vec::with_capacity(launches.len());
        let mut launches = *launches;
        while let Some((launched, later)) = launches.split_first() {
            if !launched.library {
                let found = rest.split_first().filter(|(kernel, _)| collected.name(kernel) == launched.name);
                let Some((kernel, after)) = found else {
                    let found = rest.first().map_or("nothing", |kernel| collected.name(kernel));
                    return Err(format!(
                        "CUPTI's records do not match the launches: step {index} launched {}, and {found} was recorded",
                        launched.name
                    ));
                };
                records.push(record(launched, kernel, kernel));
                (rest, launches) = (after, later);
                continue;
            }
            // Calls of the library in a row, and the kernels of names that are not ours.
            let calls = launches.iter().take_while(|launched| launched.library).count();
            let foreign = rest.iter().take_while(|kernel| !own.contains(collected.name(kernel))).count();
            let groups = group(&rest[..foreign], calls, collected).ok_or_else(|| {
                format!("{calls} library calls of step {index} and {foreign} kernels of theirs")
            })?;
            for (launched, group) in launches[..calls].iter().zip(groups) {
                let last = group.iter().max_by_key(|kernel| kernel.end_ns);
                if let (Some(first), Some(last)) = (group.first(), last) {
                    records.push(record(launched, first, last));
                }
            }
            (rest, launches) = (&rest[foreign..], &launches[calls..]);
        }
        all.push(records);
    }
    if rest.is_empty() { Ok(all) } else { Err(format!("CUPTI recorded {} kernels too many", rest.len())) }
}

/// Deals kernels out to library calls: one each, or all to the only one, or those that sum up the parts of a product to
/// the call in front.
fn group<'a>(
    kernels: &'a [KernelTime],
    calls: usize,
    collected: &Collected,
) -> Option<Vec<&'a [KernelTime]>> {
    if calls == 1 && !kernels.is_empty() {
        return Some(vec![kernels]);
    }
    let is_sum = |kernel: &KernelTime| {
        let name = collected.name(kernel).to_lowercase();
        name.contains("splitk") && name.contains("reduce")
    };
    let mut groups = Vec::with_capacity(calls);
    let mut first = 0;
    for end in 1..=kernels.len() {
        if kernels.get(end).is_none_or(|next| !is_sum(next)) {
            groups.push(&kernels[first..end]);
            first = end;
        }
    }
    (groups.len() == calls).then_some(groups)
}

#[cfg(test)]
mod tests {
    use super::super::launch::LaunchCost;
    use super::*;

    fn launched(name: &'static str, library: bool) -> Launched {
        Launched { name, role: "mlp_in", cost: LaunchCost::new(100, 7), library }
    }

    fn own(name: &'static str) -> Launched {
        launched(name, false)
    }

    /// Kernels of 10 ns, each beginning 5 ns before the one in front ends.
    fn collected(names: &[&str]) -> Collected {
        let kernels = (0..names.len()).map(|at| KernelTime {
            name: at as u32,
            start_ns: 1_000 + 5 * at as u64,
            end_ns: 1_010 + 5 * at as u64,
        });
        Collected {
            kernels: kernels.collect(),
            names: names.iter().map(|name| (*name).to_string()).collect(),
            ..Collected::default()
        }
    }

    fn matched(steps: &[&[Launched]], names: &[&str]) -> Result<Vec<Vec<KernelRecord>>, String> {
        kernels(steps, &collected(names), (900, 2.0))
    }

    #[test]
    fn records_take_the_costs_of_their_launches_step_by_step() {
        let steps: [&[Launched]; 2] = [&[own("a"), own("b")], &[own("a")]];
        let found = matched(&steps, &["a", "b", "a"]).unwrap();
        assert_eq!((found[0].len(), found[1].len()), (2, 1));
        let second = &found[0][1];
        assert_eq!((second.name.as_str(), second.bytes, second.flops), ("mlp_in: b", 100, 7));
        // 105 ns after the moment that is 2 s on the session's clock.
        assert!((second.start_s - 2.000_000_105).abs() < 1e-12, "{}", second.start_s);
        assert!((second.end_s - second.start_s - 10e-9).abs() < 1e-12);
    }

    #[test]
    fn a_library_s_call_takes_the_kernels_between_its_neighbours() {
        let library = launched("cublaslt", true);
        let found = matched(&[&[own("a"), library, own("b")]], &["a", "gemm", "splitKreduce", "b"]).unwrap();
        assert_eq!(found[0].len(), 3);
        assert!((found[0][1].end_s - found[0][1].start_s - 15e-9).abs() < 1e-12);
        // Two calls in a row: a sum belongs to the product in front of it.
        let steps: [&[Launched]; 1] = [&[library, library, own("b")]];
        assert_eq!(matched(&steps, &["gemm", "splitKreduce_kernel", "gemm", "b"]).unwrap()[0].len(), 3);
        assert!(matched(&steps, &["gemm", "other", "gemm", "b"]).is_err());
    }

    #[test]
    fn what_does_not_match_is_told() {
        let steps: [&[Launched]; 1] = [&[own("a"), own("b")]];
        for (names, words) in [
            (&["a"][..], "nothing was recorded"),
            (&["a", "a"][..], "a was recorded"),
            (&["a", "b", "b"][..], "1 kernels too many"),
        ] {
            let error = matched(&steps, names).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        let lost = Collected { dropped: 3, ..collected(&["a", "b"]) };
        assert!(kernels(&steps, &lost, (0, 0.0)).unwrap_err().contains("dropped 3"));
    }
}
