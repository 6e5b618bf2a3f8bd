"""First kernel of `triton_grouped`: the router's product in parts, and all that the kernels after it need of x."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from firstlight.ops.experts.triton_list_kernels import COUNT_STRIDE, Lists
from firstlight.ops.linear.triton_quantise import quantise_columns
from firstlight.ops.triton_launch import dependent_launch, kernel, wait_for_inputs
from firstlight.ops.triton_support import cdiv, power_of_two


@kernel
def multiply_parts(
    x_ptr, router_ptr, gate_ptr, parts_ptr, quantised_ptr, x_scale_ptr, count_ptr,
    T, H, E, local_experts, x_stride_t, router_stride_n, parts_stride_part, parts_stride_t,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, GROUPS: tl.constexpr, COUNTS: tl.constexpr,
    HAS_GATE: tl.constexpr, QUANTISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """parts [H / (128 GROUPS), T, E + 1] float32: products of x with the router, and in column E with gate [1, H].

    A program multiplies BLOCK_T tokens by BLOCK_E rows over 128 * GROUPS columns. Those of the first rows also write x
    in FP8, a scale for 128 columns, and the very first sets the lists' counters to 0.
    """
    wait_for_inputs(PDL)
    i_e, i_part, i_t = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    COLUMNS: tl.constexpr = 128 * GROUPS
    o_t = i_t * BLOCK_T + tl.arange(0, BLOCK_T)
    o_e, o_k = i_e * BLOCK_E + tl.arange(0, BLOCK_E), i_part * COLUMNS + tl.arange(0, COLUMNS)
    m_t, m_k = o_t < T, o_k < H
    if i_e + i_part + i_t == 0:
        o_count = tl.arange(0, COUNTS)
        tl.store(count_ptr + o_count * COUNT_STRIDE, o_count * 0, mask=o_count < local_experts)
    b_x = tl.load(
        x_ptr + o_t.to(tl.int64)[:, None] * x_stride_t + o_k[None, :], mask=m_t[:, None] & m_k[None, :], other=0.0
    )
    p_row = router_ptr + o_e * router_stride_n
    m_e = o_e < E
    if HAS_GATE:
        p_row = tl.where(o_e == E, gate_ptr, p_row)
        m_e = o_e < E + 1
    b_row = tl.load(p_row[:, None] + o_k[None, :], mask=m_e[:, None] & m_k[None, :], other=0.0)
    b_part = tl.dot(b_x, tl.trans(b_row), input_precision="ieee")
    p_part = parts_ptr + i_part * parts_stride_part + o_t[:, None] * parts_stride_t + o_e[None, :]
    tl.store(p_part, b_part, mask=m_t[:, None] & m_e[None, :])
    if QUANTISE:  # noqa: SIM102 - decided when it is compiled
        if i_e == 0:
            # Rows of 128: each is a group of a token.
            o_r = tl.arange(0, BLOCK_T * GROUPS)
            o_token = i_t * BLOCK_T + o_r // GROUPS
            o_group = i_part * GROUPS + o_r % GROUPS
            m_r = (o_token < T) & (o_group * 128 < H)
            b_group = b_x.to(tl.float32).reshape(BLOCK_T * GROUPS, 128)
            b_y, b_scale = quantise_columns(b_group, quantised_ptr.dtype.element_ty)
            p_y = (
                quantised_ptr + o_token.to(tl.int64)[:, None] * H + o_group[:, None] * 128 + tl.arange(0, 128)[None, :]
            )
            tl.store(p_y, b_y, mask=m_r[:, None])
            tl.store(x_scale_ptr + o_token * (H // 128) + o_group, b_scale, mask=m_r)


def router_parts(
    x: Tensor, router: Tensor, gate: Tensor | None, dtype: torch.dtype | None, lists: Lists, **tuning: int
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """x [T, H], columns adjacent -> (parts [parts, T, columns] float32, (x in `dtype`, scales [T, H / 128])).

    dtype: None leaves x as it is (and twice in the pair). Sets the counters of `lists` to 0.
    tuning: block_t, block_e, groups.
    """
    tokens, hidden_size = x.shape
    experts = router.shape[0]
    groups, block_e = tuning.get("groups", 2), tuning.get("block_e", 16)
    block_t = tuning.get("block_t", min(64, max(16, power_of_two(tokens))))
    parts = cdiv(hidden_size, 128 * groups)
    columns = -(-(experts + 1) // 16) * 16
    sums = torch.empty((parts, tokens, columns), dtype=torch.float32, device=x.device)
    source, scale = x, x
    if dtype is not None:
        source = torch.empty((tokens, hidden_size), dtype=dtype, device=x.device)
        scale = torch.empty((tokens, hidden_size // 128), dtype=torch.float32, device=x.device)
    rows = experts + (gate is not None)
    multiply_parts[(cdiv(rows, block_e), parts, cdiv(tokens, block_t))](
        x, router, router if gate is None else gate, sums, source, scale, lists.count, tokens, hidden_size, experts,
        lists.entries.shape[0], x.stride(0), router.stride(0), sums.stride(0), sums.stride(1),
        BLOCK_T=block_t, BLOCK_E=block_e, GROUPS=groups, COUNTS=power_of_two(lists.entries.shape[0]),
        HAS_GATE=gate is not None, QUANTISE=dtype is not None, num_warps=tuning.get("warps", 4), **dependent_launch(x),
    )  # fmt: skip
    return sums, (source, scale)
