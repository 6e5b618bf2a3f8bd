"""Kernels of `hopper_grouped`, and their launches: a warp that loads and two groups of warps that multiply.

Rows stand in the order of their experts, each expert's at a multiple of 128: a tile is 128 rows of one expert, 64 for each
group of four warps, and tile i begins at row i * 128. What lies between an expert's last row and the next tile is read and
never used. Blocks of 128 of K go from memory to shared memory by TMA, asked for by a warp that does nothing else, and are
handed over with barriers. A group that has no rows in a tile only hands back what was loaded.

The matrix units add up one block of 128 of K; a group then adds that to its sums in float32, by the scales of the block,
while the other group has the matrix units. One program a multiprocessor goes from tile to tile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from firstlight.ops.experts.hopper_grouped import BLOCK, most_tiles
from firstlight.ops.experts.triton_list_kernels import Lists, tiled
from firstlight.ops.experts.triton_row_kernels import numbered, quantised_to_rows
from firstlight.ops.triton_support import multiprocessors
from firstlight.quant import Packed

LEAST = gl.constexpr(1e-10)
LOG2_E = gl.constexpr(1.4426950408889634)
ROWS = gl.constexpr(64)
"""Rows of a group of warps."""


@gluon.jit
def find_tile(tile_ptr, i_tile):
    """A tile's expert, and how many rows of it there are."""
    expert = gl.load(tile_ptr + i_tile * 3)
    rows = gl.load(tile_ptr + i_tile * 3 + 2) - gl.load(tile_ptr + i_tile * 3 + 1)
    return expert, rows


@gluon.jit
def start_ring(full, empty, STAGES: gl.constexpr):
    """Barriers of blocks that one warp fills and two groups empty."""
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)


