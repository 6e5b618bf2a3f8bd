"""Compiles norms and gates that give their results packed for a GPU that needn't be here, and prints a line of JSON a kernel.

    python compile_rows.py cuda 90 | hip gfx950

{"kernel": name, "shared": bytes of shared memory, "float8": whether it converts to FP8,
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

from firstlight.ops.rms_norm import triton_fused_kernel as norms
from firstlight.ops.silu_mul import triton_fused_kernel as gates

CONVERSION = re.compile(r"cvt\.\w+\.satfinite\.e4m3x2|v_cvt_\w*fp8")
PLAIN = {"data_ptr": None, "scale_ptr": None}
ALONE = {"y_ptr": None}
ALIGNED = re.compile(r"\w+_ptr|[ND]|\w+_stride_[tk]")


def cases() -> list[tuple[str, Any, dict[str, Any]]]:
    """(name, kernel, constants)."""
    row = {"BLOCK_D": 2048, "ZERO_CENTRED": True}
    gate = {"BLOCK_N": 1024, "gate_stride_n": 1, "SILU": False}
    norm = {"BLOCK_R": 1, "x_stride_h": 16, **row}
    kernels = [
        ("norm", norms.norm_rows, norm),
        ("add and norm", norms.add_and_norm_rows, row),
        ("gate", gates.activate_and_multiply, gate),
    ]
    forms: list[tuple[str, dict[str, Any]]] = [("plain", PLAIN), ("packed", ALONE), ("both", {})]
    return [
        (f"{name}, {form}", kernel, constants | fixed) for name, kernel, constants in kernels for form, fixed in forms
    ]


def kind_of(name: str) -> str:
    """Triton's type of an argument."""
    if name.endswith("_ptr"):
        return {"data_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}.get(name, "*bf16")
    return "fp32" if name == "eps" else "i32"


def main() -> None:
    backend, architecture = sys.argv[1:]
    target = GPUTarget("cuda", int(architecture), 32) if backend == "cuda" else GPUTarget("hip", architecture, 64)
    for name, kernel, constants in cases():
        names = kernel.arg_names
        fixed = {**constants, "PDL": backend == "cuda"}
        source = ASTSource(
            kernel, signature={n: "constexpr" if n in fixed else kind_of(n) for n in names},
            constexprs={(names.index(n),): value for n, value in fixed.items()},
            attrs={(names.index(n),): [["tt.divisibility", 16]] for n in names if n not in fixed and ALIGNED.fullmatch(n)},
        )  # fmt: skip
        compiled = triton.compile(source, target=target, options={"num_warps": 4})
        assembly = compiled.asm["ptx" if backend == "cuda" else "amdgcn"]
        found = {"shared": compiled.metadata.shared, "float8": bool(CONVERSION.search(assembly))}
        print(json.dumps({"kernel": name, **found, "early": early_loads(assembly)}))


if __name__ == "__main__":
    main()
