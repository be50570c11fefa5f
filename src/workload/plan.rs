//! From a [`LoadSpec`] and a seed to a [`Schedule`].

use rand_distr::{Distribution, Exp1};

use super::lengths::LengthPair;
use super::probe::Probe;
use super::prompts::Prompts;
use super::schedule::{Pacing, PlannedRequest, Role, Schedule, ScheduleContext};
use super::seeds::{Purpose, repeat_seed, request_seed, stream};
use super::spec::{
    Count, LATEST_ARRIVAL_S, LoadSpec, MOST_PROMPT_TOKENS, MOST_REQUESTS, MOST_TOKENS, PromptKind,
};
use super::{arrivals, lengths, replay};
use crate::engine::request::Request;
use crate::{Error, Result};

/// Tokens of an answer in a short round of warm-up: the first, and the 16 decodes that judging step times takes.
const SHORT_ANSWER: usize = 17;

impl LoadSpec {
    /// The measured run.
    ///
    /// # Errors
    /// Values out of bounds; files that cannot be read; text without a tokenizer.
    pub fn schedule(&self, context: &ScheduleContext) -> Result<Schedule> {
        self.validate()?;
        if self.probe.is_some() { self.probe_schedule(context) } else { self.load_schedule(context) }
    }

    /// One round of warm-up: the load with fewer requests and from another seed stream, so that concurrency and shapes
    /// are the arm's own. `None` when warm-up is off. Rounds after the first are for step times that were not yet
    /// stationary: where answers set the pace (a flood or a closed loop) theirs are cut to [`SHORT_ANSWER`] tokens,
    /// which keeps prompts, prefills and batch sizes and saves time. A probe is run without its waits.
    ///
    /// # Errors
    /// As [`LoadSpec::schedule`].
    pub fn warmup_schedule(&self, context: &ScheduleContext, round: usize) -> Result<Option<Schedule>> {
        let most = self.requests(context.seats);
        let count = self.warmup.prompts.resolve(context.seats).min(most);
        if count == 0 || self.warmup.max_rounds == 0 {
            return Ok(None);
        }
        let seed = repeat_seed(context.seed ^ Purpose::WarmUp as u64, round as u32 + 1);
        let context = ScheduleContext { seed, ..*context };
        if let Some(probe) = self.probe {
            let hasty = Probe { inject_after_s: 0.0, drain_s: 0.0, ..probe };
            return Self { probe: Some(hasty), ..self.clone() }.probe_schedule(&context).map(Some);
        }
        let of = |count| Self { prompts: Count::Exact(count), ..self.clone() }.load_schedule(&context);
        let mut schedule = of(count)?;
        let arrivals_s = schedule.requests.last().map_or(0.0, |planned| planned.arrival_s);
        if arrivals_s > self.warmup.max_arrivals_s {
            schedule = of(((count as f64 * self.warmup.max_arrivals_s / arrivals_s) as usize).max(1))?;
        }
        let paced_by_answers = matches!(schedule.pacing, Pacing::Closed { .. })
            || schedule.requests.iter().all(|planned| planned.arrival_s == 0.0);
        if round > 0 && paced_by_answers {
            for planned in &mut schedule.requests {
                planned.request.max_tokens = planned.request.max_tokens.min(SHORT_ANSWER);
            }
        }
        Ok(Some(schedule))
    }

    fn load_schedule(&self, context: &ScheduleContext) -> Result<Schedule> {
        let (arrivals_s, pairs) = self.arrivals_and_lengths(context)?;
        check_size(&arrivals_s, &pairs)?;
        let prompts = self.prompts(context, &pairs)?;
        let mut think = stream(context.seed, Purpose::ThinkTime);
        let requests =
            arrivals_s.iter().zip(&pairs).enumerate().map(|(index, (&arrival_s, &(input, output)))| {
                let pause: f64 = Exp1.sample(&mut think);
                PlannedRequest {
                    arrival_s,
                    think_s: self.think_time_s * pause,
                    role: Role::Load,
                    request: self.request(context, prompts.prompt(index, input), output, index),
                }
            });
        let closed = self.request_rate.is_flood() && self.replay.is_none();
        Ok(Schedule {
            requests: requests.collect(),
            pacing: match self.concurrency {
                Some(clients) if closed => Pacing::Closed { clients },
                max_in_flight => Pacing::Open { max_in_flight },
            },
            offered_rate: match self.concurrency {
                Some(_) if closed => None,
                _ => self.offered_rate(&arrivals_s),
            },
        })
    }

