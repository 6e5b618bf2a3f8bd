"""The Triton providers of gated_delta under Triton's interpreter, on tiny odd shapes, against the float64 reference."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from triton_mixers import STATE_TOLERANCE, errors, gated_delta_inputs

from firstlight.ops import triton_launch
from firstlight.ops.gated_delta import gated_delta, triton_chunked, triton_decode

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")

STATES = pytest.mark.parametrize("state_dtype", STATE_TOLERANCE, ids=str)
DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 4e-3)], ids=str)


@STATES
@DTYPES
@pytest.mark.parametrize(
    "tiles", [triton_decode.Tiles(2, 1, norm=True), triton_decode.Tiles(4, 1, norm=False)], ids=["two kernels", "three"]
)
@pytest.mark.parametrize(
    "heads",
    [
        {"key_heads": 2, "value_heads": 2}, {"key_heads": 1, "value_heads": 3, "width": 3},
        {"key_heads": 1, "value_heads": 1, "width": 2}, {"key_heads": 1, "value_heads": 1, "width": 6},
    ],
    ids=str,
)  # fmt: skip
def test_decode(
    heads: dict[str, int],
    tiles: triton_decode.Tiles,
    dtype: torch.dtype,
    tolerance: float,
    state_dtype: torch.dtype,
) -> None:
    """Null slots, copies, in place, requests without a token, exports before and after the token."""
    exports = ((0, 1, 7), (1, 0, 8), (2, 1, 9), (4, 0, 0))
    args, kwargs = gated_delta_inputs(
        [1, 1, 1, 1, 0, 0],
        [1, 2, 0, 2, 4, 5],
        [1, 3, 5, 0, 6, 0],
        exports=exports,
        key_dim=16,
        value_dim=8,
        dtype=dtype,
        state_dtype=state_dtype,
        **heads,
    )
    found = errors(lambda *a, **k: triton_decode.run(*a, **k, tiles=tiles), args, kwargs)
    assert found.pop("states") < tolerance + STATE_TOLERANCE[state_dtype]
    assert max(found.values()) < tolerance, found


@pytest.mark.parametrize("had", [False, True])
def test_decode_starts_kernels_early_only_where_the_gpu_has_it(had: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs before Hopper don't, nor does a benchmark that turns it off."""
    asked, tiles = [], triton_decode.Tiles(4, 1, norm=True)
    monkeypatch.setattr(triton_launch, "_options_on", lambda device: {"PDL": had})
    monkeypatch.setattr(triton_decode, "choose_tiles", lambda *sizes: asked.append(sizes[-1]) or tiles)
    args, kwargs = gated_delta_inputs([1], [1], [1], key_heads=1, value_heads=1, key_dim=8, value_dim=8)
    triton_decode.run(*args, **kwargs)
    assert asked == [had]


@STATES
@pytest.mark.parametrize(
    ("cut", "dtype", "tolerance"),
    [
        (None, torch.float32, 5e-6),
        (triton_chunked.Cut(16, 4, 2), torch.float16, 4e-3),
        (triton_chunked.Cut(32, 4, 2, segments=3, norm=True), torch.float32, 5e-6),
        (triton_chunked.Cut(16, 4, 2, segments=2), torch.float16, 4e-3),
    ],
    ids=["float32", "float16 in slices", "segments and norm", "float16 in segments and slices"],
)
def test_prefill(
    cut: triton_chunked.Cut | None, dtype: torch.dtype, tolerance: float, state_dtype: torch.dtype
) -> None:
    """Ragged requests and exports at a chunk's start, inside it and at the request's end."""
    exports = ((0, 64, 7), (0, 128, 8), (0, 70, 9), (1, 64, 10), (2, 1, 11), (4, 0, 0), (0, 0, 12), (0, 130, 13))
    args, kwargs = gated_delta_inputs(
        [130, 100, 2, 1, 0],
        [1, 0, 2, 2, 5],
        [1, 3, 4, 0, 6],
        exports=exports,
        dtype=dtype,
        state_dtype=state_dtype,
        key_dim=16,
        value_dim=32,
    )
    # In float16 the reference rounds too, at the same places: as far from float64 as the kernels are.
    exact = dtype == torch.float32
    found = errors(lambda *a, **k: triton_chunked.run(*a, **k, cut=cut), args, kwargs, exact=exact)
    assert found.pop("states") < tolerance + STATE_TOLERANCE[state_dtype]
    assert max(found.values()) < tolerance, found


def test_chunks_are_single_steps() -> None:
    """Two steps of prefill and one of decoding end where one prefill of all tokens ends."""
    args, kwargs = gated_delta_inputs([71], [0], [1], key_dim=16, padding=0)
    whole: list[Any] = [x.clone() for x in args]
    expected = gated_delta.reference(*whole, **kwargs)
    parts = []
    for begin, end in ((0, 66), (66, 70), (70, 71)):
        start = torch.tensor([0, end - begin], dtype=torch.int32)
        source = torch.tensor([min(begin, 1)], dtype=torch.int32)
        run = triton_decode.run if end - begin == 1 else triton_chunked.run
        inputs = [x[begin:end] for x in args[:4]]
        parts.append(run(*inputs, *args[4:10], start, source, *args[12:], **{**kwargs, "max_query": end - begin}))
    torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(args[9][1], whole[9][1], rtol=1e-5, atol=1e-5)
