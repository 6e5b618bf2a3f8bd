"""Compiles the kernels of attention for a GPU that needn't be here, and prints a line of JSON a kernel.

    python compile_attention.py cuda 90 | hip gfx942 | hip gfx950

{"kernel": name, "shared": bytes of shared memory, "products": matrix instructions in the assembly, by their dtype of input,
"transfers": dimensions of the tensors that TMA reads, "spilled": bytes that a thread keeps in local memory, or null}
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from firstlight.hardware.detect import gluon_is_known
from firstlight.ops.attention import hopper_paged, triton_paged, triton_paged_kernels
from firstlight.ops.attention_prologue.triton_fused_kernel import attention_prologue_kernel
from firstlight.ops.triton_launch import ONE_VARIANT
from firstlight.ops.triton_support import FNUZ_ARCHITECTURES

PRODUCT = re.compile(r"wgmma\.mma_async\.sync\.aligned\.\w+\.f32\.(\w+)\.\w+|v_mfma_f32_\d+x\d+x\d+_?(f32|f16|bf16)")
TRANSFER = re.compile(r"cp\.async\.bulk\.tensor\.(\dd)\.shared")
LOCAL = re.compile(r"STACK:(\d+)")
INT32 = {"pages_ptr", "row_ptr", "query_start_ptr", "length_ptr", "slot_ptr"}
FP32 = {"partial_ptr", "summary_ptr", "sinks_ptr", "angles_ptr"}
PAGES = {"k_ptr", "v_ptr"}
HEADS = {"H": 16, "KV": 2, "D": 256}
KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv"}
PLAIN: dict[str, Any] = {"CAUSAL": True, "HAS_WINDOW": False, "HAS_SINKS": False, "sinks_ptr": None}
EVERYTHING: dict[str, Any] = {"CAUSAL": True, "HAS_WINDOW": True, "HAS_SINKS": True}


def triton_cases(backend: str) -> list[tuple[str, Any, torch.dtype, dict[str, Any], int, int]]:
    """(name, kernel, dtype, constants, warps, stages) at the heads of Qwen3.5-35B-A3B, cut as calls are.

    Pages are e4m3 where the name says so, and else have the kernel's dtype.
    """
    kernels = triton_paged_kernels

    def cut(max_query: int, dtype: torch.dtype) -> triton_paged.Tiles:
        q = torch.empty(max(max_query, 8), 16, 256, dtype=dtype, device="meta")
        pool = torch.empty(2, 64, 2, 256, dtype=dtype, device="meta")
        return triton_paged.choose_tiles(q, pool, 1, max_query, 8192, 132, hip=backend == "hip")

    def prefill(name: str, dtype: torch.dtype, page: int, settings: dict[str, Any]) -> tuple[Any, ...]:
        tiles = cut(8192, dtype)
        sizes = {"BLOCK_M": tiles.rows, "BLOCK_N": tiles.keys, "TOKENS": tiles.tokens, "STAGES": tiles.stages}
        constants = {**HEADS, **sizes, "PAGE": page, "BLOCK_D": 256, "BLOCK_R": 64, **settings}
        return name, kernels.prefill_kernel, dtype, constants, tiles.warps, tiles.stages

    one = cut(1, torch.bfloat16)
    split = {"BLOCK_M": one.rows, "BLOCK_N": one.keys, "IS_SPLIT": True, "PAGE": 64, "BLOCK_D": 256}
    prologue = {"H": 16, "KV": 2, "D": 256, "F": 32, "PAGE": 64, "BLOCK_D": 256, "GATED": True}
    prologue |= {"ZERO_CENTRED": True, "HAS_Q_NORM": True, "HAS_K_NORM": True}
    merge = {"H": 16, "D": 256, "BLOCK_D": 256, "BLOCK_S": 16, "HAS_SINKS": False, "sinks_ptr": None}
    return [
        prefill("prefill", torch.bfloat16, 64, PLAIN),
        prefill("prefill, pages of 16", torch.bfloat16, 16, PLAIN),
        prefill("prefill, pages of 1, window and sinks", torch.bfloat16, 1, EVERYTHING),
        prefill("prefill in float32", torch.float32, 64, PLAIN),
        prefill("prefill, e4m3 pages", torch.bfloat16, 64, PLAIN),
        prefill("prefill, e4m3 pages of 16, window and sinks", torch.bfloat16, 16, EVERYTHING),
        ("split", kernels.split_kernel, torch.bfloat16, {**HEADS, **split, **PLAIN}, one.warps, one.stages),
        ("split, e4m3 pages", kernels.split_kernel, torch.bfloat16, {**HEADS, **split, **PLAIN}, one.warps, one.stages),
        ("prologue", attention_prologue_kernel, torch.bfloat16, {**prologue, "BLOCK_T": 4}, 4, one.stages),
        ("prologue, e4m3 pages", attention_prologue_kernel, torch.bfloat16, {**prologue, "BLOCK_T": 1}, 1, one.stages),
        ("merge", kernels.merge_kernel, torch.bfloat16, merge, 4, one.stages),
    ]


def arguments(
    kernel: Any, dtype: torch.dtype, constants: dict[str, Any], pages: torch.dtype | None = None
) -> tuple[dict[str, str], Any, Any]:
    """Types, constants and alignments of a kernel's arguments. pages: dtype of keys and values, if it isn't `dtype`."""
    names = kernel.arg_names
    kinds = {
        name: "constexpr" if name in constants
        else "*i32" if name in INT32
        else "*fp32" if name in FP32
        else f"*{KINDS[pages or dtype]}" if name in PAGES
        else f"*{KINDS[dtype]}" if name.endswith("_ptr")
        else "fp32" if name in ("scale", "eps") else "i32"
        for name in names
    }  # fmt: skip
    unknown = {*constants, *ONE_VARIANT["do_not_specialize"], *ONE_VARIANT["do_not_specialize_on_alignment"]}
    aligned = [n for n in names if n not in unknown and (n.endswith("_ptr") or "_stride_" in n)]
    fixed = {(names.index(n),): value for n, value in constants.items()}
    return kinds, fixed, {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}


def hopper_sources() -> list[tuple[str, Any]]:
    """(name, source) of the kernel for Hopper."""
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.experimental.gluon.language import NVMMASharedLayout

    from firstlight.ops.attention.hopper_paged_kernels import prefill_kernel

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    fixed = {"PAGE": hopper_paged.PAGE, "STAGES": hopper_paged.STAGES}
    plain = {"CAUSAL": True, "HAS_SINKS": False, "sinks_ptr": None}
    sources = []
    for name, dtype, settings in (
        ("hopper", torch.bfloat16, {**HEADS, "BLOCK_R": 64, **plain}),
        ("hopper, every key, sinks", torch.bfloat16, {**HEADS, "BLOCK_R": 256, "CAUSAL": False, "HAS_SINKS": True}),
        ("hopper, heads of 128", torch.float16, {"H": 32, "KV": 8, "D": 128, "BLOCK_R": 64, **plain}),
    ):
        kinds, constants, aligned = arguments(prefill_kernel, dtype, {**fixed, **settings})
        block = [1, hopper_paged.PAGE, 1, settings["D"]]
        for pool in ("k_desc", "v_desc"):
            kinds[pool] = f"tensordesc<{KINDS[dtype]}{block},{layout!r}>"
        sources.append((name, GluonASTSource(prefill_kernel, kinds, constants, aligned)))
    return sources


def report(name: str, source: Any, target: GPUTarget, warps: int, stages: int) -> None:
    """Compile and print."""
    compiled = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})
    assembly = compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"]
    spilled = None
    if target.backend == "cuda":
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "kernel.cubin").write_bytes(compiled.asm["cubin"])
            tool = [knobs.nvidia.cuobjdump.path, "-res-usage", f"{folder}/kernel.cubin"]
            usage = subprocess.run(tool, capture_output=True, text=True, check=True)
        spilled = max(map(int, LOCAL.findall(usage.stdout + usage.stderr)))
    line = {
        "kernel": name,
        "shared": compiled.metadata.shared,
        "products": sorted({"".join(found) for found in PRODUCT.findall(assembly)}),
        "transfers": sorted(set(TRANSFER.findall(assembly))),
        "spilled": spilled,
    }
    print(json.dumps(line), flush=True)


def main() -> None:
    backend, architecture = sys.argv[1:]
    target = GPUTarget("cuda", int(architecture), 32) if backend == "cuda" else GPUTarget("hip", architecture, 64)
    for name, kernel, dtype, constants, warps, stages in triton_cases(backend):
        if "e4m3" in name and architecture in FNUZ_ARCHITECTURES:
            continue
        pages = torch.float8_e4m3fn if "e4m3" in name else dtype
        kinds, fixed, aligned = arguments(kernel, dtype, constants, pages)
        report(name, ASTSource(kernel, signature=kinds, constexprs=fixed, attrs=aligned), target, warps, stages)
    if backend == "cuda" and gluon_is_known():
        for name, source in hopper_sources():
            report(name, source, target, 4, 3)


if __name__ == "__main__":
    main()
