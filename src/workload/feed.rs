//! Hands the requests of a [`Schedule`] out as they fall due, and learns from step reports what was answered.
//!
//! A state machine without a thread or a clock of its own, so that one loop can drive real and virtual time alike:
//!
//! ```text
//! loop {
//!     while let Some(due) = feed.take_due(clock.now()) { submit; feed.submitted(due.index, id) }
//!     match engine.step()? {
//!         Some(report) => { feed.observe(&report, clock.now()); recorder.step(report, clock.now()) }
//!         None => match feed.next_due_s() { Some(at) => clock.wait_until(at), None => break },
//!     }
//! }
//! ```
//! All times here are seconds on the session's clock; `origin_s` is where the schedule's own 0 lies.

use std::collections::HashMap;
use std::ops::Range;

use super::probe::Probe;
use super::schedule::{Pacing, Role, Schedule};
use super::seeds::request_seed;
use crate::engine::request::{Request, RequestId};
use crate::engine::step_report::{Event, StepReport};

/// A request that is due now.
#[derive(Debug, Clone, PartialEq)]
pub struct Due {
    /// Its place in the schedule; for a probe, whose victims repeat, its place in the order of handing out.
    pub index: usize,
    /// When it should have been sent: latency counts from here.
    pub intended_s: f64,
    pub role: Role,
    pub request: Request,
}

pub struct Feed {
    schedule: Schedule,
    origin_s: f64,
    /// Next request of the schedule (open and closed pacing).
    next: usize,
    handed_out: usize,
    in_flight: HashMap<RequestId, InFlight>,
    /// Requests handed out and not yet known by an id: counted as in flight.
    unnamed: HashMap<usize, InFlight>,
    /// Closed loop: requests that a free client has taken up, with the time its pause ends.
    thinking: Vec<(f64, usize)>,
    probe: Option<ProbeState>,
}

#[derive(Debug, Clone, Copy)]
struct InFlight {
    role: Role,
    /// Which victim it belongs to.
    victim: usize,
    tokens: usize,
}

#[derive(Debug, Clone, Copy)]
struct NextVictim {
    /// Its latency counts from here.
    intended_s: f64,
    /// It is sent then.
    due_s: f64,
}

#[derive(Debug)]
struct ProbeState {
    plan: Probe,
    /// The next request of each victim; `None` while one is in flight.
    victims: Vec<Option<NextVictim>>,
    injected_s: Option<f64>,
    /// Injectors not yet handed out, and not yet answered.
    to_inject: usize,
    unanswered: usize,
    /// When victims stop asking.
    stop_s: Option<f64>,
}

impl Feed {
    pub fn new(schedule: Schedule, origin_s: f64) -> Self {
        let probe = match schedule.pacing {
            Pacing::Probe(plan) => Some(ProbeState::new(plan, origin_s)),
            _ => None,
        };
        let mut feed = Self {
            schedule,
            origin_s,
            next: 0,
            handed_out: 0,
            in_flight: HashMap::new(),
            unnamed: HashMap::new(),
            thinking: Vec::new(),
            probe,
        };
        if let Pacing::Closed { clients } = feed.schedule.pacing {
            (0..clients).for_each(|_| feed.client_is_free(origin_s));
        }
        feed
    }

    /// When the next request falls due; `None` when nothing more comes, or only after an answer.
    pub fn next_due_s(&self) -> Option<f64> {
        if let Some(probe) = &self.probe {
            return self.next_probe(probe).map(|(due_s, _)| due_s);
        }
        if let Pacing::Open { max_in_flight } = self.schedule.pacing {
            let planned = self.schedule.requests.get(self.next)?;
            let full = max_in_flight.is_some_and(|most| self.in_flight.len() + self.unnamed.len() >= most);
            return (!full).then_some(self.origin_s + planned.arrival_s);
        }
        self.thinking.iter().map(|&(due_s, _)| due_s).min_by(f64::total_cmp)
    }

    /// The next request that is due at `now_s`. Call until `None`.
    pub fn take_due(&mut self, now_s: f64) -> Option<Due> {
        if self.next_due_s()? > now_s {
            return None;
        }
        let (index, intended_s) = match self.schedule.pacing {
            Pacing::Probe(_) => return self.take_probe(now_s),
            Pacing::Open { .. } => {
                let index = self.next;
                self.next += 1;
                (index, self.origin_s + self.schedule.requests[index].arrival_s)
            }
            Pacing::Closed { .. } => {
                let earliest = self.thinking.iter().enumerate().min_by(|a, b| a.1.0.total_cmp(&b.1.0))?.0;
                let (due_s, index) = self.thinking.remove(earliest);
                (index, due_s)
            }
        };
        let planned = &self.schedule.requests[index];
        let due = Due { index, intended_s, role: planned.role, request: planned.request.clone() };
        Some(self.hand_out(due, 0))
    }

    /// A request handed out was accepted under this id.
    pub fn submitted(&mut self, index: usize, id: RequestId) {
        if let Some(state) = self.unnamed.remove(&index) {
            self.in_flight.insert(id, state);
        }
    }

    /// A request handed out was refused: it counts as answered at `now_s`.
    pub fn refused(&mut self, index: usize, now_s: f64) {
        if let Some(state) = self.unnamed.remove(&index) {
            self.answered(state, now_s);
        }
    }

