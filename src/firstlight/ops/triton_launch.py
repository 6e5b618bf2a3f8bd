"""How kernels are started: quickly, and while the one before still ends.

Kernel module: it needs triton. What the host launches is declared with `@kernel`, what kernels call with `@triton.jit`. A
kernel's pointers are the parameters whose names end in `_ptr`; the others are numbers, and constants (`tl.constexpr`).

**Quick starts.** From one launch to the next Triton finds out anew which variant of a kernel the arguments need. On a slow host
that takes longer than most kernels run. `@kernel` finds it by one tuple of all that Triton tells variants apart by, and leaves
to Triton those that weren't launched yet.

**Programmatic dependent launch**, where the GPU has it. A kernel takes `PDL: tl.constexpr`, calls `wait_for_inputs(PDL)` before
it touches memory, in every program, and is launched with `**dependent_launch(x)`. Its programs then take their places while
the last programs of the kernel before it still run, which saves about a microsecond a launch. Anywhere else the switch is off.

Weights may be asked for before the wait, and are then on their way while the kernel before still runs: they are as old as the model.
Whatever a kernel writes in a step may not, be it several kernels back, and nothing may be stored: kernels start early one after
another, so more than one may still run. (`let_next_begin`, the loads, `wait_for_earlier`.)

Not behind kernels whose programs all run at once and read weights until the end (`multiply_thin`, those of `triton_few_kernels`): programs
that take places early crowd on the multiprocessors that happen to be free, and the fullest of these then decides how long it takes.
Such a kernel doesn't let the next one begin before its own end (it calls `wait_for_earlier` alone), or isn't launched so at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime import JITFunction, driver

OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
"""What a launch may name beside the kernel's arguments."""
ONE_VARIANT: Mapping[str, Any] = {
    "do_not_specialize": ("requests", "exports_count", "segment_chunks", "pages_stride_row", "splits"),
    "do_not_specialize_on_alignment": (
        "query_start_ptr", "length_ptr", "row_ptr", "state_in_ptr", "state_out_ptr", "exports_ptr", "live_ptr",
    ),
}  # fmt: skip
"""Numbers that aren't compiled in if they are 1 or 16 divides them, and pointers whose alignment isn't, in every kernel that has one of
these names. They say where a step's requests are, and are read or used once a program, so a variant gains nothing; but each is
compiled when the first step comes that has it."""
START = """
def start(_grid, {parameters}):
    _device = _current_device()
    {addresses}
    _low_bits = ({all_addresses}) & 15
    _key = (_device, _low_bits and ({all_low_bits}), {told_apart})
    _variant = _variants.get(_key)
    if _variant is None or _enter_hooks or _exit_hooks:
        return _launch_by_triton(_key, _grid, {arguments}, {options})
    _launch, _function, _is_cooperative, _is_dependent, _metadata = _variant
    _sizes = len(_grid)
    _launch(
        _grid[0], _grid[1] if _sizes > 1 else 1, _grid[2] if _sizes > 2 else 1, _current_stream(_device), _function,
        _is_cooperative, _is_dependent, None, None, _metadata, None, None, None, {launched},
    )
"""
"""A kernel's own launch function: written out for its parameters, since a loop over them would take most of the time. Names
that aren't the kernel's begin with an underscore. A pointer goes to the launcher as a number, which it needn't ask about."""


class _Kinds(dict[int, int]):
    """What Triton tells numbers apart by: whether one is 1, else whether 16 divides it, and the bits that it takes."""

    def __missing__(self, number: int) -> int:
        if len(self) >= 1 << 16:
            self.clear()
        width = 0 if -(1 << 31) <= number < 1 << 31 else 1 if number < 1 << 63 else 2
        self[number] = kind = 0 if number == 1 else 1 + width * 2 + (number % 16 == 0)
        return kind


