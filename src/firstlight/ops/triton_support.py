"""What every Triton provider needs to know before its kernels are imported, and what differs between GPUs.

Kernels live in modules that import triton at their top; a provider imports them inside `run`, when it is first called. So
`firstlight.ops` can be imported, and a model bound or predicted, where triton isn't installed.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from firstlight.hardware import Hardware
from firstlight.hardware.detect import GLUON_RELEASE
from firstlight.ops.op import Call, Op
from firstlight.quant import E4M3FNUZ, FLOAT8_BY_COLUMN, FLOAT8_BY_TOKEN, Packed
from firstlight.quant.activations import GROUP

FNUZ_ARCHITECTURES = ("gfx940", "gfx941", "gfx942")
"""GPUs whose FP8 matrix instructions read e4m3fnuz: an exponent bias of 8 where e4m3fn has 7, and no negative zero."""
E4M3FN_ARCHITECTURES = ("gfx950",)
"""AMD's GPUs with instructions for e4m3fn."""


def unavailable(hardware: Hardware) -> str | None:
    """Why Triton kernels can't serve this hardware, or None."""
    if hardware.kind not in ("cuda", "hip"):
        return f"Triton kernels are for GPUs, and this is {hardware.name}"
    return None if hardware.has("triton") else "triton is not installed"


def hopper_unavailable(hardware: Hardware) -> str | None:
    """Why kernels in Gluon for Hopper's matrix units and TMA can't serve this hardware, or None."""
    if reason := unavailable(hardware):
        return reason
    if hardware.architecture != "sm_90":
        return f"serves sm_90, not {hardware.architecture}"
    if not hardware.has("gluon"):
        return f"is written in the Gluon of triton {GLUON_RELEASE}, and another release is installed"
    return None


def float8_pages_unavailable(hardware: Hardware, *pages: torch.Tensor) -> str | None:
    """Why Triton kernels can't convert these pages from and to e4m3fn, or None: they can, or none of the pages is FP8."""
    if not any(pool.dtype == torch.float8_e4m3fn for pool in pages):
        return None
    architecture = hardware.architecture
    if architecture in FNUZ_ARCHITECTURES:
        return f"the pages are float8_e4m3fn, and {architecture} converts e4m3fnuz"
    if hardware.kind == "hip" and architecture not in E4M3FN_ARCHITECTURES:
        return f"the pages are float8_e4m3fn, which {', '.join(E4M3FN_ARCHITECTURES)} converts, not {architecture}"
    if hardware.kind == "cuda" and int(architecture.removeprefix("sm_")) < 89:
        return f"the pages are float8_e4m3fn, which GPUs convert from sm_89 on, not {architecture}"
    return None


def cannot_emit(call: Call, columns: int, dimensions: int = 2) -> str | None:
    """Why Triton kernels can't pack a result as a call asks for it, or None: they can, or it is plain.

    columns: that a program has of a row, and that groups have to fill. dimensions: of the result.
    """
    emit = call.kwargs.get("emit")
    if emit is None:
        return None
    if emit.format not in (FLOAT8_BY_TOKEN, FLOAT8_BY_COLUMN):
        return f"emits {FLOAT8_BY_TOKEN} and {FLOAT8_BY_COLUMN}, not {emit.format}"
    if call.hardware.architecture in FNUZ_ARCHITECTURES:
        return f"emits float8_e4m3fn, and {call.hardware.architecture} multiplies e4m3fnuz"
    if dimensions != 2:
        return f"emits tokens by columns, and the result has {dimensions} dimensions"
    return f"emits whole groups of {GROUP} columns, not {columns} columns" if columns % GROUP else None


def provide_fp8(
    op: Op, name: str, run: Callable[..., Any], *, when: Callable[[Call], str | None], weights: tuple[str, ...],
    **properties: Any,
) -> None:  # fmt: skip
    """Register a provider of FP8 weights twice: as checkpoints store them, and as `name`_fnuz for GPUs that multiply e4m3fnuz.

    weights: the arguments that may be FP8; for the second they are converted at load (layout e4m3fnuz). The kernels are the
    same: they multiply in the dtype that a weight comes in.
    """
    parameters = list(inspect.signature(op.body).parameters)[1 if op.parts else 0 :]

    def given(call: Call) -> Mapping[str, Any]:
        values = {**dict(zip(parameters, call.args, strict=False)), **call.kwargs}
        return {key: values[key] for key in weights if values.get(key) is not None}

    def as_stored(call: Call) -> str | None:
        if call.hardware.architecture in FNUZ_ARCHITECTURES and any(
            isinstance(w, Packed) for w in given(call).values()
        ):
            return f"{call.hardware.architecture} multiplies e4m3fnuz, for which there is {name}_fnuz"
        return when(call)

    def converted(call: Call) -> str | None:
        if call.hardware.architecture not in FNUZ_ARCHITECTURES:
            return f"serves {', '.join(FNUZ_ARCHITECTURES)}, not {call.hardware.architecture}"
        for key, weight in given(call).items():
            if not isinstance(weight, Packed):
                return f"{key} is plain, which {name} serves"
            if reason := E4M3FNUZ.accepts(weight.format, tuple(weight.shape)):
                return f"{key}: {reason}"
        return when(call)

    op.provide(name, run, when=as_stored, **properties)
    properties["wants"] = None  # nobody emits e4m3fnuz
    op.provide(f"{name}_fnuz", run, when=converted, layout=dict.fromkeys(weights, E4M3FNUZ.name), **properties)


def cdiv(n: int, size: int) -> int:
    """How many of `size` cover n. Triton's own, like its power of two, serves kernels as well and takes the host 5 us."""
    return -(-n // size)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n; n from 1 on."""
    return 1 << (n - 1).bit_length()


def request_block(requests: int) -> int:
    """The power of two that a kernel looks through a step's requests in, to find what a program works on.

    64 at least: each size is a kernel of its own, and where steps aren't captured before the first request comes (prompts inside a
    host), the first step of each size waits until it is compiled.
    """
    return max(64, power_of_two(requests))


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side, at one a multiprocessor."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def register_limit(registers: int) -> dict[str, int]:
    """Launch option that caps a thread's registers, so that more programs share a multiprocessor; 0: no cap. NVIDIA only."""
    return {"maxnreg": registers} if registers and torch.version.hip is None else {}


def read_tiles(kernel_file: str, name: str) -> list[dict[str, Any]]:
    """The rows of a tuning table beside a kernel for this torch's kind of GPU, ordered by `up_to` (None: all the rest)."""
    kind = "cuda" if torch.version.hip is None else "hip"
    rows: list[dict[str, Any]] = json.loads((Path(kernel_file).parent / name).read_text())[kind]
    bounds = [float("inf") if row["up_to"] is None else row["up_to"] for row in rows]
    if bounds != sorted(set(bounds)) or bounds[-1] != float("inf"):
        raise ValueError(f"{name}: up_to must rise from row to row and end with null; it is {bounds}")
    return rows


def tile_for(rows: list[dict[str, Any]], size: float) -> dict[str, Any]:
    """The first row whose `up_to` isn't below `size`."""
    return next(row for row in rows if row["up_to"] is None or size <= row["up_to"])
