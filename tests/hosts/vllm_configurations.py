"""Finishes vLLM configurations in this process, without engines: `python vllm_configurations.py CASES RESULT`.

CASES: {name: arguments of EngineArgs}. RESULT: {name: {"architecture": who serves, "error": or null, "log": lines of ours}}.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any


class Lines:
    """Collects what our part of vLLM's log says, as a filter: vLLM takes away handlers when it sets up its own."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep a line, and let it pass."""
        self.lines.append(f"{record.levelname} {record.getMessage()}")
        return True


def finish(arguments: dict[str, Any], said: Lines) -> dict[str, Any]:
    """One configuration, as an engine would finish it."""
    from vllm.engine.arg_utils import EngineArgs

    said.lines.clear()
    architecture = error = None
    try:
        config = EngineArgs(**{"dtype": "float32", "max_model_len": 512, "enforce_eager": True, **arguments})
        architecture = config.create_engine_config().model_config.architecture
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"architecture": architecture, "error": error, "log": list(said.lines)}


def main() -> None:
    """See the module's docstring."""
    said = Lines()
    logging.getLogger("vllm.firstlight").addFilter(said)
    cases = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps({name: finish(case, said) for name, case in cases.items()}))


if __name__ == "__main__":
    main()
