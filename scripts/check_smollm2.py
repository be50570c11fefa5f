#!/usr/bin/env python3
"""The checks of check_smollm2.sh: perplexity of a text, and greedy tokens of ten prompts. Standard library only.

Golden tokens come from transformers with bf16 weights in f32 arithmetic. Another order of summation may pick the other
of two nearly equal tokens, so a continuation is compared up to its first step whose margin is below NEAR_TIE.
"""

import json
import subprocess
import sys
from pathlib import Path

# Perplexity of the GPL-3's first 2,048 tokens in one window, f32 arithmetic, by folder. `-linears` folders keep the
# embedding in f32; the `bf16` one rounds everything, and transformers gives its figure.
PERPLEXITY = {"f32": 20.115, "f16-linears": 20.116, "bf16-linears": 20.120, "bf16": 20.1247}
PERPLEXITY_TOLERANCE = 0.002
NEAR_TIE = 0.02

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "text"


def inferwall(binary, *arguments):
    done = subprocess.run([binary, *arguments, "--device", "cpu", "--format", "json"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(arguments[:2])} failed with {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)


def check_perplexity(binary, folder):
    failed = 0
    for name, expected in PERPLEXITY.items():
        result = inferwall(binary, "model", "eval", "--model", str(folder / f"smollm2-{name}"),
                           "--text", str(FIXTURES / "gpl-3.txt"), "--window", "2048", "--windows", "1")
        found = result["perplexity"]
        ok = abs(found - expected) <= PERPLEXITY_TOLERANCE and result["tokens"] == 2047
        failed += not ok
        print(f"perplexity {name}: {found:.4f}, expected {expected} +- {PERPLEXITY_TOLERANCE} "
              f"({result['tokens']} tokens, {result['bits_per_byte']:.4f} bits per byte): {'ok' if ok else 'WRONG'}")
    return failed


def check_tokens(binary, folder):
    failed = 0
    for golden in json.loads((FIXTURES / "smollm2.json").read_text()):
        result = inferwall(binary, "generate", "--model", str(folder / "smollm2-bf16"), "--prompt", golden["prompt"],
                           "--max-tokens", str(len(golden["ids"])))
        compared = next((i for i, margin in enumerate(golden["margin"]) if margin < NEAR_TIE), len(golden["ids"]))
        same = next((i for i, (a, b) in enumerate(zip(result["tokens"], golden["ids"])) if a != b),
                    min(len(result["tokens"]), len(golden["ids"])))
        ok = same >= compared
        failed += not ok
        print(f"tokens {golden['prompt'][-40:]!r}: {same} of {len(golden['ids'])} equal, {compared} without a near-tie: "
              f"{'ok' if ok else 'WRONG'}")
    return failed


def main():
    binary, folder = sys.argv[1], Path(sys.argv[2])
    failed = check_perplexity(binary, folder) + check_tokens(binary, folder)
    if failed:
        sys.exit(f"{failed} checks failed")
    print("all checks hold")


if __name__ == "__main__":
    main()
