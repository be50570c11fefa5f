#!/usr/bin/env python3
"""Makes golden checkpoints: small models with seeded random weights, and the answers that a correct engine gives.

    python3 -m venv venv && venv/bin/pip install torch transformers safetensors tokenizers numpy
    venv/bin/python scripts/golden/make.py OUT [NAME ...]         make all fixtures, or those named
    venv/bin/python scripts/golden/make.py --check FOLDER ...     recompute the answers of existing fixtures

Logits come from transformers in float32 on the CPU, loading the very weights that are saved (4-bit ones unpacked first,
which is exact). `reference.py`, a float64 program written from the equations, must agree with them; its difference is
the error that tolerances are made from. Seeds are fixed; other versions of torch and numpy may give other weights.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from safetensors.torch import load_file

import checkpoints
from checkpoints import FIXTURES, SPECIAL_TOKENS
from reference import Reference

PROMPT, GREEDY, DRAFTS = 150, 48, 5
CLASSES = {"qwen3_5_text": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"), "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
           "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"), "llama": ("LlamaConfig", "LlamaForCausalLM")}


def transformers_model(text, weights):
    config_class, model_class = (getattr(transformers, name) for name in CLASSES[text["model_type"]])
    config = config_class(**{k: v for k, v in text.items() if k not in ("model_type", "architectures", "torch_dtype")})
    config._attn_implementation = "eager"
    model = model_class(config).float().eval()
    state = {name if name.startswith("lm_head") else f"model.{name}": torch.from_numpy(np.array(value))
             for name, value in weights.items() if not name.startswith("mtp.")}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and all("lm_head" in name for name in missing), (missing, unexpected)
    model.tie_weights()
    return model


@torch.no_grad()
def logits_of(model, ids):
    return model(input_ids=torch.tensor([list(map(int, ids))]), use_cache=False).logits[0].float().numpy()


@torch.no_grad()
def one_at_a_time(model, ids):
    rows, cache = [], None
    for token in ids:
        given = {} if cache is None else {"past_key_values": cache}
        out = model(input_ids=torch.tensor([[int(token)]]), use_cache=True, **given)
        cache = out.past_key_values
        rows.append(out.logits[0, 0].float().numpy())
    return np.stack(rows)


@torch.no_grad()
def greedy(model, prompt, count=GREEDY):
    out = model(input_ids=torch.tensor([list(prompt)]), use_cache=True)
    ids = [int(out.logits[0, -1].argmax())]
    while len(ids) < count:
        out = model(input_ids=torch.tensor([ids[-1:]]), use_cache=True, past_key_values=out.past_key_values)
        ids.append(int(out.logits[0, -1].argmax()))
    return ids


def error(found, exact):
    difference = np.asarray(found, np.float64) - exact
    return {"max_abs": float(np.abs(difference).max()),
            "rms_rel": float(np.sqrt(np.mean(difference**2)) / np.sqrt(np.mean(np.asarray(exact) ** 2)))}


def margins(logits):
    best = np.sort(logits, -1)
    return [float(f"{m:.6g}") for m in best[:, -1] - best[:, -2]]


def find_prompt(model, vocab, seed):
    """A prompt whose continuation has no special token and no near-tie."""
    for attempt in range(200):
        prompt = np.random.default_rng([seed, attempt]).integers(0, vocab - SPECIAL_TOKENS, PROMPT)
        ids = greedy(model, prompt, 8)
        if max(ids) >= vocab - SPECIAL_TOKENS:
            continue
        ids = greedy(model, prompt)
        rows = logits_of(model, [*prompt, *ids[:-1]])[PROMPT - 1 :]
        if max(ids) < vocab - SPECIAL_TOKENS and min(margins(rows)) > 0.03:
            return [seed, attempt], [int(t) for t in prompt], ids
    raise SystemExit("no prompt without near-ties: try another seed of the weights")


def answers(text, weights, model, prompt, ids, last_rows):
    """The tensors and the json of one prompt."""
    vocab = text["vocab_size"]
    everything = [*prompt, *ids[:-1]]
    f32 = logits_of(model, everything)
    reference = Reference(text, {name: np.asarray(value, np.float64) for name, value in weights.items()})
    exact, hidden, _, _ = reference.run(everything)
    _, prompt_hidden, residual, _ = reference.run(prompt)
    single = one_at_a_time(model, everything)
    measured = {"float32_vs_float64": error(f32[:PROMPT], exact[:PROMPT]),
                "float32_decode_vs_float64": error(single[PROMPT - 1 :], exact[PROMPT - 1 :]),
                "float32_one_token_at_a_time_vs_float64": error(single[:PROMPT], exact[:PROMPT])}
    assert max(m["rms_rel"] for m in measured.values()) < 1e-5, measured
    assert (exact[PROMPT - 1 :].argmax(-1) == ids).all(), "the float64 program picks other tokens"
    for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        half = transformers_model(text, weights).to(dtype)
        rows = logits_of(half, everything)
        measured[f"{name}_vs_float64"] = {
            **error(rows[:PROMPT], exact[:PROMPT]),
            "prompt_argmax_agree": float((rows[:PROMPT].argmax(-1) == exact[:PROMPT].argmax(-1)).mean()),
            "greedy_argmax_agree": float((rows[PROMPT - 1 :].argmax(-1) == ids).mean())}
    worst = max(measured[k]["rms_rel"] for k in measured if k.startswith("float32"))
    rows = f32[:PROMPT][-last_rows:] if last_rows else f32[:PROMPT]
    tensors = {"ids": np.array(prompt, np.int32), "logits": rows, "greedy_ids": np.array(ids, np.int32),
               "greedy_logits": f32[PROMPT - 1 :], "residual_last": residual.astype(np.float32),
               "hidden_last": prompt_hidden[-1].astype(np.float32)}
    order = np.argsort(f32[PROMPT - 1 :], -1)
    entry = {
        "length": PROMPT, "logits_first_position": PROMPT - len(rows), "ids": prompt,
        "argmax": f32[:PROMPT].argmax(-1).tolist(), "margin": margins(f32[:PROMPT]),
        "greedy": {"ids": ids, "second": order[:, -2].tolist(), "margin": margins(f32[PROMPT - 1 :]),
                   "min_margin": min(margins(f32[PROMPT - 1 :]))},
        "logit_rms": float(np.sqrt(np.mean(exact[:PROMPT] ** 2))), **measured,
        "suggested_tolerance": {
            "float32_max_abs": 10 * measured["float32_vs_float64"]["max_abs"], "float32_rms_rel": 10 * worst,
            "float16_rms_rel": 3 * measured["float16_vs_float64"]["rms_rel"],
            "bfloat16_rms_rel": 3 * measured["bfloat16_vs_float64"]["rms_rel"]}}
    if "mtp.fc.weight" in weights:
        state, following = {}, [*prompt[1:], ids[0]]
        rows = [reference.mtp_step(prompt_hidden[t], following[t], state, t) for t in range(PROMPT)]
        drafts = [rows[-1]]
        for i in range(1, DRAFTS):
            drafts.append(reference.mtp_step(drafts[-1][1], int(drafts[-1][0].argmax()), state, PROMPT - 1 + i))
        kept = [row for row, _ in (rows[-last_rows:] if last_rows else rows)]
        tensors["mtp_logits"] = np.stack(kept).astype(np.float32)
        tensors["mtp_draft_logits"] = np.stack([row for row, _ in drafts]).astype(np.float32)
        entry["mtp"] = {"next_ids": following, "logits_first_position": PROMPT - len(kept),
                        "argmax": [int(row.argmax()) for row, _ in rows],
                        "draft_ids": [int(row.argmax()) for row, _ in drafts]}
    assert all(t.shape[-1] == vocab for name, t in tensors.items() if name.endswith("logits"))
    return tensors, entry


def make(out, name):
    fixture, folder = FIXTURES[name], out / name
    _, text = checkpoints.config_of(fixture)
    weights = checkpoints.random_weights(text, fixture["seed"], fixture.get("shape", {}).get("mtp", False))
    packed, exact = checkpoints.quantized(weights, fixture["quantize"]) if "quantize" in fixture else ({}, weights)
    checkpoints.save(folder, fixture, weights, packed)
    model = transformers_model(text, exact)
    seed, prompt, ids = find_prompt(model, text["vocab_size"], fixture["seed"])
    tensors, entry = answers(text, exact, model, prompt, ids, fixture.get("last_rows"))
    expected = {"note": fixture["note"], "model": ".", "vocab_size": text["vocab_size"],
                "tokenizer_check": checkpoints.save_tokenizer(folder, text["vocab_size"]),
                "prompts": {"p150": {"prompt_seed": seed, **entry}}}
    if packed:
        plain = logits_of(transformers_model(text, weights), prompt)
        expected["prompts"]["p150"]["unquantised_vs_this"] = error(plain, logits_of(model, prompt))
    save_file({f"p150.{key}": np.ascontiguousarray(value) for key, value in tensors.items()},
              folder / "expected.safetensors")
    (folder / "expected.json").write_text(compact(expected))
    if name == "hybrid-geom":
        make_replay(out / "spec-replay", text, exact, model, entry, ids)
    print(f"{name}: rms logit {entry['logit_rms']:.2f}, float32 error {entry['float32_vs_float64']['rms_rel']:.1e}, "
          f"float16 {entry['float16_vs_float64']['rms_rel']:.1e}, smallest margin {entry['greedy']['min_margin']:.3f}")


def make_replay(folder, text, weights, model, entry, ids):
    """Cuts and rollbacks over one sequence: prompt and its greedy tokens."""
    tokens = [*entry["ids"], *ids]
    reference = Reference(text, {name: np.asarray(value, np.float64) for name, value in weights.items()})
    exact, _, _, _ = reference.run(tokens)
    logits = logits_of(model, tokens)
    cuts = [[70, 80, 48], [64, 86, 48], [63, 87, 48], [65, 85, 48], [128, 22, 48], [1, 149, 48], [149, 1, 48],
            [5] * 30 + [48], [33, 31, 1, 64, 21, 48], [1] * 198]
    rng = np.random.default_rng(7)
    # (drafted, right ones) a round: acceptance of all, some, none, with undrafted rounds between.
    rounds, tensors, at = [], {"ids": np.array(tokens, np.int32), "logits": logits}, PROMPT
    for drafted, right in [(4, 2), (0, 0), (4, 4), (1, 0), (0, 0), (5, 1), (3, 3), (2, 0), (0, 0), (4, 3), (5, 5), (4, 0)]:
        if at + right + 1 >= len(tokens):
            break
        draft = [int(t) for t in tokens[at + 1 : at + 1 + right]]
        while len(draft) < drafted:
            wrong = int(rng.integers(0, text["vocab_size"] - SPECIAL_TOKENS))
            follows = tokens[at + 1 + right] if len(draft) == right else None
            draft += [wrong] if wrong != follows else []
        wrong_rows = None
        if drafted > right:
            wrong_rows = f"round{len(rounds)}.wrong_logits"
            rows = logits_of(model, [*tokens[: at + 1], *draft])
            tensors[wrong_rows] = np.ascontiguousarray(rows[at + 1 + right :])
        rounds.append({"processed_before": at, "pending": int(tokens[at]), "draft": draft, "accept": right,
                       "next": int(logits[at + right].argmax()), "processed_after": at + 1 + right,
                       "base_rows": [at, at + right], "wrong_rows": wrong_rows})
        at += 1 + right
    states = []
    for count in (1, 3, 64, 150, 198):
        _, _, _, state = reference.run(tokens[:count])
        linear = [i for i, kind in enumerate(text["layer_types"]) if kind == "linear_attention"]
        states.append({"processed": count, "linear_layers": linear,
                       "S_frobenius_per_value_head": [[float(np.linalg.norm(S)) for S in state[i]["S"]] for i in linear],
                       "conv_window_frobenius": [float(np.linalg.norm(state[i]["window"])) for i in linear]})
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, folder / "expected.safetensors")
    (folder / "expected.json").write_text(compact({
        "note": "Cuts and rollbacks over hybrid-geom (this folder holds no weights).", "model": "../hybrid-geom",
        "vocab_size": text["vocab_size"], "prompt_length": PROMPT, "ids": tokens,
        "logit_rms": float(np.sqrt(np.mean(exact**2))), "greedy_margin": margins(logits[PROMPT - 1 : -1]),
        "float32_vs_float64": error(logits, exact), "splits": [{"pieces": cut} for cut in cuts], "rounds": rounds,
        "state_norms": states}))


def compact(value):
    """JSON with one line for each list of numbers."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    lines, open_list = [], None
    for line in text.splitlines():
        bare = line.strip()
        if open_list is not None:
            open_list.append(bare)
            if bare.startswith("]"):
                lines.append("".join(part + (" " if part.endswith(",") else "") for part in open_list).rstrip())
                open_list = None
        elif bare.endswith("[") and not bare.startswith("{"):
            open_list = [line]
        else:
            lines.append(line)
        if open_list is not None and len(open_list) > 1 and open_list[-1].endswith(("{", "[")):
            lines.extend(open_list)
            open_list = None
    return "\n".join(lines) + "\n"


