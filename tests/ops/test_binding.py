"""Providers are chosen once, for described hardware, with reasons; overrides are met or refused."""

from __future__ import annotations

import pytest
import torch
from reference import tiny_config

from firstlight.hardware import CPU_GENERIC, H200
from firstlight.hardware.calibration import Measured, Table
from firstlight.hardware.timings import Timings
from firstlight.models import build_model
from firstlight.models.walk import bind_model, meta_step, walk
from firstlight.ops import binding
from firstlight.ops.binding import PARTS, BindingError, Record, bind, parse_overrides
from firstlight.ops.observe import observed
from firstlight.ops.op import REFERENCE, REGISTRY, Call, CallSite, Cost, Op, sites
from firstlight.quant import LAYOUTS, Layout, Packed, plain, register_layout
from firstlight.step import Bucket

BUCKETS = [Bucket(0, 4, 4, 1, 64, 4), Bucket(1, 64, 4, 64, 64, 4)]


@pytest.fixture
def op():
    """A primitive op y = x * weight, with no providers yet; forgotten afterwards."""
    made = Op(
        "test_scale", lambda x, weight: x * weight, abstract=lambda x, weight: torch.empty_like(x),
        cost=lambda shape, x, weight: Cost(read=x.nbytes),
    )  # fmt: skip
    yield made
    del REGISTRY["test_scale"]


def call(bucket=BUCKETS[0], rows=4):
    return Call((torch.empty(rows, 8, device="meta"), torch.empty(8, device="meta")), {}, bucket, CPU_GENERIC)


def bound(op, **options):
    """The site of an op, bound in both buckets."""
    site = CallSite(op, "here")
    records = [Record("here", site, call(BUCKETS[0])), Record("here", site, call(BUCKETS[1], rows=64))]
    options["overrides"] = parse_overrides(options.pop("overrides", ()))
    bind(records, 2, CPU_GENERIC, **options)
    return site


def test_the_highest_rank_that_can_serve_is_chosen_and_others_say_why(op):
    op.provide("slow", lambda x, weight: "slow", rank=1)
    op.provide(
        "narrow", lambda x, weight: "narrow", when=lambda c: "too many rows" if c.args[0].shape[0] > 8 else None, rank=5
    )
    site = bound(op)
    assert [run(1, 1) for run in site] == ["narrow", "slow"]
    assert dict(site.choices[1].refused)["narrow"] == "too many rows"
    assert dict(site.choices[0].refused)["slow"] == "narrow ranks higher"


def test_invariant_binds_one_provider_to_all_buckets(op):
    op.provide("slow", lambda x, weight: "slow", rank=1)
    op.provide(
        "narrow", lambda x, weight: "narrow", when=lambda c: "too many rows" if c.args[0].shape[0] > 8 else None, rank=5
    )
    assert [run(1, 1) for run in bound(op, invariant=True)] == ["slow", "slow"]


def test_lossy_providers_wait_to_be_asked_for(op):
    op.provide("rough", lambda x, weight: "rough", lossy="half the bits", rank=9)
    assert bound(op).choices[0].provider == REFERENCE
    assert "ask for it with --op test_scale=rough" in dict(bound(op).choices[0].refused)["rough"]
    assert bound(op, overrides=["test_scale=rough"]).choices[0].provider == "rough"


def test_an_override_may_name_a_site(op):
    op.provide("fast", lambda x, weight: "fast", rank=9)
    assert bound(op, overrides=["test_scale.here=reference"]).choices[0].provider == REFERENCE
    assert bound(op, overrides=["test_scale.there=reference"]).choices[0].provider == "fast"


def test_an_override_that_cannot_be_met_says_why(op):
    op.provide("picky", lambda x, weight: 0, when=lambda c: "only on Sundays")
    with pytest.raises(BindingError, match="--op test_scale=picky: only on Sundays"):
        bound(op, overrides=["test_scale=picky"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "expected OP=PROVIDER"),
        ("no_such_op=x", "expected OP=PROVIDER"),
        ("linear=magic", "has no provider 'magic'; it has reference"),
    ],
)
def test_overrides_that_name_nothing_are_refused(text, message):
    with pytest.raises(BindingError, match=message):
        parse_overrides([text])


