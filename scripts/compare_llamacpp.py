#!/usr/bin/env python3
"""llama.cpp and inferwall in turns on the same model and cores. Called by compare_llamacpp.sh, which makes the models.

    compare_llamacpp.py FOLDER STEP_TIMES [--quick] [--no-repack]

FOLDER holds smollm2.gguf, smollm2-f16, smollm2-bf16 and smollm2-int4; STEP_TIMES is the example `step_times`. Each
round asks every engine each question once, so a moment's other load falls on all. A figure is the median of the rounds, and a
round's is its fastest step. Needs the cores to itself: OpenMP's threads spin at barriers, so llama.cpp loses a hundredfold
where another process takes a core; the load average is printed for that reason.
"""

import argparse
import ctypes
import os
import statistics
import subprocess
import time
from pathlib import Path

import llama_cpp as llama

CONTEXT = 128  # tokens in the cache before decode, as in benches/cpu_rig
SEQUENCES = [1, 2, 4, 8, 16]
PROMPTS = [256, 512]
FILES = {"F16": llama.LLAMA_FTYPE_MOSTLY_F16, "BF16": llama.LLAMA_FTYPE_MOSTLY_BF16, "Q8_0": llama.LLAMA_FTYPE_MOSTLY_Q8_0,
         "Q4_0": llama.LLAMA_FTYPE_MOSTLY_Q4_0, "Q4_1": llama.LLAMA_FTYPE_MOSTLY_Q4_1}


def quantize(source, target, ftype):
    """llama.cpp's own conversion of the 4-bit file that the wheel holds; the wider formats hold its very values."""
    if target.exists():
        return
    params = llama.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = ftype, 2, True
    part = target.with_suffix(".part")
    if llama.llama_model_quantize(str(source).encode(), str(part).encode(), ctypes.byref(params)) != 0:
        raise SystemExit(f"llama.cpp could not write {target}")
    part.rename(target)


