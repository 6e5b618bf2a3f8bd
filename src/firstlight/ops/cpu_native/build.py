"""Compiles the kernels at first use, for the CPU at hand, and loads them.

One g++ call of a few seconds; the result is kept in `~/.cache/firstlight/cpu_native/<hash>/`, where the hash covers the sources,
the compiler, the flags, Python, and the CPU's instruction sets, so nothing stale is ever loaded. A finished file is moved into
place in one step: processes that start together may each compile, and any of them wins.

The kernels use the OpenMP runtime that torch has loaded, and with it torch's number of threads: a second runtime beside it
would put twice as many threads on the cores.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

logger = logging.getLogger(__name__)

MODULE = "firstlight_cpu_native"
SOURCES = Path(__file__).parent
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fPIC",
    "-fno-math-errno",
    "-Wno-attributes",
    "-Wno-ignored-attributes",
)
COMPILE_TIMEOUT_S = 300


class NativeUnavailableError(RuntimeError):
    """The kernels can't be built or run here; the message says why, for people."""


def missing_requirement() -> str | None:
    """What the kernels need of this machine and it lacks, instruction sets aside; or None. Compiles nothing."""
    if sys.platform != "linux":
        return f"the native CPU kernels are built for Linux only, and this is {sys.platform}"
    if compiler() is None:
        return "no C++ compiler found (g++ or c++); install one, e.g. Debian's package g++"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return f"no Python.h in {sysconfig.get_path('include')}; install Python's headers, e.g. Debian's package python3-dev"
    return None


@functools.cache
def attempt() -> ModuleType | str:
    """The compiled module, or why there is none. Tried once a process; a failure is logged, since steps get slower."""
    try:
        return load()
    except NativeUnavailableError as error:
        logger.warning("the native CPU kernels are not used: %s", error)
        return str(error)


def load() -> ModuleType:
    """The compiled module; built first if need be. Raises NativeUnavailableError with the reason."""
    if reason := missing_requirement():
        raise NativeUnavailableError(reason)
    library = cache_folder() / f"{MODULE}.so"
    if not library.exists():
        build(library)
    return import_library(library)


def import_library(library: Path) -> ModuleType:
    """The module in a compiled file. Raises NativeUnavailableError if it can't be loaded."""
    spec = importlib.util.spec_from_file_location(MODULE, library)
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise NativeUnavailableError(f"the compiled kernels in {library} can't be loaded: {error}") from error
    return module


def build(library: Path) -> None:
    """Compile to `library`. Raises NativeUnavailableError with the compiler's words."""
    program = compiler()
    assert program is not None
    logger.info("compiling the CPU kernels, once (about 5 s)")
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built, target = Path(folder) / "module.o", Path(folder) / library.name
        run_compiler(
            [program, *FLAGS, f"-I{sysconfig.get_path('include')}", "-c", str(SOURCES / "module.cpp"), "-o", str(built)]
        )
        # Linked without -fopenmp, which would add the system's OpenMP runtime to torch's.
        run_compiler([program, "-shared", str(built), *openmp_libraries(), "-o", str(target)])
        os.replace(target, library)


def run_compiler(command: list[str]) -> None:
    """Run the compiler or linker. Raises NativeUnavailableError with its words."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(f"compiling the native CPU kernels failed: {error}") from error
    if result.returncode:
        words = "\n".join(result.stderr.splitlines()[:12])
        raise NativeUnavailableError(f"compiling the native CPU kernels failed; {' '.join(command)} said:\n{words}")


def cache_folder() -> Path:
    """Where the library for these sources, this compiler and this CPU is kept."""
    digest = hashlib.sha256()
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        digest.update(source.read_bytes())
    for part in (*FLAGS, compiler_version(), sys.version, " ".join(sorted(cpu_flags())), *openmp_libraries()):
        digest.update(part.encode())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "firstlight" / "cpu_native" / digest.hexdigest()[:20]


def compiler() -> str | None:
    """The C++ compiler's path."""
    return shutil.which("g++") or shutil.which("c++")


@functools.cache
def compiler_version() -> str:
    """What the compiler says of itself; part of the hash."""
    program = compiler()
    assert program is not None
    return subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The CPU's instruction sets, as Linux names them."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def openmp_libraries() -> list[str]:
    """The very OpenMP library that torch has loaded, whatever its file is called, to link against.

    Wheels bring their own copy, some under a name with a hash: linking to the system's would start a second runtime.
    """
    folder = Path(torch.__file__).parent
    candidates = [*(folder / "lib").glob("libgomp*"), *(folder.parent / "torch.libs").glob("libgomp*")]
    return [str(sorted(candidates)[0])] if candidates else ["-lgomp"]