    /// The nominal rate; of a replay or a ramp, requests over the time they span.
    fn offered_rate(&self, arrivals_s: &[f64]) -> Option<super::rate::Rate> {
        if self.replay.is_none() && self.ramp.is_none() {
            return Some(self.request_rate);
        }
        let last_s = arrivals_s.last().copied().unwrap_or(0.0);
        super::rate::Rate::new(arrivals_s.len() as f64 / last_s).ok()
    }

    fn arrivals_and_lengths(&self, context: &ScheduleContext) -> Result<(Vec<f64>, Vec<LengthPair>)> {
        let count = self.requests(context.seats);
        if count > MOST_REQUESTS {
            return Err(Error::invalid(
                format!("prompts = {count} is out of bounds with {} seats", context.seats),
                format!("prompts must be 1 to {MOST_REQUESTS}: lower per_seat, or give it a max"),
            ));
        }
        let Some(replay) = &self.replay else {
            let times = arrivals::arrival_times(
                count,
                self.request_rate,
                self.arrivals,
                self.burstiness,
                self.ramp,
                context.seed,
            );
            return Ok((
                times,
                lengths::draw(&self.lengths, self.input_len, self.output_len, count, context.seed)?,
            ));
        };
        let mut rows = replay::read(&replay.file)?.rows;
        rows.truncate(count);
        let recorded_s = rows.last().map_or(0.0, |row| row.arrival_s);
        let scale = match self.request_rate.finite() {
            Some(per_s) if recorded_s > 0.0 => rows.len() as f64 / per_s / recorded_s,
            _ => 1.0 / replay.speedup,
        };
        Ok(rows.iter().map(|row| (row.arrival_s * scale, (row.input_tokens, row.output_tokens))).unzip())
    }

    fn probe_schedule(&self, context: &ScheduleContext) -> Result<Schedule> {
        let Some(probe) = self.probe else {
            return Err(Error::bug("this load has no probe"));
        };
        let prompts = Prompts::new(&PromptKind::Random, 0, 1, *context)?;
        let plan = |role, input, output, prompt_index, index| PlannedRequest {
            arrival_s: 0.0,
            think_s: 0.0,
            role,
            request: self.request(context, prompts.prompt(prompt_index, input), output, index),
        };
        let victims = (0..probe.victims).map(|victim| {
            plan(Role::Victim, probe.victim_input_len, probe.victim_output_len, victim, victim)
        });
        let injectors = (0..probe.injectors).map(|injector| {
            let index = probe.victims + injector;
            let prompt_index = if probe.identical_prompts { probe.victims } else { index };
            plan(Role::Injector, probe.injector_input_len, probe.injector_output_len, prompt_index, index)
        });
        Ok(Schedule {
            requests: victims.chain(injectors).collect(),
            pacing: Pacing::Probe(probe),
            offered_rate: None,
        })
    }

    fn prompts<'a>(&self, context: &ScheduleContext<'a>, pairs: &[LengthPair]) -> Result<Prompts<'a>> {
        let shortest = pairs.iter().map(|pair| pair.0).min().unwrap_or(0);
        if self.prefix_len > shortest {
            return Err(Error::invalid(
                format!(
                    "prefix_len = {} is longer than the shortest prompt, {shortest} tokens",
                    self.prefix_len
                ),
                "make prefix_len smaller or prompts longer",
            ));
        }
        Prompts::new(&self.prompt, self.prefix_len, self.prefix_count, *context)
    }

    fn request(
        &self,
        context: &ScheduleContext,
        prompt: Vec<u32>,
        max_tokens: usize,
        index: usize,
    ) -> Request {
        Request {
            prompt,
            max_tokens,
            sampling: self.sampling(),
            seed: request_seed(context.seed, index),
            stop_tokens: context.stop_tokens.to_vec(),
            ignore_eos: self.ignore_eos,
        }
    }
}

