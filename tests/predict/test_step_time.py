"""What must hold for any model, GPU and shape."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from predict.priced import priced

from firstlight.hardware import GPUS
from firstlight.predict import constants
from firstlight.predict.layout import Layout
from firstlight.predict.shape import StepShape
from firstlight.predict.speculation import Speculation, decode_seconds
from firstlight.predict.step_time import Conditions

CASES = [
    ("Qwen3-8B", "h20", None),
    ("Qwen3.5-35B-A3B", "h200", None),
    ("Qwen3-30B-A3B-FP8", "mi355x", Layout(tensor_parallel=2)),
    ("qwen3-next-80B-A3B", "gb300", Layout(data_parallel=4, expert_parallel=4)),
    ("deepseek_v3", "h800", None),
]
pytestmark = pytest.mark.parametrize(("name", "gpu", "layout"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])


def with_hardware(steps, **changes):
    return replace(steps, hardware=replace(steps.hardware, **changes))


def faster(hardware, factor):
    return {
        "peak": {dtype: rate * factor for dtype, rate in hardware.peak.items()},
        "bandwidth": hardware.bandwidth * factor,
        "links": tuple(replace(link, bandwidth=link.bandwidth * factor) for link in hardware.links),
    }


def test_time_rises_with_the_batch(name, gpu, layout):
    seconds = priced(name, gpu, layout).time(StepShape.of_decode(np.arange(1, 600), 2048)).seconds
    assert np.all(np.diff(seconds) >= -1e-9 * seconds[:-1])


def test_time_rises_with_the_context(name, gpu, layout):
    seconds = priced(name, gpu, layout).time(StepShape.of_decode(16, np.arange(64, 100_000, 97))).seconds
    assert np.all(np.diff(seconds) >= -1e-9 * seconds[:-1])


def test_time_rises_with_the_prompt(name, gpu, layout):
    seconds = priced(name, gpu, layout).time(StepShape.of_prefill(1, np.arange(1, 20_000, 37))).seconds
    assert np.all(np.diff(seconds) >= -1e-9 * seconds[:-1])


def test_time_falls_with_the_bandwidth(name, gpu, layout):
    steps, shape = priced(name, gpu, layout), StepShape.of_decode(np.array([1, 32, 256]), 4096)
    before = steps.time(shape).seconds
    for factor in (1.1, 1.5, 4.0):
        after = with_hardware(steps, bandwidth=steps.hardware.bandwidth * factor).time(shape).seconds
        assert np.all(after <= before)
        before = after


def test_twice_the_peaks_halve_all_but_the_starts(name, gpu, layout):
    steps = priced(name, gpu, layout)
    shape = StepShape.of_decode(np.array([1, 64, 512]), 4096) + StepShape.of_prefill(16, np.array([1, 64, 512]))
    times = [with_hardware(steps, **faster(steps.hardware, n)).time(shape).seconds for n in (1, 2, 4)]
    fixed = 2 * times[1] - times[0]  # what is left if the rest halves
    again = 2 * times[2] - times[1]
    # The chain of a chunked state is a start too, but one beside work: it may come to bind as the rest gets faster.
    assert np.all(fixed >= 0)
    np.testing.assert_allclose(again, fixed, rtol=0.05)


def test_no_time_is_under_the_roofline(name, gpu, layout):
    steps = priced(name, gpu, layout)
    shape = StepShape.of_decode(np.array([1, 7, 64, 512]), 9000) + StepShape.of_prefill(1, np.array([1, 64, 700, 8192]))
    step = steps.time(shape)
    for item in step.kernels:
        assert np.all(item.seconds >= item.floor)
        memory = item.moved / steps.hardware.bandwidth
        if item.bound[0] != "link":
            assert np.all(item.floor >= memory * (1 - 1e-12))
    assert np.all(step.low >= step.floor)
    assert np.all((step.low <= step.seconds) & (step.seconds <= step.high))


def test_a_mixed_step_costs_less_than_two(name, gpu, layout):
    steps = priced(name, gpu, layout)
    decode, prefill = StepShape.of_decode(32, 4096), StepShape.of_prefill(1, 1024)
    apart = steps.time(decode).seconds + steps.time(prefill).seconds
    together = steps.time(decode + prefill).seconds
    assert float(together[0]) < float(apart[0])
    assert float(together[0]) > float(steps.time(prefill).seconds[0])


def test_many_shapes_at_once_are_each_alone(name, gpu, layout):
    steps = priced(name, gpu, layout)
    requests, context = np.array([1, 5, 130]), np.array([300, 9000, 2000])
    together = steps.time(StepShape.of_decode(requests, context)).seconds
    alone = [float(steps.time(StepShape.of_decode(*pair)).seconds[0]) for pair in zip(requests, context, strict=True)]
    np.testing.assert_allclose(together, alone, rtol=1e-12)


def test_launching_from_the_host_is_never_faster(name, gpu, layout):
    steps = priced(name, gpu, layout)
    eager = replace(steps, conditions=Conditions(graph=False))
    shape = StepShape.of_decode(1, 512)
    launches = sum(item.kernel.launches * item.kernel.count for item in steps.time(shape).kernels)
    assert eager.time(shape).seconds[0] >= max(steps.time(shape).seconds[0], launches * constants.EAGER_LAUNCH / 2)


def test_certain_drafts_pay_and_hopeless_ones_cost(name, gpu, layout):
    steps = priced(name, gpu, layout)
    plain = decode_seconds(steps, 1, 2048)
    assert decode_seconds(steps, 1, 2048, Speculation(3, 1.0)) < plain
    assert decode_seconds(steps, 1, 2048, Speculation(3, 0.0)) > plain
    assert Speculation(3, 0.5).tokens == 1.875


def test_every_described_gpu_prices_it(name, gpu, layout):
    shape = StepShape.of_decode(8, 1000)
    for hardware in GPUS.values():
        step = replace(priced(name, gpu, layout), hardware=hardware).time(shape)
        assert np.isfinite(step.seconds[0])
        assert set(step.origins) <= {"interpolated", "transferred", "datasheet"}
