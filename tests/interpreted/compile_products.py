"""Compiles the product kernels for a GPU that needn't be here, and prints a line of JSON a kernel.

    python compile_products.py cuda 90 | hip gfx942 | hip gfx950

{"kernel": name, "shared": bytes of shared memory, "fp8": whether an FP8 matrix instruction is in the assembly}
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from firstlight.ops.experts import triton_few_kernels, triton_grouped_kernels, triton_thin_kernels
from firstlight.ops.linear import triton_block_fp8_kernel, triton_skinny_kernels

FP8_INSTRUCTION = re.compile(r"v_mfma_\w*(fp8_fp8|f8f6f4)|wgmma\.mma_async\S*e4m3\.e4m3")
BF16 = {"hidden_ptr", "x_ptr", "weights_ptr", "bias_ptr", "scale_ptr", "shared_scale_ptr", "y_ptr"}
INT32 = {"experts_ptr", "order_ptr", "tile_ptr", "tiles_ptr"}
FP32 = {"x_scale_ptr", "hidden_scale_ptr", "share_ptr"}
BLOCKS = {"SCALE_ROWS": 128, "SCALE_COLUMNS": 128, "HAS_SCALE": True}
MIXTURE = {"I": 512, "SHARED_I": 512, "SLOTS": 9, "TOP_K": 8}


def cases(stages: int) -> list[tuple[str, Any, set[str], dict[str, Any], int, int]]:
    """(name, kernel, arguments that are FP8, constants, warps, stages)."""
    few, thin, wide = triton_few_kernels, triton_thin_kernels, triton_grouped_kernels
    block = triton_block_fp8_kernel
    both = {"x_ptr", "w_ptr"}
    product = {"BLOCK_M": 64, "BLOCK_K": 128, "HAS_SCALE": True}
    one = {"TOKENS": 1, "BLOCK_N": 8, "BLOCK_K": 1024, "HAS_BIAS": False, **BLOCKS}
    some = {"CHOICES": 8, "BLOCK_H": 8, "BLOCK_I": 512, "HAS_SHARE": True}
    return [
        ("grouped wide gate_and_up", wide.gate_and_up, both, {"TOP_K": 8, "BLOCK_I": 64, **product}, 4, stages),
        ("grouped wide down", wide.down, {"hidden_ptr", "w_ptr"}, {"BLOCK_N": 128, "N_TILES": 4, **product}, 4, stages),
        ("grouped thin gate_and_up", thin.gate_and_up, {*both, "hidden_ptr"},
         {"TOP_K": 8, "BLOCK_M": 16, "BLOCK_I": 128}, 4, min(stages, 3)),
        ("grouped thin down", thin.down, {"hidden_ptr", "w_ptr"}, {"BLOCK_M": 16, "BLOCK_N": 128}, 4, min(stages, 3)),
        ("block wide", block.multiply, both,
         {"BLOCK_T": 64, "BLOCK_N": 128, "TILES_TOGETHER": 16, "HAS_BIAS": True}, 4, stages),
        ("block thin", block.multiply_thin, both, {"BLOCK_T": 16, "BLOCK_N": 64, "HAS_BIAS": True}, 4, stages),
        ("skinny", triton_skinny_kernels.multiply, {"w_ptr"}, one, 2, stages),
        ("few gate_and_up", few.gate_and_up, {"w_ptr", "shared_ptr"},
         {"BLOCK_I": 4, "BLOCK_K": 1024, **MIXTURE, **BLOCKS}, 2, stages),
        ("few down", few.down_and_sum, {"w_ptr", "shared_ptr"}, {**some, **MIXTURE, **BLOCKS}, 4, stages),
    ]  # fmt: skip


def kind_of(name: str, fp8: set[str], dtype: str) -> str:
    """Triton's type of an argument."""
    if name in fp8:
        return f"*{dtype}"
    for names, kind in ((BF16, "*bf16"), (INT32, "*i32"), (FP32, "*fp32")):
        if name in names:
            return kind
    return "i32"


def main() -> None:
    backend, architecture = sys.argv[1:]
    target = GPUTarget("cuda", int(architecture), 32) if backend == "cuda" else GPUTarget("hip", architecture, 64)
    dtype = "fp8e4b8" if architecture == "gfx942" else "fp8e4nv"
    for name, kernel, fp8, constants, warps, stages in cases(4 if backend == "cuda" else 2):
        names = kernel.arg_names
        signature = {n: "constexpr" if n in constants else kind_of(n, fp8, dtype) for n in names}
        aligned = [
            n for n in names if n.endswith("_ptr") or n in ("H", "I", "N", "K") or re.match(r"(x|w|shared)_stride", n)
        ]
        source = ASTSource(
            kernel, signature=signature, constexprs={(names.index(n),): value for n, value in constants.items()},
            attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned if n not in constants},
        )  # fmt: skip
        compiled = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})
        assembly = compiled.asm["ptx" if backend == "cuda" else "amdgcn"]
        print(
            json.dumps(
                {"kernel": name, "shared": compiled.metadata.shared, "fp8": bool(FP8_INSTRUCTION.search(assembly))}
            )
        )


if __name__ == "__main__":
    main()
