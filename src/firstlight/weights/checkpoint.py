"""Opening a checkpoint: what the model is, its tensors and its tokenizer, from whichever form it was published in.

Nothing is read but headers and configuration until a tensor or the tokenizer is asked for. A checkpoint is data: code in
its directory is never run (`auto_map` and other references to it in config.json are ignored), and pickled weights, which
are programs, are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from firstlight.errors import CheckpointError
from firstlight.weights.gguf_reader import read_gguf
from firstlight.weights.safetensors_reader import read_safetensors
from firstlight.weights.stored import StoredTensor
from firstlight.weights.strict_json import read_json_object
from firstlight.weights.tokenizer import Tokenizer, tokenizer_from_directory, tokenizer_from_gguf

MAX_CONFIG_BYTES = 50_000_000
PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Checkpoint:
    """A published model.

    config: as config.json has it (for a GGUF file: rebuilt from its metadata, with `gguf_architecture`).
    generation_config: as generation_config.json has it, or empty.
    has_weights: whether there are tensors; without, `tensors` is empty and the model can only have random weights.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    has_weights: bool

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors by their published names. Reads headers on first use; raises CheckpointError if one is wrong."""
        raise NotImplementedError

    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises TokenizerError if the checkpoint has none, or one of an unsupported kind."""
        raise NotImplementedError


class DirectoryCheckpoint(Checkpoint):
    """A directory with config.json, safetensors (or no weights), and the tokenizer's files."""

    def __init__(self, directory: Path, config_path: Path, has_weights: bool) -> None:
        self.path = directory
        self.config = read_json_object(config_path, MAX_CONFIG_BYTES)
        generation_path = directory / "generation_config.json"
        self.generation_config = (
            read_json_object(generation_path, MAX_CONFIG_BYTES) if generation_path.exists() else {}
        )
        self.has_weights = has_weights

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """See Checkpoint."""
        return MappingProxyType(read_safetensors(self.path) if self.has_weights else {})

    def tokenizer(self) -> Tokenizer:
        """See Checkpoint."""
        return tokenizer_from_directory(self.path, self.config, self.generation_config)


class GgufCheckpoint(Checkpoint):
    """A GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, tensors, self._metadata = read_gguf(path)
        self._tensors = MappingProxyType(tensors)
        self.generation_config = {}
        self.has_weights = bool(tensors)

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """See Checkpoint."""
        return self._tensors

    def tokenizer(self) -> Tokenizer:
        """See Checkpoint."""
        return tokenizer_from_gguf(self._metadata, self.path)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint at a path.

    path: a directory with config.json and safetensors; a .gguf file, or a directory whose only model is one; or, for a
    model with random weights, a config.json or a directory with nothing but it.
    Raises CheckpointError, naming the path, if there is no such thing or it is malformed.
    """
    path = Path(path).expanduser()
    try:
        if path.is_dir():
            return _open_directory(path)
        if path.suffix == ".gguf":
            return GgufCheckpoint(path)
        if path.suffix == ".json":
            return DirectoryCheckpoint(path.parent, path, has_weights=False)
        if path.suffix in PICKLED_SUFFIXES:
            raise CheckpointError(_pickled(path))
        if path.exists():
            raise CheckpointError(
                f"{path}: not a checkpoint; give the directory that holds config.json, a .gguf file, or a config.json"
            )
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror or error}") from error
    raise CheckpointError(f"{path}: no such file or directory (models are opened from disk; download it first)")


def _open_directory(directory: Path) -> Checkpoint:
    files = sorted(directory.iterdir())
    config_path = directory / "config.json"
    ggufs = [file for file in files if file.suffix == ".gguf"]
    has_safetensors = any(file.name.endswith((".safetensors", ".safetensors.index.json")) for file in files)
    if config_path.exists() and (has_safetensors or not ggufs):
        pickled = [file for file in files if file.suffix in PICKLED_SUFFIXES]
        if pickled and not has_safetensors:
            raise CheckpointError(_pickled(pickled[0]))
        return DirectoryCheckpoint(directory, config_path, has_safetensors)
    if len(ggufs) == 1:
        return GgufCheckpoint(ggufs[0])
    if ggufs:
        raise CheckpointError(f"{directory}: {len(ggufs)} GGUF files; name one, such as {ggufs[0]}")
    raise CheckpointError(f"{directory}: there is neither a config.json nor a .gguf file")


def _pickled(path: Path) -> str:
    return f"{path}: pickled weights can run code when they are loaded, so they are refused; convert them to safetensors"
