use crate::env::{Ran, TestEnv};

fn fixture(name: &str) -> String {
    format!("{}/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn logits_are_one_json_object() {
    let env = TestEnv::new();
    let model = fixture("hybrid-tiny");
    let all =
        env.run(&format!("logits --model {model} --tokens 1,2,3 --device cpu --format json")).ok().json();
    let rows = all["logits"].as_array().unwrap();
    assert_eq!((rows.len(), all.as_object().unwrap().len()), (3, 1));
    let vocabulary = rows[0].as_array().unwrap().len();
    assert!(rows.iter().all(|row| row.as_array().unwrap().len() == vocabulary));
    env.write("ids", "1 2\n3\n");
    let last = env.run(&format!("logits --model {model} --tokens @ids --last 1 --device cpu")).ok().json();
    assert_eq!(last["logits"][0], rows[2]);
}

#[test]
fn wrong_tokens() {
    let env = TestEnv::new();
    let logits =
        |rest: &str| env.run(&format!("logits --model {} --device cpu {rest}", fixture("hybrid-tiny")));
    logits("--tokens 1,999999").fails(
        2,
        "token 999999 at position 1 is outside the vocabulary",
        "ids from 0",
    );
    logits("--tokens 1,x").fails(2, "`x` is not a token id", "1,2,3");
    logits("--tokens @none").fails(2, "none", "exists");
    logits("--tokens @.").fails(2, "cannot read .", "that is a folder");
    std::fs::write(env.path().join("bytes"), [0xff, 0xfe]).unwrap();
    logits("--tokens @bytes").fails(2, "cannot read bytes", "it is no text");
    logits("--tokens @").fails(2, "--tokens @ names no file", "@ids.txt");
    logits("--tokens -1").fails(2, "`-1` is not a token id", "0 or more");
    logits("--tokens 99999999999").fails(2, "`99999999999` is not a token id", "below the vocabulary's size");
    env.run("generate --device sim:fixed --tokens -1").fails(2, "`-1` is not a token id", "0 or more");
    logits("--tokens 1,2 --last 3").fails(2, "--last 3", "1 to 2");
}

#[test]
fn folders_that_hold_no_model() {
    let env = TestEnv::new();
    let generate = |model: &str| env.run(&format!("generate --model {model} --device sim:fixed --prompt x"));
    generate("./none").fails(2, "no model folder at `./none`", "a folder that exists");
    std::fs::create_dir(env.path().join("empty")).unwrap();
    generate("empty").fails(2, "empty: there is no config.json", "give a folder that holds config.json");
    // Two parts may be a hub id: whoever meant a folder is told that there is none. (No hub answers on port 9.)
    let mut command = env.command();
    command.env("HF_ENDPOINT", "http://127.0.0.1:9").args(["model", "fetch", "some/folder"]);
    Ran::new(command.output().unwrap()).fails(
        1,
        "cannot fetch some/folder",
        "there is no folder some/folder either",
    );
}

#[test]
fn sampling_out_of_bounds() {
    let env = TestEnv::new();
    let generate = |rest: &str| {
        env.run(&format!("generate --model {} --device cpu --tokens 1 {rest}", fixture("hybrid-tiny")))
    };
    generate("--temperature -1").fails(2, "temperature = -1 is out of bounds", "0 (greedy)");
    generate("--temperature 1 --top-p -0.5").fails(2, "top_p = -0.5 is out of bounds", "above 0");
    generate("--set top_k=5").fails(2, "`top_k` is no knob of the engine", "flags of its own");
}

#[test]
fn generated_tokens_only() {
    let env = TestEnv::new();
    let model = fixture("hybrid-tiny");
    let generate =
        |rest: &str| env.run(&format!("generate --model {model} --device cpu --format json {rest}"));
    let one = generate("--tokens 1,2,3 --max-tokens 5 --ignore-eos").ok().json();
    assert_eq!(one["tokens"].as_array().unwrap().len(), 5);
    assert_eq!(one, generate("--tokens 1,2,3 --max-tokens 5 --ignore-eos").ok().json(), "greedy by default");
}

#[test]
fn synthetic_models_write_bytes() {
    let env = TestEnv::new();
    let text =
        env.run("generate --model synthetic:demo --device sim:fixed --prompt hello --max-tokens 3").ok();
    assert!(text.stdout.ends_with('\n') && text.stdout.len() > 1);
    env.run("generate --device sim:fixed").fails(2, "nothing to go on from", "--prompt");
    env.run("generate --device sim:fixed --prompt x --max-tokens 0").fails(2, "--max-tokens 0", "1 or more");
    env.run("generate --device sim:fixed --prompt x --set input_len=3").fails(
        2,
        "no knob of the engine",
        "engine",
    );
}

#[test]
fn doctor_names_what_it_found() {
    let json = TestEnv::new().run("doctor --no-measure --format json").ok().json();
    assert!(json["cpu"]["memory"].as_str().unwrap().contains("free"));
    assert!(json["cuda"]["NVRTC"].is_string());
}

/// Loaders pointed at nothing, and at files that are no libraries.
#[test]
fn cuda_libraries_that_are_missing_or_broken_are_a_sentence_each() {
    let env = TestEnv::new();
    let folder = env.path().join("cuda/lib64");
    std::fs::create_dir_all(&folder).unwrap();
    for name in ["libcuda.so.1", "libnvrtc.so", "libcublasLt.so", "libcupti.so"] {
        std::fs::write(folder.join(name), "no library").unwrap();
    }
    let doctor = |home: &std::path::Path| {
        let mut command = env.command();
        command.env("CUDA_HOME", home).env("HOME", env.path()).env("PATH", "");
        command.env_remove("LD_LIBRARY_PATH").env_remove("CUDA_PATH").env_remove("VIRTUAL_ENV");
        Ran::new(command.args(["doctor", "--no-measure", "--format", "json"]).output().unwrap()).ok().json()
    };
    for json in [doctor(&env.path().join("cuda")), doctor(&env.path().join("absent"))] {
        // (Where CUDA is installed in a system folder, it is found all the same.)
        for (name, hint) in
            [("NVRTC", "nvidia-cuda-nvrtc"), ("cuBLASLt", "pip install"), ("CUPTI", "pip install")]
        {
            let found = json["cuda"][name].as_str().unwrap();
            assert!(found.contains(".so") || found.contains(hint), "{name}: {found}");
            assert!(!found.contains("cuda/lib64/lib") || found.starts_with("/usr"), "{name}: {found}");
        }
        if let Some(words) = json["cuda"]["GPU"].as_str() {
            assert!(words.contains("driver") || words.contains("none found"), "{words}");
        }
    }
}

#[test]
fn a_gpu_where_there_is_none_is_refused_with_a_hint() {
    if inferwall::engine::device::cuda::probe().is_ok_and(|gpus| !gpus.is_empty()) {
        eprintln!("skipped: this machine has a GPU");
        return;
    }
    let env = TestEnv::new();
    for command in ["generate --prompt x", "run part3-batching-cliff"] {
        let ran = env.run(&format!("{command} --device cuda"));
        ran.fails(2, "driver", "--device cpu");
    }
}

#[test]
fn quantize_writes_a_folder_that_opens() {
    let env = TestEnv::new();
    let model = fixture("dense-qwen3-tiny");
    let quantize = |rest: &str| env.run(&format!("model quantize {model} {rest}"));
    assert_eq!(quantize("--format awq --group 64 --out ./q").ok().stdout, "./q\n");
    let text = env.run("model inspect ./q --format json").ok().stdout;
    assert!(text.contains("int4"), "{text}");
    quantize("--format awq --group 64 --out ./q").fails(2, "is not empty", "--out");
    quantize("--format awq --group 48 --out ./r").fails(2, "groups of 48 do not divide", "--group 128");
    env.run("model quantize synthetic:demo --format awq --group 64 --out ./r").fails(
        2,
        "no files",
        "model synth",
    );
}

#[test]
fn quantising_with_awq_needs_text_and_says_what_it_gained() {
    let env = TestEnv::new();
    let model = fixture("dense-llama-tiny");
    let quantize =
        |rest: &str| env.run(&format!("model quantize {model} --format awq --group 32 --out out {rest}"));
    quantize("--method awq").fails(2, "--method awq needs calibration text", "--text");
    env.write("short", "a few words");
    quantize("--text short").fails(2, "--text is read by --method awq only", "--method awq");
    quantize("--method awq --text short").fails(2, "expected 256 or more", "longer text");
    quantize("--method awq --text none").fails(2, "none", "exists");
    env.write("text", &"The mill stood where the river bent, and it had one wheel. ".repeat(20));
    let done = quantize("--method awq --text text").ok();
    assert!(done.stderr.contains("by AWQ: scales for"), "{}", done.stderr);
    env.run("model inspect out").ok();
}

/// What `model synth` wrote stays synthetic: in a run's rows, of a quantised copy, and when it is looked at.
#[test]
fn a_folder_of_synthetic_weights_is_known_by_its_mark() {
    let env = TestEnv::new();
    let folder = env.path().join("synth");
    std::fs::create_dir(&folder).unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(std::path::Path::new(&fixture("hybrid-tiny")).join(file), folder.join(file)).unwrap();
    }
    let mut config: serde_json::Value =
        serde_json::from_str(&crate::env::read(&folder, "config.json")).unwrap();
    config["inferwall"] = serde_json::json!({ "weights": "synthetic", "seed": 3 });
    env.write("synth/config.json", &config.to_string());
    env.run("model quantize synth --format awq --group 32 --out four").ok();
    env.write("text", &"Rivers run down to the sea. ".repeat(8));
    for model in ["synth", "./four"] {
        let seen = env.run(&format!("model inspect {model} --format json")).ok().json();
        assert_eq!(seen["weights"], "synthetic", "{model}");
        let evaluated =
            env.run(&format!("model eval --model {model} --text text --device cpu --format json"));
        let evaluated = evaluated.ok().json();
        assert_eq!(
            (&evaluated["weights"], &evaluated["device"]),
            (&"synthetic".into(), &"cpu".into()),
            "{model}"
        );
        let sweep = "sweep --knob max_num_seqs --values 2 --device sim:fixed --prompts 2 --set max_model_len=64 \
                     --set input_len=8 --set output_len=4 --format json";
        assert_eq!(env.run(&format!("{sweep} --model {model}")).ok().json()[0]["weights"], "synthetic");
    }
    let real = env.run(&format!("model inspect {} --format json", fixture("hybrid-tiny"))).ok().json();
    assert_eq!(real["weights"], "real");
}