class LlamaCpp:
    def __init__(self, path, threads, repack=True):
        self.name = f"llama.cpp {path.stem.removeprefix('smollm2-')}"
        params = llama.llama_model_default_params()
        params.use_mmap = False
        params.use_extra_bufts = repack
        self.model = llama.llama_model_load_from_file(str(path).encode(), params)
        params = llama.llama_context_default_params()
        params.n_seq_max = max(SEQUENCES)
        params.n_ctx, params.n_batch, params.n_ubatch = params.n_seq_max * (max(PROMPTS) + 32), 512, 512
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        self.context = llama.llama_init_from_model(self.model, params)
        self.batch = llama.llama_batch_init(512, 0, 1)
        self.memory = llama.llama_get_memory(self.context)
        self.filled = 0

    def step(self, tokens):
        """Milliseconds of one batch of (sequence, position, wants logits)."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (sequence, position, wanted) in enumerate(tokens):
            batch.token[i] = (position * 7919 + 31 * sequence) % 30_000
            batch.pos[i], batch.n_seq_id[i], batch.logits[i] = position, 1, wanted
            batch.seq_id[i][0] = sequence
        start = time.perf_counter()
        if llama.llama_decode(self.context, batch) != 0:
            raise SystemExit(f"{self.name}: llama_decode failed")
        llama.llama_synchronize(self.context)
        return 1e3 * (time.perf_counter() - start)

    def prompt(self, sequence, tokens):
        return self.step([(sequence, position, position + 1 == tokens) for position in range(tokens)])

    def prefill(self, tokens):
        self.filled = 0
        llama.llama_memory_clear(self.memory, False)
        return self.prompt(0, tokens)

    def decode(self, sequences, steps):
        if self.filled == 0:
            llama.llama_memory_clear(self.memory, False)
        for sequence in range(self.filled, sequences):
            self.prompt(sequence, CONTEXT)
        self.filled = max(self.filled, sequences)
        for sequence in range(sequences):
            llama.llama_memory_seq_rm(self.memory, sequence, CONTEXT, -1)
        return min(self.step([(sequence, CONTEXT + step, True) for sequence in range(sequences)]) for step in range(steps))


class Inferwall:
    def __init__(self, name, step_times, folder, math):
        self.name = f"inferwall {name}"
        self.process = subprocess.Popen([step_times, folder, math], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True, bufsize=1)
        loaded = self.process.stdout.readline()
        self.missing = "" if loaded else self.process.stderr.read().partition('fact: "')[2].partition('"')[0]

    def ask(self, question):
        self.process.stdin.write(question + "\n")
        return float(self.process.stdout.readline())

    def prefill(self, tokens):
        return self.ask(f"prefill {tokens}")

    def decode(self, sequences, steps):
        return self.ask(f"decode {sequences} {steps}")


def measure(engines, rounds, steps):
    """Milliseconds of each engine's rounds by question: a prompt's length or a number of sequences."""
    times = {engine.name: {} for engine in engines}
    questions = [("prefill", tokens, 0) for tokens in PROMPTS] + [("decode", count, steps) for count in SEQUENCES]
    for turn in range(rounds + 1):  # the first turn warms up
        for kind, size, count in questions:
            for engine in engines:
                took = engine.prefill(size) if kind == "prefill" else engine.decode(size, count)
                if turn > 0:
                    times[engine.name].setdefault((kind, size), []).append(took)
                time.sleep(0.02)  # threads of the engine before stop spinning
    return times


def rate(times, kind, size):
    """Tokens a second."""
    return 1e3 * size / statistics.median(times[(kind, size)])


def cpu_name():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = dict(line.split(":", 1) for line in lines[:26] if ":" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    flags = facts.get("flags", "").split()
    sets = [flag for flag in ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni") if flag in flags]
    return f"{facts.get('model name')}, family {facts.get('cpu family')} model {facts.get('model')}; {' '.join(sets)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("step_times")
    parser.add_argument("--quick", action="store_true", help="one round of few steps")
    parser.add_argument(
        "--no-repack",
        action="store_true",
        help="llama.cpp with weights as files hold them: no AMX, no repacked Q4_0 (its AMX path can crash)",
    )
    args = parser.parse_args()
    rounds, steps = (1, 8) if args.quick else (5, 24)
    threads = os.cpu_count()
    quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda level, text, data: None)
    llama.llama_log_set(quiet, None)
    llama.llama_backend_init()
    source = args.folder / "smollm2.gguf"
    for name, ftype in FILES.items():
        quantize(source, args.folder / f"smollm2-{name}.gguf", ftype)

    ours = [Inferwall("f16, f32 math", args.step_times, args.folder / "smollm2-f16", "f32"),
            Inferwall("bf16, bf16 math", args.step_times, args.folder / "smollm2-bf16", "bf16"),
            Inferwall("int4 g32, f32 math", args.step_times, args.folder / "smollm2-int4", "f32"),
            Inferwall("int4 g32, int16 math", args.step_times, args.folder / "smollm2-int4", "int16"),
            Inferwall("int4 g32, bf16 math", args.step_times, args.folder / "smollm2-int4", "bf16")]
    theirs = {name: LlamaCpp(args.folder / f"smollm2-{name}.gguf", threads, not args.no_repack) for name in FILES}
    order = [theirs["F16"], ours[0], theirs["BF16"], ours[1], theirs["Q8_0"], theirs["Q4_0"], theirs["Q4_1"], *ours[2:]]
    engines = [engine for engine in order if not getattr(engine, "missing", "")]
    before = os.getloadavg()[0]
    times = measure(engines, rounds, steps)

    print(f"SmolLM2-135M-Instruct, {threads} threads, {cpu_name()}")
    if args.no_repack:
        print("llama.cpp with weights as files hold them: no AMX, no repacked Q4_0")
    print(f"medians of {rounds} rounds, engines in turns; decode from {CONTEXT} tokens of context, fastest of {steps} steps a round")
    print(f"load average {before:.1f} before, {os.getloadavg()[0]:.1f} after ({threads} threads are ours)\n")
    print("| engine, weights | prefill tok/s at 256 / 512 | decode tok/s, one stream | total tok/s at 2 / 4 / 8 / 16 sequences |")
    print("|---|---|---|---|")
    for engine in order:
        if getattr(engine, "missing", ""):
            print(f"| {engine.name} | {engine.missing} | | |")
            continue
        found = times[engine.name]
        cells = lambda kind, sizes: " / ".join(f"{rate(found, kind, size):,.0f}" for size in sizes)
        print(f"| {engine.name} | {cells('prefill', PROMPTS)} | {cells('decode', [1])} | {cells('decode', SEQUENCES[1:])} |")


if __name__ == "__main__":
    main()
