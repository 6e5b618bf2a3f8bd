"""Compiles the product kernels for a GPU that needn't be here, and prints a line of JSON a kernel.

    python compile_products.py cuda 90 | hip gfx942 | hip gfx950

{"kernel": name, "shared": bytes of shared memory, "fp8": whether an FP8 matrix instruction is in the assembly,
"early": loads above the wait for the kernels before, and below it}
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
import triton.language as tl
from early_loads import early_loads
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from firstlight.ops.experts import (
    triton_few_kernels,
    triton_grouped_kernels,
    triton_list_kernels,
    triton_sum_kernel,
    triton_thin_kernels,
)
from firstlight.ops.linear import (
    triton_block_fp8_kernel,
    triton_quantise,
    triton_skinny_kernels,
)
from firstlight.ops.moe import triton_router_kernel
from firstlight.ops.route import triton_fused_kernel
from firstlight.ops.sample import triton_split_kernels
from firstlight.quant import WHOLE_ROW

FP8_INSTRUCTION = re.compile(r"v_mfma_\w*(fp8_fp8|f8f6f4)|wgmma\.mma_async\S*e4m3\.e4m3")
KINDS = {
    "*bf16": "hidden_ptr x_ptr weights_ptr bias_ptr scale_ptr shared_scale_ptr y_ptr pairs_ptr router_ptr gate_ptr",
    "*i32": "experts_ptr row_ptr count_ptr list_ptr tile_ptr tiles_ptr live_ptr token_ptr counts_ptr taken_ptr id_ptr",
    "*fp32": "x_scale_ptr hidden_scale_ptr share_ptr parts_ptr temperature_ptr top_p_ptr value_ptr z_ptr",
    "*fp64": "sum_ptr mass_ptr",
    "*i64": "top_k_ptr seed_ptr position_ptr out_ptr",
}
ALIGNED = re.compile(r"\w+_ptr|[HINKV]|(x|w|shared|router|logits)_stride_\w+|part_columns")
"""Arguments that are multiples of 16 in every launch."""
BLOCKS = {"SCALE_ROWS": 128, "SCALE_COLUMNS": 128, "HAS_SCALE": True}
MIXTURE = {"I": 512, "SHARED_I": 512, "SLOTS": 9, "TOP_K": 8}
ROUTE = {
    "E": 256, "BLOCK_E": 256, "TOP_K": 8, "BLOCK_CHOICES": 8, "SIGMOID": False, "RENORMALISE": True, "HAS_BIAS": False,
    "HAS_LIVE": True, "HAS_GATE": True, "BLOCK_H": 1024, "SUMMED": True, "MOST_PARTS": 8, "DTYPE": tl.bfloat16, "HAS_LISTS": True,
}  # fmt: skip
SAMPLE = {"BLOCK_V": 2048, "BLOCK_PARTS": 128, "CAPACITY": 4096}


def cases(stages: int) -> list[tuple[str, Any, set[str], dict[str, Any], int, int]]:
    """(name, kernel, arguments that are FP8, constants, warps, stages)."""
    few, thin, wide, lists = triton_few_kernels, triton_thin_kernels, triton_grouped_kernels, triton_list_kernels
    block, draw = triton_block_fp8_kernel, triton_split_kernels
    both = {"x_ptr", "w_ptr", "shared_ptr"}
    hidden, weights = {"hidden_ptr", "w_ptr", "shared_ptr"}, {"w_ptr", "shared_ptr"}
    product = {"BLOCK_M": 64, "BLOCK_K": 128, "HAS_SCALE": True, "BY_ROW": False, **MIXTURE}
    thin_product = {"BLOCK_M": 16, "BY_ROW": False, **MIXTURE}
    few_product = {"BY_ROW": False, **MIXTURE, **BLOCKS}
    # To Triton a stride that is 1 is a constant, and those of scales a row are.
    rows = {"BY_ROW": True, "scale_stride_n": 1, "shared_scale_stride_n": 1}
    one_row = {"BY_ROW": True, "HAS_SCALE": False, "SCALE_ROWS": 1, "SCALE_COLUMNS": WHOLE_ROW, "scale_stride_n": 1}
    few_rows = rows | one_row
    one = {"K": 2048, "TOKENS": 1, "BLOCK_N": 8, "BLOCK_K": 1024, "HAS_BIAS": False, "BY_ROW": False, **BLOCKS}
    some = {"CHOICES": 8, "BLOCK_H": 8, "BLOCK_I": 512, "HAS_SHARE": True}
    thin_tile = {"BLOCK_T": 16, "BLOCK_N": 64, "HAS_BIAS": True, "BY_ROW": False}
    router = {"BLOCK_T": 16, "BLOCK_E": 16, "GROUPS": 2, "COUNTS": 256, "HAS_GATE": True, "QUANTISE": True}
    return [
        ("grouped wide gate_and_up", wide.gate_and_up, both | hidden, {"BLOCK_I": 64, **product}, 4, stages),
        ("grouped wide down", wide.down, hidden, {"BLOCK_N": 128, "N_TILES": 4, **product}, 4, stages),
        ("grouped wide gate_and_up by row", wide.gate_and_up, both | hidden, {"BLOCK_I": 64, **product, **rows}, 4, stages),
        ("grouped wide down by row", wide.down, hidden, {"BLOCK_N": 128, "N_TILES": 4, **product, **rows}, 4, stages),
        ("grouped thin gate_and_up", thin.gate_and_up, both | hidden, {"BLOCK_I": 128, **thin_product}, 4, min(stages, 3)),
        ("grouped thin down", thin.down, hidden, {"BLOCK_N": 128, **thin_product}, 4, min(stages, 3)),
        ("grouped thin gate_and_up by row", thin.gate_and_up, both | hidden, {"BLOCK_I": 128, **thin_product, **rows}, 4,
         min(stages, 3)),
        ("grouped thin down by row", thin.down, hidden, {"BLOCK_N": 128, **thin_product, **rows}, 4, min(stages, 3)),
        ("block wide", block.multiply, both,
         {"BLOCK_T": 64, "BLOCK_N": 128, "TILES_TOGETHER": 16, "HAS_BIAS": True, "BY_ROW": False}, 4, stages),
        ("block wide by row", block.multiply, both,
         {"BLOCK_T": 64, "BLOCK_N": 128, "TILES_TOGETHER": 16, "HAS_BIAS": True, "BY_ROW": True}, 4, stages),
        ("block thin", block.multiply_thin, both, thin_tile, 4, stages),
        ("block thin by row", block.multiply_thin, both, thin_tile | {"BY_ROW": True}, 4, stages),
        ("quantise", triton_quantise.quantise_rows, {"y_ptr"}, {"BLOCK_T": 2, "GROUPS": 16}, 4, stages),
        ("quantise rows", triton_quantise.quantise_whole_rows, {"y_ptr"}, {"BLOCK_K": 4096}, 8, stages),
        ("skinny by row", triton_skinny_kernels.multiply, weights, one | one_row, 2, stages),
        ("skinny", triton_skinny_kernels.multiply, weights, one, 2, stages),
        ("skinny, K at once", triton_skinny_kernels.multiply, weights, one | {"BLOCK_K": 2048}, 4, stages),
        ("few gate_and_up", few.gate_and_up, weights, {"BLOCK_I": 4, "BLOCK_K": 1024, **few_product}, 2, stages),
        ("few down", few.down_and_sum, weights, {**some, **few_product}, 4, stages),
        ("few gate_and_up by row", few.gate_and_up, weights, {"BLOCK_I": 4, "BLOCK_K": 1024, **few_product, **few_rows}, 2,
         stages),
        ("few down by row", few.down_and_sum, weights, {**some, **few_product, **few_rows}, 4, stages),
        ("router", triton_router_kernel.multiply_parts, {"quantised_ptr"}, router, 4, stages),
        ("choice of a sum", triton_fused_kernel.choose, set(), ROUTE, 1, stages),
        ("choice", triton_fused_kernel.choose, set(), ROUTE | {"SUMMED": False, "HAS_LISTS": False, "HAS_BIAS": True}, 1,
         stages),
        ("lists", lists.list_pairs, set(), {"TOP_K": 8, "PART": 128}, 4, stages),
        ("tiles", lists.plan_tiles, set(), {"BINS": 512, "BLOCK_M": 64, "HAS_SHARED": True}, 4, stages),
        ("sum", triton_sum_kernel.weighted_sum, set(),
         {"SLOTS": 9, "TOP_K": 8, "BLOCK_H": 1024, "HAS_SHARE": True, "HAS_ROWS": False}, 4, stages),
        ("sample part", draw.largest_of_part, set(), {"BLOCK_V": 2048, "GREEDY": False, "FILTERED": True}, 4, stages),
        ("sample count", draw.count_buckets, set(), SAMPLE, 4, stages),
        ("sample take", draw.take_candidates, set(), SAMPLE, 4, stages),
        ("sample draw unfiltered", draw.draw, set(),
         {"ID_BITS": 18, "CAPACITY": 4096, "BLOCK_PARTS": 128, "FILTERED": False}, 4, stages),
        ("sample draw", draw.draw, set(),
         {"ID_BITS": 18, "CAPACITY": 4096, "BLOCK_PARTS": 128, "FILTERED": True}, 16, stages),
    ]  # fmt: skip


def kind_of(name: str, fp8: set[str], dtype: str) -> str:
    """Triton's type of an argument."""
    if name in fp8:
        return f"*{dtype}"
    if name == "scale":
        return "fp32"
    return next((kind for kind, names in KINDS.items() if name in names.split()), "i32")


