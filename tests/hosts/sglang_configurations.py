"""Finishes SGLang's options in this process, without engines: `python sglang_configurations.py CASES RESULT`.

CASES: {name: arguments of ServerArgs}. RESULT: {name: {"objection": why we don't serve, or null; "options": those that our
defaults touch; "log": lines of ours; "error": what SGLang said to the options, or null}}.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

TOUCHED = ("enable_multimodal", "mamba_radix_cache_strategy", "disable_overlap_schedule", "uses_mamba_radix_cache")


def finish(arguments: dict[str, Any], said: list[str]) -> dict[str, Any]:
    """One configuration, as an engine would finish it. `env` in the arguments: variables for this case alone."""
    import torch
    from sglang.srt.server_args import ServerArgs

    from firstlight.plugin.sglang.options import objection

    said.clear()
    told: dict[str, Any] = {"objection": None, "options": {}, "error": None}
    dtype = arguments.pop("dtype", "float32")
    environment = arguments.pop("env", {})
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        options = ServerArgs(
            device="cpu", dtype=dtype, attention_backend="torch_native", skip_tokenizer_init=True, **arguments
        )
        found = objection(options, options.get_model_config().hf_config, getattr(torch, dtype), options.tp_size)
        told |= {"objection": found, "options": {name: getattr(options, name) for name in TOUCHED}}
    except Exception as raised:
        told["error"] = f"{type(raised).__name__}: {raised}"
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    return {**told, "log": list(said)}


def main() -> None:
    """See the module's docstring."""
    from sglang.srt.plugins import load_plugins

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logging.getLogger("firstlight").addHandler(handler)
    load_plugins()
    cases = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps({name: finish(case, said) for name, case in cases.items()}))


if __name__ == "__main__":
    main()