    /// Takes note of tokens and finishes that reached the client at `now_s`.
    pub fn observe(&mut self, report: &StepReport, now_s: f64) {
        for event in &report.events {
            match event {
                Event::Tokens { request, tokens } => {
                    let Some(state) = self.in_flight.get_mut(request) else { continue };
                    let before = state.tokens;
                    state.tokens += tokens.len();
                    if let Some(probe) = &mut self.probe
                        && state.role == Role::Victim
                        && state.victim == 0
                    {
                        probe.pin_injection(before..state.tokens, self.origin_s, now_s);
                    }
                }
                Event::Finished { request, .. } => {
                    if let Some(state) = self.in_flight.remove(request) {
                        self.answered(state, now_s);
                    }
                }
                Event::Scheduled { .. } | Event::Preempted { .. } => {}
            }
        }
    }

    /// Nothing more will be handed out.
    pub fn is_done(&self) -> bool {
        match &self.probe {
            Some(probe) => probe.stop_s.is_some() && self.next_due_s().is_none() && self.nothing_in_flight(),
            None => self.next == self.schedule.requests.len() && self.thinking.is_empty(),
        }
    }

    fn nothing_in_flight(&self) -> bool {
        self.in_flight.is_empty() && self.unnamed.is_empty()
    }

    fn hand_out(&mut self, due: Due, victim: usize) -> Due {
        self.handed_out += 1;
        self.unnamed.insert(due.index, InFlight { role: due.role, victim, tokens: 0 });
        due
    }

    /// Closed loop: the client takes the next request of the list up, to send it after its pause.
    fn client_is_free(&mut self, now_s: f64) {
        if let Some(planned) = self.schedule.requests.get(self.next) {
            self.thinking.push((now_s + planned.think_s, self.next));
            self.next += 1;
        }
    }

    fn answered(&mut self, state: InFlight, now_s: f64) {
        match &mut self.probe {
            None => {
                if matches!(self.schedule.pacing, Pacing::Closed { .. }) {
                    self.client_is_free(now_s);
                }
            }
            Some(probe) if state.role == Role::Injector => {
                probe.unanswered -= 1;
                if probe.unanswered == 0 {
                    probe.stop_s = Some(now_s + probe.plan.drain_s);
                }
            }
            Some(probe) => {
                let due_s = now_s + probe.plan.victim_restart_s;
                probe.victims[state.victim] = Some(NextVictim { intended_s: now_s, due_s });
            }
        }
    }

    /// The earliest of the injection and the victims that are ready: when, and which victim (`None`: injector).
    fn next_probe(&self, probe: &ProbeState) -> Option<(f64, Option<usize>)> {
        let due_s = match probe.plan.inject_at_token {
            None => Some(self.origin_s + probe.plan.inject_after_s),
            Some(_) => probe.injected_s,
        };
        let injection = due_s.filter(|_| probe.to_inject > 0).map(|due_s| (due_s, None));
        let open = |due_s: f64| probe.stop_s.is_none_or(|stop_s| due_s < stop_s);
        let victims = probe.victims.iter().enumerate();
        let victims = victims.filter_map(|(victim, next)| Some((next.as_ref()?.due_s, Some(victim))));
        victims
            .filter(|&(due_s, _)| open(due_s))
            .chain(injection)
            .min_by(|a, b| a.0.total_cmp(&b.0).then(b.1.is_none().cmp(&a.1.is_none())))
    }

    fn take_probe(&mut self, now_s: f64) -> Option<Due> {
        let probe = self.probe.as_ref()?;
        let (due_s, victim) = self.next_probe(probe)?;
        let next = victim.and_then(|victim| probe.victims[victim]);
        let intended_s = next.map_or(due_s, |next| next.intended_s);
        let index = self.handed_out;
        let probe = self.probe.as_mut()?;
        let planned = match victim {
            Some(victim) => {
                probe.victims[victim] = None;
                &self.schedule.requests[victim]
            }
            None => {
                probe.injected_s.get_or_insert(now_s);
                let injector = probe.plan.injectors - probe.to_inject;
                probe.to_inject -= 1;
                &self.schedule.requests[probe.plan.victims + injector]
            }
        };
        let mut request = planned.request.clone();
        request.seed = request_seed(request.seed, index);
        let due = Due { index, intended_s, role: planned.role, request };
        Some(self.hand_out(due, victim.unwrap_or(0)))
    }
}

impl ProbeState {
    fn new(plan: Probe, origin_s: f64) -> Self {
        Self {
            plan,
            victims: vec![Some(NextVictim { intended_s: origin_s, due_s: origin_s }); plan.victims],
            injected_s: None,
            to_inject: plan.injectors,
            unanswered: plan.injectors,
            stop_s: None,
        }
    }

    /// With a pinned phase, the injection happens at the moment the first victim's chosen token arrives; `arrived` counts
    /// its tokens from 0, and several come at once where drafts were accepted.
    fn pin_injection(&mut self, arrived: Range<usize>, origin_s: f64, now_s: f64) {
        if let Some(token) = self.plan.inject_at_token
            && self.injected_s.is_none()
            && (arrived.start + 1..=arrived.end).contains(&token)
            && now_s >= origin_s + self.plan.inject_after_s
        {
            self.injected_s = Some(now_s);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pinned_injection_is_not_jumped_over_by_tokens_that_come_together() {
        let plan = Probe { inject_at_token: Some(16), inject_after_s: 1.0, ..Probe::default() };
        let mut probe = ProbeState::new(plan, 0.0);
        let answer = [(0, 1), (1, 6), (6, 11), (11, 15), (15, 20), (20, 25)];
        let mut arrive = |start_s: f64| -> Option<f64> {
            for (step, (from, to)) in answer.into_iter().enumerate() {
                probe.pin_injection(from..to, 0.0, start_s + step as f64 * 0.01);
            }
            probe.injected_s
        };
        assert_eq!(arrive(0.5), None, "before its time");
        assert_eq!(arrive(2.0), Some(2.04));
        assert_eq!(arrive(3.0), Some(2.04), "once");
    }
}