def main() -> None:
    backend, architecture = sys.argv[1:]
    target = GPUTarget("cuda", int(architecture), 32) if backend == "cuda" else GPUTarget("hip", architecture, 64)
    dtype = "fp8e4b8" if architecture == "gfx942" else "fp8e4nv"
    for name, kernel, fp8, constants, warps, stages in cases(4 if backend == "cuda" else 2):
        names = kernel.arg_names
        constants = constants | ({"PDL": backend == "cuda"} if "PDL" in names else {})
        # The sampler's logits are the only ones that aren't sums.
        kinds = {"logits_ptr": "*fp32" if name == "choice of a sum" else "*bf16"}
        signature = {n: "constexpr" if n in constants else kinds.get(n) or kind_of(n, fp8, dtype) for n in names}
        source = ASTSource(
            kernel, signature=signature, constexprs={(names.index(n),): value for n, value in constants.items()},
            attrs={
                (names.index(n),): [["tt.divisibility", 16]]
                for n in names if ALIGNED.fullmatch(n) and n not in constants
            },
        )  # fmt: skip
        compiled = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})
        assembly = compiled.asm["ptx" if backend == "cuda" else "amdgcn"]
        fp8_used = bool(FP8_INSTRUCTION.search(assembly))
        found = {"shared": compiled.metadata.shared, "fp8": fp8_used, "early": early_loads(assembly)}
        print(json.dumps({"kernel": name, **found}))


if __name__ == "__main__":
    main()
