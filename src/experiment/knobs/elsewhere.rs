//! Names that vLLM has for what is called otherwise here.

/// Its engine's arguments, its speculation's keys and its load generator's flags, beside the knob (or the setting).
const VLLM: &[(&str, &str)] = &[
    ("block_size", "kv_block_tokens"),
    ("num_gpu_blocks_override", "kv_blocks"),
    ("num_gpu_blocks", "kv_blocks"),
    ("kv_cache_dtype", "kv_dtype"),
    ("mamba_ssm_cache_dtype", "state_dtype"),
    ("mamba_cache_dtype", "state_dtype"),
    ("enable_prefix_caching", "prefix_caching"),
    ("enable_chunked_prefill", "chunked_prefill"),
    ("enforce_eager", "cuda_graphs=false"),
    ("max_seq_len", "max_model_len"),
    ("max_seq_len_to_capture", "max_model_len"),
    ("speculative_config", "speculation"),
    ("num_speculative_tokens", "speculative_tokens"),
    ("prompt_lookup_min", "ngram_min"),
    ("prompt_lookup_max", "ngram_max"),
    ("max_concurrency", "concurrency"),
    ("num_prompts", "prompts"),
    ("random_input_len", "input_len"),
    ("random_output_len", "output_len"),
    ("max_tokens", "output_len"),
    ("random_prefix_len", "prefix_len"),
];

/// What vLLM's `name` is here; dashes are as good as underscores.
pub fn here(name: &str) -> Option<&'static str> {
    let name = name.trim_start_matches('-').replace('-', "_").to_ascii_lowercase();
    VLLM.iter().find(|(theirs, _)| *theirs == name).map(|(_, ours)| *ours)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::knobs::{KNOBS, find};

    #[test]
    fn every_name_leads_to_a_knob_and_is_none() {
        for (theirs, ours) in VLLM {
            let knob = ours.split('=').next().unwrap_or(ours);
            assert!(KNOBS.iter().any(|known| known.name == knob), "{ours}");
            let hint = find(theirs).unwrap_err().hint().to_string();
            assert_eq!(hint, format!("vLLM's `{theirs}` is `{ours}` here"));
        }
        assert_eq!(here("--enable-prefix-caching"), Some("prefix_caching"));
        assert_eq!(here("max_num_seqs"), None);
    }
}