/// Requests that a run can hold and see the end of.
fn check_size(arrivals_s: &[f64], pairs: &[LengthPair]) -> Result<()> {
    let last_s = arrivals_s.last().copied().unwrap_or(0.0);
    if last_s > LATEST_ARRIVAL_S {
        return Err(Error::invalid(
            format!("the last of {} requests would be due after {last_s:.0} seconds", arrivals_s.len()),
            format!("raise request_rate or ask for fewer prompts: {LATEST_ARRIVAL_S} seconds at most"),
        ));
    }
    if let Some(pair) = pairs.iter().find(|pair| pair.0.max(pair.1) > MOST_TOKENS) {
        return Err(Error::invalid(
            format!("a request of {} + {} tokens is out of bounds", pair.0, pair.1),
            format!("prompts and answers have {MOST_TOKENS} tokens at most"),
        ));
    }
    let tokens: usize = pairs.iter().map(|pair| pair.0).sum();
    if tokens > MOST_PROMPT_TOKENS {
        return Err(Error::invalid(
            format!("{} prompts of {tokens} tokens in all do not fit in memory", pairs.len()),
            format!("ask for fewer prompts or shorter ones: {MOST_PROMPT_TOKENS} tokens in all at most"),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::rate::Rate;
    use crate::workload::spec::{Arrivals, CountRule, Lengths, Replay, WholeTrace};

    fn context(seed: u64) -> ScheduleContext<'static> {
        ScheduleContext {
            vocab_size: 1000,
            special_tokens: &[0, 1],
            stop_tokens: &[1],
            seats: 4,
            seed,
            encode: None,
        }
    }

    #[test]
    fn part_five_draws_the_published_totals() {
        let spec = LoadSpec {
            input_len: 512,
            output_len: 512,
            lengths: Lengths::NumpyUniform { ratio: 0.9 },
            ..Default::default()
        };
        let schedule = spec.schedule(&context(0)).unwrap();
        assert_eq!(schedule.total_tokens(), (108_378, 105_567));
        assert_eq!(schedule.offered_rate, Some(Rate::FLOOD));
    }

    #[test]
    fn the_seed_sets_everything_and_a_knob_moves_only_its_own_draws() {
        let slow = LoadSpec { request_rate: Rate::new(2.0).unwrap(), ..Default::default() };
        let fast = LoadSpec { request_rate: Rate::new(4.0).unwrap(), ..slow.clone() };
        let (a, b) = (slow.schedule(&context(0)).unwrap(), fast.schedule(&context(0)).unwrap());
        assert_eq!(a, slow.schedule(&context(0)).unwrap());
        assert_ne!(a, slow.schedule(&context(1)).unwrap());
        for (slow, fast) in a.requests.iter().zip(&b.requests) {
            assert_eq!(slow.request, fast.request);
            assert!((slow.arrival_s - 2.0 * fast.arrival_s).abs() < 1e-9);
        }
        let constant = LoadSpec { arrivals: Arrivals::Constant, ..slow }.schedule(&context(0)).unwrap();
        assert_eq!(constant.requests[9].request, a.requests[9].request);
    }

    #[test]
    fn concurrency_is_a_closed_loop_in_a_flood_and_a_limit_at_a_rate() {
        let flood = LoadSpec { concurrency: Some(3), think_time_s: 2.0, ..Default::default() };
        let schedule = flood.schedule(&context(0)).unwrap();
        assert_eq!((schedule.pacing, schedule.offered_rate), (Pacing::Closed { clients: 3 }, None));
        let mean = schedule.requests.iter().map(|planned| planned.think_s).sum::<f64>() / 200.0;
        assert!((mean - 2.0).abs() < 0.5, "{mean}");
        let rate = LoadSpec { request_rate: Rate::new(5.0).unwrap(), ..flood };
        let pacing = rate.schedule(&context(0)).unwrap().pacing;
        assert_eq!(pacing, Pacing::Open { max_in_flight: Some(3) });
    }

    #[test]
    fn the_probe_has_the_prompts_of_the_series() {
        let spec = LoadSpec { probe: Some(Probe::default()), ..Default::default() };
        let schedule = spec.schedule(&context(0)).unwrap();
        let lengths = |role| -> Vec<(usize, usize)> {
            let of_role = schedule.requests.iter().filter(|planned| planned.role == role);
            of_role.map(|planned| (planned.request.prompt.len(), planned.request.max_tokens)).collect()
        };
        assert_eq!(lengths(Role::Victim), [(8, 64); 6]);
        assert_eq!(lengths(Role::Injector), [(5408, 32); 12]);
        assert_eq!(schedule.requests[6].request.prompt, schedule.requests[17].request.prompt);
        assert_eq!(schedule.longest_request_tokens(), 5440);
    }

    #[test]
    fn warm_up_has_the_load_s_lengths_and_other_prompts() {
        let spec = LoadSpec { request_rate: Rate::new(2.0).unwrap(), ..Default::default() };
        let measured = spec.schedule(&context(0)).unwrap();
        let warm = spec.warmup_schedule(&context(0), 0).unwrap().unwrap();
        assert_eq!(warm.requests.len(), 16);
        assert!((warm.requests[15].arrival_s - 8.0).abs() < 1e-9);
        let mut slow = LoadSpec { request_rate: Rate::new(0.25).unwrap(), ..spec.clone() };
        assert_eq!(
            slow.warmup_schedule(&context(0), 0).unwrap().unwrap().requests.len(),
            7,
            "30 s at 4 s each"
        );
        slow.prompts = Count::Exact(3);
        assert_eq!(slow.warmup_schedule(&context(0), 0).unwrap().unwrap().requests.len(), 3);
        assert_eq!(warm.requests[0].request.prompt.len(), 256);
        assert_ne!(warm.requests[0].request.prompt, measured.requests[0].request.prompt);
        let mut off = spec;
        off.warmup.prompts = Count::Exact(0);
        assert_eq!(off.warmup_schedule(&context(0), 0).unwrap(), None);
    }

    #[test]
    fn later_rounds_of_warm_up_are_short_where_answers_set_the_pace() {
        let lengths = |spec: &LoadSpec, round| -> Vec<(usize, usize)> {
            let warm = spec.warmup_schedule(&context(0), round).unwrap().unwrap();
            warm.requests.iter().map(|one| (one.request.prompt.len(), one.request.max_tokens)).collect()
        };
        let flood = LoadSpec::default();
        assert_eq!((lengths(&flood, 0), lengths(&flood, 1)), (vec![(256, 128); 16], vec![(256, 17); 16]));
        let closed = LoadSpec { concurrency: Some(4), think_time_s: 1.0, output_len: 9, ..flood.clone() };
        assert_eq!(lengths(&closed, 1), [(256, 9); 16]);
        // At a rate the batch depends on how long answers are.
        let rate = LoadSpec { request_rate: Rate::new(2.0).unwrap(), ..flood };
        assert_eq!(lengths(&rate, 1), [(256, 128); 16]);
        let probe = LoadSpec { probe: Some(Probe::default()), ..LoadSpec::default() };
        let warm = probe.warmup_schedule(&context(0), 0).unwrap().unwrap();
        let Pacing::Probe(hasty) = warm.pacing else { panic!("{:?}", warm.pacing) };
        assert_eq!((hasty.inject_after_s, hasty.drain_s, hasty.injectors), (0.0, 0.0, 12));
        assert_eq!(warm.requests.len(), 18);
    }

    #[test]
    fn a_replay_keeps_its_shape_at_its_own_speed_or_at_a_rate() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("trace.csv");
        std::fs::write(&file, "arrival_s,input_tokens,output_tokens\n0,5,2\n1,6,3\n4,7,4\n").unwrap();
        let arrivals = |spec: &LoadSpec| -> Vec<f64> {
            let schedule = spec.schedule(&context(0)).unwrap();
            schedule.requests.iter().map(|planned| planned.arrival_s).collect()
        };
        let spec = LoadSpec { replay: Some(Replay { file, speedup: 2.0 }), ..Default::default() };
        assert_eq!(arrivals(&spec), [0.0, 0.5, 2.0]);
        assert_eq!(spec.schedule(&context(0)).unwrap().total_tokens(), (18, 9));
        assert_eq!(arrivals(&LoadSpec { prompts: Count::Exact(2), ..spec.clone() }), [0.0, 0.5]);
        assert_eq!(arrivals(&LoadSpec { prompts: Count::Trace(WholeTrace::All), ..spec.clone() }).len(), 3);
        let spec = LoadSpec { request_rate: Rate::new(3.0).unwrap(), ..spec };
        assert_eq!(arrivals(&spec), [0.0, 0.25, 1.0]);
    }

    #[test]
    fn loads_that_no_memory_holds_or_that_never_end_are_refused() {
        let refused = |spec: &LoadSpec| spec.schedule(&context(0)).unwrap_err().to_string();
        let many = LoadSpec { prompts: Count::Exact(1 << 20), input_len: 1 << 12, ..Default::default() };
        assert!(refused(&many).contains("1048576 prompts of 4294967296 tokens"));
        let rule = CountRule { per_seat: 1 << 60, min: 1, max: None, at_rate: None };
        let rule = LoadSpec { prompts: Count::Rule(rule), ..Default::default() };
        assert!(refused(&rule).contains("prompts"), "{}", refused(&rule));
        let slow = LoadSpec { request_rate: Rate::new(1e-12).unwrap(), ..Default::default() };
        assert!(refused(&slow).contains("200000000000000 seconds"), "{}", refused(&slow));
    }

    #[test]
    fn a_prefix_longer_than_a_prompt_is_refused() {
        let spec = LoadSpec { prefix_len: 300, ..Default::default() };
        assert!(spec.schedule(&context(0)).unwrap_err().to_string().contains("prefix_len = 300"));
    }
}
