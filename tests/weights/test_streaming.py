"""Weights from a stream are the weights of a file, whatever the order, on every rank; what is wrong is named."""

from __future__ import annotations

import random

import pytest
import torch
from checkpoints import quantise_checkpoint, stack_experts
from reference import save_checkpoint, tiny_config
from safetensors.torch import load_file

from firstlight.errors import CheckpointError
from firstlight.models import build_model
from firstlight.nn.module import Module
from firstlight.parallel import Mesh
from firstlight.quant import WHOLE_ROW, Packed, scheme_of
from firstlight.weights.checkpoint import open_checkpoint
from firstlight.weights.loader import load_weights, published_names
from firstlight.weights.streaming import load_streaming


def weights(model):
    """Every tensor of every declared weight, by name."""
    for path, module in model.named_modules():
        for attribute in module.weight_specs if isinstance(module, Module) else ():
            weight = getattr(module, attribute)
            for part, tensor in (weight.parts if isinstance(weight, Packed) else {"": weight}).items():
                yield f"{path}.{attribute}.{part}", tensor


def model_of(directory, mesh):
    """An unfilled model, and its checkpoint's tensors as the file loader takes them."""
    checkpoint = open_checkpoint(directory)
    model_class = type(build_model(checkpoint.config, dtype=torch.float32))
    stored = published_names(model_class, checkpoint.tensors)
    scheme = scheme_of(checkpoint.config, torch.float32, stored={name: t.dtype for name, t in stored.items()})
    return build_model(checkpoint.config, dtype=torch.float32, scheme=scheme, mesh=mesh), stored


@pytest.mark.parametrize("mesh", [Mesh(), Mesh.of(1, tp=2), Mesh.of(1, tp=2, ep=2)], ids=("whole", "tp", "ep"))
@pytest.mark.parametrize("name", ["qwen3_5_text_tied", "qwen3_5", "qwen3_next", "qwen3_5_moe"])
def test_a_stream_in_any_order_fills_what_a_file_fills(name, mesh, tmp_path):
    save_checkpoint(name, tmp_path)
    expected, stored = model_of(tmp_path, mesh)
    load_weights(expected, stored, "cpu")
    tensors = list(load_file(tmp_path / "model.safetensors").items())
    random.Random(7).shuffle(tensors)
    model, _ = model_of(tmp_path, mesh)
    assert load_streaming(model, tensors, "cpu") == {name for name, _ in tensors}
    got = dict(weights(model))
    for name, tensor in weights(expected):
        assert torch.equal(got.pop(name), tensor), name
    assert not got


@pytest.mark.parametrize("mesh", [Mesh(), Mesh.of(1, tp=2)], ids=("whole", "tp"))
@pytest.mark.parametrize("block", [(32, 16), (1, WHOLE_ROW)], ids=("blocks", "rows"))
def test_scales_follow_their_blocks(mesh, block, tmp_path):
    quantise_checkpoint(tmp_path, "qwen3_moe", block, torch.float32)
    expected, stored = model_of(tmp_path, mesh)
    load_weights(expected, stored, "cpu")
    tensors = sorted(load_file(tmp_path / "model.safetensors").items(), reverse=True)  # scales first
    model, _ = model_of(tmp_path, mesh)
    load_streaming(model, tensors, "cpu")
    for (name, tensor), (_, want) in zip(weights(model), weights(expected), strict=True):
        assert torch.equal(tensor.view(torch.uint8), want.view(torch.uint8)), name


def filled(name, tensors):
    """Stream tensors into a tiny model."""
    load_streaming(build_model(tiny_config(name), dtype=torch.float32), tensors, "cpu")


def test_what_is_wrong_is_named(tmp_path):
    save_checkpoint("qwen3_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    norm, expert = "model.norm.weight", "model.layers.0.mlp.experts.5.down_proj.weight"
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[7\]"):
        filled("qwen3_moe", [(norm, torch.zeros(7))])
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is int64; the model needs float16"):
        filled("qwen3_moe", [(norm, tensors[norm].long())])
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is there twice"):
        filled("qwen3_moe", [(norm, tensors[norm]), (norm, tensors[norm])])
    with pytest.raises(CheckpointError, match=r"experts\.5\.down_proj\.weight is missing from the checkpoint$"):
        filled("qwen3_moe", [item for item in tensors.items() if item[0] != expert])
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj\.weight is missing from the checkpoint$"):
        filled("qwen3_moe", [item for item in tensors.items() if ".experts." not in item[0]])
    stacks = {name: tensor for name, tensor in stack_experts(tensors).items() if name not in tensors}
    with pytest.raises(CheckpointError, match=r"stored in two forms"):
        filled("qwen3_moe", [*tensors.items(), *stacks.items()])


def test_a_tied_head_must_be_the_embedding(tmp_path):
    save_checkpoint("qwen3_5_text_tied", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = next(tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    filled("qwen3_5_text_tied", [("lm_head.weight", embedding.clone()), *tensors.items()])
    with pytest.raises(CheckpointError, match="tie_word_embeddings, but tensor lm_head"):
        filled("qwen3_5_text_tied", [*tensors.items(), ("lm_head.weight", embedding + 1)])
