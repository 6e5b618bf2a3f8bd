"""Starting a kernel while the one before it ends: programmatic dependent launch, where the GPU has it.

Kernel module: it needs triton. A kernel takes `PDL: tl.constexpr`, calls `wait_for_inputs(PDL)` before it touches memory, in
every program, and is launched with `**dependent_launch(x)`. Its programs then take their places while the last programs of
the kernel before it still run, which saves about a microsecond a launch. Anywhere else the switch is off.

Not for kernels whose programs all run at once and read weights until the end (`multiply_thin`, `triton_few_kernels`): programs that
take places early crowd on the multiprocessors that happen to be free, and the fullest of these then decides how long it takes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Until every kernel before this one has ended and its writes can be read; the next kernel may take its places now."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@cache
def _has_dependent_launch(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def dependent_launch(x: Tensor) -> dict[str, Any]:
    """Launch options of a kernel that calls `wait_for_inputs`; x: a tensor on its device."""
    if x.is_cuda and _has_dependent_launch(x.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
