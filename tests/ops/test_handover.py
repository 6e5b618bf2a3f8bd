"""In which form tensors go from op to op: what the providers that were chosen agree on, and nothing otherwise."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from float8_model import float8_config

from firstlight.hardware import CPU_GENERIC, GPUS
from firstlight.models import build_model
from firstlight.models.activations import activation_bytes
from firstlight.models.walk import bind_model
from firstlight.ops.binding import Record, bind
from firstlight.ops.handover import kept_plain
from firstlight.ops.linear.torch_block_fp8 import LEAST_TOKENS
from firstlight.ops.op import REGISTRY, Call, CallSite, Cost, Handover, Op, sites
from firstlight.parallel import Mesh
from firstlight.quant import (
    FLOAT8_BY_COLUMN,
    FLOAT8_BY_TOKEN,
    Emission,
    Format,
    Packed,
    emitted,
    empty_result,
    scheme_of,
)
from firstlight.step import Bucket

CONFIGS = Path(__file__).parents[1] / "configs"
BUCKETS = [
    Bucket(0, 1, 1, 1, 4096, 1),
    Bucket(1, 8, 8, 1, 4096, 8),
    Bucket(2, 256, 256, 1, 4096, 256),
    Bucket(3, 8200, 16, 8192, 8192, 8),
]
DECODE, MANY, PREFILL = 1, 2, 3
PACKED, BOTH = Emission(FLOAT8_BY_COLUMN, plain=False), Emission(FLOAT8_BY_COLUMN, plain=True)
THIN_PACKED, THIN_BOTH = Emission(FLOAT8_BY_TOKEN, plain=False), Emission(FLOAT8_BY_TOKEN, plain=True)


def on(name):
    """A described GPU on a machine with triton."""
    return replace(GPUS[name], features=GPUS[name].features | {"triton"})


def bound(config, hardware, *, tp=1, overrides=(), **options):
    mesh = Mesh.of(0, tp=tp)
    model = build_model(config, dtype=torch.bfloat16, scheme=scheme_of(config, torch.bfloat16), mesh=mesh)
    bind_model(model, BUCKETS, hardware, overrides=overrides, **options)
    return model


def hybrid():
    """Qwen3.5-35B-A3B-FP8 with a layer of each kind."""
    config = json.loads((CONFIGS / "Qwen3.5-35B-A3B-FP8.json").read_text())
    text = config["text_config"]
    return {**config, "text_config": {**text, "num_hidden_layers": 4, "layer_types": text["layer_types"][:4]}}


def emissions(model, bucket):
    """What every op is asked for, by a path that stands for all layers."""
    found = {}
    for path, site in sites(model):
        if site.gives is not None and site.choices and site.gives[bucket] and called(site, bucket):
            found[re.sub(r"\.\d+\.", ".*.", path)] = site.gives[bucket]["emit"]
    return found


def readers_of(path):
    """The FP8 product that reads what a site makes."""
    layer = ".".join(path.split(".")[:2])
    return [f"{layer}.mixer.in_proj_qkvz" if "layernorm" in path else f"{layer}.mixer.out_proj"]


def called(site, bucket):
    return not any(name == "*" for name, _ in site.choices[bucket].refused)


def noted(model, bucket):
    """What is said of every site, by path."""
    return {path: site.choices[bucket].handover for path, site in sites(model) if site.choices}


@pytest.fixture(scope="module")
def h200():
    return bound(hybrid(), on("h200"))


def test_who_emits_what_on_an_h200(h200):
    """One token is a dot product of plain values. The norm before Gated DeltaNet has a reader in bfloat16, the one before a
    mixture no other."""
    assert emissions(h200, 0) == {}
    for bucket in (DECODE, MANY, PREFILL):
        packed, both = (PACKED, BOTH) if BUCKETS[bucket].tokens >= LEAST_TOKENS else (THIN_PACKED, THIN_BOTH)
        mixers = ["mix.decode", "gate", *(["mix.prefill"] if bucket == PREFILL else [])]
        found = emissions(h200, bucket)
        norms = {path: found.pop(path) for path in list(found) if "layernorm" in path}
        assert found == {f"layers.*.mixer.{name}": packed for name in mixers}
        assert set(norms) == {"layers.*.input_layernorm.norm", "layers.*.input_layernorm.add_norm"}
        by_layer = [layer.input_layernorm.handover[bucket]["emit"] for layer in h200.layers]
        assert by_layer == [both, both, both, packed]
        assert not any(layer.post_attention_layernorm.handover[bucket] for layer in h200.layers)


def test_readers_say_so_and_count_less_scratch_memory(h200):
    for bucket, form in ((DECODE, FLOAT8_BY_TOKEN), (PREFILL, FLOAT8_BY_COLUMN)):
        found = noted(h200, bucket)
        for path in (
            "layers.0.mixer.in_proj_qkvz",
            "layers.0.mixer.out_proj",
            "layers.3.mixer.qkv_proj",
            "layers.3.mixer.o_proj",
        ):
            assert found[f"{path}.product"] == f"reads {form}"
        assert found["layers.0.mixer.in_proj_ba.product"] == ""
        assert found["layers.0.input_layernorm.norm"] == f"gives {form} and plain values"
    product = dict(sites(h200))["layers.0.mixer.in_proj_qkvz.product"]
    scales = h200.get_submodule("layers.0.mixer.in_proj_qkvz").weight.parts["scale"].numel()
    assert product.choices[PREFILL].provider == "torch_block_fp8"
    assert product.choices[PREFILL].workspace == 4 * scales


def test_one_binding_for_all_buckets_hands_over_in_those_that_it_can():
    model = bound(hybrid(), on("h200"), invariant=True)
    assert emissions(model, PREFILL) == {}  # a single token has to be served as well
    assert emissions(model, DECODE) == {}


@pytest.mark.parametrize("hardware", [CPU_GENERIC, on("mi300x")], ids=["cpu", "gfx942"])
def test_nothing_is_handed_over_where_nobody_wants_it(hardware):
    model = bound(hybrid(), hardware)
    for bucket in range(len(BUCKETS)):
        assert emissions(model, bucket) == {}
        assert set(noted(model, bucket).values()) == {""}


def test_dense_layers_and_other_gpus():
    for name in ("h200", "mi355x"):
        found = emissions(bound(float8_config(), on(name)), DECODE)
        assert found == {
            "layers.*.input_layernorm.norm": THIN_BOTH,
            "layers.*.input_layernorm.add_norm": THIN_PACKED,
            "layers.*.mixer.mix.decode": THIN_PACKED,
            "layers.*.mixer.gate": THIN_PACKED,
            "layers.*.post_attention_layernorm.add_norm": THIN_PACKED,
            "layers.*.mlp.activation": THIN_PACKED,
        }


def test_ranks_share_what_they_can():
    """The sum over ranks is a part of its own there, and the norm behind it emits."""
    model = bound(hybrid(), on("h200"), tp=2)
    choice = dict(sites(model))["layers.1.input_layernorm.add_norm"].choices[PREFILL]
    assert choice.provider == "parts"
    assert choice.handover == f"gives {FLOAT8_BY_COLUMN} and plain values"
    assert emissions(model, PREFILL)["layers.*.mixer.gate"] == PACKED


@pytest.mark.parametrize(
    ("override", "path", "reason"),
    [
        ("add_rms_norm=reference", "layers.1.input_layernorm.add_norm", "the reference would quantise op by op"),
        ("rms_norm=reference", "layers.1.input_layernorm.add_norm", "the reference would quantise op by op"),
        ("gated_delta=parts", "layers.0.mixer.mix.decode", "none of its parts can"),
        ("gated_delta.prefill=parts", "layers.0.mixer.mix.decode", "another op gives a part of the tensor, and can't"),
    ],
)
def test_who_cannot_emit_gives_plain_values_and_says_why(override, path, reason):
    model = bound(hybrid(), on("h200"), overrides=[override])
    site = dict(sites(model))[path]
    assert site.gives[PREFILL] == {}
    assert site.choices[PREFILL].handover == f"gives plain values, and {FLOAT8_BY_COLUMN} is wanted: {reason}"
    assert all(noted(model, PREFILL)[f"{reader}.product"] == "" for reader in readers_of(path))


@pytest.fixture
def ops():
    """(an op that makes a tensor, one that reads it with a weight); forgotten afterwards."""

    def cost(shape, *args, **kwargs):
        return Cost(read=1)

    makes = Op(
        "test_makes", lambda x, *, emit=None: emitted(x, emit), cost=cost,
        abstract=lambda x, *, emit=None: empty_result(x, x.shape, emit),
    )  # fmt: skip
    reads = Op("test_reads", lambda x, weight: x, abstract=lambda x, weight: x, cost=cost)
    reads.provide("plain", lambda x, weight: x)
    reads.provide(
        "fast", lambda x, weight: x, rank=2, wants=FLOAT8_BY_COLUMN,
        when=lambda call: None if call.args[0].shape[0] > 2 else "serves more than two",
    )  # fmt: skip
    yield makes, reads
    del REGISTRY["test_makes"], REGISTRY["test_reads"]


def handed_over(ops, tokens, weights, **provider):
    """(the handover between a site of each op, the choice of the one that makes), bound for so many tokens.

    weights: of the readers. provider: properties of the one that makes.
    """
    makes, reads = ops
    makes.provide("fast", lambda x, *, emit=None: x, **provider)
    readers = [CallSite(reads) for _ in weights]
    maker = CallSite(makes, gives=Handover(readers))
    x = torch.empty(tokens, 256, dtype=torch.bfloat16, device="meta")
    records = [Record("makes", maker, Call((x,), {}, BUCKETS[0], CPU_GENERIC))]
    records += [
        Record("reads", site, Call((x, weight), {}, BUCKETS[0], CPU_GENERIC))
        for site, weight in zip(readers, weights, strict=True)
    ]
    bind(records, 1, CPU_GENERIC)
    return list(maker.gives), maker.choices[0].handover


PLAIN_WEIGHT = torch.empty(7, 256, dtype=torch.bfloat16, device="meta")
FLOAT8_WEIGHT = Packed(
    {"data": PLAIN_WEIGHT.to(torch.float8_e4m3fn)}, Format("float8_e4m3fn", (128, 128), "float32"), (7, 256)
)


def test_readers_with_packed_weights_have_to_agree(ops):
    assert handed_over(ops, 4, [FLOAT8_WEIGHT], emits=True) == ([{"emit": PACKED}], f"gives {FLOAT8_BY_COLUMN}")


@pytest.mark.parametrize(
    ("rows", "emission", "text"),
    [
        ((3, 3), [{"emit": THIN_PACKED}], f"gives {FLOAT8_BY_TOKEN}"),
        ((3, 7), [{}], f"gives plain values: its readers want {FLOAT8_BY_TOKEN} and {FLOAT8_BY_COLUMN}"),
    ],
)
def test_readers_that_want_different_forms_get_plain_values(ops, rows, emission, text):
    _, reads = ops
    reads.provide(
        "narrow", lambda x, weight: x, rank=3, wants=FLOAT8_BY_TOKEN,
        when=lambda call: None if call.args[1].shape[0] < 7 else "serves fewer than seven rows",
    )  # fmt: skip
    weights = [replace(FLOAT8_WEIGHT, shape=(count, 256)) for count in rows]
    assert handed_over(ops, 4, weights, emits=True) == (emission, text)


def test_others_get_plain_values_beside(ops):
    found, text = handed_over(ops, 4, [PLAIN_WEIGHT, FLOAT8_WEIGHT, FLOAT8_WEIGHT], emits=True)
    assert found == [{"emit": BOTH}]
    assert text == f"gives {FLOAT8_BY_COLUMN} and plain values"


def test_a_tensor_that_no_packed_weight_meets_stays_plain(ops):
    assert handed_over(ops, 4, [PLAIN_WEIGHT], emits=True) == ([{}], "")


def test_a_reader_that_wants_plain_values_in_a_bucket_gets_them(ops):
    assert handed_over(ops, 2, [FLOAT8_WEIGHT, FLOAT8_WEIGHT], emits=True) == ([{}], "")


@pytest.mark.parametrize(
    ("provider", "reason"),
    [
        ({}, "fast gives plain results only"),
        ({"emits": True, "when": lambda call: "not today" if "emit" in call.kwargs else None}, "not today"),
    ],
)
def test_a_provider_that_cannot_emit_says_why(ops, provider, reason):
    found, text = handed_over(ops, 4, [FLOAT8_WEIGHT], **provider)
    assert found == [{}]
    assert text == f"gives plain values, and {FLOAT8_BY_COLUMN} is wanted: {reason}"


def test_plans_of_memory_count_what_is_handed_over(h200):
    """Packed activations are half of plain ones, and the products make none of their own."""
    bucket = BUCKETS[PREFILL]
    packed = activation_bytes(h200, bucket, decode_requests=0, page_size=16)
    with kept_plain(h200):
        assert emissions(h200, PREFILL) == {}
        plain = activation_bytes(h200, bucket, decode_requests=0, page_size=16)
    assert emissions(h200, PREFILL)
    assert abs(packed - plain) < 0.2 * plain
