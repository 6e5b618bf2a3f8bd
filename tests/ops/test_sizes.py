"""Sizes of calls: what a step sets is told apart from what the model fixes, for every op of every family."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from ops.examples import EXAMPLES
from reference import FAMILIES, tiny_config

from firstlight.hardware import CPU_GENERIC
from firstlight.hardware.timings import STEP_AXES
from firstlight.models import build_model
from firstlight.models.walk import record
from firstlight.ops.op import REGISTRY, sites
from firstlight.ops.sizes import sizes_of
from firstlight.quant import WHOLE_ROW
from firstlight.quant.blocks import pack_blocks
from firstlight.step import Bucket

STEPS = [
    Bucket(0, 3, 3, 1, 64, 3),
    Bucket(0, 5, 5, 1, 96, 5),
    Bucket(0, 40, 2, 30, 64, 2),
    Bucket(0, 77, 7, 50, 128, 7),
]


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_every_op_has_sizes(name):
    for example in EXAMPLES[name]:
        args, kwargs = example()
        sizes = sizes_of(REGISTRY[name], args, kwargs)
        assert sizes.step["tokens"] >= 0
        assert set(sizes.step) <= set(STEP_AXES)
        assert not set(sizes.fixed) & set(STEP_AXES)
        assert all(type(size) is int for size in (*sizes.step.values(), *sizes.fixed.values()))
        assert sizes.format


@pytest.mark.parametrize("name", ["attention", "attention_prologue", "write_kv"])
def test_times_over_float8_pages_are_not_those_over_others(name):
    args, kwargs = EXAMPLES[name][0]()
    names = list(REGISTRY[name].signature.parameters)
    pools = [names.index("k_pages"), names.index("v_pages")]
    narrow = [x.to(torch.float8_e4m3fn) if i in pools else x for i, x in enumerate(args)]
    wide, found = (sizes_of(REGISTRY[name], given, kwargs) for given in (args, tuple(narrow)))
    assert (wide.format, found.format) == ("float32", "float8_e4m3fn")
    assert (wide.dtype, found.dtype) == ("float32", "float32")
    assert wide.fixed == found.fixed


def all_sizes(model, step):
    """(path, op) -> sizes of every call there, composites' parts included, in order."""
    for _, site in sites(model):
        site.unbind()
    found = {}

    def visit(path, op, *args, **kwargs):
        if op.parts:
            op.compose({name: partial(visit, f"{path}.{name}", part) for name, part in op.parts.items()})(
                *args, **kwargs
            )
        found.setdefault((path, op.name), []).append(sizes_of(op, args, kwargs))
        return op.abstract(*args, **kwargs)

    for made in record(model, [step], CPU_GENERIC, 16):
        visit(made.path, made.site.op, *made.call.args, **made.call.kwargs)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_changes_its_own_sizes_only(family):
    model = build_model(tiny_config(family), dtype=torch.float32)
    base = {
        key: {(s.format, s.dtype, *sorted(s.fixed.items())) for s in made}
        for key, made in all_sizes(model, STEPS[0]).items()
    }
    for step in STEPS[1:]:
        for key, made in all_sizes(model, step).items():
            for sizes in made:
                fixed = (sizes.format, sizes.dtype, *sorted(sizes.fixed.items()))
                if key in base:
                    assert fixed in base[key], key
    assert len(base) > 10


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "kimi_linear"])
def test_what_was_timed_on_float32_states_says_nothing_of_bfloat16_ones(family):
    """A table's times are found by format and dtype, and sizes: that of states has to be among them."""
    step = Bucket(0, 3, 3, 1, 64, 3)
    wide, narrow = (
        all_sizes(build_model(tiny_config(family), dtype=torch.bfloat16, state_dtype=dtype), step)
        for dtype in (torch.float32, torch.bfloat16)
    )
    of_states = {
        key for key in wide if key[1] in ("gated_delta", "gated_delta_rule", "channel_delta", "channel_delta_rule")
    }
    assert len({op for _, op in of_states}) == 2
    assert {s.format for key in of_states for s in wide[key]} == {"float32"}
    assert {s.format for key in of_states for s in narrow[key]} == {"bfloat16"}
    assert {key: made for key, made in wide.items() if key not in of_states} == {
        key: made for key, made in narrow.items() if key not in of_states
    }


def test_tokens_requests_and_bounds_are_read_off():
    model = build_model(tiny_config("qwen3_5_moe_text"), dtype=torch.float32)
    found = all_sizes(model, Bucket(0, 40, 2, 30, 64, 2))
    prefill = found["layers.3.mixer.attend.prefill", "attention"][0]
    assert prefill.step == {"tokens": 40, "requests": 2, "query": 30, "context": 64}
    assert prefill.fixed == {"heads": 4, "kv_heads": 2, "head_dim": 64}
    head = found["lm_head.product", "linear"][0]
    assert (head.step, head.fixed) == ({"tokens": 2}, {"rows": 512, "columns": 128})
    assert found["layers.0.mixer.mix.prefill", "gated_delta"][0].step == {"tokens": 40, "requests": 2, "query": 30}
    assert found["layers.0.mlp.mixture", "moe"][0].fixed["shared"] == 64


def test_what_was_timed_on_scales_of_blocks_says_nothing_of_those_of_rows():
    x, weight = torch.empty(3, 256, dtype=torch.bfloat16), torch.empty(128, 256)
    formats = [
        sizes_of(REGISTRY["linear"], (x, pack_blocks(weight, block, torch.float8_e4m3fn, torch.float32)), {}).format
        for block in ((128, 128), (1, WHOLE_ROW))
    ]
    assert formats == ["float8_e4m3fn", "float8_e4m3fn/row"]