class Kernel(JITFunction):
    """A function that the host launches as `kernel[grid](...)`, with a tuple of one to three sizes.

    The first launch of a variant goes through Triton, and every one while launch hooks are set (a profiler's). The others
    don't notice globals or environment variables that changed since, nor a tensor that isn't on a GPU.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function, **ONE_VARIANT)
        self.variants: dict[Any, tuple[Any, ...]] = {}
        self._start: Callable[..., Any] | None = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        """The launch function for a grid."""
        return partial(self._start or self._write_start(), grid)

    def _write_start(self) -> Callable[..., Any]:
        """Make the launch function. It knows the driver, which importing a kernel mustn't ask for: there may be no GPU."""
        names = self.arg_names
        pointers = [name for name in names if name.endswith("_ptr")]
        constants = [self.arg_names[i] for i in self.constexprs]

        def by(name: str) -> str:
            if name in pointers:
                return f"None if {name} is None else {name}.dtype"
            if name in constants:
                return f"{name}, {name}.__class__"  # 1, True and 1.0 are equal, and other constants
            return f"_kinds[{name}] if {name}.__class__ is int else {name}.__class__"

        source = START.format(
            parameters=", ".join([*names, *(f"{option}=None" for option in OPTIONS)]),
            addresses="; ".join(f"_{name} = 0 if {name} is None else {name}.data_ptr()" for name in pointers),
            all_addresses=" | ".join(f"_{name}" for name in pointers),
            all_low_bits=", ".join([f"_{name} & 15" for name in pointers] + [""]),
            told_apart=", ".join([*map(by, names), *OPTIONS]),
            arguments=", ".join(names),
            options=", ".join(OPTIONS),
            launched=", ".join(f"_{name}" if name in pointers else name for name in names),
        )
        space: dict[str, Any] = {
            "_current_device": driver.active.get_current_device,
            "_current_stream": driver.active.get_current_stream,
            "_enter_hooks": knobs.runtime.launch_enter_hook.calls,
            "_exit_hooks": knobs.runtime.launch_exit_hook.calls,
            "_kinds": _Kinds(),
            "_variants": self.variants,
            "_launch_by_triton": self._launch_by_triton,
        }
        exec(source, space)
        self._start = start = space["start"]
        return start

    def _launch_by_triton(self, key: Any, grid: tuple[int, ...], *values: Any) -> None:
        """Launch, and remember under `key` what the next launch of this variant needs."""
        arguments = dict(zip(self.arg_names, values, strict=False))
        self.device_caches[key[0]][1].clear()  # what Triton remembers takes equal constants for the same
        given = zip(OPTIONS, values[len(arguments) :], strict=True)
        compiled = self.run(grid=grid, warmup=False, **arguments, **{name: v for name, v in given if v is not None})
        launcher = compiled.run
        told_apart = all(
            isinstance(value, Tensor | None) if name.endswith("_ptr") else type(value) in (int, float, bool)
            for i, (name, value) in enumerate(arguments.items())
            if i not in self.constexprs
        )
        if told_apart and launcher.global_scratch_size == launcher.profile_scratch_size == 0:
            is_cooperative, is_dependent = launcher.launch_cooperative_grid, launcher.launch_pdl
            self.variants[key] = (
                launcher.launch,
                compiled.function,
                is_cooperative,
                is_dependent,
                compiled.packed_metadata,
            )


def kernel(function: Callable[..., Any]) -> Any:
    """Declare a kernel that the host launches. `Kernel` knows one release of Triton, and CUDA; elsewhere it is `triton.jit`."""
    known = triton.__version__.startswith("3.6.") and torch.version.hip is None
    return Kernel(function) if known and not knobs.runtime.interpret else triton.jit(function, **ONE_VARIANT)


@triton.jit
def let_next_begin(PDL: tl.constexpr):
    """The next kernel may take its places, once all programs of this one have come here."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_earlier(PDL: tl.constexpr):
    """Until every kernel before this one has ended and its writes can be read."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Both at once, for kernels that have nothing to ask for before they wait."""
    let_next_begin(PDL)
    wait_for_earlier(PDL)


@cache
def _options_on(device: torch.device) -> Mapping[str, Any]:
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] < 9:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


def dependent_launch(x: Tensor) -> Mapping[str, Any]:
    """Launch options of a kernel that calls `wait_for_inputs`; x: a tensor on its device."""
    return _options_on(x.device)
