#!/usr/bin/env bash
# Builds, checks and times everything CUDA in one go, and prints a short table last.
#
#   scripts/cuda_check.sh            build, compile every kernel for every target, tests on the GPU, bench
#   scripts/cuda_check.sh --sanitize also run memcheck and racecheck of compute-sanitizer on a small golden test
#
# Needs a Rust toolchain and NVRTC; tests and bench that need a GPU say that they were skipped where there is none.
set -euo pipefail
cd "$(dirname "$0")/.."

logs="${OUT:-target/cuda-check}"
mkdir -p "$logs"
failed=()

check() {
    local name="$1"
    shift
    printf '\n== %s\n' "$name"
    if "$@" >"$logs/$name.log" 2>&1; then
        grep -E "^(test result|SKIPPED)|SKIPPED" "$logs/$name.log" | sort -u || true
    else
        failed+=("$name")
        tail -40 "$logs/$name.log"
    fi
}

check compile cargo test --test cuda_compile -- --nocapture
for file in tests/cuda_*.rs; do
    name="$(basename "$file" .rs)"
    [ "$name" = cuda_compile ] || check "$name" cargo test --test "$name" -- --nocapture --test-threads=1
done

if [ "${1:-}" = --sanitize ] && command -v compute-sanitizer >/dev/null; then
    binary="$(cargo test --test cuda_golden --no-run 2>&1 | sed -n 's/.*(\(.*\)).*/\1/p' | tail -1)"
    for tool in memcheck racecheck; do
        check "$tool" compute-sanitizer --tool "$tool" --error-exitcode 1 "$binary" --test-threads=1 whole_prompts_match
    done
fi

check bench cargo bench --bench cuda

printf '\n== registers and spills (sm_90a)\n'
grep -E "^(target|sm_90a)" "$logs/compile.log" || true
printf '\n== times\n'
sed -n '/^row /,/^$/p' "$logs/bench.log" || true
if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAILED: %s (logs in %s)\n' "${failed[*]}" "$logs"
    exit 1
fi
printf 'all checks passed; logs in %s\n' "$logs"
