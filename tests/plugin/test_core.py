"""The core of the plugins, over memory in a host's layout: equal to the native model, and clear about what it can't take."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import forward
import pytest
import torch
from checkpoints import quantise_checkpoint
from reference import save_checkpoint, tiny_config
from safetensors.torch import load_file

from firstlight.cache import PagedSpec
from firstlight.config import EngineOptions
from firstlight.errors import CheckpointError, FirstlightError
from firstlight.hardware import H200
from firstlight.models.buckets import bucket_ladder
from firstlight.ops.op import REFERENCE, sites
from firstlight.parallel import Mesh
from firstlight.plugin import core
from firstlight.plugin.core import (
    TRIAL_ROWS,
    TRIAL_TOKENS,
    UNREAD,
    HostBounds,
    HostedModel,
    describe,
    kinds_of_steps,
    mesh_of,
)
from firstlight.quant import WHOLE_ROW
from firstlight.step import Bucket, PageTable, SlotTable

BOUNDS = HostBounds(tokens=512, requests=4, context=512)
FAMILIES = ("llama", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text_tied", "qwen3_5", "qwen3_5_moe")
PAGE = 16


def hosted(directory, **given) -> HostedModel:
    """The model of a saved checkpoint, loaded from a stream whose tensors are overwritten as soon as the next one comes."""
    config = json.loads((directory / "config.json").read_text())
    model = HostedModel(config, dtype=torch.float32, device="cpu", bounds=BOUNDS, **given)
    tensors = load_file(directory / "model.safetensors")

    def stream():
        for name, tensor in tensors.items():
            yield name, tensor
            tensor.view(torch.uint8).fill_(0xFF)

    assert model.load(stream()) == set(tensors)
    return model


def give_memory(model: HostedModel) -> None:
    """Pages with K and V of a row side by side and heads before rows, states packed into one run of bytes; all NaN."""
    for path, spec in model.caches().items():
        if isinstance(spec, PagedSpec):
            pages = torch.full((40, spec.kv_heads, PAGE, 2 * spec.head_dim), float("nan")).transpose(1, 2)
            model.bind_cache(path, {"k": pages[..., : spec.head_dim], "v": pages[..., spec.head_dim :]})
            model.set_group(path, f"pages of {path}")
        else:
            sizes = {name: torch.Size(shape).numel() for name, (shape, _) in spec.tensors.items()}
            slots = torch.full((3, sum(sizes.values()) + 5), float("nan"))
            views, start = {}, 0
            for name, (shape, _) in spec.tensors.items():
                views[name] = slots[:, start : start + sizes[name]].unflatten(1, shape)
                start += sizes[name]
            model.bind_cache(path, views)
            model.set_group(path, f"states of {path}")


def logits(model: HostedModel, ids, cuts) -> torch.Tensor:
    """[T, V] of one sequence in steps of the host, each with a table for every module."""
    pieces = []
    for start, stop in itertools.pairwise((0, *cuts, len(ids))):
        plain = forward.step_of(model.model, ids[start:stop], start)
        tables = {}
        for spec in model.caches().values():
            table = plain.tables["attention" if isinstance(spec, PagedSpec) else "state"]
            assert isinstance(table, PageTable | SlotTable)
            tables[spec.group] = table
        step = model.step(
            ids=plain.ids.int(),
            positions=torch.arange(start, stop, dtype=torch.int32),
            query_start=plain.query_start,
            length=plain.length,
            tables=tables,
            live=plain.live,
            decode_requests=plain.decode_requests,
            max_query=plain.max_query,
            max_context=plain.max_context,
        )
        pieces.append(model.logits(model.hidden(step)))
    return torch.cat(pieces)


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_a_hosted_model_is_the_native_one(name, tmp_path):
    save_checkpoint(name, tmp_path)
    model = hosted(tmp_path)
    give_memory(model)
    ids, cuts = forward.sequence(75), (40, 41)
    assert torch.equal(logits(model, ids, cuts), forward.logits(forward.load(tmp_path), ids, cuts))


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_fp8_blocks_load_from_a_stream(scale, tmp_path):
    quantise_checkpoint(tmp_path, "qwen3_5_moe_text", (32, 16), scale)
    model = hosted(tmp_path)
    give_memory(model)
    ids = forward.sequence(20)
    assert torch.equal(logits(model, ids, (9,)), forward.logits(forward.load(tmp_path), ids, (9,)))


def test_scales_by_channel_are_left_to_the_host(tmp_path):
    quantise_checkpoint(tmp_path, "qwen3", (1, WHOLE_ROW), torch.bfloat16)
    with pytest.raises(FirstlightError, match="a scale a channel"):
        hosted(tmp_path)


@torch.inference_mode()
def test_defaults_of_the_host_change_nothing(tmp_path):
    save_checkpoint("qwen3_next", tmp_path)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = hosted(tmp_path)
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    give_memory(model)
    ids = forward.sequence(20)
    assert torch.equal(logits(model, ids, ()), forward.logits(forward.load(tmp_path), ids, ()))


@pytest.mark.parametrize("name", UNREAD)
def test_fields_that_hosts_heed_are_refused(name):
    value = 0.5 if name == "logit_scale" else not UNREAD[name]
    for config in (tiny_config("llama"), {"text_config": tiny_config("qwen3_5")} | tiny_config("qwen3_5")):
        describe(config | {name: UNREAD[name]}, dtype=torch.float32)
        with pytest.raises(
            FirstlightError, match=f"{name} = {value} in config.json is not served, only {UNREAD[name]}"
        ):
            describe(config | {name: value}, dtype=torch.float32)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_two_fields_of_biases_are_refused(family):
    with pytest.raises(FirstlightError, match="qkv_bias beside attention_bias"):
        describe(tiny_config(family) | {"attention_bias": True, "qkv_bias": False}, dtype=torch.float32)


def test_a_null_step_runs_before_there_is_memory(tmp_path):
    save_checkpoint("qwen3_next", tmp_path)
    model = hosted(tmp_path)
    for tokens in (1, 4, 5, 512):
        ids = torch.zeros(tokens, dtype=torch.int32)
        step = model.null_step(ids, torch.zeros(tokens, dtype=torch.int64), BOUNDS.page_size)
        assert model.hidden(step).shape == (tokens, model.model.config.hidden_size)


@pytest.mark.parametrize("name", FAMILIES)
def test_warming_up_runs_every_bucket_and_changes_no_answer(name, tmp_path, monkeypatch):
    save_checkpoint(name, tmp_path)
    model, ran = hosted(tmp_path), []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda step: ran.append(step) or hidden(step))
    model.warm_up()
    assert {step.bucket.index for step in ran} == {bucket.index for bucket in model.buckets}
    give_memory(model)
    ids = forward.sequence(20)
    with torch.inference_mode():
        assert torch.equal(logits(model, ids, (9,)), forward.logits(forward.load(tmp_path), ids, (9,)))


@pytest.mark.parametrize(
    ("tokens", "requests", "context"),
    [(2048, 256, 262144), (16640, 256, 4096), (8192, 1, 40), (8192, 3, 1), (64, 4096, 512), (266240, 4096, 262144)],
)
def test_trial_steps_come_to_every_bucket_of_a_gpu_and_not_beyond(tokens, requests, context):
    bounds = HostBounds(tokens=tokens, requests=requests, context=context)
    options = EngineOptions.load({"model": "-", "max_running": requests, "step_tokens": tokens})
    buckets = bucket_ladder(options, context, H200, fillable=False)
    reached = set()
    for decode, counts, bound in kinds_of_steps(buckets, bounds):
        assert counts[:decode] == [1] * decode
        assert min(counts) > 0
        assert max(counts) <= bound <= context
        assert len(counts) <= min(requests, TRIAL_ROWS)
        assert sum(counts) - decode <= TRIAL_TOKENS
        # As `HostedModel.step` asks for a bucket.
        query = 1 if decode == len(counts) else max(2, *counts)
        needed = Bucket(0, sum(counts), len(counts), query, 1, 0)
        reached.add(next(bucket.index for bucket in buckets if bucket.holds(needed)))
    most = min(TRIAL_TOKENS, requests * context)
    within = [b for b in buckets if (b.requests <= TRIAL_ROWS if b.query == 1 else b.query <= most)]
    assert reached >= {bucket.index for bucket in within}


def test_weights_load_once(tmp_path):
    save_checkpoint("llama", tmp_path)
    model = hosted(tmp_path)
    with pytest.raises(FirstlightError, match="can't be replaced"):
        model.load(iter(()))


def test_what_is_missing_or_unknown_is_named(tmp_path):
    save_checkpoint("qwen3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    bound = {"dtype": torch.float32, "device": "cpu", "bounds": BOUNDS}
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        HostedModel(tiny_config("qwen3"), **bound).load(tensors.items())
    with pytest.raises(CheckpointError, match=r"tensor model\.sinks is in the checkpoint, but"):
        HostedModel(tiny_config("qwen3"), **bound).load([("model.sinks", torch.zeros(4))])


def test_memory_of_another_shape_is_refused():
    model = HostedModel(tiny_config("llama"), dtype=torch.float32, device="cpu", bounds=BOUNDS)
    path, spec = next(iter(model.caches().items()))
    good = torch.zeros(4, PAGE, spec.kv_heads, spec.head_dim)
    with pytest.raises(ValueError, match=r"keeps k, v; got k"):
        model.bind_cache(path, {"k": good})
    with pytest.raises(ValueError, match=r"\.v: needs torch\.float32 \[\.\.\., \d+, \d+\], got torch\.float16"):
        model.bind_cache(path, {"k": good, "v": good.half()})
    with pytest.raises(ValueError, match=r"\.k: its last dimension must be dense"):
        model.bind_cache(path, {"k": torch.zeros(4, PAGE, spec.head_dim, spec.kv_heads).transpose(2, 3), "v": good})


def test_a_step_beyond_the_bounds_is_refused():
    model = HostedModel(tiny_config("llama"), dtype=torch.float32, device="cpu", bounds=BOUNDS)
    with pytest.raises(FirstlightError, match="a step of 513 tokens in 1 rows, 513 of one row, exceeds"):
        model.bucket(513, 1, 513)


def test_what_we_cannot_run_is_said_at_once():
    with pytest.raises(ValueError, match="quant_method 'awq'"):
        describe({**tiny_config("qwen3"), "quantization_config": {"quant_method": "awq"}}, dtype=torch.float32)
    with pytest.raises(ValueError, match="model_type 'gemma' is not supported"):
        describe({"model_type": "gemma"}, dtype=torch.float32)
    with pytest.raises(ValueError, match="can't be split evenly over 3 tp ranks"):
        describe(tiny_config("qwen3"), dtype=torch.float32, mesh=Mesh.of(tp=3))
    assert mesh_of(4, 2).tp.index == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_on_a_gpu_every_call_has_a_provider_with_pages_of_one_token(monkeypatch, ranks):
    """Where SGLang has us run. The reference would wait for the device, which ends a capture."""
    monkeypatch.setattr(core, "detect", lambda device: replace(H200, features=frozenset({"triton"})))
    file = Path(__file__).parent.parent / "configs" / "Qwen3.5-35B-A3B-FP8.json"
    config = json.loads(file.read_text())
    text = config["text_config"]
    text |= {"num_hidden_layers": 4, "layer_types": text["layer_types"][:4]}
    bounds = HostBounds(tokens=16384 + 256, requests=256, context=text["max_position_embeddings"], page_size=1)
    mesh = mesh_of(ranks, ranks - 1)
    model = HostedModel(config, dtype=torch.bfloat16, device="cpu", bounds=bounds, mesh=mesh)
    assert {"attention", "gated_delta", "moe", "linear"} <= {site.op.name for _, site in sites(model.model)}
    lacking = {
        (path, bucket.query)
        for path, site in sites(model.model)
        for bucket, choice in zip(model.buckets, site.choices, strict=False)  # a site that no step calls has none
        if choice.provider == REFERENCE and site.op.name not in ("all_reduce", "all_gather")
        if bucket.query > 1 or site.label != "prefill"
    }
    assert not lacking


@pytest.mark.parametrize("bounds", [BOUNDS, HostBounds(tokens=1, requests=1, context=16)], ids=str)
def test_a_prompt_of_one_token_is_run_as_a_prompt(bounds):
    """Among decode steps nothing is bound for prompts."""
    model = HostedModel(tiny_config("llama"), dtype=torch.float32, device="cpu", bounds=bounds)
    plain = forward.step_of(model.model, torch.tensor([1]), 0)

    def bucket(decode_requests):
        step = model.step(
            ids=plain.ids,
            positions=plain.positions,
            query_start=plain.query_start,
            length=plain.length,
            tables=plain.tables,
            live=plain.live,
            decode_requests=decode_requests,
            max_query=1,
            max_context=1,
        )
        return step.bucket

    assert bucket(1).query == 1
    assert bucket(0).query > 1


def test_caches_are_not_searched_for_in_every_step(monkeypatch):
    """Adapters ask in each step, and a walk over all modules takes longer than making the step does."""
    model = HostedModel(tiny_config("qwen3_next"), dtype=torch.float32, device="cpu", bounds=BOUNDS)
    monkeypatch.setattr(torch.nn.Module, "named_modules", lambda *_, **__: pytest.fail("looked at every module"))
    assert len(model.caches()) == model.model.config.num_hidden_layers
