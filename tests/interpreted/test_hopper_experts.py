"""The experts of Hopper GPUs as far as they go without one: the rows' order, what is refused, and how the kernels compile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from interpreted.own_process import needs_gluon, printed
from product_checks import draw, fp8, routed

from firstlight.hardware import H200
from firstlight.ops.experts import hopper_grouped
from firstlight.ops.op import Call
from firstlight.quant import WHOLE_ROW


@pytest.mark.parametrize("shared", [False, True])
def test_rows(shared: bool) -> None:
    """Every pair of a local expert has a row of its own in a tile of its expert, where its token stands as elsewhere."""
    from firstlight.ops.experts.triton_list_kernels import Lists, listed, tiled
    from firstlight.ops.experts.triton_row_kernels import numbered, quantised_to_rows
    from firstlight.ops.experts.triton_sum_kernel import summed
    from firstlight.ops.linear.triton_quantise import quantised

    tokens, top_k, local, first = 70, 3, 5, 1
    weights, chosen = routed(tokens, local + 2, top_k, "cpu", padding=3)
    x = draw(tokens, 256, dtype=torch.float32, device="cpu")
    lists = listed(chosen, first, local)
    slots = top_k + shared
    entries = lists.entries // top_k * slots + lists.entries % top_k
    lists = Lists(lists.count, entries, slots)
    bound = tokens * top_k // 16 + local + shared * 5
    tile, tiles = tiled(lists, 16, bound, shared)
    row = numbered(lists, tile, tiles, 16, top_k)
    y, scale = torch.zeros(bound * 16, 256, dtype=torch.float8_e4m3fn), torch.zeros(bound * 16, 2)
    quantised_to_rows(x, chosen, row, y, scale, slots, first, local)
    expected_y, expected_scale = quantised(x, y.dtype)
    owner = torch.full((bound * 16,), -1)
    for i, (expert, _, _) in enumerate(tile[: int(tiles)].tolist()):
        owner[i * 16 : i * 16 + 16] = expert
    number = chosen.long() - first
    number = torch.where((number >= 0) & (number < local), number, -1)
    number = torch.cat([number, torch.full((tokens, int(shared)), local)], 1).flatten()
    served = (number >= 0).nonzero()[:, 0]
    places = row[served].long()
    assert len(places.unique()) == len(places)
    assert torch.equal(owner[places], number[served])
    assert torch.equal(y.float()[places], expected_y.float()[served // slots])
    assert torch.equal(scale[places], expected_scale[served // slots])
    products = torch.full((bound * 16, 256), torch.nan)
    products[places] = draw(len(places), 256, dtype=torch.float32, device="cpu")
    share = torch.rand(tokens) if shared else None
    each = torch.cat([weights.float(), share[:, None]], 1) if share is not None else weights.float()
    expected = torch.zeros(tokens, 256)
    expected.index_add_(0, served // slots, products[places] * each.flatten()[served][:, None])
    actual = summed(products, weights.float(), chosen, first, local, share, row)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("", None), ("architecture", "serves sm_90"), ("few", "pairs an expert or more"), ("cut", "reads dense weights"),
        ("rows", "reads a scale a block, and the weights are float8_e4m3fn/1xrow:bfloat16"),
    ],
)  # fmt: skip
def test_refuses(change: str, reason: str | None) -> None:
    tokens = 10 if change == "few" else 200
    x = torch.zeros(tokens, 256, dtype=torch.bfloat16)
    block = (1, WHOLE_ROW) if change == "rows" else (128, 128)
    gate_up = fp8(torch.zeros(4, 512, 256, dtype=torch.bfloat16), block)
    down = fp8(torch.zeros(4, 256, 256, dtype=torch.bfloat16), block)
    if change == "cut":
        down.parts["data"] = torch.zeros(4, 256, 512).to(torch.float8_e4m3fn)[..., :256]
    chosen = torch.zeros(tokens, 2, dtype=torch.int32)
    hardware = replace(H200, features=H200.features | {"triton"})
    if change == "architecture":
        hardware = replace(hardware, architecture="sm_100")
    found = hopper_grouped.when(Call((x, chosen, chosen, gate_up, down), {}, None, hardware))
    assert found is None if reason is None else found is not None and reason in found


@needs_gluon
def test_compiles() -> None:
    """For sm_90: within shared memory, without spills, and products that aren't waited for one by one."""
    kernels = printed("compile_hopper_experts.py")
    assert len(kernels) == 10
    for kernel in kernels:
        assert kernel["shared"] <= 227 * 1024, kernel
        assert kernel["spilled"] == 0, kernel
        assert kernel["fp8"] == 4 * kernel["waits"] > 0, kernel
