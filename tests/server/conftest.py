from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server.served import RunningServer, running, write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint directory named `echo`, with a tokenizer."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "echo")


@pytest.fixture(scope="session")
def server(checkpoint: Path) -> Iterator[RunningServer]:
    """One server for all tests that leave it as it was."""
    with running({"model": str(checkpoint)}) as server:
        yield server