#[test]
fn the_device_of_an_evaluation_is_the_one_that_was_opened() {
    let env = TestEnv::new();
    env.write("text", "Rivers run down to the sea.");
    let eval = format!("model eval --model {} --text text --format json", fixture("dense-llama-tiny"));
    let device = env.run(&eval).ok().json()["device"].as_str().unwrap().to_string();
    assert!(device == "cpu" || device.starts_with("cuda:"), "{device}");
}

/// The passage is side work: arms that can run do so, whatever becomes of it.
#[test]
fn a_perplexity_that_cannot_be_measured_is_a_warning() {
    let env = TestEnv::new();
    for name in ["dense-llama-tiny", "dense-qwen3-tiny"] {
        std::fs::create_dir(env.path().join(name)).unwrap();
        for file in ["config.json", "generation_config.json", "model.safetensors"] {
            std::fs::copy(format!("{}/{file}", fixture(name)), env.path().join(name).join(file)).unwrap();
        }
    }
    // A vocabulary, so that the model opens, and no tokenizer that could cut a text.
    env.write("dense-llama-tiny/tokenizer.json", r#"{"model": {"type": "?", "vocab": {"a": 0, "b": 1}}}"#);
    std::fs::copy(
        format!("{}/tokenizer.json", fixture("dense-qwen3-tiny")),
        env.path().join("dense-qwen3-tiny/tokenizer.json"),
    )
    .unwrap();
    env.write(
        "e.toml",
        r#"
[two]
question = "Which model?"
model = "./dense-qwen3-tiny"
load = { prompts = 2, input_len = 8, output_len = 4, warmup = { prompts = 1, max_rounds = 1 } }
engine = { max_model_len = 32, max_num_batched_tokens = 32 }
arms = [{ name = "qwen" }, { name = "llama", model = "./dense-llama-tiny" }]
"#,
    );
    let ran = env.run("run two --experiments e.toml --device cpu").ok();
    assert!(ran.stderr.contains("its perplexity was not measured"), "{}", ran.stderr);
    let run: serde_json::Value =
        serde_json::from_str(&crate::env::read(&env.only_result(), "run.json")).unwrap();
    assert_eq!(run["status"], "complete");
    let measured: Vec<bool> =
        run["models"].as_array().unwrap().iter().map(|model| model["perplexity"].is_f64()).collect();
    assert_eq!(measured, [false, true]);
    assert!(run["warnings"].to_string().contains("dense-llama-tiny"), "{}", run["warnings"]);
}
