"""Describe the device that is really there."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from firstlight.errors import InputError
from firstlight.hardware.description import Hardware
from firstlight.hardware.gpus import H200

CPU_FEATURES = (
    "avx2", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8",
    "asimd", "bf16", "sve",
)  # fmt: skip

GLUON_RELEASE = "3.6"
"""Of Triton: the names in its Gluon still change from one release to the next."""


def detect(device: str) -> Hardware:
    """The description of `device` ("cpu", "cuda", "cuda:1"). Raises ValueError if it isn't there."""
    if device == "cpu":
        return describe_cpu()
    import torch

    if not torch.cuda.is_available():
        raise InputError(
            f"device {device!r} was asked for, but torch {torch.__version__} sees no GPU; use --device cpu"
        )
    properties = torch.cuda.get_device_properties(device)
    hip = torch.version.hip is not None
    architecture = properties.gcnArchName.split(":")[0] if hip else f"sm_{properties.major}{properties.minor}"
    known = H200 if properties.name == H200.name else None
    return Hardware(
        name=properties.name,
        kind="hip" if hip else "cuda",
        architecture=architecture,
        peak=known.peak if known else {},
        bandwidth=known.bandwidth if known else 0.0,
        memory=properties.total_memory,
        multiprocessors=properties.multi_processor_count,
        l2=getattr(properties, "L2_cache_size", 0),
        features=_triton_features(hip),
    )


def _triton_features(hip: bool) -> frozenset[str]:
    """ "triton", and "gluon" with the release whose Gluon our kernels are written in."""
    if not triton_is_installed():
        return frozenset()
    return frozenset({"triton", "gluon"} if gluon_is_known() and not hip else {"triton"})


def gluon_is_known() -> bool:
    """Whether the triton that is installed is the release whose Gluon our kernels are written in."""
    try:
        return version("triton").startswith(f"{GLUON_RELEASE}.")
    except PackageNotFoundError:  # on a path, but not installed
        return False


def triton_is_installed() -> bool:
    """Whether triton can be imported (a folder that happens to have its name doesn't count)."""
    spec = find_spec("triton")
    return spec is not None and spec.origin is not None


def describe_cpu() -> Hardware:
    """This machine's CPU: cores, memory, the instruction sets that providers ask for, and whether a compiler is here."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    words: set[str] = set()
    name = platform.processor() or platform.machine()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            words.update(value.split())
        elif key.strip() == "model name":
            name = value.strip()
    features = {feature for feature in CPU_FEATURES if feature in words}
    if shutil.which("g++") or shutil.which("c++"):
        features.add("compiler")
    pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return Hardware(
        name=name,
        kind="cpu",
        architecture="+".join(feature for feature in CPU_FEATURES if feature in features) or platform.machine(),
        memory=pages * os.sysconf("SC_PAGE_SIZE") if pages else 0,
        multiprocessors=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        features=frozenset(features),
    )
