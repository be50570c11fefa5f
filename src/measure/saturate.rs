//! The highest request rate that keeps the limits: bracketing by doubling, then bisection.
//!
//! A driver without a device: a closure runs one repeat at a rate. A rate is judged from repeats. It *keeps* the limits
//! when for each of them the upper end of the one-sided 95 % interval of the mean over repeats (Student's t) is within
//! it, and *breaks* them when for one of them the lower end is beyond it. The repeats are looked at after each but the
//! first, so the 5 % are shared out among the looks (Bonferroni) and the confidence is that of the decision. A first repeat that is clear of every limit by a
//! factor of two, or beyond one by it, decides alone. What is still open after the last repeat goes by the means and is
//! marked so. A failed request breaks any limit.
//!
//! A finite burst is no rate: requests that are all in before the first is answered show no queue, whatever their rate.
//! So no rate is tried beyond what a flood completes, and one that keeps the limits must last: its arrivals take at least
//! [`TURNS`] times as long as a request does, else more requests are sent; and of what is offered, at least
//! [`KEEPS_PACE`] is completed in the whole time.

use super::quantile::{quantile, supported};
use super::statistics::{mean, t_quantile, variance};
use super::summary::Summary;
use crate::workload::rate::Rate;
use crate::workload::slo::Slo;
use crate::{Error, Result};

/// Of each one-sided decision about a rate.
pub const CONFIDENCE: f64 = 0.95;
const CLEAR_FACTOR: f64 = 2.0;
/// Times a request's own time that arrivals must take for a queue to show. (By Little's law: times the requests in flight.)
pub const TURNS: f64 = 8.0;
/// Share of the offered rate that is completed in arrivals of [`TURNS`] and the wait for the last answer: 8/9 of it without
/// a queue.
const KEEPS_PACE: f64 = 0.8;
/// How often requests are added to a rate, and how many it may come to: where it is never enough, the queue grows with them.
const EXTENSIONS: usize = 4;
/// Where f times as many requests take more than f to this power times as long, what waits grows with them. (In a queue at
/// its very limit it grows with the square root.)
const GROWTH: f64 = 0.6;
const MOST_PROMPTS: usize = 1 << 16;

#[derive(Debug, Clone, PartialEq)]
pub struct SearchOptions {
    pub slo: Slo,
    /// Where bracketing starts, and how far it may go, requests a second.
    pub start: f64,
    pub lowest: f64,
    pub highest: f64,
    /// Bisection ends when the rates on both sides of the answer differ by this share.
    pub precision: f64,
    pub most_repeats: u32,
    /// Requests of a run, unless more are needed.
    pub prompts: usize,
    /// Requests of the flood that bounds the search; `None`: a load that cannot flood has no such bound.
    pub flood_prompts: Option<usize>,
}

/// A run that is asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Trial {
    pub rate: Rate,
    pub prompts: usize,
}

