"""Launches a kernel in many ways on a driver that only writes down what it is given, and prints a line of JSON a launch.

    python launch_variants.py

{"case": name, "triton": what plain Triton launches, "first", "quick": what `kernel` launches the first and the second time,
"new": how many of these two went through Triton}. A launch is [variant, grid, stream, function, options, warps, arguments].
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from firstlight.ops.triton_launch import kernel

launches: list[Any] = []
"""What the driver was given since it was last emptied."""


class Launcher:
    """In the place of triton's CudaLauncher."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self, source: Any, metadata: Any) -> None:
        self.launch_cooperative_grid, self.launch_pdl = metadata.launch_cooperative_grid, metadata.launch_pdl
        self.variant = metadata.hash

    def __call__(self, x: int, y: int, z: int, stream: int, function: str, *arguments: Any) -> None:
        self.launch(x, y, z, stream, function, self.launch_cooperative_grid, self.launch_pdl, None, None, *arguments)

    def launch(self, x: int, y: int, z: int, stream: int, function: str, *more: Any) -> None:
        cooperative, pdl, _, _, metadata, _, enter_hook, exit_hook, *arguments = more
        for hook in (enter_hook, exit_hook):
            if hook is not None:
                hook(None)
        given = [repr(a.data_ptr() if isinstance(a, torch.Tensor) else 0 if a is None else a) for a in arguments]
        launches.append([self.variant, [x, y, z], stream, function, [cooperative, pdl], metadata[0], given])


class Driver:
    """A GPU with compute capability 9.0 that isn't there. `device` is the current one."""

    launcher_cls = Launcher
    device = 0

    def __init__(self) -> None:
        self.utils = SimpleNamespace(
            load_binary=lambda name, binary, shared, device: (name, f"{device}:{hash(binary)}", 32, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 232448},
        )

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 1000 + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def copy(y_ptr, x_ptr, extra_ptr, n, stride, factor, BLOCK: tl.constexpr, HAS_EXTRA: tl.constexpr, MORE: tl.constexpr):
    o_x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(x_ptr + o_x * stride, mask=o_x < n, other=0.0) * factor
    if HAS_EXTRA:
        b_x += tl.load(extra_ptr + o_x, mask=o_x < n, other=0.0)
    b_x += MORE
    tl.store(y_ptr + o_x, b_x.to(y_ptr.dtype.element_ty), mask=o_x < n)


def cases() -> list[tuple[str, dict[str, Any]]]:
    """(name, what differs from the plain launch)."""
    x = torch.zeros(1024)
    half = torch.zeros(1024, dtype=torch.float16)
    return [
        ("plain", {}),
        ("another address", {"x_ptr": torch.zeros(1024)}),
        ("address off by 4", {"x_ptr": x[1:]}),
        ("another address off by 4", {"y_ptr": x[1:]}),
        ("address off by 16", {"x_ptr": x[4:]}),
        ("dtype", {"x_ptr": half}),
        ("dtype and address", {"x_ptr": half[1:]}),
        ("no pointer", {"extra_ptr": None, "HAS_EXTRA": False}),
        ("n = 1", {"n": 1}),
        ("n = 16", {"n": 16}),
        ("n = 17", {"n": 17}),
        ("n = 0", {"n": 0}),
        ("n in 64 bits", {"n": 1 << 31}),
        ("odd n in 64 bits", {"n": (1 << 31) + 1}),
        ("n in 64 bits, unsigned", {"n": 1 << 63}),
        ("least n in 32 bits", {"n": -(1 << 31)}),
        ("negative n in 64 bits", {"n": -(1 << 31) - 1}),
        ("n a bool", {"n": True}),
        ("n a float", {"n": 1.0}),
        ("stride = 1", {"stride": 1}),
        ("factor = 1", {"factor": 1.0}),
        ("factor an int", {"factor": 1}),
        ("factor another int", {"factor": 3}),
        ("block", {"BLOCK": 128}),
        ("constant 1", {"MORE": 1}),
        ("constant True", {"MORE": True}),
        ("constant 1.0", {"MORE": 1.0}),
        ("warps", {"num_warps": 2}),
        ("stages", {"num_stages": 2}),
        ("registers", {"maxnreg": 64}),
        ("dependent launch", {"launch_pdl": True}),
        ("two sizes", {"grid": (3, 2)}),
        ("three sizes", {"grid": (3, 2, 5)}),
        ("device", {"device": 1}),
    ]


def main() -> None:
    active = Driver()
    driver.set_active(active)
    ours = kernel(copy)
    new: list[str] = []
    ours.run = lambda **arguments: new.append("new") or type(ours).run(ours, **arguments)
    plain = {"y_ptr": torch.zeros(1024), "x_ptr": torch.zeros(1024), "extra_ptr": torch.zeros(1024), "n": 1000,
             "stride": 2, "factor": 0.5, "BLOCK": 256, "HAS_EXTRA": True, "MORE": 0, "grid": (4,), "device": 0}  # fmt: skip
    for name, changed in cases():
        arguments = plain | changed
        grid, active.device = arguments.pop("grid"), arguments.pop("device")
        launches.clear()
        new.clear()
        theirs = triton.jit(copy)  # anew: to itself, constants of 1, True and 1.0 are one
        for launched in (theirs, ours, ours):
            launched[grid](**arguments)
        print(json.dumps({"case": name, **dict(zip(("triton", "first", "quick"), launches, strict=True)),
                          "new": len(new)}))  # fmt: skip
    launches.clear()
    knobs.runtime.launch_enter_hook.add(lambda metadata: launches.append("hook"))
    arguments = {key: value for key, value in plain.items() if key not in ("grid", "device")}
    ours[4,](**arguments)
    print(json.dumps({"case": "hook", "launches": [one if one == "hook" else "launch" for one in launches]}))


if __name__ == "__main__":
    main()
