use super::*;

fn options(slo: &str) -> SearchOptions {
    SearchOptions { slo: slo.parse().unwrap(), ..SearchOptions::default() }
}

/// An M/D/1 queue's mean wait on top of a service time of 100 ms: breaks any limit before 10 a second.
fn queue(Trial { rate, .. }: Trial, noise: f64) -> Summary {
    let load: f64 = (rate.per_s() / 10.0).min(0.999);
    let ttft_ms = (100.0 + 100.0 * load / (2.0 * (1.0 - load))) * (1.0 + noise);
    Summary {
        completed: 200,
        ttft_p99_ms: Some(ttft_ms),
        goodput: Some(rate.per_s().min(10.0)),
        ..Summary::default()
    }
}

#[test]
fn the_knee_is_found_within_the_precision() {
    // 250 ms is reached at load l with l / (2 (1 - l)) = 1.5: l = 0.75, so 7.5 a second.
    let found = search(&options("ttft_p99=250"), |trial, _| Ok(queue(trial, 0.0))).unwrap();
    let (keeps, breaks) = (found.keeps.unwrap(), found.breaks.unwrap());
    assert!(keeps.rate.per_s() <= 7.5 && 7.5 <= breaks.rate.per_s());
    assert!(breaks.rate.per_s() <= 1.05 * keeps.rate.per_s());
    // Rates that a person would write.
    assert!(found.tried.iter().all(|judged| judged.rate.to_string().len() <= 5), "{:?}", found.tried);
    assert_eq!(keeps.goodput(), Some(keeps.rate.per_s()));
    assert!(found.tried.iter().all(|judged| judged.certain));
}

#[test]
fn rates_between_are_short_and_inside() {
    assert_eq!(between(1.0, 2.0, 0.05), 1.4);
    assert_eq!(between(4.0, 8.0, 0.01), 5.66);
    assert_eq!(between(1000.0, 1010.0, 0.005), 1005.0);
    for (keeps, breaks, precision) in [(7.0, 7.4, 0.05), (0.0156, 0.031, 1e-4), (3.0, 3.000_001, 1e-7)] {
        let rate = between(keeps, breaks, precision);
        assert!(keeps < rate && rate < breaks, "{keeps} {rate} {breaks}");
    }
}

#[test]
fn noise_takes_repeats_near_the_limit_and_none_far_from_it() {
    let noise = [0.02, -0.02, 0.01, -0.01, 0.0];
    let run = |trial, repeat: u32| Ok(queue(trial, noise[repeat as usize]));
    let found = search(&options("ttft_p99=250"), run).unwrap();
    let repeats = |per_s: f64| {
        let judged = found.tried.iter().find(|judged| judged.rate.per_s() == per_s).unwrap();
        judged.repeats.len()
    };
    assert_eq!((repeats(1.0), repeats(2.0)), (1, 1));
    assert!(repeats(8.0) > 1);
    assert!(found.tried.iter().any(|judged| judged.repeats.len() > 1));
    let basis: Vec<&str> = found.tried.iter().map(Judged::basis).collect();
    assert!(basis[0] == "twofold" && basis.contains(&"95 %"), "{basis:?}");
    let keeps = found.keeps.unwrap().rate.per_s();
    assert!((6.9..=7.6).contains(&keeps), "{keeps}");
}

#[test]
fn bounds_of_the_search_are_kept() {
    let always = |ttft_ms: f64| {
        move |_: Trial, _: u32| {
            Ok(Summary { completed: 200, ttft_p99_ms: Some(ttft_ms), ..Summary::default() })
        }
    };
    let found = search(&options("ttft_p99=100"), always(1.0)).unwrap();
    assert_eq!((found.keeps.unwrap().rate.per_s(), found.breaks), (4096.0, None));
    let found = search(&options("ttft_p99=100"), always(1000.0)).unwrap();
    assert_eq!((found.keeps, found.breaks.unwrap().rate.per_s()), (None, 1.0 / 64.0));
}

#[test]
fn failed_requests_break_every_limit() {
    let run =
        |trial: Trial, _| Ok(Summary { failed: usize::from(trial.rate.per_s() > 3.0), ..queue(trial, 0.0) });
    let keeps = search(&options("ttft_p99=10000"), run).unwrap().keeps.unwrap();
    assert!((2.8..=3.0).contains(&keeps.rate.per_s()));
}