def test_an_override_of_a_site_that_the_model_does_not_have_is_refused():
    model = build_model(tiny_config("qwen3_next"), dtype=torch.float32)
    with pytest.raises(BindingError, match="op attention has no site 'decod' in this model; it has decode, prefill"):
        bind_model(model, BUCKETS, CPU_GENERIC, overrides=["attention.decod=reference"])
    with pytest.raises(BindingError, match="op silu_mul has no site 'decode' in this model; it has none with a name"):
        bind_model(model, BUCKETS, CPU_GENERIC, overrides=["silu_mul.decode=reference"])
    inner = "gated_delta_rule.decode=reference"  # a part of gated_delta, whose site has the label
    bind_model(model, BUCKETS, CPU_GENERIC, overrides=[inner, "latent_attention.anywhere=reference"])


def test_a_weight_has_one_layout_for_all_buckets(op):
    """The layout is chosen by all uses together: a provider for one bucket may lose to one that serves both."""
    name = "test_layout"
    register_layout(
        Layout(
            name,
            pack=lambda w: Packed({"data": w.clone()}, plain(w.dtype).with_layout(name), tuple(w.shape)),
            unpack=lambda w: w.parts["data"],
            accepts=lambda form, shape: None,
            nbytes=lambda form, shape: 0,
        )
    )
    try:
        few = lambda c: "too many rows" if c.args[0].shape[0] > 8 else None  # noqa: E731
        op.provide("packed few", lambda x, weight: "packed few", when=few, layout={"weight": name}, rank=3)
        op.provide("plain many", lambda x, weight: "plain many", rank=2)
        weight, site = torch.empty(8, device="meta"), CallSite(op)
        records = [
            Record("s", site, Call((torch.empty(rows, 8, device="meta"), weight), {}, bucket, CPU_GENERIC))
            for rows, bucket in zip((4, 64), BUCKETS, strict=True)
        ]
        result = bind(records, 2, CPU_GENERIC)
        assert result.layouts == {}
        assert [choice.provider for choice in site.choices] == ["plain many"] * 2
        assert "reads weight as test_layout" in dict(site.choices[0].refused)["packed few"]
        op.provide("packed many", lambda x, weight: "packed many", layout={"weight": name}, rank=2)
        result = bind(records, 2, CPU_GENERIC)
        assert result.layouts == {id(weight): name}
        assert [choice.provider for choice in site.choices] == ["packed few", "packed many"]
    finally:
        del LAYOUTS[name]


def test_a_composite_round_an_overridden_part_is_made_of_its_parts():
    model = build_model(tiny_config("qwen3"), dtype=torch.float32)
    bind_model(model, BUCKETS, CPU_GENERIC, overrides=["rms_norm=reference"])
    choices = dict(sites(model))["layers.0.mixer.prologue"].choices
    assert {choice.provider for choice in choices} == {PARTS}
    assert {part.op: part.provider for part in choices[0].parts}["rms_norm"] == REFERENCE


def test_binding_is_for_described_hardware_that_need_not_be_here():
    model = build_model(tiny_config("qwen3_5_moe_text"), dtype=torch.bfloat16)
    bind_model(model, BUCKETS, H200)
    called = {path: site for path, site in sites(model) if site.choices}
    assert all(len(site) == len(site.choices) == len(BUCKETS) for site in called.values())
    assert {"layers.0.mixer.mix.decode", "layers.3.mixer.attend.prefill", "layers.1.mlp.mixture"} <= set(called)


