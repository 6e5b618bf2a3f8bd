"""The Triton providers of gated_delta on a GPU, against the float64 reference, with fresh inputs each run."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton_mixers import STATE_TOLERANCE, errors, gated_delta_inputs

from firstlight.ops.gated_delta import gated_delta, triton_chunked, triton_decode

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

REAL: dict[str, Any] = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128, "device": "cuda"}
ODD: dict[str, Any] = {"key_heads": 3, "value_heads": 9, "key_dim": 64, "value_dim": 32, "width": 3, "device": "cuda"}
TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
STATES = pytest.mark.parametrize("state_dtype", STATE_TOLERANCE, ids=str)
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def fresh_seed() -> int:
    """Printed, so that a failure can be repeated."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    return seed


@STATES
@DTYPES
@pytest.mark.parametrize("sizes", [REAL, ODD], ids=["real", "odd"])
@pytest.mark.parametrize("norm", [True, False])
def test_decode(norm: bool, sizes: dict[str, Any], dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    """Null slots, copies, in place, requests without a token, exports before and after the token."""
    tiles = triton_decode.choose_tiles(1 if norm else 1000, sizes["value_dim"], sizes["key_dim"], dependent=True)
    exports = ((0, 1, 8), (1, 0, 9), (2, 1, 10), (0, 0, 11), (4, 0, 0))
    args, kwargs = gated_delta_inputs(
        [1] * 5 + [0, 0],
        [1, 2, 0, 2, 5, 4, 0],
        [1, 3, 6, 0, 5, 7, 0],
        exports=exports,
        dtype=dtype,
        state_dtype=state_dtype,
        seed=fresh_seed(),
        **sizes,
    )
    found = errors(lambda *a, **k: triton_decode.run(*a, **k, tiles=tiles), args, kwargs)
    assert found.pop("states") < TOLERANCE[dtype] + STATE_TOLERANCE[state_dtype]
    assert max(found.values()) < TOLERANCE[dtype], found


@STATES
@DTYPES
@pytest.mark.parametrize("sizes", [REAL, ODD], ids=["real", "odd"])
@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("counts", [[200, 64, 1, 0], [63, 65, 128, 2], [1, 1, 1, 1]], ids=str)
def test_prefill(
    counts: list[int], segments: int, sizes: dict[str, Any], dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    """Ragged requests and exports at a chunk's start, inside it and at the request's end."""
    exports = (
        (0, 0, 7),
        (0, counts[0], 8),
        (0, counts[0] * 2 // 3, 9),
        (1, min(64, counts[1]), 10),
        (2, 1, 11),
        (1, 1, 0),
    )
    args, kwargs = gated_delta_inputs(
        counts,
        [1, 0, 2, 2],
        [1, 3, 5, 6],
        exports=exports,
        dtype=dtype,
        state_dtype=state_dtype,
        seed=fresh_seed(),
        **sizes,
    )
    exact = dtype == torch.float32
    cut = triton_chunked.choose_cut(sum(counts), 4, sizes["value_heads"], sizes["value_dim"], max(counts), exact=exact)
    cut = replace(cut, segments=segments)
    found = errors(lambda *a, **k: triton_chunked.run(*a, **k, cut=cut), args, kwargs, exact=exact)
    assert found.pop("states") < TOLERANCE[dtype] + STATE_TOLERANCE[state_dtype]
    assert max(found.values()) < TOLERANCE[dtype], found


def test_prefill_of_one_repeated_token() -> None:
    """Equal keys that are wholly written: the triangular system is as hard to solve as it gets."""
    args, kwargs = gated_delta_inputs([130], [0], [1], dtype=torch.bfloat16, padding=0, seed=fresh_seed(), **REAL)
    mixed, z, a, b, conv_weight, *rest = args
    same, width = mixed[:1].repeat(130, 1), REAL["key_heads"] * REAL["key_dim"]
    # Queries are the keys: one that is nearly at a right angle to its key asks for what rounding left.
    for x in (same.t(), conv_weight):
        x[:width] = x[width : 2 * width]
    found = errors(
        triton_chunked.run,
        (same, z, torch.full_like(a, -20.0), torch.full_like(b, 9.0), conv_weight, *rest),
        kwargs,
        exact=False,
    )
    assert max(found.values()) < 3e-2, found


def test_512_steps_do_not_drift() -> None:
    """Decoding 512 tokens one by one ends in the state that one prefill of them ends in, by the float64 reference."""
    args, kwargs = gated_delta_inputs([512], [0], [1], dtype=torch.bfloat16, padding=0, seed=fresh_seed(), **REAL)
    tokens, (weights, pools, slots) = args[:4], (args[4:8], args[8:10], args[10:])
    exact = [x.double() if x.is_floating_point() else x.clone() for x in args]
    gated_delta.reference(*exact, **kwargs)
    _, state_in, state_out, exports = slots
    step = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    for t in range(512):
        inputs = [x[t : t + 1] for x in tokens]
        source = state_in if t == 0 else state_out
        triton_decode.run(*inputs, *weights, *pools, step, source, state_out, exports, **{**kwargs, "max_query": 1})
    error = (pools[1][1].double() - exact[9][1]).norm() / exact[9][1].norm()
    assert error < 1e-2


@pytest.mark.parametrize("counts", [[1, 1], [70, 3]])
def test_slots_beyond_two_billion_elements(counts: list[int]) -> None:
    """Slots so far apart that 32-bit offsets would wrap."""
    args, kwargs = gated_delta_inputs(counts, [1, 2], [1, 2], dtype=torch.bfloat16, seed=fresh_seed(), **REAL)
    slots, far = args[9].shape[0], 2**31 // 2
    apart = torch.empty((slots - 1) * far + args[9][0].numel(), device="cuda").as_strided(
        args[9].shape, (far, *args[9].stride()[1:])
    )
    apart.copy_(args[9])
    run = triton_decode.run if max(counts) == 1 else triton_chunked.run
    expected = args[9].clone()
    for pool in (apart, expected):
        run(*args[:8], args[8].clone(), pool, *args[10:], **kwargs)
    assert torch.equal(apart[1:], expected[1:])
