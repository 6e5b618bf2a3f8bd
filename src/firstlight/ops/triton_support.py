"""What every Triton provider needs to know before its kernels are imported, and what differs between GPUs.

Kernels live in modules that import triton at their top; a provider imports them inside `run`, when it is first called. So
`firstlight.ops` can be imported, and a model bound or predicted, where triton isn't installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from firstlight.hardware import Hardware

FNUZ_ARCHITECTURES = ("gfx940", "gfx941", "gfx942")
"""GPUs whose FP8 matrix instructions read e4m3fnuz: an exponent bias of 8 where e4m3fn has 7, and no negative zero."""


def unavailable(hardware: Hardware) -> str | None:
    """Why Triton kernels can't serve this hardware, or None."""
    if hardware.kind not in ("cuda", "hip"):
        return f"Triton kernels are for GPUs, and this is {hardware.name}"
    return None if hardware.has("triton") else "triton is not installed"


def fp8_dtype(architecture: str) -> str:
    """The dtype that this architecture's FP8 matrix instructions read."""
    return "float8_e4m3fnuz" if architecture in FNUZ_ARCHITECTURES else "float8_e4m3fn"


def register_limit(registers: int) -> dict[str, int]:
    """Launch option that caps a thread's registers, so that more programs share a multiprocessor; 0: no cap. NVIDIA only."""
    import torch

    return {"maxnreg": registers} if registers and torch.version.hip is None else {}


def read_tiles(kernel_file: str, name: str) -> list[dict[str, Any]]:
    """The rows of a tuning table beside a kernel for this torch's kind of GPU, ordered by `up_to` (None: all the rest)."""
    import torch

    kind = "cuda" if torch.version.hip is None else "hip"
    rows: list[dict[str, Any]] = json.loads((Path(kernel_file).parent / name).read_text())[kind]
    bounds = [float("inf") if row["up_to"] is None else row["up_to"] for row in rows]
    if bounds != sorted(set(bounds)) or bounds[-1] != float("inf"):
        raise ValueError(f"{name}: up_to must rise from row to row and end with null; it is {bounds}")
    return rows


def tile_for(rows: list[dict[str, Any]], size: float) -> dict[str, Any]:
    """The first row whose `up_to` isn't below `size`."""
    return next(row for row in rows if row["up_to"] is None or size <= row["up_to"])
