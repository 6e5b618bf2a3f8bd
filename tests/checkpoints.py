"""Rewrite tiny checkpoints in the other forms in which they are published."""

from __future__ import annotations

import json

import torch
from reference import reference_model, save_checkpoint, tiny_config
from safetensors.torch import load_file, save_file

from firstlight.quant import WHOLE_ROW, unpack
from firstlight.quant.blocks import pack_blocks


def stack_experts(tensors):
    """Per-expert tensors as the fused stacks of published BF16 checkpoints: gate rows, then up rows; no suffix."""
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    prefixes = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    for prefix in prefixes:
        count = 1 + max(
            int(n.split(".experts.")[1].split(".")[0]) for n in tensors if n.startswith(prefix + ".experts.")
        )
        one = [
            {part: tensors[f"{prefix}.experts.{e}.{part}_proj.weight"] for part in ("gate", "up", "down")}
            for e in range(count)
        ]
        stacked[f"{prefix}.experts.gate_up_proj"] = torch.stack([torch.cat([e["gate"], e["up"]]) for e in one])
        stacked[f"{prefix}.experts.down_proj"] = torch.stack([e["down"] for e in one])
    return stacked


LINEAR = ("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight", "in_proj_qkvz.weight")


CHANNELS = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed", "ignore": ["lm_head"],
    "kv_cache_scheme": None, "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"type": "float", "num_bits": 8, "strategy": "channel", "dynamic": False, "symmetric": True},
        "input_activations": {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True},
    }},
}  # fmt: skip
"""`quantization_config` of FP8 by channel and token, as compressed-tensors publishes it."""


def quantise_checkpoint(directory, name, block, scale_dtype):
    """Turn a saved tiny checkpoint into an FP8 one; returns transformers' model with the values that it stands for.

    block: (rows, columns) that share a scale; (1, WHOLE_ROW): as compressed-tensors names and declares it.
    """
    suffix = "_scale" if block[1] == WHOLE_ROW else "_scale_inv"
    save_checkpoint(name, directory)
    tensors, values = load_file(directory / "model.safetensors"), {}
    for key, tensor in list(tensors.items()):
        if key.endswith(LINEAR) and "lm_head" not in key:
            packed = pack_blocks(tensor, block, torch.float8_e4m3fn, scale_dtype)
            tensors[key], tensors[key + suffix] = packed.parts["data"], packed.parts["scale"]
            values[key] = unpack(packed, torch.float32)
    save_file(tensors, directory / "model.safetensors")
    config = tiny_config(name)
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    config["quantization_config"] = CHANNELS if block[1] == WHOLE_ROW else blocks
    (directory / "config.json").write_text(json.dumps(config))
    plain = directory / "plain"
    reference_model(name).save_pretrained(plain)
    stored = load_file(plain / "model.safetensors")
    save_file({key: values.get(key, tensor) for key, tensor in stored.items()}, plain / "model.safetensors")
    (plain / "config.json").write_text(json.dumps(tiny_config(name)))
    return plain