/// 32 seats that answer in two seconds: 16 requests a second, and a burst that they hold at once shows no queue whatever
/// its rate.
fn burst(Trial { rate, prompts }: Trial) -> Summary {
    let capacity = 16.0;
    let (per_s, n) = (rate.per_s(), prompts as f64);
    let queued_s = (n / capacity - n / per_s - 2.0).max(0.0);
    let e2el_s = 2.0 + 0.5 * queued_s;
    Summary {
        requests: prompts,
        completed: prompts,
        ttft_mean_ms: Some(100.0 + 500.0 * queued_s),
        itl_p99_ms: Some(20.0),
        e2el_mean_ms: Some(1e3 * e2el_s),
        request_throughput: Some(n / (n / per_s + 2.0 + queued_s)),
        goodput: Some(per_s.min(capacity)),
        ..Summary::default()
    }
}

#[test]
fn a_finite_burst_is_no_rate() {
    for slo in ["ttft_mean=500", "itl_p99=100"] {
        for flood_prompts in [None, Some(400)] {
            let options = SearchOptions { prompts: 20, flood_prompts, ..options(slo) };
            let found = search(&options, |trial, _| Ok(burst(trial))).unwrap();
            let keeps = found.keeps.unwrap();
            assert!((12.0..20.5).contains(&keeps.rate.per_s()), "{slo}, {flood_prompts:?}: {}", keeps.rate);
            assert!(keeps.repeats[0].requests >= 128, "arrivals took eight times two seconds");
            assert_eq!(found.flood_throughput.is_some(), flood_prompts.is_some());
        }
    }
}

/// A server that completes fewer than it is offered, by less than the wait for the last answer would show.
#[test]
fn a_queue_that_grows_with_the_load_is_no_rate() {
    let run = |trial: Trial, _| {
        let per_s = trial.rate.per_s();
        let over = (per_s / 6.5 - 1.0).max(0.0);
        let e2el_s = 10.0 + 0.5 * over * trial.prompts as f64 / per_s;
        let (requests, request_throughput) = (trial.prompts, Some(per_s.min(6.5)));
        let e2el_mean_ms = Some(1e3 * e2el_s);
        let itl_p99_ms = Some(20.0);
        let completed = requests;
        Ok(Summary {
            requests,
            completed,
            request_throughput,
            e2el_mean_ms,
            itl_p99_ms,
            ..Summary::default()
        })
    };
    let options = SearchOptions { highest: 7.7, ..options("itl_p99=100") };
    let found = search(&options, run).unwrap();
    assert!((6.5..7.6).contains(&found.keeps.unwrap().rate.per_s()));
    assert_eq!(found.breaks.unwrap().basis(), "not sustained");
}

#[test]
fn a_trace_too_short_to_tell_is_not_taken_for_a_rate() {
    let run = |trial: Trial, _| Ok(burst(Trial { prompts: trial.prompts.min(20), ..trial }));
    let options = SearchOptions { prompts: 200, ..options("itl_p99=100") };
    let found = search(&options, run).unwrap();
    // Twenty requests of two seconds last eight turns at 1.25 a second and below.
    assert!(found.keeps.unwrap().rate.per_s() <= 1.25);
    let breaks = found.breaks.unwrap();
    assert_eq!((breaks.basis(), breaks.certain), ("not sustained", false));
}

#[test]
fn limits_that_cannot_be_told_are_refused() {
    let short = |requests: usize| {
        let run = |trial: Trial, _| Ok(Summary { completed: 50, requests, ..queue(trial, 0.0) });
        search(&options("ttft_p99=250"), run).unwrap_err()
    };
    let error = short(SearchOptions::default().prompts);
    assert!(error.to_string().contains("ttft_p99") && error.hint().starts_with("raise --prompts: "));
    // More requests than a trace has cannot be asked for.
    let error = short(50);
    assert!(error.hint().contains("longer"), "{}", error.hint());
    assert!(search(&options(""), |trial, _| Ok(queue(trial, 0.0))).is_err());
}

#[test]
fn a_sweep_ends_once_over_saturation_is_certain() {
    let rate = |per_s| Rate::new(per_s).unwrap();
    let mut rule = OverSaturation::default();
    // Part 1's throughputs.
    for (per_s, throughput) in [(1.0, 0.99), (4.0, 3.77), (6.0, 5.41), (8.0, 6.37)] {
        rule.observe(rate(per_s), throughput);
        assert!(!rule.skips(rate(10.0)), "after {per_s}");
    }
    rule.observe(rate(10.0), 6.22);
    assert!(rule.skips(rate(16.0)) && !rule.skips(Rate::FLOOD) && !rule.skips(rate(10.0)));
    let mut still_rising = OverSaturation::default();
    still_rising.observe(rate(10.0), 6.0);
    still_rising.observe(rate(20.0), 9.0);
    assert!(!still_rising.skips(rate(40.0)));
}

#[test]
fn a_measured_rate_is_rounded_down() {
    assert_eq!([1858.0, 22.46, 0.99999, 100.0].map(rounded), [1850.0, 22.4, 0.999, 100.0]);
}
