"""`firstlight verify MODEL`: where, and by how much, a model departs from transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import Field

from firstlight.cli.options import load, options_of
from firstlight.config import EngineOptions, Options


def _description(name: str) -> str:
    return EngineOptions.model_fields[name].description or ""


class VerifyOptions(Options):
    """What is verified. Names and meanings are those of the options of a run."""

    model: str = Field(description=_description("model"))
    weights: Literal["auto", "random"] = Field("auto", description=_description("weights"))
    device: str = Field("auto", description=_description("device"))
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Activations; `auto`: float32 on a CPU, the checkpoint's own on a GPU. The reference is in float32.",
    )
    seed: int = Field(0, description="Seed of the token ids, and of random weights.")
    layers: int = Field(0, ge=0, description="Only this many layers, from the first; 0: as many as memory holds.")
    op: tuple[str, ...] = Field((), description=_description("op"))


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

    from firstlight.errors import FirstlightError
    from firstlight.verify.opening import model_name, open_subject
    from firstlight.verify.report import as_json, full_table, summary_table, verdict
    from firstlight.verify.run import verify

    errors = Console(stderr=True)
    try:
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
        errors.print(f"firstlight: error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    name = model_name(options.model)
    report = as_json(name, subject, findings)
    console = Console()
    head = f"{name}: {report['layers']} layers in {report['dtype']} on {report['device']}; {report['reference']}\n"
    console.print(head, markup=False, highlight=False, soft_wrap=True)
    console.print(full_table(findings) if all else summary_table(subject, findings))
    console.print()
    for line in verdict(subject, findings):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if json is not None:
        from json import dumps

        json.write_text(dumps(report, indent=1) + "\n")
    if not report["ok"]:
        raise typer.Exit(1)
