//! The JSON of `vllm bench serve --save-result`, read as the summaries of one arm.
//!
//! Objects are one repeat each; several (an array, or an object a line from `--append-result`) are grouped by model,
//! rate, concurrency and number of prompts. Percentiles are there as far as `--metric-percentiles` asked for them.

use super::ArmSamples;
use super::read::{HINT, Object, entry};
use crate::{Error, Result};

/// This program's column, and vLLM's key.
const PLAIN: [(&str, &str); 5] = [
    ("request_throughput", "request_throughput"),
    ("output_throughput", "output_throughput"),
    ("total_throughput", "total_token_throughput"),
    ("peak_output_throughput", "max_output_tokens_per_s"),
    ("goodput", "request_goodput"),
];

pub(super) fn arms(objects: &[Object]) -> Result<Vec<ArmSamples>> {
    let mut arms = Vec::new();
    for object in objects {
        let number = |key: &str| object.get(key).and_then(serde_json::Value::as_f64);
        if number("request_throughput").is_none() || number("completed").is_none() {
            let keys: Vec<&str> = object.keys().map(String::as_str).take(12).collect();
            return Err(Error::invalid(
                format!(
                    "a JSON object with the keys {} is no benchmark result, which has completed and request_throughput",
                    keys.join(", ")
                ),
                HINT,
            ));
        }
        let word = |key: &str| match object.get(key) {
            Some(serde_json::Value::String(text)) => text.clone(),
            Some(serde_json::Value::Null) | None => String::new(),
            Some(value) => value.to_string(),
        };
        let prompts = word("num_prompts");
        let load = format!(
            "{prompts} prompts, rate {}, concurrency {}",
            word("request_rate"),
            if word("max_concurrency").is_empty() { "none".to_string() } else { word("max_concurrency") },
        );
        let arm = entry(&mut arms, &format!("{} {load}", word("model_id")));
        arm.identity.insert("model".to_string(), word("model_id"));
        let mut add = |metric: &str, value: Option<f64>| {
            if let Some(value) = value {
                arm.values.entry(metric.to_string()).or_default().push(value);
            }
        };
        for (metric, key) in PLAIN {
            // vLLM writes the goodput key with a colon.
            add(metric, number(key).or_else(|| number(&format!("{key}:"))));
        }
        let failed = number("failed").or_else(|| Some(number("num_prompts")? - number("completed")?));
        add("failed", failed);
        for latency in ["ttft", "tpot", "itl", "e2el"] {
            add(&format!("{latency}_mean_ms"), number(&format!("mean_{latency}_ms")));
            let median =
                number(&format!("p50_{latency}_ms")).or_else(|| number(&format!("median_{latency}_ms")));
            add(&format!("{latency}_p50_ms"), median);
            add(&format!("{latency}_p90_ms"), number(&format!("p90_{latency}_ms")));
            add(&format!("{latency}_p99_ms"), number(&format!("p99_{latency}_ms")));
        }
    }
    Ok(arms)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn objects(text: &str) -> Vec<Object> {
        vec![serde_json::from_str(text).unwrap()]
    }

    const RESULT: &str = r#"{"date": "20260709-101112", "backend": "vllm", "model_id": "Qwen/Qwen3.5-4B",
        "num_prompts": 200, "request_rate": "inf", "burstiness": 1.0, "max_concurrency": null, "duration": 23.45,
        "completed": 199, "total_input_tokens": 51200, "total_output_tokens": 25600, "request_throughput": 8.53,
        "output_throughput": 1092.0, "total_token_throughput": 3276.0, "max_output_tokens_per_s": 2190.0,
        "mean_ttft_ms": 7000.1, "median_ttft_ms": 5030.0, "std_ttft_ms": 10.0, "p50_ttft_ms": 5030.0,
        "p99_ttft_ms": 18877.0, "mean_itl_ms": 95.0, "median_itl_ms": 70.0, "p99_itl_ms": 459.0}"#;

    #[test]
    fn a_saved_result_becomes_an_arm() {
        let arms = arms(&objects(RESULT)).unwrap();
        assert_eq!(arms[0].arm, "Qwen/Qwen3.5-4B 200 prompts, rate inf, concurrency none");
        let value = |name: &str| arms[0].values[name][0];
        assert_eq!(
            [value("request_throughput"), value("total_throughput"), value("failed")],
            [8.53, 3276.0, 1.0]
        );
        assert_eq!([value("ttft_p50_ms"), value("itl_p50_ms"), value("itl_p99_ms")], [5030.0, 70.0, 459.0]);
        assert!(!arms[0].values.contains_key("e2el_mean_ms"));
    }

    #[test]
    fn results_of_equal_settings_are_repeats() {
        let twice: Vec<Object> = [objects(RESULT), objects(RESULT)].concat();
        assert_eq!(arms(&twice).unwrap()[0].values["ttft_mean_ms"].len(), 2);
        let faster = objects(&RESULT.replace("\"inf\"", "8.0"));
        assert_eq!(arms(&[objects(RESULT), faster].concat()).unwrap().len(), 2);
    }

    #[test]
    fn other_json_is_refused() {
        let error = arms(&objects(r#"{"name": "x"}"#)).unwrap_err();
        assert!(error.to_string().contains("name") && error.hint().contains("vllm"));
    }
}
