"""`firstlight ops MODEL`: who computes what, in each bucket, and why nobody else does."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from firstlight.cli.options import load, options_of
from firstlight.config import EngineOptions


@options_of(EngineOptions)
def command(
    given: dict[str, Any],
    gpu: Annotated[str, typer.Option("--gpu", help="Bind for this described GPU (h200), which need not be here.")] = "",
    sites: Annotated[
        bool, typer.Option("--sites", help="List every call site, not one line for those that agree.")
    ] = False,
) -> None:
    """Show the provider bound to each op of a model, and why the others were refused. Loads no weights."""
    options = load(EngineOptions, given)
    from firstlight.cli.tables import table_console
    from firstlight.engine.ops_report import ops_report
    from firstlight.errors import FirstlightError
    from firstlight.hardware import GPUS

    if gpu and gpu.lower() not in GPUS:
        raise FirstlightError(f"--gpu {gpu}: not described; described are {', '.join(sorted(GPUS))}")
    console = table_console()
    for part in ops_report(options, GPUS.get(gpu.lower()), every_site=sites):
        console.print(part)
