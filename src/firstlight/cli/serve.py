"""`firstlight serve MODEL`: the OpenAI-compatible server."""

from __future__ import annotations

from typing import Any

from firstlight.cli.options import load, options_of
from firstlight.config import EngineOptions, ServerOptions


@options_of(EngineOptions, ServerOptions)
def command(given: dict[str, Any]) -> None:
    """Serve a model through the OpenAI API."""
    engine_options, server_options = load(EngineOptions, given), load(ServerOptions, given)
    from firstlight.server.launch import serve

    serve(engine_options, server_options)
