"""The golden models: their configurations, seeded random weights, tokenizers, and the files they are saved as."""

import json

import numpy as np
import torch
from safetensors.torch import save_file

from quantize import awq, compressed_tensors

SPECIAL_TOKENS = 16  # the last ids of every vocabulary; they occur in no prompt and in no continuation

TINY = dict(hidden_size=64, intermediate_size=160, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
            linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
            vocab_size=512, max_position_embeddings=4096, tied=True, mtp=True, sections=[2, 1, 1])
# The real head sizes: query heads of 256 with a quarter rotated, linear heads of 128.
GEOM = dict(TINY, hidden_size=128, intermediate_size=256, num_key_value_heads=1, head_dim=256,
            linear_key_head_dim=128, linear_value_head_dim=128, max_position_embeddings=262144, tied=False, mtp=False,
            sections=[11, 11, 10])
GEOM_OF_2 = dict(GEOM, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])

FIXTURES = {
    "hybrid-tiny": dict(kind="hybrid", shape=TINY, seed=1, note="Hybrid, 3 linear + 1 full layers, tied head."),
    "hybrid-tiny-sharded": dict(kind="hybrid", shape=TINY, seed=1, shards=2, note="hybrid-tiny over two files."),
    "hybrid-geom": dict(kind="hybrid", shape=GEOM, seed=2, note="Hybrid with the real head sizes, separate head."),
    "hybrid-geom-awq": dict(kind="hybrid", shape=GEOM, seed=2, quantize="awq", last_rows=8,
                            note="hybrid-geom, large linears in AutoAWQ GEMM int4, group 128, zero points."),
    "hybrid-geom-awq-mlp": dict(kind="hybrid", shape=GEOM_OF_2, seed=2, quantize="awq-mlp", last_rows=8,
                                note="Two layers like hybrid-geom's, only the MLPs of layers 1.. in AutoAWQ int4."),
    "hybrid-geom-ct": dict(kind="hybrid", shape=GEOM, seed=2, quantize="compressed-tensors", last_rows=8,
                           note="hybrid-geom, large linears in compressed-tensors int4, symmetric, group 32."),
    "dense-qwen2-tiny": dict(kind="qwen2", seed=3, note="Qwen2: bias on q, k, v; tied head; no head_dim."),
    "dense-qwen3-tiny": dict(kind="qwen3", seed=4, note="Qwen3: norm on q and k; separate head."),
    "dense-llama-tiny": dict(kind="llama", seed=5, note="Llama: eps 1e-5; separate head."),
}


