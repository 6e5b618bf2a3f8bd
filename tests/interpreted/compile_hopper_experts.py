"""Compiles the experts' Gluon kernels for sm_90, which needn't be here, and prints a line of JSON a kernel.

{"kernel": name, "shared": bytes of shared memory, "spilled": bytes of stack a thread, "fp8": FP8 matrix instructions,
"waits": waits for them}
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from firstlight.ops.experts import hopper_grouped_kernels as kernels

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
BOXES = {"x_desc": ("fp8e4nv", 64), "hidden_desc": ("fp8e4nv", 64), "y_desc": ("bf16", 64)}
"""Described tensors, apart from weights: dtype and rows of a box."""
KINDS = {"*bf16": "scale_ptr shared_scale_ptr", "*i32": "tile_ptr tiles_ptr"}


def kind_of(name: str) -> str:
    """Triton's type of an argument."""
    if name.endswith("_desc"):
        dtype, rows = BOXES.get(name, ("fp8e4nv", 128))
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16 if dtype == "bf16" else 8, rank=2)
        return f"tensordesc<{dtype}[{rows},128],{layout!r}>"
    known = next((kind for kind, names in KINDS.items() if name in names.split()), None)
    return known or ("*fp32" if name.endswith("_ptr") else "i32")


def main() -> None:
    cases: list[tuple[Any, dict[str, Any]]] = [(kernels.gate_and_up, {"STAGES": kernels.STAGES, "I": 512})]
    cases += [(kernels.multiply_down, {**kernels.down_shape(2048, size), "I": size}) for size in (256, 512, 1024, 1536)]
    for kernel, sizes in cases:
        for has_shared in (False, True):
            constants = {**sizes, "H": 2048, "HAS_SHARED": has_shared}
            names = kernel.arg_names
            source = GluonASTSource(
                kernel,
                {name: "constexpr" if name in constants else kind_of(name) for name in names},
                {(names.index(name),): value for name, value in constants.items()},
                {(names.index(name),): [["tt.divisibility", 16]] for name in names if name.endswith("_ptr")},
            )
            compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(compiled.asm["cubin"])
                file.flush()
                listing = [
                    subprocess.run(
                        [TOOLS / "cuobjdump", flag, file.name], capture_output=True, text=True, check=True
                    ).stdout
                    for flag in ("-res-usage", "-sass")
                ]
            stack = re.search(r"STACK:(\d+)", listing[0])
            assert stack, listing[0]
            print(
                json.dumps(
                    {
                        "kernel": f"{kernel.__name__} {constants}",
                        "shared": compiled.metadata.shared,
                        "spilled": int(stack[1]),
                        "fp8": len(re.findall(r"QGMMA\S*E4M3\.E4M3", listing[1])),
                        "waits": len(re.findall(r"WARPGROUP\.DEPBAR", listing[1])),
                    }
                )
            )


if __name__ == "__main__":
    main()
