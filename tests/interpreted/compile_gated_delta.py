"""Compiles the kernels of Gated DeltaNet for a GPU that needn't be here, and prints a line of JSON a kernel.

    python compile_gated_delta.py cuda 90 | hip gfx942 | hip gfx950

{"kernel": name, "shared": bytes of shared memory, "products": dtypes of the matrix instructions in the assembly,
"early": loads above the wait for the kernels before, and below it}
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
from early_loads import early_loads
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from firstlight.ops.gated_delta import triton_chunked_kernels as chunked
from firstlight.ops.gated_delta import triton_decode_kernel as decode
from firstlight.ops.gated_delta import triton_states_kernels as states
from firstlight.ops.gated_delta.triton_chunked import choose_cut
from firstlight.ops.triton_launch import ONE_VARIANT

PRODUCT = re.compile(r"wgmma\.mma_async\.sync\.aligned\.\w+\.f32\.(\w+)\.\w+|v_mfma_f32_\d+x\d+x\d+_?(f32|f16|bf16)")
INT32 = {"query_start_ptr", "state_in_ptr", "state_out_ptr", "exports_ptr", "tickets_ptr"}
FP32 = {
    "scale_ptr",
    "A_log_ptr",
    "dt_bias_ptr",
    "state_pool_ptr",
    "decays_ptr",
    "starts_ptr",
    "transitions_ptr",
    "gates_ptr",
}
UNIT_STRIDES = {"weight_stride_w": 1, "conv_stride_w": 1}
ALIGNED = re.compile(r"\w+_ptr|(mixed|z)_stride_t|(conv|state)_stride_slot")
UNALIGNED = ONE_VARIANT["do_not_specialize_on_alignment"]
NARROW = " of bfloat16"
"""Ends the names of kernels whose states are bfloat16 in the pool."""
PLAIN = {"data_ptr": None, "scale_ptr": None}
"""Of kernels that may give their result packed, when they don't."""
HEADS = {"HK": 16, "HV": 32, "K": 128, "V": 128}


def cases(backend: str) -> list[tuple[str, Any, dict[str, Any], int]]:
    """(name, kernel, constants, warps) at the sizes of Qwen3.5-35B-A3B, cut as for one request of 8,192 tokens."""
    cut = choose_cut(8192, 1, 32, 128, 8192, exact=False, hip=backend == "hip")
    chunk = {**HEADS, "CHUNK": 64, "BLOCK_R": 64}
    conv = {"W": 4, "KEY_HEADS": 4, "VALUE_HEADS": 4, "TOKENS": 32}
    carried = {"BLOCK_V": cut.values, "BLOCK_E": 32, "HAS_EXPORTS": True, "HAS_SEGMENTS": True, "NORM": cut.norm,
               "ROUND_PRODUCT": True}  # fmt: skip
    fold = {
        "HV": 32,
        "K": 128,
        "V": 128,
        "CHUNK": 64,
        "BLOCK": 16,
        "BLOCK_R": 64,
        "PRECISION": "tf32" if backend == "cuda" else "ieee",
    }
    exports = {"HAS_EXPORTS": True, "BLOCK_E": 4}
    step = {**HEADS, **exports, "ROUND_PRODUCT": True, "PDL": backend == "cuda"}
    window = {**HEADS, **exports, "W": 4, "PDL": backend == "cuda"}
    norm = {"HV": 32, "V": 128, "BLOCK_ROWS": 32, "ROUND_PRODUCT": True, "PDL": backend == "cuda"}
    streamed = {**step, "BLOCK_V": 8, "NORM": True}
    return [
        ("convolutions", chunked.convolutions_kernel, {**chunk, **conv}, 4),
        ("matrices", chunked.matrices_kernel, {**chunk, "EXACT": False}, 4),
        ("windows", chunked.windows_kernel, {"W": 4, "BLOCK_C": 1024, "BLOCK_E": 32}, 4),
        ("norm", chunked.norm_kernel, norm | PLAIN, 4),
        ("norm packed", chunked.norm_kernel, norm | {"y_ptr": None}, 4),
        ("transitions", states.transitions_kernel, {**chunk, "BLOCK": 64}, 4),
        ("fold", states.fold_kernel, fold, 8),
        ("states", states.states_kernel, {**chunk, **carried}, cut.warps),
        ("exports", states.exports_kernel, {**chunk, "BLOCK_V": 32}, 4),
        ("decode prepare", decode.prepare_kernel, window, 2),
        ("decode streamed", decode.streaming_kernel, streamed | PLAIN, 1),
        ("decode streamed packed", decode.streaming_kernel, streamed | {"normed_ptr": None}, 1),
    ]


def cut_stages(backend: str) -> int:
    """Stages of the kernels that carry states; the others have no loops to be pipelined."""
    return choose_cut(8192, 1, 32, 128, 8192, exact=False, hip=backend == "hip").stages


def kind_of(name: str, wide: set[str], float8: str) -> str:
    """Triton's type of an argument."""
    if name == "data_ptr":
        return f"*{float8}"
    if name in INT32:
        return "*i32"
    if name in wide:
        return "*fp32"
    return "*bf16" if name.endswith("_ptr") else "fp32" if name == "eps" else "i32"


def main() -> None:
    backend, architecture = sys.argv[1:]
    target = GPUTarget("cuda", int(architecture), 32) if backend == "cuda" else GPUTarget("hip", architecture, 64)
    float8 = "fp8e4b8" if architecture == "gfx942" else "fp8e4nv"
    made = cases(backend)
    made += [(name + NARROW, *rest) for name, *rest in made if "state_pool_ptr" in rest[0].arg_names]
    for name, kernel, constants, warps in made:
        names = kernel.arg_names
        wide = FP32 - ({"state_pool_ptr"} if name.endswith(NARROW) else set())
        fixed = constants | {n: value for n, value in UNIT_STRIDES.items() if n in names}
        source = ASTSource(
            kernel, signature={n: "constexpr" if n in fixed else kind_of(n, wide, float8) for n in names},
            constexprs={(names.index(n),): value for n, value in fixed.items()},
            attrs={(names.index(n),): [["tt.divisibility", 16]] for n in names if n not in fixed and ALIGNED.fullmatch(n) and n not in UNALIGNED},
        )  # fmt: skip
        compiled = triton.compile(
            source, target=target, options={"num_warps": warps, "num_stages": cut_stages(backend)}
        )
        assembly = compiled.asm["ptx" if backend == "cuda" else "amdgcn"]
        products = sorted({"".join(found) for found in PRODUCT.findall(assembly)})
        found = {"shared": compiled.metadata.shared, "products": products, "early": early_loads(assembly)}
        print(json.dumps({"kernel": name, **found}))


if __name__ == "__main__":
    main()
