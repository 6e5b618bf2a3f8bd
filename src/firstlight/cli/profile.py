"""`firstlight profile MODEL --batch B --context C`: a step of the engine, op by op."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from firstlight.cli.options import load, options_of
from firstlight.config import EngineOptions


@options_of(EngineOptions)
def command(
    given: dict[str, Any],
    batch: Annotated[int, typer.Option(min=0, help="Requests that decode in the step.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each of them, with this step.")] = 4096,
    prefill: Annotated[int, typer.Option(min=0, help="New prompt tokens in the step beside them.")] = 0,
    why: Annotated[bool, typer.Option("--why", help="Also say why each op's other providers were not chosen.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write the lines to this file, in seconds.")] = None,
) -> None:
    """Time a step of the engine op by op, and say who computes each, and how near its floor it is."""
    options = load(EngineOptions, given)
    from firstlight.cli.output_file import check_output, write_output

    if json is not None:
        check_output("--json", json)
    from firstlight.calibrate.profile import profile
    from firstlight.calibrate.profile_report import profile_json, profile_report
    from firstlight.cli.tables import table_console
    from firstlight.engine.engine import Engine

    engine = Engine(options)
    try:
        made = profile(engine, batch=batch, context=context, prefill=prefill)
    finally:
        engine.close()
    console = table_console()
    for part in profile_report(made, engine.loaded.hardware, why=why):
        console.print(part)
    if json is not None:
        write_output("--json", json, profile_json(made))
