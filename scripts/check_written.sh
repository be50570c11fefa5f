#!/usr/bin/env bash
# Small golden models in 4 bits, both formats and methods, read back by scripts/check_quantized.py. Takes seconds.
#
#   scripts/check_written.sh FOLDER [BINARY]
#
# FOLDER is made anew; BINARY is target/release/inferwall if not given. `python3` needs numpy.
set -euo pipefail
folder="${1:?usage: scripts/check_written.sh FOLDER [BINARY]}"
binary="${2:-target/release/inferwall}"
fixtures="$(dirname "$0")/../tests/fixtures"
rm -rf "$folder"
for model in dense-llama-tiny hybrid-tiny; do
    source="$folder/$model"
    mkdir -p "$source"
    cp "$fixtures/$model"/{config.json,tokenizer.json,model.safetensors} "$source/"
    for format in awq compressed-tensors; do
        for method in rtn awq; do
            out="$source-$format-$method"
            text=()
            [ "$method" = rtn ] || text=(--text "$fixtures/text/gpl-3.txt")
            "$binary" model quantize "$source" --format "$format" --group 32 --method "$method" "${text[@]}" \
                --out "$out" >/dev/null 2>&1 || { echo "model quantize failed for $out"; exit 1; }
            echo "$model, $format, $method"
            python3 "$(dirname "$0")/check_quantized.py" "$source" "$out"
        done
    done
done