def test_an_observer_sees_every_call_and_leaves_no_trace():
    model = build_model(tiny_config("llama"), dtype=torch.float32)
    bind_model(model, BUCKETS, CPU_GENERIC)
    before = [list(site) for _, site in sites(model)]
    seen = []

    def observer(bound_call, args, kwargs):
        seen.append((bound_call.path, bound_call.op.name))
        return bound_call.op.abstract(*args, **kwargs)

    walk(model, meta_step(model, BUCKETS[1], decode_requests=1, page_size=16), observer)
    assert ("layers.2.mixer.attend.decode", "attention") in seen
    assert ("layers.2.mixer.attend.prefill", "attention") in seen
    assert [list(site) for _, site in sites(model)] == before
    with pytest.raises(RuntimeError), observed(model, observer):
        raise RuntimeError
    assert [list(site) for _, site in sites(model)] == before


def test_workspace_of_the_largest_call_is_reported(op):
    op.provide("hungry", lambda x, weight: 0, workspace=lambda c: 100 * c.args[0].shape[0])
    records = [Record("h", CallSite(op), call(BUCKETS[1], rows=64))]
    assert binding.bind(records, 2, CPU_GENERIC).workspace == 6400


def test_what_parts_pass_on_is_scratch_memory_too(op):
    op.provide("hungry", lambda x, weight: 0, workspace=lambda c: 1000)
    whole = Op(
        "test_whole", lambda parts, x, weight: parts.test_scale(parts.test_scale(x, weight), weight),
        abstract=lambda x, weight: torch.empty_like(x), parts=[op],
    )  # fmt: skip
    try:
        site = bound(whole)
        assert [choice.workspace for choice in site.choices] == [1000 + 4 * 8 * 4, 1000 + 64 * 8 * 4]
    finally:
        del REGISTRY["test_whole"]


def timed(op_name, *providers, refused=(), tokens=(4, 64)):
    """Timings of `test_scale`: (provider, seconds at each of `tokens`)."""

    def group(name, seconds, failed=()):
        rows = tuple(((float(n), 8.0), s) for n, s in zip(tokens, seconds, strict=True) if s)
        failed = tuple(((float(n), 8.0), reason) for n, reason in failed)
        return Measured(
            "cpu", op_name, "", name, "float32", "a test", ("tokens", "columns"), rows, dtype="float32", refused=failed
        )

    groups = [group(name, seconds) for name, seconds in providers]
    groups += [group(name, (0,) * len(tokens), failed) for name, failed in refused]
    return Timings(Table("cpu", tuple(groups)))


@pytest.fixture
def three(op):
    """The op with three providers, the slowest of them ranked highest."""
    for name, rank in (("low", 1), ("middle", 2), ("high", 3)):
        op.provide(name, lambda x, weight, name=name: name, rank=rank)
    return op


def test_the_measured_fastest_wins_in_each_bucket_and_the_account_says_so(three):
    table = timed(three.name, ("low", (3e-6, 9e-6)), ("middle", (8e-6, 2e-6)), ("high", (9e-6, 9e-5)))
    site = bound(three, timings=table)
    assert [run(1, 1) for run in site] == ["low", "middle"]
    assert site.choices[0].seconds == pytest.approx(3e-6)
    assert site.choices[0].runner_up == ("middle", pytest.approx(8e-6))
    assert dict(site.choices[0].refused)["high"] == "9.0 us measured, low takes 3.0 us"


def test_where_the_table_says_nothing_rank_decides(three):
    table = timed(three.name, ("low", (3e-6,)), ("high", (9e-6,)), tokens=(4,))
    site = bound(three, timings=table)
    assert [choice.provider for choice in site.choices] == ["low", "high"]
    assert [bool(choice.seconds) for choice in site.choices] == [True, False]
    assert dict(site.choices[0].refused)["middle"] == "not measured, low takes 3.0 us"
    assert dict(site.choices[1].refused)["low"] == "high ranks higher"


