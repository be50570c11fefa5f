#!/usr/bin/env python3
"""Reads a checkpoint that `inferwall model quantize` wrote as other tools read it, and compares it with its source.

    scripts/check_quantized.py SOURCE QUANTISED

SOURCE is the 16-bit folder, QUANTISED the 4-bit one. numpy is enough: AutoAWQ's layout is read here as its kernels read
it. With PyPI's `compressed-tensors` (which needs torch) installed, compressed-tensors folders are read by that package
itself, and its config class must accept the quantization_config; without it by the same steps in numpy, and that is said.

Checked: every module that should be 4-bit is, everything else has the source's bits or was scaled, weights come back
within half a step of the source (--method rtn), or, where the module's input norm was scaled (--method awq), with an rms
error of the size of 4-bit steps once the scales are divided out again.
"""

import json
import sys
from pathlib import Path

import numpy as np

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I32": np.int32, "I64": np.int64}
# Nibble i of an AutoAWQ word holds column AWQ_ORDER[i] of eight; so column j is at nibble AWQ_REVERSE[j].
AWQ_REVERSE = [0, 4, 1, 5, 2, 6, 3, 7]
NORM_OF = {"q_proj": "input", "k_proj": "input", "v_proj": "input", "in_proj_qkv": "input", "in_proj_z": "input",
           "gate_proj": "post_attention", "up_proj": "post_attention"}


def tensors(folder):
    """name -> (dtype, array); bf16 as its 16 bits."""
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:8 + length])
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                data = np.frombuffer(raw[8 + length + start:8 + length + end], DTYPES[entry["dtype"]])
                found[name] = entry["dtype"], data.reshape(entry["shape"])
    return found


def floats(tensor):
    dtype, data = tensor
    return (data.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else data.astype(np.float32)


def unpack_awq(words):
    """int32 [rows, columns / 8] -> integers [rows, columns], as AutoAWQ's unpack and reverse_awq_order."""
    shifts = np.array([4 * nibble for nibble in AWQ_REVERSE], np.uint32)
    return ((words.view(np.uint32)[..., None] >> shifts) & 15).astype(np.int32).reshape(words.shape[0], -1)


def read_awq(module, all_tensors, group):
    """W [out, in], and the step of each weight."""
    q = unpack_awq(all_tensors[f"{module}.qweight"][1])
    z = unpack_awq(all_tensors[f"{module}.qzeros"][1])
    s = floats(all_tensors[f"{module}.scales"])
    z, s = np.repeat(z, group, 0), np.repeat(s, group, 0)
    return ((q - z) * s).T, s.T


def read_compressed(module, all_tensors, group, package):
    packed = all_tensors[f"{module}.weight_packed"][1]
    shape = [int(size) for size in all_tensors[f"{module}.weight_shape"][1]]
    if package:
        import torch
        q = package(torch.from_numpy(packed.copy()), 4, torch.Size(shape)).numpy().astype(np.int32)
    else:
        # unpack_from_int32 of compressed-tensors 0.20: element i of a word in bits 4i, less 8.
        shifts = np.arange(0, 32, 4, dtype=np.uint32)
        q = ((packed.view(np.uint32)[..., None] >> shifts) & 15).astype(np.int32).reshape(shape) - 8
    s = np.repeat(floats(all_tensors[f"{module}.weight_scale"]), group, 1)
    return q * s, s


def compressed_tensors_package(config):
    """unpack_from_int32, once the package has accepted the config; None where it is not installed."""
    try:
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    except ImportError:
        try:
            from compressed_tensors.compressors.quantized_compressors.pack_quantized import unpack_from_int32
        except ImportError as error:
            print(f"compressed-tensors is not installed ({error}): read with its steps in numpy")
            return None
    from compressed_tensors.quantization import QuantizationConfig
    parsed = QuantizationConfig.model_validate(config)
    print(f"compressed-tensors accepts the config: {parsed.format}, {list(parsed.config_groups)}")
    return unpack_from_int32


def scales_of(module, source, quantised, plus_one):
    """What the module's columns were multiplied by, said by its norm before and after; None if nothing or unknown."""
    layer, part = module.rsplit(".", 2)[0], module.rsplit(".", 1)[1]
    if part not in NORM_OF:
        return None
    name = f"{layer}.{NORM_OF[part]}_layernorm.weight"
    before, after = (floats(found[name]) + plus_one for found in (source, quantised))
    return None if np.array_equal(before, after) else before / np.where(after == 0, 1, after)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, quantised = tensors(sys.argv[1]), tensors(sys.argv[2])
    root = json.loads((Path(sys.argv[2]) / "config.json").read_text())
    config = root["quantization_config"]
    plus_one = 1.0 if "qwen3_5" in root["model_type"] else 0.0
    awq = config["quant_method"] == "awq"
    if awq:
        group = config["group_size"]
        ending, package = ".qweight", None
    else:
        group = config["config_groups"]["group_0"]["weights"]["group_size"]
        ending, package = ".weight_packed", compressed_tensors_package(config)
    modules = [name.removesuffix(ending) for name in quantised if name.endswith(ending)]
    kept = config["modules_to_not_convert"] if awq else config["ignore"]
    worst, errors, scaled, unknown = 0.0, [], 0, 0
    for module in modules:
        if module in kept:
            sys.exit(f"{module} is 4-bit, but the config says that it is not")
        read = read_awq(module, quantised, group) if awq else read_compressed(module, quantised, group, package)
        weight, step = read
        original = floats(source[f"{module}.weight"])
        if weight.shape != original.shape:
            sys.exit(f"{module} is {weight.shape}, its source {original.shape}")
        scales = scales_of(module, source, quantised, plus_one)
        if scales is not None:
            scaled += 1
            weight, step = weight / scales, step / scales
        difference = np.abs(weight - original)
        moved, rms = float((difference / step).max()), float(np.sqrt(np.mean(difference**2) / np.mean(original**2)))
        rows_scaled = module.endswith(("up_proj", "v_proj", "down_proj", "o_proj", "out_proj"))
        if scales is None and (moved <= 0.51 or not rows_scaled):
            worst = max(worst, moved)
            errors.append(rms)
        elif rows_scaled:
            # Rows divided, or columns scaled, by what another module took: not to be told from here.
            unknown += 1
        else:
            errors.append(rms)
            if rms > 0.3:
                sys.exit(f"{module} differs by {rms:.3f} rms of its weights once its scales are divided out")
    changed = [name for name in source if name in quantised and not np.array_equal(source[name][1], quantised[name][1])]
    missing = [name for name in source if name not in quantised and name.removesuffix(".weight") not in modules]
    if missing:
        sys.exit(f"tensors of the source are missing: {missing[:5]}")
    print(f"{len(modules)} modules of {config['quant_method']}, groups of {group}, {scaled} with scaled norms")
    print(f"rms error over rms weight: mean {np.mean(errors):.4f}, most {np.max(errors):.4f}")
    print(f"{len(changed)} other tensors changed, {unknown} modules scaled by what no norm shows")
    if not scaled:
        print(f"no weight moved by more than {worst:.4f} of its step")
        if worst > 0.51 or changed:
            sys.exit("rounding to nearest moves a weight by half a step at most and changes nothing else")
    print("ok")


if __name__ == "__main__":
    main()
