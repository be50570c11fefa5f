#!/usr/bin/env bash
# SmolLM2 in 4 bits: perplexity of texts and decode speed beside the 16-bit model, for rounding to nearest and AWQ.
#
#   scripts/smollm2_int4.sh FOLDER CALIBRATION EVALUATION...
#
# FOLDER holds smollm2-bf16 (scripts/check_smollm2.sh makes it) and gets the 4-bit versions, which a second run uses again;
# CALIBRATION and the EVALUATION texts are plain text files, different ones. Needs `cargo build --release --bin inferwall
# --example step_times`. Prints a Markdown table: perplexity of the first windows of each text, processor seconds that
# quantising took, and tokens a second of one stream (the best of five medians).
set -euo pipefail
folder="${1:?usage: scripts/smollm2_int4.sh FOLDER CALIBRATION EVALUATION...}"
calibration="${2:?no calibration text}"
texts=("${@:3}")
windows=(--windows 2 --window 1024)
inferwall=target/release/inferwall
step_times=target/release/examples/step_times

perplexity() { # MODEL TEXT
    "$inferwall" model eval --model "$1" --text "$2" --device cpu "${windows[@]}" --format json 2>/dev/null |
        sed -n 's/.*"perplexity": \([0-9.]*\).*/\1/p' | awk '{ printf "%.2f", $1 }'
}
speed() { # MODEL MATH
    printf 'decode 1 40\n%.0s' 1 2 3 4 5 | "$step_times" "$1" "$2" | tail -n +2 | sort -n |
        awk 'NR == 1 { printf "%.0f", 1000 / $1 }'
}
row() { # NAME MODEL SECONDS MATH...
    local cells=""
    for text in "${texts[@]}"; do cells+=" $(perplexity "$2" "$text") |"; done
    for math in "${@:4}"; do cells+=" $(speed "$2" "$math") |"; done
    printf '| %s | %s | %s |%s\n' "$1" "$(du -m "$2/model.safetensors" | cut -f1) MB" "$3" "$cells"
}
quantize() { # OUT OPTIONS...
    [ ! -f "$1/quantized_in" ] || return 0
    rm -rf "$1"
    TIMEFORMAT=%U
    { time "$inferwall" model quantize "$folder/smollm2-bf16" "${@:2}" --out "$1" >/dev/null 2>&1; } 2>"$folder/took"
    mv "$folder/took" "$1/quantized_in"
}

printf '| weights | file | quantised in, CPU s |'
for text in "${texts[@]}"; do printf ' perplexity, %s |' "$(basename "$text" .txt)"; done
printf ' decode tok/s, f32 math | int16 math |\n|---|---|---|'
for _ in "${texts[@]}"; do printf -- '---|'; done
printf -- '---|---|\n'
row "bf16" "$folder/smollm2-bf16" – f32 int16
for format in awq compressed-tensors; do
    for group in 32 64; do
        for method in rtn awq; do
            out="$folder/smollm2-$format-g$group-$method"
            options=(--format "$format" --group "$group" --method "$method")
            [ "$method" = rtn ] || options+=(--text "$calibration")
            quantize "$out" "${options[@]}"
            row "$format, g$group, $method" "$out" "$(printf '%.0f' "$(cat "$out/quantized_in")")" f32 int16
        done
    done
done