def test_who_failed_when_it_was_measured_is_not_chosen(three):
    table = timed(three.name, ("low", (3e-6, 9e-6)), refused=[("high", [(4, "gives NaN")])])
    assert bound(three, timings=table).choices[0].provider == "low"
    nobody_timed = timed(three.name, refused=[("high", [(4, "gives NaN"), (64, "gives NaN")])])
    site = bound(three, timings=nobody_timed)
    assert [choice.provider for choice in site.choices] == ["middle", "middle"]
    assert dict(site.choices[0].refused)["high"] == "failed when it was measured: gives NaN"


def test_an_override_is_stronger_than_a_table(three):
    table = timed(three.name, ("low", (3e-6, 9e-6)), ("high", (9e-6, 9e-6)))
    site = bound(three, timings=table, overrides=["test_scale=high"])
    assert {choice.provider for choice in site.choices} == {"high"}
    assert not site.choices[0].seconds


def test_a_lossy_provider_is_not_chosen_for_its_speed(three):
    three.provide("rough", lambda x, weight: "rough", lossy="half the bits")
    table = timed(three.name, ("low", (3e-6, 9e-6)), ("rough", (1e-6, 1e-6)))
    assert bound(three, timings=table).choices[0].provider == "low"


def test_one_provider_for_all_buckets_is_the_one_that_takes_least_in_all(three):
    table = timed(three.name, ("low", (1e-6, 90e-6)), ("middle", (8e-6, 20e-6)), ("high", (9e-6, 95e-6)))
    site = bound(three, timings=table, invariant=True)
    assert [choice.provider for choice in site.choices] == ["middle", "middle"]


def test_a_composite_is_made_of_its_parts_where_that_was_measured_faster(op):
    op.provide("fast part", lambda x, weight: "part")
    whole = Op(
        "test_whole", lambda parts, x, weight: parts.test_scale(x, weight), abstract=lambda x, weight: torch.empty_like(x),
        parts=[op],
    )  # fmt: skip
    try:
        whole.provide("fused", lambda x, weight: "fused")
        assert bound(whole)[0](1, 1) == "fused"
        table = timed(whole.name, ("fused", (9e-6, 1e-6)), (PARTS, (3e-6, 5e-6)))
        site = bound(whole, timings=table)
        assert [run(1, 1) for run in site] == ["part", "fused"]
        assert site.choices[0].runner_up == ("fused", pytest.approx(9e-6))
        alone = timed(whole.name, (PARTS, (3e-6, 5e-6)))
        assert bound(whole, timings=alone)[0](1, 1) == "fused", (
            "parts alone can't be compared with what wasn't measured"
        )
    finally:
        del REGISTRY["test_whole"]


def test_a_layout_is_chosen_by_time_if_all_its_uses_were_measured(op):
    name = "test_layout"
    register_layout(
        Layout(
            name,
            pack=lambda w: Packed({"data": w.clone()}, plain(w.dtype).with_layout(name), tuple(w.shape)),
            unpack=lambda w: w.parts["data"],
            accepts=lambda form, shape: None,
            nbytes=lambda form, shape: 0,
        )
    )
    try:
        op.provide("packed", lambda x, weight: "packed", layout={"weight": name}, rank=9)
        op.provide("plain", lambda x, weight: "plain", rank=1)
        weight, site = torch.empty(8, device="meta"), CallSite(op)
        records = [
            Record("s", site, Call((torch.empty(rows, 8, device="meta"), weight), {}, bucket, CPU_GENERIC))
            for rows, bucket in zip((4, 64), BUCKETS, strict=True)
        ]
        assert bind(records, 2, CPU_GENERIC).layouts == {id(weight): name}
        table = timed(op.name, ("packed", (1e-6, 90e-6)), ("plain", (2e-6, 20e-6)))
        assert bind(records, 2, CPU_GENERIC, timings=table).layouts == {}
        assert [run(1, 1) for run in site] == ["plain", "plain"]
        in_part = timed(op.name, ("packed", (1e-6, 90e-6)))
        assert bind(records, 2, CPU_GENERIC, timings=in_part).layouts == {id(weight): name}
    finally:
        del LAYOUTS[name]
