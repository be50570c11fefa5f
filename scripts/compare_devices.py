#!/usr/bin/env python3
"""Greedy text of a model on two devices, token by token. Standard library only.

    scripts/compare_devices.py BINARY MODEL [DEVICE [REFERENCE]]     (cuda and cpu if not given)

Ten prompts, 64 tokens each. Where the devices part, the reference's two best logits at that place are compared: closer
than NEAR_TIE, either is right, since 16-bit arithmetic differs from 32-bit by as much. Anything else is a fault.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TOKENS = 64
# Three times the largest difference of a logit that fp16 and f32 arithmetic show on SmolLM2 (0.03); printed beside it.
NEAR_TIE = 0.1

PROMPTS = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "text" / "smollm2.json"


def inferwall(binary, *arguments):
    done = subprocess.run([binary, *arguments, "--format", "json"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(arguments[:1])} failed with {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)


def joined(tokens):
    return ",".join(map(str, tokens))


def where(model, device):
    return ["--model", model, "--device", device]


def greedy(binary, model, device, tokens):
    length = ["--max-tokens", str(TOKENS), "--ignore-eos"]
    return inferwall(binary, "generate", "--tokens", joined(tokens), *where(model, device), *length)["tokens"]


def logits(binary, model, device, tokens):
    return inferwall(binary, "logits", "--tokens", joined(tokens), *where(model, device), "--last", "1")["logits"][0]


def margin(binary, model, device, tokens):
    best = sorted(logits(binary, model, device, tokens))[-2:]
    return best[1] - best[0]


def compare(binary, model, device, reference, golden):
    """(line to print, faults, largest difference of a logit after the prompt)"""
    prompt = golden["prompt_ids"]
    found, expected = (greedy(binary, model, name, prompt) for name in (device, reference))
    same = next((i for i, pair in enumerate(zip(found, expected)) if pair[0] != pair[1]), min(len(found), len(expected)))
    verdict, fault = "equal", False
    if found != expected:
        gap = margin(binary, model, reference, prompt + expected[:same])
        fault = gap >= NEAR_TIE
        verdict = f"part at a margin of {gap:.4f}: {'WRONG' if fault else 'a near-tie'}"
    pairs = zip(*(logits(binary, model, name, prompt) for name in (device, reference)))
    line = f"{golden['prompt'][-40:]!r}: {same} of {len(expected)} tokens, {verdict}"
    return line, fault, max(abs(a - b) for a, b in pairs)


def main():
    binary, model = sys.argv[1:3]
    device, reference = (sys.argv[3:] + ["cuda", "cpu"][len(sys.argv) - 3:])[:2]
    with ThreadPoolExecutor(4) as pool:
        goldens = json.loads(PROMPTS.read_text())
        results = list(pool.map(lambda golden: compare(binary, model, device, reference, golden), goldens))
    for line, _, _ in results:
        print(line)
    difference, faults = max(result[2] for result in results), sum(result[1] for result in results)
    print(f"largest difference of a logit after the prompts: {difference:.4f}; a near-tie is closer than {NEAR_TIE}")
    if faults:
        sys.exit(f"{faults} texts differ without a near-tie")
    print(f"{device} writes what {reference} writes")


if __name__ == "__main__":
    main()
