"""How long a call takes: inside a CUDA graph on a GPU, by repeated calls on a CPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import cache
from statistics import median
from typing import Any

import torch

Call = Callable[[], Any]
LEAST_CALLS = 8
"""In a graph, where they are short: the time between two replays is spread over them."""
GRAPH_SECONDS = 0.015
REPLAYS = 7
CPU_SECONDS = 0.02


class CaptureError(RuntimeError):
    """A call that can't be captured in a graph: it waits for the device, or launches by what it finds there."""


def once(call: Call, device: torch.device) -> float:
    """Seconds of one call that has run before, launches included."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def seconds_of(calls: Sequence[Call], device: torch.device) -> float:
    """Median seconds of a call, taken in turn. Every call must have run before. Raises CaptureError."""
    estimate = once(calls[0], device)
    return _in_graph(calls, estimate) if device.type == "cuda" else _repeated(calls, estimate)


def refuse_waiting(call: Call) -> None:
    """Run a call on a GPU; raises CaptureError if it waits for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        raise CaptureError("waits for the device, so it can't be captured in a graph") from None
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _in_graph(calls: Sequence[Call], estimate: float) -> float:
    refuse_waiting(calls[0])
    most = max(1, int(GRAPH_SECONDS / estimate))
    count = min(max(len(calls), LEAST_CALLS), most)
    graph = _captured([calls[i % len(calls)] for i in range(count)])
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / count)
    return median(times[1:])


@cache
def _capture_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def _captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """`torch.cuda.graph` gives all cached memory back first, which takes longer than what is measured here.

    One stream for all: what a provider keeps for a stream is made by the call before the capture.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(_capture_stream()):
        calls[0]()
        torch.cuda.current_stream().synchronize()
        graph.capture_begin()
        try:
            for call in calls:
                call()
        except RuntimeError as error:
            with contextlib.suppress(RuntimeError):  # it says once more that the capture failed
                graph.capture_end()
            raise CaptureError(f"can't be captured in a graph: {' '.join(str(error).split())[:200]}") from error
        graph.capture_end()
    torch.cuda.synchronize()
    return graph


def _repeated(calls: Sequence[Call], estimate: float) -> float:
    count = max(1, int(CPU_SECONDS / REPLAYS / max(estimate, 1e-7)))
    times = []
    for _ in range(REPLAYS):
        start = time.perf_counter()
        for i in range(count):
            calls[i % len(calls)]()
        times.append((time.perf_counter() - start) / count)
    return min(times)  # what else runs on the machine only adds to them


def copy_bandwidth(device: torch.device, nbytes: int = 1 << 30) -> float:
    """Bytes a second of a copy, read and written: what the memory gives at most."""
    source = torch.randn(nbytes // 4, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        torch.mul(source, 1.0, out=target)

    copy()
    return 2 * source.nbytes / seconds_of([copy], device)
