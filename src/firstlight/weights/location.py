"""Where a checkpoint's parts are, decided by what files are there; nothing but configuration is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstlight.errors import CheckpointError
from firstlight.weights.strict_json import read_json_object

MAX_CONFIG_BYTES = 50_000_000
PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Location:
    """A checkpoint on disk: a GGUF file, or a directory with a config.json and perhaps safetensors."""

    directory: Path
    config: Path | None = None
    has_safetensors: bool = False
    gguf: Path | None = None

    def read_configs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """config.json and generation_config.json, or empty. Raises CheckpointError, naming the file."""
        generation = self.directory / "generation_config.json"
        return (
            read_json_object(self.config, MAX_CONFIG_BYTES) if self.config else {},
            read_json_object(generation, MAX_CONFIG_BYTES) if generation.exists() else {},
        )


def model_name(path: str | Path) -> str:
    """What a model is called: as the checkpoint's directory, or as its GGUF or JSON file without the suffix."""
    path = Path(path).expanduser().resolve()
    if path.suffix == ".json":
        return path.parent.name if path.name == "config.json" else path.stem
    return path.stem if path.suffix == ".gguf" else path.name


def locate(path: str | Path) -> Location:
    """The checkpoint at a path; see `open_checkpoint` for what a path may be.

    Raises CheckpointError, naming the path and what is missing.
    """
    path = Path(path).expanduser()
    try:
        if path.is_dir():
            return _in_directory(path)
        if path.exists() and path.suffix == ".gguf":
            return Location(path.parent, gguf=path)
        if path.exists() and path.suffix == ".json":
            return Location(path.parent, config=path)
        if path.exists() and path.suffix in PICKLED_SUFFIXES:
            raise CheckpointError(_pickled(path))
        if path.exists():
            raise CheckpointError(
                f"{path}: not a checkpoint; give the directory that holds config.json, a .gguf file, or a config.json"
            )
    except (OSError, ValueError) as error:  # no permission; a name too long; a null character
        raise CheckpointError(f"{path}: can't be read: {error}") from error
    raise CheckpointError(f"{path}: no such file or directory (models are opened from disk; download it first)")


def _in_directory(directory: Path) -> Location:
    files = sorted(directory.iterdir())
    config = directory / "config.json"
    ggufs = [file for file in files if file.suffix == ".gguf"]
    has_safetensors = any(file.name.endswith((".safetensors", ".safetensors.index.json")) for file in files)
    if config.exists() and (has_safetensors or not ggufs):
        pickled = [file for file in files if file.suffix in PICKLED_SUFFIXES]
        if pickled and not has_safetensors:
            raise CheckpointError(_pickled(pickled[0]))
        return Location(directory, config, has_safetensors)
    if len(ggufs) == 1:
        return Location(directory, gguf=ggufs[0])
    if ggufs:
        raise CheckpointError(f"{directory}: {len(ggufs)} GGUF files; name one, such as {ggufs[0]}")
    raise CheckpointError(f"{directory}: there is neither a config.json nor a .gguf file")


def _pickled(path: Path) -> str:
    return (
        f"{path}: pickled weights can run code when they are loaded, so they are refused; convert them to safetensors"
    )
