#!/usr/bin/env bash
# SmolLM2 in 4 bits: perplexity of two texts and decode speed beside the 16-bit model, for rounding to nearest and AWQ.
#
#   scripts/smollm2_int4.sh FOLDER CALIBRATION EVALUATION... [-- BINARY]
#
# FOLDER holds smollm2-bf16 (scripts/check_smollm2.sh makes it) and gets the 4-bit versions; CALIBRATION and the
# EVALUATION texts are plain text files, different ones. Prints a Markdown table.
set -euo pipefail
folder="${1:?usage: scripts/smollm2_int4.sh FOLDER CALIBRATION EVALUATION... [-- BINARY]}"
calibration="$2"
shift 2
texts=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do texts+=("$1"); shift; done
binary="${2:-target/release/inferwall}"
windows="${WINDOWS:-4}"

perplexity() { # MODEL TEXT
    "$binary" model eval --model "$1" --text "$2" --device cpu --windows "$windows" --format json 2>/dev/null |
        sed -n 's/.*"perplexity": \([0-9.]*\).*/\1/p'
}
speed() { # MODEL; decode tokens a second of one stream, best of three, first token and loading left out
    for _ in 1 2 3; do
        "$binary" sweep --model "$1" --device cpu --knob max_num_seqs --values 1 --prompts 2 --set input_len=64 \
            --set output_len=96 --out "$folder/runs" --format csv 2>/dev/null |
            python3 -c 'import csv, sys; print(1e3 / float(next(csv.DictReader(sys.stdin))["itl_p50_ms"]))'
    done | sort -n | tail -1
}
row() { # NAME MODEL SECONDS
    local cells=""
    for text in "${texts[@]}"; do cells+=" $(perplexity "$2" "$text") |"; done
    printf '| %s | %s | %s%s %.0f |\n' "$1" "$(du -m "$2/model.safetensors" | cut -f1) MB" "$3 |" "$cells" "$(speed "$2")"
}

printf '| weights | file | quantised in |'
for text in "${texts[@]}"; do printf ' perplexity, %s |' "$(basename "$text" .txt)"; done
printf ' decode tok/s |\n|---|---|---|'
for _ in "${texts[@]}"; do printf -- '---|'; done
printf -- '---|\n'
row "bf16" "$folder/smollm2-bf16" –
for format in awq compressed-tensors; do
    for group in 32 64; do
        for method in rtn awq; do
            out="$folder/smollm2-$format-g$group-$method"
            options=()
            [ "$method" = rtn ] || options=(--text "$calibration")
            rm -rf "$out"
            begin="$(date +%s.%N)"
            "$binary" model quantize "$folder/smollm2-bf16" --format "$format" --group "$group" --method "$method" \
                "${options[@]}" --out "$out" >/dev/null 2>&1
            took="$(python3 -c "import time; print(f'{time.time() - $begin:.0f} s')")"
            row "$format, g$group, $method" "$out" "$took"
        done
    done
done