@gluon.jit
def store_result(desc, row, column, out, result):
    """To memory by way of `out`, from which what was stored before has been read by then."""
    tma.store_wait(0)
    gl.thread_barrier()
    out.store(result.to(desc.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(desc, [row, column], out)


@gluon.jit
def load_gate_and_up(
    x_desc, w_desc, shared_desc, x_smem, gate_smem, up_smem, full, empty, tile_ptr, works, first_work, programs,
    local_experts, I: gl.constexpr, STEPS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, HAS_SHARED: gl.constexpr,
):  # fmt: skip
    """The warp that asks for rows and weights."""
    count = 0
    for work in range(first_work, works, programs):
        i_tile = work // COLUMNS
        i_n = work % COLUMNS
        expert, rows = find_tile(tile_ptr, i_tile)
        both = rows > ROWS
        is_shared = expert == local_experts
        for i_k in range(STEPS):
            slot = count % STAGES
            mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
            bar = full.index(slot)
            mbarrier.expect(bar, 2 * ROWS * 128 + 2 * 128 * 128, pred=both)
            mbarrier.expect(bar, ROWS * 128 + 2 * 128 * 128, pred=rows <= ROWS)
            column = i_k * 128
            tma.async_copy_global_to_shared(x_desc, [i_tile * 128, column], bar, x_smem.index(slot * 2))
            tma.async_copy_global_to_shared(
                x_desc, [i_tile * 128 + ROWS, column], bar, x_smem.index(slot * 2 + 1), pred=both
            )
            if HAS_SHARED and is_shared:
                tma.async_copy_global_to_shared(shared_desc, [i_n * 128, column], bar, gate_smem.index(slot))
                tma.async_copy_global_to_shared(shared_desc, [I + i_n * 128, column], bar, up_smem.index(slot))
            else:
                row = expert * (2 * I) + i_n * 128
                tma.async_copy_global_to_shared(w_desc, [row, column], bar, gate_smem.index(slot))
                tma.async_copy_global_to_shared(w_desc, [row + I, column], bar, up_smem.index(slot))
            count += 1


@gluon.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) to a few units in the last place, in three instructions in place of a division's twelve."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 e; ex2.approx.ftz.f32 e, $1; add.ftz.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e; }", "=f,f",
        [x * -LOG2_E], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def product(x, w, SUMS: gl.constexpr):
    """x [64, 128] by w [128, 128], one block of K."""
    part = warpgroup_mma(x, w.permute((1, 0)), gl.zeros([ROWS, 128], gl.float32, SUMS), use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[part])


@gluon.jit
def add_up_gate_and_up(
    x_scale_ptr, scale_ptr, shared_scale_ptr, hidden_desc, hidden_scale_ptr, x_smem, gate_smem, up_smem, out_smem, full,
    empty, tile_ptr, works, first_work, programs, local_experts, scale_stride_e, scale_stride_n, shared_scale_stride_n,
    two, I: gl.constexpr, STEPS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, HAS_SHARED: gl.constexpr,
    HALF: gl.constexpr,
):  # fmt: skip
    """A group of warps: rows HALF * 64 .. HALF * 64 + 63 of each tile.

    `once` is 1, and the compiler doesn't know: it would put off adding up gate's product until up's is under way, which takes
    64 registers more than there are.
    """
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    o_m = HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))
    out = out_smem.index(HALF)
    once = two - 1
    count = 0
    for work in range(first_work, works, programs):
        i_tile = work // COLUMNS
        i_n = work % COLUMNS
        expert, rows = find_tile(tile_ptr, i_tile)
        if rows > HALF * ROWS:
            p_scale = scale_ptr + expert.to(gl.int64) * scale_stride_e + i_n * scale_stride_n
            to_up = (I // 128) * scale_stride_n
            if HAS_SHARED:
                is_shared = expert == local_experts
                p_scale = gl.where(is_shared, shared_scale_ptr + i_n * shared_scale_stride_n, p_scale)
                to_up = gl.where(is_shared, (I // 128) * shared_scale_stride_n, to_up)
            o_row = i_tile * 128 + o_m
            p_x_scale = x_scale_ptr + o_row.to(gl.int64) * STEPS
            gate = gl.zeros([ROWS, 128], gl.float32, SUMS)
            up = gl.zeros([ROWS, 128], gl.float32, SUMS)
            for i_k in range(STEPS):
                slot = count % STAGES
                x_scale = gl.load(p_x_scale + i_k)
                gate_scale = gl.expand_dims(x_scale * gl.load(p_scale + i_k).to(gl.float32), 1)
                up_scale = gl.expand_dims(x_scale * gl.load(p_scale + to_up + i_k).to(gl.float32), 1)
                mbarrier.wait(full.index(slot), (count // STAGES) & 1)
                x = x_smem.index(slot * 2 + HALF)
                for _ in range(once):
                    gate += product(x, gate_smem.index(slot), SUMS) * gate_scale
                for _ in range(once):
                    up += product(x, up_smem.index(slot), SUMS) * up_scale
                gl.thread_barrier()
                mbarrier.arrive(empty.index(slot), count=1)
                count += 1
            hidden = gate * up * sigmoid(gate)
            most = gl.maximum(gl.max(gl.abs(hidden), 1), LEAST)
            gl.store(hidden_scale_ptr + o_row.to(gl.int64) * COLUMNS + i_n, most / 448.0)
            # What rounding makes larger than the largest number becomes the largest: conversions saturate.
            hidden = hidden * gl.expand_dims(448.0 / most, 1)
            store_result(hidden_desc, i_tile * 128 + HALF * ROWS, i_n * 128, out, hidden)
        else:
            for _ in range(STEPS):
                slot = count % STAGES
                mbarrier.wait(full.index(slot), (count // STAGES) & 1)
                gl.thread_barrier()
                mbarrier.arrive(empty.index(slot), count=1)
                count += 1
    tma.store_wait(0)


@gluon.jit
def gate_and_up(
    x_desc, w_desc, shared_desc, hidden_desc, x_scale_ptr, scale_ptr, shared_scale_ptr, hidden_scale_ptr, tile_ptr,
    tiles_ptr, local_experts, scale_stride_e, scale_stride_n, shared_scale_stride_n, two,
    H: gl.constexpr, I: gl.constexpr, STAGES: gl.constexpr, HAS_SHARED: gl.constexpr,
):  # fmt: skip
    """hidden [rows, I] = silu(gate) * up in FP8, hidden_scale [rows, I / 128]; x [rows, H] in FP8, x_scale [rows, H / 128].

    w: gate | up [E * 2 I, H]; a work is the same 128 columns of gate and up for a tile, those of a tile one after another.
    """
    STEPS: gl.constexpr = H // 128
    COLUMNS: gl.constexpr = I // 128
    SQUARE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2, ROWS, 128], SQUARE)
    gate_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES, 128, 128], SQUARE)
    up_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES, 128, 128], SQUARE)
    out_smem = gl.allocate_shared_memory(x_desc.dtype, [2, ROWS, 128], SQUARE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    start_ring(full, empty, STAGES)
    fence_async_shared()
    gl.thread_barrier()
    works = gl.load(tiles_ptr) * COLUMNS
    first_work = gl.program_id(0)
    programs = gl.num_programs(0)
    gl.warp_specialize(
        [
            (add_up_gate_and_up, (x_scale_ptr, scale_ptr, shared_scale_ptr, hidden_desc, hidden_scale_ptr, x_smem, gate_smem, up_smem, out_smem, full, empty, tile_ptr, works, first_work, programs, local_experts, scale_stride_e, scale_stride_n, shared_scale_stride_n, two, I, STEPS, COLUMNS, STAGES, HAS_SHARED, 0)),
            (add_up_gate_and_up, (x_scale_ptr, scale_ptr, shared_scale_ptr, hidden_desc, hidden_scale_ptr, x_smem, gate_smem, up_smem, out_smem, full, empty, tile_ptr, works, first_work, programs, local_experts, scale_stride_e, scale_stride_n, shared_scale_stride_n, two, I, STEPS, COLUMNS, STAGES, HAS_SHARED, 1)),
            (load_gate_and_up, (x_desc, w_desc, shared_desc, x_smem, gate_smem, up_smem, full, empty, tile_ptr, works, first_work, programs, local_experts, I, STEPS, COLUMNS, STAGES, HAS_SHARED)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def load_down(
    hidden_desc, w_desc, shared_desc, x_smem, w_smem, x_full, x_empty, w_full, w_empty, tile_ptr, works, first_work,
    programs, local_experts, H: gl.constexpr, STEPS: gl.constexpr, BAND: gl.constexpr, BANDS: gl.constexpr,
    X_STAGES: gl.constexpr, W_STAGES: gl.constexpr, HAS_SHARED: gl.constexpr,
):  # fmt: skip
    """The warp that asks for weights, and for a tile's rows once a band."""
    x_count = 0
    w_count = 0
    for work in range(first_work, works, programs):
        i_tile = work // BANDS
        i_band = work % BANDS
        expert, rows = find_tile(tile_ptr, i_tile)
        both = rows > ROWS
        is_shared = expert == local_experts
        for i in range(BAND * STEPS):
            i_k = i % STEPS
            row = (i_band * BAND + i // STEPS) * 128
            if i < STEPS:
                slot = x_count % X_STAGES
                mbarrier.wait(x_empty.index(slot), ((x_count // X_STAGES) & 1) ^ 1)
                bar = x_full.index(slot)
                mbarrier.expect(bar, 2 * ROWS * 128, pred=both)
                mbarrier.expect(bar, ROWS * 128, pred=rows <= ROWS)
                tma.async_copy_global_to_shared(hidden_desc, [i_tile * 128, i_k * 128], bar, x_smem.index(slot * 2))
                tma.async_copy_global_to_shared(
                    hidden_desc, [i_tile * 128 + ROWS, i_k * 128], bar, x_smem.index(slot * 2 + 1), pred=both
                )
                x_count += 1
            slot = w_count % W_STAGES
            mbarrier.wait(w_empty.index(slot), ((w_count // W_STAGES) & 1) ^ 1)
            bar = w_full.index(slot)
            mbarrier.expect(bar, 128 * 128)
            if HAS_SHARED and is_shared:
                tma.async_copy_global_to_shared(shared_desc, [row, i_k * 128], bar, w_smem.index(slot))
            else:
                tma.async_copy_global_to_shared(w_desc, [expert * H + row, i_k * 128], bar, w_smem.index(slot))
            w_count += 1


@gluon.jit
def add_up_down(
    hidden_scale_ptr, scale_ptr, shared_scale_ptr, y_desc, x_smem, w_smem, out_smem, x_full, x_empty, w_full, w_empty,
    tile_ptr, works, first_work, programs, local_experts, scale_stride_e, scale_stride_n, shared_scale_stride_n,
    STEPS: gl.constexpr, BAND: gl.constexpr, BANDS: gl.constexpr, X_STAGES: gl.constexpr, W_STAGES: gl.constexpr,
    HAS_SHARED: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """A group of warps: rows HALF * 64 .. HALF * 64 + 63 of each tile."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    o_m = HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))
    out = out_smem.index(HALF)
    x_count = 0
    w_count = 0
    for work in range(first_work, works, programs):
        i_tile = work // BANDS
        i_band = work % BANDS
        expert, rows = find_tile(tile_ptr, i_tile)
        if rows > HALF * ROWS:
            p_scale = scale_ptr + expert.to(gl.int64) * scale_stride_e
            stride = scale_stride_n
            if HAS_SHARED:
                is_shared = expert == local_experts
                p_scale = gl.where(is_shared, shared_scale_ptr, p_scale)
                stride = gl.where(is_shared, shared_scale_stride_n, stride)
            p_scale += i_band * BAND * stride
            p_x_scale = hidden_scale_ptr + (i_tile * 128 + o_m).to(gl.int64) * STEPS
            for i_n in range(BAND):
                acc = gl.zeros([ROWS, 128], gl.float32, SUMS)
                for i_k in range(STEPS):
                    x_slot = (x_count + i_k) % X_STAGES
                    w_slot = (w_count + i_k) % W_STAGES
                    scale = gl.load(p_x_scale + i_k) * gl.load(p_scale + i_n * stride + i_k).to(gl.float32)
                    mbarrier.wait(x_full.index(x_slot), ((x_count + i_k) // X_STAGES) & 1)
                    mbarrier.wait(w_full.index(w_slot), ((w_count + i_k) // W_STAGES) & 1)
                    part = product(x_smem.index(x_slot * 2 + HALF), w_smem.index(w_slot), SUMS)
                    gl.thread_barrier()
                    mbarrier.arrive(w_empty.index(w_slot), count=1)
                    mbarrier.arrive(x_empty.index(x_slot), count=1, pred=i_n == BAND - 1)
                    acc += part * gl.expand_dims(scale, 1)
                store_result(y_desc, i_tile * 128 + HALF * ROWS, (i_band * BAND + i_n) * 128, out, acc)
                w_count += STEPS
            x_count += STEPS
        else:
            for i in range(BAND * STEPS):
                slot = w_count % W_STAGES
                mbarrier.wait(w_full.index(slot), (w_count // W_STAGES) & 1)
                x_slot = (x_count + i % STEPS) % X_STAGES
                mbarrier.wait(x_full.index(x_slot), ((x_count + i % STEPS) // X_STAGES) & 1)
                gl.thread_barrier()
                mbarrier.arrive(w_empty.index(slot), count=1)
                mbarrier.arrive(x_empty.index(x_slot), count=1, pred=i >= (BAND - 1) * STEPS)
                w_count += 1
            x_count += STEPS
    tma.store_wait(0)


@gluon.jit
def multiply_down(
    hidden_desc, w_desc, shared_desc, y_desc, hidden_scale_ptr, scale_ptr, shared_scale_ptr, tile_ptr, tiles_ptr,
    local_experts, scale_stride_e, scale_stride_n, shared_scale_stride_n,
    H: gl.constexpr, I: gl.constexpr, BAND: gl.constexpr, X_STAGES: gl.constexpr, W_STAGES: gl.constexpr,
    HAS_SHARED: gl.constexpr,
):  # fmt: skip
    """y [rows, H] in 16 bits = hidden [rows, I] by w [E * H, I]. A work is BAND times 128 columns of a tile.

    A tile's rows stay in shared memory for the band: X_STAGES * 128 >= I, where BAND isn't 1.
    """
    STEPS: gl.constexpr = I // 128
    BANDS: gl.constexpr = H // 128 // BAND
    gl.static_assert(BAND == 1 or X_STAGES >= STEPS)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    x_smem = gl.allocate_shared_memory(hidden_desc.dtype, [X_STAGES * 2, ROWS, 128], SQUARE)
    w_smem = gl.allocate_shared_memory(hidden_desc.dtype, [W_STAGES, 128, 128], SQUARE)
    out_smem = gl.allocate_shared_memory(y_desc.dtype, [2, ROWS, 128], WIDE)
    x_full = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], BARRIER)
    x_empty = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], BARRIER)
    w_full = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], BARRIER)
    w_empty = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], BARRIER)
    start_ring(x_full, x_empty, X_STAGES)
    start_ring(w_full, w_empty, W_STAGES)
    fence_async_shared()
    gl.thread_barrier()
    works = gl.load(tiles_ptr) * BANDS
    first_work = gl.program_id(0)
    programs = gl.num_programs(0)
    gl.warp_specialize(
        [
            (add_up_down, (hidden_scale_ptr, scale_ptr, shared_scale_ptr, y_desc, x_smem, w_smem, out_smem, x_full, x_empty, w_full, w_empty, tile_ptr, works, first_work, programs, local_experts, scale_stride_e, scale_stride_n, shared_scale_stride_n, STEPS, BAND, BANDS, X_STAGES, W_STAGES, HAS_SHARED, 0)),
            (add_up_down, (hidden_scale_ptr, scale_ptr, shared_scale_ptr, y_desc, x_smem, w_smem, out_smem, x_full, x_empty, w_full, w_empty, tile_ptr, works, first_work, programs, local_experts, scale_stride_e, scale_stride_n, shared_scale_stride_n, STEPS, BAND, BANDS, X_STAGES, W_STAGES, HAS_SHARED, 1)),
            (load_down, (hidden_desc, w_desc, shared_desc, x_smem, w_smem, x_full, x_empty, w_full, w_empty, tile_ptr, works, first_work, programs, local_experts, H, STEPS, BAND, BANDS, X_STAGES, W_STAGES, HAS_SHARED)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


STAGES = 4
"""Blocks of rows and of gate's and up's weights on their way or in use, 48 KB each."""
DOWN_BLOCKS = 12
"""The same for down, of rows and of weights together, 16 KB each."""
BAND = 4
"""Column tiles of down that a program computes of the same rows, at most."""


def down_shape(hidden_size: int, size: int) -> dict[str, int]:
    """How down divides its columns and its shared memory. Rows stay for a band where half of the blocks and two hold them."""
    steps = size // 128
    if steps > DOWN_BLOCKS // 2 + 2:
        return {"BAND": 1, "X_STAGES": DOWN_BLOCKS // 2, "W_STAGES": DOWN_BLOCKS // 2}
    rows = max(steps, DOWN_BLOCKS // 2)
    band = next(band for band in (BAND, BAND // 2, BAND // 4, 1) if hidden_size // 128 % band == 0)
    return {"BAND": band, "X_STAGES": rows, "W_STAGES": DOWN_BLOCKS - rows}


def described(x: Tensor, rows: int) -> TensorDescriptor:
    """x [rows, columns] for TMA in boxes of `rows` x 128, swizzled as the matrix units read them."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=x.element_size() * 8, rank=2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, 128], layout)


def multiplied(
    x: Tensor, chosen: Tensor, lists: Lists, gate_up: Packed, down: Packed, top_k: int, first_expert: int,
    shared: tuple[Packed, Packed] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(products [rows, H] in the order of the experts, row int32 [T * slots]: where each listed pair's product stands).

    x [T, H]; chosen [T, k], contiguous, of which `lists` were made. shared: gate_up and down of the expert of every token's
    last slot.
    """
    tokens, hidden_size = x.shape
    local_experts, _, size = down.shape
    most = most_tiles(tokens, top_k, local_experts, has_shared=shared is not None)
    height = most * BLOCK
    tile, tiles = tiled(lists, BLOCK, most, shared is not None)
    row = numbered(lists, tile, tiles, BLOCK, top_k)
    products = torch.empty((height, hidden_size), dtype=x.dtype, device=x.device)
    # Tokens in FP8 lie where the products come later: they are read before the first product is written.
    source = products.view(-1).view(gate_up.parts["data"].dtype)[: height * hidden_size].view(height, hidden_size)
    source_scale = torch.empty((height, hidden_size // 128), dtype=torch.float32, device=x.device)
    quantised_to_rows(x, chosen, row, source, source_scale, lists.slots, first_expert, local_experts)
    hidden = torch.empty((height, size), dtype=source.dtype, device=x.device)
    hidden_scale = torch.empty((height, size // 128), dtype=torch.float32, device=x.device)
    common: dict[str, Any] = {
        "hidden_scale_ptr": hidden_scale, "tile_ptr": tile, "tiles_ptr": tiles, "local_experts": local_experts,
        "H": hidden_size, "I": size, "HAS_SHARED": shared is not None, "num_warps": 4,
    }  # fmt: skip
    grid = (multiprocessors(x.device),)
    weights, arguments = weight_arguments(gate_up, shared[0] if shared else gate_up)
    gate_and_up[grid](
        described(source, 64), *weights, described(hidden, 64), x_scale_ptr=source_scale, two=2, STAGES=STAGES, **arguments,
        **common,
    )  # fmt: skip
    weights, arguments = weight_arguments(down, shared[1] if shared else down)
    multiply_down[grid](
        described(hidden, 64), *weights, described(products, 64), **down_shape(hidden_size, size), **arguments, **common
    )
    return products, row


def weight_arguments(weight: Packed, shared: Packed) -> tuple[list[TensorDescriptor], dict[str, Any]]:
    """(descriptors, scales and their strides) of the experts' weights and of the shared expert's."""
    scale, shared_scale = weight.parts["scale"], shared.parts["scale"]
    described_weights = [described(w.parts["data"].flatten(0, -2), 128) for w in (weight, shared)]
    return described_weights, {
        "scale_ptr": scale, "shared_scale_ptr": shared_scale, "scale_stride_e": scale.stride(0),
        "scale_stride_n": scale.stride(1), "shared_scale_stride_n": shared_scale.stride(-2),
    }  # fmt: skip