def load(folder):
    """(text config, canonical weights in float32) of a 16-bit fixture."""
    root = json.loads((folder / "config.json").read_text())
    text = root.get("text_config", root)
    weights = {}
    for file in sorted(folder.glob("model*.safetensors")):
        for name, tensor in load_file(file).items():
            short = name.removeprefix("model.language_model.").removeprefix("model.")
            if not short.startswith("visual."):
                weights[short] = tensor.float().numpy()
    return text, weights


def check(folder):
    """Recomputes the stored answers of `folder` and prints how far they are from this program's."""
    text, weights = load(folder)
    stored = load_file(folder / "expected.safetensors")
    expected = json.loads((folder / "expected.json").read_text())
    for name, prompt in expected["prompts"].items():
        model = transformers_model(text, weights)
        ids = stored[f"{name}.greedy_ids"].tolist()
        everything = [*prompt["ids"], *ids[:-1]]
        first = prompt["logits_first_position"]
        rows = stored[f"{name}.logits"].numpy()
        found = logits_of(model, everything)
        reference = Reference(text, {key: np.asarray(value, np.float64) for key, value in weights.items()})
        exact, hidden, residual, _ = reference.run(everything[: prompt["length"]])
        last = prompt["length"]
        print(f"{folder.name} {name}: stored against transformers {error(rows, found[first:last])['rms_rel']:.1e}, "
              f"against float64 {error(rows, exact[first:])['rms_rel']:.1e}, "
              f"greedy {error(stored[f'{name}.greedy_logits'], found[last - 1 :])['rms_rel']:.1e}, "
              f"residual {error(stored[f'{name}.residual_last'], residual)['rms_rel']:.1e}, "
              f"hidden {error(stored[f'{name}.hidden_last'], hidden[-1])['rms_rel']:.1e}")
        if "mtp.fc.weight" in weights:
            state, following = {}, [*prompt["ids"][1:], ids[0]]
            rows = np.stack([reference.mtp_step(hidden[t], following[t], state, t)[0] for t in range(last)])
            kept = stored[f"{name}.mtp_logits"].numpy()
            print(f"  mtp {error(kept, rows[-len(kept):])['rms_rel']:.1e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("names", nargs="*", choices=[[], *FIXTURES], metavar="NAME")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the matrices are too small to share
    for folder in args.check or []:
        check(folder)
    if args.out:
        for name in args.names or FIXTURES:
            make(args.out, name)


if __name__ == "__main__":
    main()