impl Default for SearchOptions {
    fn default() -> Self {
        Self {
            slo: Slo::default(),
            start: 1.0,
            lowest: 1.0 / 64.0,
            highest: 4096.0,
            precision: 0.05,
            most_repeats: 5,
            prompts: 200,
            flood_prompts: None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Judgement {
    Keeps,
    Breaks,
}

/// What was found at one rate.
#[derive(Debug, Clone, PartialEq)]
pub struct Judged {
    pub rate: Rate,
    pub judgement: Judgement,
    /// Decided with [`CONFIDENCE`] rather than by the means alone.
    pub certain: bool,
    /// The limits were kept, but only as long as requests were still coming in.
    pub unsustained: bool,
    pub repeats: Vec<Summary>,
}

impl Judged {
    /// The confidence of the judgement, where it rests on an interval; `None` for one clear by a factor and for means.
    pub fn confidence(&self) -> Option<f64> {
        (self.basis() == "95 %").then_some(CONFIDENCE)
    }

    /// What the judgement rests on, in a word or two.
    pub fn basis(&self) -> &'static str {
        match (self.certain, self.repeats.len()) {
            _ if self.unsustained => "not sustained",
            (true, _) if self.repeats.iter().any(|summary| summary.failed > 0) => "a request failed",
            (true, 1) => "twofold",
            (true, _) => "95 %",
            (false, _) => "by the means",
        }
    }

    /// Median over the repeats of completed requests a second that kept the limits.
    pub fn goodput(&self) -> Option<f64> {
        let mut values: Vec<f64> =
            self.repeats.iter().map(|summary| summary.goodput).collect::<Option<_>>()?;
        values.sort_by(f64::total_cmp);
        quantile(&values, 0.5)
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Saturation {
    /// Highest rate found to keep the limits; `None` when even the lowest one breaks them.
    pub keeps: Option<Judged>,
    /// Lowest rate found to break them; `None` when even the highest one keeps them.
    pub breaks: Option<Judged>,
    /// Every rate tried, in order.
    pub tried: Vec<Judged>,
    /// Requests a second that a flood completed: no higher rate was tried.
    pub flood_throughput: Option<f64>,
}

/// # Errors
/// No limits; a limit whose percentile the runs are too short to support; what `run` says, which is asked for a repeat of
/// a trial.
pub fn search(
    options: &SearchOptions,
    mut run: impl FnMut(Trial, u32) -> Result<Summary>,
) -> Result<Saturation> {
    if options.slo.is_empty() {
        return Err(Error::invalid(
            "there are no limits to keep",
            "give --slo, for example --slo ttft_p99=500",
        ));
    }
    let mut found = Saturation { keeps: None, breaks: None, tried: Vec::new(), flood_throughput: None };
    let mut highest = options.highest;
    if let Some(prompts) = options.flood_prompts {
        let flood = run(Trial { rate: Rate::FLOOD, prompts }, 0)?;
        let completed = flood.request_throughput.unwrap_or(0.0);
        found.flood_throughput =
            flood.steady_request_throughput.filter(|steady| *steady > completed).or(Some(completed));
        highest = found.flood_throughput.map_or(highest, rounded).clamp(options.lowest, highest);
    }
    let mut per_s = options.start.clamp(options.lowest, highest);
    loop {
        let judged = judge(Rate::new(per_s)?, options, &mut run)?;
        found.tried.push(judged.clone());
        match judged.judgement {
            Judgement::Keeps => found.keeps = Some(judged),
            Judgement::Breaks => found.breaks = Some(judged),
        }
        let keeps = found.keeps.as_ref().map(|judged| judged.rate.per_s());
        let breaks = found.breaks.as_ref().map(|judged| judged.rate.per_s());
        per_s = match (keeps, breaks) {
            (Some(keeps), Some(breaks)) if breaks <= keeps * (1.0 + options.precision) => return Ok(found),
            (Some(keeps), Some(breaks)) => between(keeps, breaks, options.precision),
            (Some(keeps), None) if keeps >= highest => return Ok(found),
            (Some(keeps), None) => (keeps * 2.0).min(highest),
            (None, Some(breaks)) if breaks <= options.lowest => return Ok(found),
            (None, Some(breaks)) => (breaks / 2.0).max(options.lowest),
            (None, None) => return Ok(found),
        };
    }
}

/// The geometric mean of two rates, to as few digits as leave it inside and off by a small part of the precision, so
/// that arms have names a person can read.
fn between(keeps: f64, breaks: f64, precision: f64) -> f64 {
    let middle = (keeps * breaks).sqrt();
    let rounded = (1..=15).filter_map(|digits| format!("{middle:.*e}", digits).parse::<f64>().ok());
    let near = |rate: &f64| keeps < *rate && *rate < breaks && (rate / middle - 1.0).abs() < precision / 4.0;
    rounded.into_iter().find(near).unwrap_or(middle)
}

/// Down to three digits, so that the arm of a measured rate has a name a person can read.
fn rounded(per_s: f64) -> f64 {
    let parse = |rate: f64| format!("{rate:.2e}").parse().unwrap_or(per_s);
    let near: f64 = parse(per_s);
    if near <= per_s { near } else { parse(near - 10f64.powf(per_s.log10().floor() - 2.0)) }
}

/// Whether a run that kept the limits lasted.
enum Pace {
    Kept,
    /// Completed far less than was offered.
    Behind,
    /// Over too soon to tell: this many requests may do.
    TooShort(usize),
}

fn pace(trial: Trial, summary: &Summary) -> Pace {
    let Some(e2el_s) = summary.e2el_mean_ms.map(|ms| ms / 1e3) else { return Pace::Kept };
    let per_s = trial.rate.per_s();
    if (summary.requests as f64) < TURNS * e2el_s * per_s {
        // (A tenth more, since a fuller batch takes longer.)
        return Pace::TooShort((1.1 * TURNS * e2el_s * per_s).ceil() as usize);
    }
    match summary.request_throughput {
        Some(completed) if completed < KEEPS_PACE * per_s => Pace::Behind,
        _ => Pace::Kept,
    }
}

fn judge(
    rate: Rate,
    options: &SearchOptions,
    run: &mut impl FnMut(Trial, u32) -> Result<Summary>,
) -> Result<Judged> {
    let mut trial = Trial { rate, prompts: options.prompts };
    let unsustained = |certain, repeats| {
        Ok(Judged { rate, judgement: Judgement::Breaks, certain, unsustained: true, repeats })
    };
    let mut shorter: Option<(usize, f64)> = None;
    for extension in 0..=EXTENSIONS {
        let judged = judge_trial(trial, options, run)?;
        if judged.judgement == Judgement::Breaks {
            return Ok(judged);
        }
        let first = &judged.repeats[0];
        let e2el_ms = first.e2el_mean_ms.unwrap_or(0.0);
        let grows = shorter.is_some_and(|(prompts, before_ms)| {
            e2el_ms > before_ms * (trial.prompts as f64 / prompts as f64).powf(GROWTH)
        });
        match pace(trial, first) {
            _ if grows => return unsustained(true, judged.repeats),
            Pace::Kept => return Ok(judged),
            Pace::Behind => return unsustained(true, judged.repeats),
            // A recorded trace has no more requests to send.
            Pace::TooShort(_) if first.requests < trial.prompts => return unsustained(false, judged.repeats),
            Pace::TooShort(prompts) => {
                shorter = Some((trial.prompts, e2el_ms));
                trial.prompts = prompts.max(2 * trial.prompts);
            }
        }
        if extension == EXTENSIONS || trial.prompts > MOST_PROMPTS {
            return unsustained(false, judged.repeats);
        }
    }
    Err(Error::bug("the search ended without a judgement"))
}

/// Judges by the limits alone. A first repeat that did not last is not repeated.
fn judge_trial(
    trial: Trial,
    options: &SearchOptions,
    run: &mut impl FnMut(Trial, u32) -> Result<Summary>,
) -> Result<Judged> {
    let rate = trial.rate;
    let mut repeats: Vec<Summary> = Vec::new();
    loop {
        let summary = run(trial, repeats.len() as u32)?;
        check_support(trial, &summary, &options.slo)?;
        repeats.push(summary);
        // Looks that an interval may decide at: after each repeat but the first.
        let looks = options.most_repeats.saturating_sub(1).max(1);
        let verdict = verdict(&repeats, &options.slo, looks);
        let last = repeats.len() as u32 >= options.most_repeats.max(1);
        let lasted = verdict.0 == Judgement::Breaks || matches!(pace(trial, &repeats[0]), Pace::Kept);
        if verdict.1 || last || !lasted {
            return Ok(Judged {
                rate,
                judgement: verdict.0,
                certain: verdict.1,
                unsustained: false,
                repeats,
            });
        }
    }
}

fn check_support(trial: Trial, summary: &Summary, slo: &Slo) -> Result<()> {
    let short = slo.limits().find(|limit| {
        let quantile = super::compare::quantile_of(limit.statistic).unwrap_or(0.0);
        limit.latency != "itl" && summary.failed == 0 && !supported(summary.completed, quantile)
    });
    match short {
        Some(limit) => Err(Error::invalid(
            format!("{} cannot be told from {} requests", limit.name, summary.completed),
            // (Fewer than were asked for: of a trace, or by --load.)
            if summary.requests < trial.prompts {
                "raise --prompts, or where a trace has no more take a longer one: a p99 needs 100 requests or more, a p90 10"
            } else {
                "raise --prompts: a p99 needs 100 requests or more, a p90 10"
            },
        )),
        None => Ok(()),
    }
}

/// The judgement by the means so far, and whether it is certain, where it is asked for `looks` times.
fn verdict(repeats: &[Summary], slo: &Slo, looks: u32) -> (Judgement, bool) {
    if repeats.iter().any(|summary| summary.failed > 0) {
        return (Judgement::Breaks, true);
    }
    let mut all_keep = true;
    let mut all_certain = true;
    for limit in slo.limits() {
        // The share of the limit that is used up, a value a repeat; a latency that does not exist uses nothing.
        let used: Vec<f64> = repeats
            .iter()
            .map(|summary| summary.metric(&format!("{}_ms", limit.name)).unwrap_or(0.0) / limit.limit_ms)
            .collect();
        let middle = mean(&used);
        let half = match used.len() {
            1 => f64::INFINITY,
            // A one-sided level of 1 - a is the two-sided one of 1 - 2 a.
            n => {
                let level = 1.0 - 2.0 * (1.0 - CONFIDENCE) / f64::from(looks);
                let quantile = t_quantile(level, n as f64 - 1.0);
                quantile * (variance(&used) / n as f64).sqrt()
            }
        };
        let clear = used.len() == 1 && !(1.0 / CLEAR_FACTOR..=CLEAR_FACTOR).contains(&middle);
        if middle > 1.0 && (clear || middle - half > 1.0) {
            return (Judgement::Breaks, true);
        }
        all_keep &= middle <= 1.0;
        all_certain &= middle <= 1.0 && (clear || middle + half <= 1.0);
    }
    (if all_keep { Judgement::Keeps } else { Judgement::Breaks }, all_keep && all_certain)
}

/// Ends a sweep over rising rates once going on can teach nothing: two finite rates in a row whose throughput stayed
/// below 80 % of what was offered, the second no more than 5 % above the first. A flood is still worth running.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct OverSaturation {
    /// Throughput of the last rate, if it was over-saturated.
    last: Option<f64>,
    certain_at: Option<f64>,
}

impl OverSaturation {
    /// A rate's median request throughput; call in order of rising rates.
    pub fn observe(&mut self, rate: Rate, request_throughput: f64) {
        let Some(per_s) = rate.finite() else { return };
        let over = request_throughput < 0.8 * per_s;
        if over
            && self.certain_at.is_none()
            && self.last.is_some_and(|last| request_throughput <= 1.05 * last)
        {
            self.certain_at = Some(per_s);
        }
        self.last = over.then_some(request_throughput);
    }

    /// Whether this rate need not be run any more.
    pub fn skips(&self, rate: Rate) -> bool {
        rate.finite().zip(self.certain_at).is_some_and(|(per_s, certain_at)| per_s > certain_at)
    }
}

#[cfg(test)]
mod tests;
