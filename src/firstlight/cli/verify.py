"""`firstlight verify MODEL`: where, and by how much, a model departs from transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from firstlight.cli.options import load, options_of
from firstlight.config import VerifyOptions


@options_of(VerifyOptions)
def command(
    given: dict[str, Any],
    all: Annotated[bool, typer.Option("--all", help="Show every module and phase, not each layer's worst.")] = False,
    json: Annotated[Path | None, typer.Option("--json", help="Write all findings to this file.")] = None,
) -> None:
    """Compare a model with transformers, layer by layer and module by module.

    Both get the same weights. Each module also runs on the reference's own inputs, so the first wrong one is named: in
    prefill, decode, a second chunk, a mixed batch. Exit status: 0 they agree, 1 a fault was found, 2 it couldn't be tried.
    """
    options = load(VerifyOptions, given)
    from rich.console import Console

    from firstlight.cli.output_file import check_output, write_output
    from firstlight.errors import FirstlightError
    from firstlight.verify.opening import open_subject
    from firstlight.verify.report import as_json, full_table, summary_table, verdict
    from firstlight.verify.run import verify
    from firstlight.weights.location import model_name

    errors = Console(stderr=True)

    def give_up(error: Exception) -> typer.Exit:
        errors.print(f"firstlight: error: {error}", markup=False, highlight=False, soft_wrap=True)
        return typer.Exit(2)  # not 1, which says that a fault was found

    try:
        if json is not None:
            check_output("--json", json)
        with errors.status("loading the model") as status:
            subject = open_subject(
                options.model,
                random=options.weights == "random",
                device=options.device,
                dtype=options.dtype,
                seed=options.seed,
                layers=options.layers,
                overrides=options.op,
            )
            findings = verify(subject, progress=status.update)
    except (FirstlightError, ValueError, RuntimeError) as error:
        raise give_up(error) from None
    name = model_name(options.model)
    report = as_json(name, subject, findings)
    console = Console()
    layers = "1 layer" if report["layers"] == 1 else f"{report['layers']} layers"
    head = f"{name}: {layers} in {report['dtype']} on {report['device']}; {report['reference']}\n"
    console.print(head, markup=False, highlight=False, soft_wrap=True)
    console.print(full_table(findings) if all else summary_table(subject, findings))
    console.print()
    for line in verdict(subject, findings):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if json is not None:
        from json import dumps

        try:
            write_output("--json", json, dumps(report, indent=1) + "\n")
        except FirstlightError as error:
            raise give_up(error) from None
    if not report["ok"]:
        raise typer.Exit(1)
