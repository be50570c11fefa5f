//! Shares of an arm's time by resource, and of its steps by what kept the queue's head waiting.

use serde::Serialize;

use crate::engine::account::{ByteClasses, Ceilings, StepCost};
use crate::measure::bound::FloorShares;
use crate::measure::rows::StepRow;

/// Fractions of an arm's duration; they add up to 1. The floor of each step (the least time that its bytes and FLOPs
/// take on the device's ceilings) is given to the class that sets it; what the device took beyond it, the host beyond
/// that, and the rest of the time there was no step at all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct TimeShares {
    pub weights: f64,
    pub state: f64,
    pub kv: f64,
    pub compute: f64,
    /// Device time above the floor: launches, ramps, kernels below the roof.
    pub beyond_floor: f64,
    pub host: f64,
    /// No step ran: nothing had arrived.
    pub idle: f64,
}

impl TimeShares {
    pub fn of(steps: &[StepRow], duration_s: f64, ceilings: Option<&Ceilings>) -> Self {
        let mut shares = Self::default();
        let total_ms = duration_s * 1e3;
        if total_ms <= 0.0 {
            return shares;
        }
        let mut busy_ms = 0.0;
        for step in steps {
            let floor = FloorShares::of(&cost(step), ceilings);
            let device_ms = step.device_ms.min(step.duration_ms);
            // A floor above the device's time (an optimistic ceiling) is scaled down to it.
            let floor_ms = floor.total_s() * 1e3;
            let scale = if floor_ms > device_ms { device_ms / floor_ms } else { 1.0 };
            shares.weights += scale * floor.weights_s * 1e3;
            shares.state += scale * floor.state_s * 1e3;
            shares.kv += scale * floor.kv_s * 1e3;
            shares.compute += scale * floor.compute_s * 1e3;
            shares.beyond_floor += device_ms - scale * floor_ms;
            shares.host += step.duration_ms - device_ms;
            busy_ms += step.duration_ms;
        }
        let total_ms = total_ms.max(busy_ms);
        shares.idle = total_ms - busy_ms;
        for part in shares.parts_mut() {
            *part /= total_ms;
        }
        shares
    }

    fn parts_mut(&mut self) -> [&mut f64; 7] {
        [
            &mut self.weights,
            &mut self.state,
            &mut self.kv,
            &mut self.compute,
            &mut self.beyond_floor,
            &mut self.host,
            &mut self.idle,
        ]
    }

    /// The parts with their names, largest first.
    pub fn sorted(&self) -> Vec<(&'static str, f64)> {
        let mut parts = vec![
            ("streaming weights", self.weights),
            ("recurrent states", self.state),
            ("KV", self.kv),
            ("matrix products", self.compute),
            ("the device beyond its floor", self.beyond_floor),
            ("the host", self.host),
            ("waiting for arrivals", self.idle),
        ];
        parts.sort_by(|a, b| b.1.total_cmp(&a.1));
        parts
    }
}

fn cost(step: &StepRow) -> StepCost {
    StepCost {
        bytes: ByteClasses {
            weights: step.weights_bytes,
            state: step.state_bytes,
            kv: step.kv_bytes,
            // In no phase of the floor: see `account`.
            activations: 0,
        },
        flops: step.flops,
        floor_s: step.floor_ms * 1e-3,
        ..StepCost::default()
    }
}

/// Fractions of step time in which the head of the queue was kept out by a limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct HeldShares {
    pub seats: f64,
    pub state_slots: f64,
    pub blocks: f64,
    pub token_budget: f64,
}

impl HeldShares {
    pub fn of<'a>(steps: impl Iterator<Item = &'a StepRow> + Clone) -> Self {
        let total_ms: f64 = steps.clone().map(|step| step.duration_ms).sum();
        let by = |limit: &str| {
            let held = steps.clone().filter(|step| step.held_back_by == limit);
            let held_ms: f64 = held.map(|step| step.duration_ms).sum();
            if total_ms > 0.0 { held_ms / total_ms } else { 0.0 }
        };
        Self {
            seats: by("seats"),
            state_slots: by("state_slots"),
            blocks: by("blocks"),
            token_budget: by("token_budget"),
        }
    }

    /// The limit that held longest, and its share; `None` when nothing was held back.
    pub fn longest(&self) -> Option<(&'static str, f64)> {
        [
            ("seats (max_num_seqs)", self.seats),
            ("state slots", self.state_slots),
            ("cache blocks", self.blocks),
            ("the token budget", self.token_budget),
        ]
        .into_iter()
        .filter(|(_, share)| *share > 0.0)
        .max_by(|a, b| a.1.total_cmp(&b.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(duration_ms: f64, device_ms: f64, weights_bytes: u64, flops: u64, held: &str) -> StepRow {
        StepRow {
            arm: "a".into(),
            repeat: 0,
            step: 0,
            start_s: 0.0,
            duration_ms,
            host_ms: 0.0,
            device_ms,
            kind: "decode".into(),
            decode_sequences: 1,
            decode_tokens: 1,
            prefill_sequences: 0,
            prefill_tokens: 0,
            recomputed_tokens: 0,
            drafted: 0,
            accepted: 0,
            overrun_tokens: 0,
            running: 1,
            waiting: 0,
            blocks_used: 0,
            blocks_total: 1,
            slots_used: 0,
            slots_total: 0,
            held_back_by: held.into(),
            weights_bytes,
            state_bytes: 1_000_000_000,
            kv_bytes: 0,
            activation_bytes: 0,
            flops,
            floor_ms: 0.0,
        }
    }

    #[test]
    fn time_is_given_to_what_sets_the_floor_and_adds_up() {
        let ceilings = Ceilings {
            read_bytes_per_s: 1e12,
            copy_bytes_per_s: 1e12,
            flops_per_s: 1e12,
            launch_s: 0.0,
            measured: true,
        };
        // One step bound by weights (4 ms), one by products (5 ms); 1 ms of state each; 10 ms long, 8 ms on the device.
        let steps = [
            step(10.0, 8.0, 4_000_000_000, 1_000_000_000, "seats"),
            step(10.0, 8.0, 4_000_000_000, 5_000_000_000, ""),
        ];
        let shares = TimeShares::of(&steps, 0.040, Some(&ceilings));
        let expected = [0.1, 0.05, 0.0, 0.125, 0.125, 0.1, 0.5];
        let found = [
            shares.weights,
            shares.state,
            shares.kv,
            shares.compute,
            shares.beyond_floor,
            shares.host,
            shares.idle,
        ];
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-12, "{shares:?}");
        }
        assert_eq!(HeldShares::of(steps.iter()).seats, 0.5);
        assert_eq!(HeldShares::of(steps.iter()).longest(), Some(("seats (max_num_seqs)", 0.5)));
    }
}
