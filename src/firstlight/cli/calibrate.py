"""`firstlight calibrate MODEL`: measure every provider that can serve the model here, and write the table to choose by."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from firstlight.cli.options import load, options_of
from firstlight.config import EngineOptions


@options_of(EngineOptions)
def command(
    given: dict[str, Any],
    out: Annotated[Path, typer.Option("--out", "-o", help="File for the table.")],
    minutes: Annotated[
        float, typer.Option(min=0.05, help="Steps that would begin later are left out, the rarest first.")
    ] = 5.0,
    only: Annotated[list[str] | None, typer.Option(help="An op to measure; may be repeated. Default: all.")] = None,
) -> None:
    """Measure the providers of every op that a model calls on this device, and write the table to choose by.

    One layer of each kind runs steps of up to --max-running rows and --step-tokens tokens, with the checkpoint's weights;
    for a config.json alone, say --weights random. Each provider is checked against
    the reference before it is timed; one that fails is written down with the reason, and never chosen near that call. Serve
    with --table FILE.
    """
    options = load(EngineOptions, given)
    from time import perf_counter

    from rich.console import Console

    from firstlight.calibrate.report import failures, scratch_lines
    from firstlight.calibrate.run import calibrate, table_text, weights_of
    from firstlight.cli.output_file import check_output, write_output
    from firstlight.errors import FirstlightError
    from firstlight.ops import REGISTRY

    for name in only or ():
        if name not in REGISTRY:
            raise FirstlightError(f"--only {name}: no such op; there are {', '.join(sorted(REGISTRY))}")
    check_output("--out", out)
    errors, start = Console(stderr=True), perf_counter()
    with errors.status("") as status:
        made = calibrate(options, only or (), minutes * 60, status.update)
    console = Console(soft_wrap=True, highlight=False)
    for line in (*failures(made.results), *scratch_lines(made.scratch)):
        console.print(line, markup=False)
    for shape in made.left_out:
        console.print(f"left out, for want of time: {shape}", markup=False)
    timed = sum(result.seconds > 0 for result in made.results)
    console.print(
        f"{timed} calls timed, {len(made.results) - timed} refused, with {weights_of(options)}, "
        f"in {perf_counter() - start:.0f} s",
        markup=False,
    )
    write_output("--out", out, table_text(made.table))
    console.print(f"written to {out}", markup=False)
