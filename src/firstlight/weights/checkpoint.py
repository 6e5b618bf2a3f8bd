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

from firstlight.errors import TokenizerError
from firstlight.weights.gguf_reader import read_gguf
from firstlight.weights.location import Location, locate
from firstlight.weights.safetensors_reader import read_safetensors
from firstlight.weights.stored import StoredTensor
from firstlight.weights.tokenizer import Tokenizer, tokenizer_from_directory, tokenizer_from_gguf


class Checkpoint:
    """A published model.

    path: the .gguf file, or the directory. config: as config.json has it (for a GGUF file: rebuilt from its metadata,
    with `gguf_architecture`). generation_config: as generation_config.json has it, or empty. has_weights: whether there
    are tensors; without, `tensors` is empty and the model can only have random weights.
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
        tokenizer = self._find_tokenizer()
        if tokenizer is None:
            raise TokenizerError(f"{self.path}: this checkpoint has no tokenizer, so it takes token ids, not text")
        return tokenizer

    def _find_tokenizer(self) -> Tokenizer | None:
        raise NotImplementedError


class DirectoryCheckpoint(Checkpoint):
    """A directory with config.json, safetensors (or no weights), and the tokenizer's files."""

    def __init__(self, location: Location) -> None:
        self.path = location.directory
        self.config, self.generation_config = location.read_configs()
        self.has_weights = location.has_safetensors

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """See Checkpoint."""
        return MappingProxyType(read_safetensors(self.path) if self.has_weights else {})

    def _find_tokenizer(self) -> Tokenizer | None:
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

    def _find_tokenizer(self) -> Tokenizer | None:
        return tokenizer_from_gguf(self._metadata, self.path)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint at a path.

    path: a directory with config.json and safetensors; a .gguf file, or a directory whose only model is one; or, for a
    model with random weights, a config.json or a directory with nothing but it.
    Raises CheckpointError, naming the path, if there is no such thing or it is malformed.
    """
    location = locate(path)
    return GgufCheckpoint(location.gguf) if location.gguf is not None else DirectoryCheckpoint(location)
