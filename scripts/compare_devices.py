#!/usr/bin/env python3
"""Greedy text of a model on two devices, token by token. Standard library only.

    scripts/compare_devices.py BINARY MODEL [DEVICE [REFERENCE]]     (cuda and cpu if not given)

Ten prompts, 64 tokens each. Where the devices part, the reference's two best logits at that place are compared: closer
than NEAR_TIE, either is right, since 16-bit arithmetic differs from 32-bit by as much. Anything else is a fault.
"""

import json
import subprocess
import sys
from pathlib import Path

TOKENS = 64
# A few times the largest difference of a logit that the prompts show between the devices; printed beside it.
NEAR_TIE = 0.1

PROMPTS = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "text" / "smollm2.json"


def inferwall(binary, *arguments):
    done = subprocess.run([binary, *arguments, "--format", "json"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(arguments[:1])} failed with {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)


def greedy(binary, model, device, tokens):
    arguments = ["--model", model, "--device", device, "--tokens", ",".join(map(str, tokens)), "--max-tokens", str(TOKENS), "--ignore-eos"]
    return inferwall(binary, "generate", *arguments)["tokens"]


def logits(binary, model, device, tokens):
    arguments = ["--model", model, "--device", device, "--tokens", ",".join(map(str, tokens)), "--last", "1"]
    return inferwall(binary, "logits", *arguments)["logits"][0]


def margin(binary, model, device, tokens):
    best = sorted(logits(binary, model, device, tokens))[-2:]
    return best[1] - best[0]


def main():
    binary, model = sys.argv[1:3]
    device, reference = (sys.argv[3:] + ["cuda", "cpu"][len(sys.argv) - 3:])[:2]
    faults, difference = 0, 0.0
    for golden in json.loads(PROMPTS.read_text()):
        prompt = golden["prompt_ids"]
        found, expected = (greedy(binary, model, name, prompt) for name in (device, reference))
        same = next((i for i, pair in enumerate(zip(found, expected)) if pair[0] != pair[1]), min(len(found), len(expected)))
        verdict = "equal"
        if found != expected:
            gap = margin(binary, model, reference, prompt + expected[:same])
            verdict = f"part at a margin of {gap:.4f}: " + ("a near-tie" if gap < NEAR_TIE else "WRONG")
            faults += gap >= NEAR_TIE
        pairs = zip(*(logits(binary, model, name, prompt) for name in (device, reference)))
        difference = max(difference, max(abs(a - b) for a, b in pairs))
        print(f"{golden['prompt'][-40:]!r}: {same} of {len(expected)} tokens, {verdict}", flush=True)
    print(f"largest difference of a logit after the prompts: {difference:.4f}; a near-tie is closer than {NEAR_TIE}")
    if faults:
        sys.exit(f"{faults} texts differ without a near-tie")
    print(f"{device} writes what {reference} writes")


if __name__ == "__main__":
    main()
