//! Every kernel compiles for every target, through NVRTC alone: no GPU is needed. Skipped loudly where NVRTC is missing
//! (`pip install nvidia-cuda-nvrtc` brings it).

mod skip;

use inferwall::engine::device::cuda::compile::{self, TARGETS};
use inferwall::engine::device::cuda::nvrtc::Nvrtc;
use inferwall::engine::device::cuda::units;
use skip::skip;

fn nvrtc(test: &str) -> Option<Nvrtc> {
    match Nvrtc::find(None) {
        Ok(nvrtc) => Some(nvrtc),
        Err(error) => {
            skip(test, format_args!("{error}; {}", error.hint()));
            None
        }
    }
}

fn capability(target: &str) -> i32 {
    target.trim_start_matches("sm_").trim_end_matches('a').parse().expect("a target is sm_ and a number")
}

#[test]
fn every_kernel_compiles_for_every_target_and_hot_ones_do_not_spill() {
    let Some(nvrtc) = nvrtc("every_kernel_compiles_for_every_target_and_hot_ones_do_not_spill") else {
        return;
    };
    let mut faults = Vec::new();
    println!("{:<10} {:<14} {:<32} registers  shared  spills", "target", "file", "kernel");
    for unit in units::ALL {
        for target in TARGETS.iter().filter(|target| unit.supports(capability(target))) {
            let compiled = match compile::compile(&nvrtc, unit, target) {
                Ok(compiled) => compiled,
                Err(error) => {
                    faults.push(format!("{} for {target}: {error}", unit.file));
                    continue;
                }
            };
            assert!(compiled.cubin.starts_with(b"\x7fELF"), "{} for {target} is no machine code", unit.file);
            let resources = compile::resources(&compiled.log).expect("the assembler's log");
            for hot in unit.hot {
                if !resources.iter().any(|kernel| kernel.kernel == *hot) {
                    faults.push(format!(
                        "{}: the log for {target} does not name the hot kernel {hot}",
                        unit.file
                    ));
                }
            }
            for kernel in resources {
                println!(
                    "{target:<10} {:<14} {:<32} {:>9} {:>7} {:>7}",
                    unit.file, kernel.kernel, kernel.registers, kernel.shared_bytes, kernel.spill_bytes
                );
                if kernel.spill_bytes > 0 && unit.hot.contains(&kernel.kernel.as_str()) {
                    faults.push(format!(
                        "{} for {target}: {} spills {} bytes",
                        unit.file, kernel.kernel, kernel.spill_bytes
                    ));
                }
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn a_broken_kernel_is_an_error_with_the_line() {
    let Some(nvrtc) = nvrtc("a_broken_kernel_is_an_error_with_the_line") else { return };
    let broken = compile::Unit {
        file: "broken.cu",
        source: "#include \"half.cuh\"\nKERNEL wrong() { undeclared = 1; }\n",
        defines: &[],
        hot: &[],
        min_capability: 80,
        max_capability: compile::ANY_LATER,
    };
    let error = compile::compile(&nvrtc, &broken, "sm_80").expect_err("must not compile").to_string();
    assert!(error.contains("broken.cu(2)") && error.contains("undeclared"), "{error}");
}