def config_of(fixture):
    """The root of config.json, and the part of it that describes the text model."""
    if fixture["kind"] != "hybrid":
        root = dense_config(fixture["kind"])
        return root, root
    s = fixture["shape"]
    vocab = s["vocab_size"]
    text = {
        "model_type": "qwen3_5_text", "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True,
        "bos_token_id": None, "pad_token_id": None, "eos_token_id": vocab - 1, "dtype": "bfloat16",
        "full_attention_interval": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "num_hidden_layers": 4, "hidden_act": "silu", "initializer_range": 0.02, "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32", "mlp_only_layers": [], "mtp_num_hidden_layers": int(s["mtp"]),
        "mtp_use_dedicated_embeddings": False, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
                            "mrope_interleaved": True, "mrope_section": s["sections"]},
        "tie_word_embeddings": s["tied"], "use_cache": True,
        **{k: v for k, v in s.items() if k not in ("tied", "mtp", "sections")},
    }
    root = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text,
            "tie_word_embeddings": s["tied"], "image_token_id": vocab - 4, "video_token_id": vocab - 5}
    quantize = fixture.get("quantize")
    if quantize in ("awq", "awq-mlp"):
        skipped = ["lm_head", "visual", "mtp"]
        skipped += ["in_proj_a", "in_proj_b"] if quantize == "awq" else ["linear_attn", "self_attn", "layers.0."]
        root["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True,
                                       "version": "gemm", "modules_to_not_convert": skipped}
    elif quantize:
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True,
                   "dynamic": False, "actorder": None}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        root["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ["lm_head", "re:.*in_proj_[ab]$"]}
    return root, text


def dense_config(kind):
    root = {
        "model_type": kind, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "hidden_act": "silu",
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": False, "vocab_size": 512,
        "bos_token_id": 510, "eos_token_id": 511, "torch_dtype": "bfloat16", "attention_bias": False,
    }
    if kind == "qwen2":
        root.update(architectures=["Qwen2ForCausalLM"], num_attention_heads=2, num_key_value_heads=1,
                    tie_word_embeddings=True, use_sliding_window=False)
        del root["head_dim"], root["attention_bias"]
    elif kind == "qwen3":
        root.update(architectures=["Qwen3ForCausalLM"], use_sliding_window=False)
    else:
        root.update(architectures=["LlamaForCausalLM"], rms_norm_eps=1e-5, rope_theta=500000.0, mlp_bias=False)
    return root


def bfloat16(array):
    """A float32 array rounded to bfloat16 values."""
    return torch.from_numpy(np.ascontiguousarray(array, np.float32)).bfloat16().float().numpy()


def random_weights(text, seed, mtp):
    """Canonical name -> float32 values that bfloat16 holds (A_log and the gated norm: any float32)."""
    rng = np.random.default_rng(seed)
    hidden, inter, vocab = text["hidden_size"], text["intermediate_size"], text["vocab_size"]
    heads, kv = text["num_attention_heads"], text["num_key_value_heads"]
    d = text.get("head_dim") or hidden // heads
    hybrid = text["model_type"].startswith("qwen3_5")
    out = {}

    def normal(name, shape, std, mean=0.0):
        out[name] = bfloat16(rng.normal(mean, std, shape))

    def linear(name, rows, cols, gain=1.0):
        normal(f"{name}.weight", (rows, cols), gain / np.sqrt(cols))

    def norm(name, size):
        normal(f"{name}.weight", size, 0.25, 0.0 if hybrid else 1.0)

    def attention(p):
        linear(f"{p}.q_proj", heads * d * (2 if hybrid else 1), hidden, 1.5)
        linear(f"{p}.k_proj", kv * d, hidden, 1.5)
        linear(f"{p}.v_proj", kv * d, hidden)
        linear(f"{p}.o_proj", hidden, heads * d)
        if text["model_type"] != "llama" and text["model_type"] != "qwen2":
            norm(f"{p}.q_norm", d)
            norm(f"{p}.k_norm", d)
        if text["model_type"] == "qwen2":
            for part, rows in (("q", heads * d), ("k", kv * d), ("v", kv * d)):
                normal(f"{p}.{part}_proj.bias", rows, 0.5)

    def delta_net(p):
        hk, hv = text["linear_num_key_heads"], text["linear_num_value_heads"]
        dk, dv = text["linear_key_head_dim"], text["linear_value_head_dim"]
        linear(f"{p}.in_proj_qkv", 2 * hk * dk + hv * dv, hidden, 1.5)
        linear(f"{p}.in_proj_z", hv * dv, hidden)
        linear(f"{p}.in_proj_b", hv, hidden)
        linear(f"{p}.in_proj_a", hv, hidden)
        normal(f"{p}.conv1d.weight", (2 * hk * dk + hv * dv, 1, 4), 0.5)
        out[f"{p}.A_log"] = rng.uniform(-3, 2, hv).astype(np.float32)
        out[f"{p}.A_log"][0] = 0.5  # at least one positive entry a layer
        normal(f"{p}.dt_bias", hv, 1.0, -1.0)
        out[f"{p}.norm.weight"] = rng.normal(1, 0.25, dv).astype(np.float32)
        linear(f"{p}.out_proj", hidden, hv * dv)

    def block(p, kind):
        norm(f"{p}.input_layernorm", hidden)
        norm(f"{p}.post_attention_layernorm", hidden)
        delta_net(f"{p}.linear_attn") if kind == "linear_attention" else attention(f"{p}.self_attn")
        linear(f"{p}.mlp.gate_proj", inter, hidden)
        linear(f"{p}.mlp.up_proj", inter, hidden)
        linear(f"{p}.mlp.down_proj", hidden, inter)

    tied = text["tie_word_embeddings"]
    normal("embed_tokens.weight", (vocab, hidden), 2.0 / np.sqrt(hidden) if tied else 0.5)
    for i, kind in enumerate(text.get("layer_types") or ["full_attention"] * text["num_hidden_layers"]):
        block(f"layers.{i}", kind)
    norm("norm", hidden)
    if not tied:
        linear("lm_head", vocab, hidden, 2.0)
    if mtp:
        linear("mtp.fc", hidden, 2 * hidden)
        for name in ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"):
            norm(name, hidden)
        block("mtp.layers.0", "full_attention")
    return out


def quantized(weights, scheme):
    """(packed tensors by canonical name, the weights they stand for)."""
    packed, exact = {}, dict(weights)
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        large = ".mlp." in name or (scheme != "awq-mlp" and weight.ndim == 2 and "_proj" in name)
        skip = "in_proj_a" in name or "in_proj_b" in name or name.startswith(("lm_head", "embed_tokens", "mtp."))
        if not large or skip or (scheme == "awq-mlp" and name.startswith("layers.0.")):
            continue
        if scheme == "compressed-tensors":
            parts, exact[name] = compressed_tensors(weight, 32, bfloat16)
        else:
            parts, exact[name] = awq(weight, 128)
        packed[module] = parts
    return packed, exact


def vision_tensors(rng, hidden):
    """A complete but tiny vision tower, which readers skip."""
    shapes = {"patch_embed.proj.weight": (16, 3, 2, 4, 4), "patch_embed.proj.bias": (16,), "pos_embed.weight": (16, 16)}
    for name, (rows, cols) in {"attn.qkv": (48, 16), "attn.proj": (16, 16), "mlp.linear_fc1": (32, 16),
                               "mlp.linear_fc2": (16, 32)}.items():
        shapes[f"blocks.0.{name}.weight"], shapes[f"blocks.0.{name}.bias"] = (rows, cols), (rows,)
    for name in ("blocks.0.norm1", "blocks.0.norm2", "merger.norm"):
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (16,), (16,)
    for name, (rows, cols) in {"merger.linear_fc1": (64, 64), "merger.linear_fc2": (hidden, 64)}.items():
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (rows, cols), (rows,)
    return {f"visual.{name}": bfloat16(rng.normal(0, 0.05, shape)) for name, shape in shapes.items()}


def save(folder, fixture, weights, packed):
    """Writes the checkpoint in the published layout."""
    root, text = config_of(fixture)
    hybrid = fixture["kind"] == "hybrid"
    prefix = "model.language_model." if hybrid else "model."
    tensors = {}

    def put(name, array):
        top = name.startswith(("lm_head", "mtp."))
        full = name if top else f"model.{name}" if name.startswith("visual.") else prefix + name
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        keep = name.endswith((".A_log", "linear_attn.norm.weight", ".scales")) or tensor.dtype in (torch.int32, torch.int64)
        tensors[full] = tensor if keep else tensor.bfloat16()

    if hybrid and fixture["shape"]["mtp"]:
        weights = {**weights, **vision_tensors(np.random.default_rng(99), text["hidden_size"])}
    for name, array in weights.items():
        module = name.removesuffix(".weight")
        if module in packed and name.endswith(".weight"):
            for part, value in packed[module].items():
                put(f"{module}.{part}", value)
        else:
            put(name, array)
    folder.mkdir(parents=True, exist_ok=True)
    shards = fixture.get("shards", 1)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    else:
        names = sorted(tensors)
        weight_map = {}
        for i in range(shards):
            file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
            part = names[len(names) * i // shards : len(names) * (i + 1) // shards]
            save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
            weight_map.update({name: file for name in part})
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    vocab = text["vocab_size"]
    (folder / "config.json").write_text(json.dumps(root, indent=1) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [vocab - 1, vocab - 3]}) + "\n")


def save_tokenizer(folder, vocab_size):
    """A byte-level BPE with Qwen3.5's splitting rule: 256 bytes, merges of letter pairs, special tokens last."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(alphabet)}
    merges = []
    for a in "etaoinshrdlucmfwypvbgkqjxz":
        for b in "etaoinshrdlucmfwypvbgkqjxz":
            if len(vocab) < vocab_size - SPECIAL_TOKENS:
                merges.append((a, b))
                vocab[a + b] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    split = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
             r"|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(split), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    names = [f"<|special_{i}|>" for i in range(SPECIAL_TOKENS - 3)] + ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]
    tokenizer.add_special_tokens(names)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "add_bos_token": False}) + "\n")
    texts = ["The state of the art, 2026.", "It's a test:\n\n  two  spaces", "café 你好 😀",
             "<|im_start|>user\nhi<|im_end|>\n", ""]
    return [{"text": text, "ids": tokenizer.encode(text).ids} for text in texts]
