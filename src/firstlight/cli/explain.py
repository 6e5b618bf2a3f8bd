"""`firstlight explain MODEL --gpu G`: what a step takes on a GPU that need not be here, and why."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from firstlight.cli.options import load, options_of
from firstlight.config import EngineOptions, ExplainOptions

MOST_TOKENS = 2**31 - 1
MOST_REQUESTS, MOST_DRAFTS, MOST_RANKS = 2**20, 2**10, 2**16
"""Together still a step whose tensors have sizes and bytes within 64 bits."""


@options_of(ExplainOptions)
def command(
    given: dict[str, Any],
    gpu: Annotated[
        str, typer.Option(help="A described GPU: h20, h100, h200, h800, b200, gb300, mi300x, mi355x, ...")
    ] = "h200",
    batch: Annotated[
        int, typer.Option(min=0, max=MOST_REQUESTS, help="Requests that decode in the step, on each attention replica.")
    ] = 1,
    context: Annotated[
        int, typer.Option(min=1, max=MOST_TOKENS, help="Tokens of each of them, with this step.")
    ] = 4096,
    prefill: Annotated[
        int, typer.Option(min=0, max=MOST_TOKENS, help="New prompt tokens in the step beside them.")
    ] = 0,
    prompt: Annotated[
        int, typer.Option(min=1, max=MOST_TOKENS, help="Length of the prompts that those belong to.")
    ] = 4096,
    tp: Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="Ranks that split every layer.")] = 1,
    dp: Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="Replicas of the attention part.")] = 1,
    ep: Annotated[
        int, typer.Option(min=1, max=MOST_RANKS, help="Ranks that experts are spread over; divides tp x dp.")
    ] = 1,
    fp8_kv: Annotated[
        bool, typer.Option("--fp8-kv", help="KV cache in FP8, as a run with --kv-dtype float8_e4m3fn.")
    ] = False,
    fp8_weights: Annotated[bool, typer.Option("--fp8-weights", help="Weights of layers in FP8 blocks.")] = False,
    fp8_head: Annotated[bool, typer.Option("--fp8-head", help="Output head in FP8 blocks.")] = False,
    bf16_state: Annotated[bool, typer.Option("--bf16-state", help="Recurrent states in bfloat16.")] = False,
    overlap: Annotated[
        bool, typer.Option("--two-batch-overlap", help="Hide the experts' exchange behind another half.")
    ] = False,
    eager: Annotated[bool, typer.Option("--eager", help="Kernels launched one by one, not from a graph.")] = False,
    bound: Annotated[
        bool, typer.Option("--bound", help="Fuse as the providers bound here do, not as a tuned engine.")
    ] = False,
    skew: Annotated[
        float, typer.Option(min=0, help="Routing: the i-th expert is i^-SKEW as popular; 0: uniform.")
    ] = 0.0,
    drafts: Annotated[int, typer.Option(min=0, max=MOST_DRAFTS, help="Draft tokens verified in each step.")] = 0,
    acceptance: Annotated[
        float, typer.Option(min=0, max=1, help="Chance that a draft is right if those before were.")
    ] = 0.8,
    dollars: Annotated[float, typer.Option(min=0, help="Rent of a GPU an hour; 0: a typical one.")] = 0.0,
    what_if: Annotated[bool, typer.Option(help="Price changes as well.")] = True,
) -> None:
    """Predict a step from the model's own code: a table by kernel, a picture, and what changes would give."""
    options = load(ExplainOptions, given)
    engine_options = load(EngineOptions, given)
    from dataclasses import replace

    from firstlight.cli.tables import table_console
    from firstlight.engine.table import timings_of
    from firstlight.errors import FirstlightError
    from firstlight.models.buckets import resolve_options
    from firstlight.models.config import ConfigError
    from firstlight.models.registry import PREDICTED_ONLY
    from firstlight.predict import report
    from firstlight.predict.fit import engine_memory, what_would_fit
    from firstlight.predict.layout import Layout, build, gpu_of, step_model
    from firstlight.predict.shape import StepShape
    from firstlight.predict.speculation import Speculation, draft_seconds
    from firstlight.predict.step_time import Conditions
    from firstlight.predict.what_if import Change, changes
    from firstlight.step import Bucket
    from firstlight.weights.checkpoint import GgufCheckpoint, open_checkpoint

    if not batch and not prefill:
        raise FirstlightError("--batch 0 --prefill 0: an empty step; give at least one of them")
    if context < 1 + drafts:
        raise FirstlightError(f"--context {context} holds the step's own {1 + drafts} tokens; give at least that")
    if (tp * dp) % ep:
        raise FirstlightError(f"--ep {ep}: it must divide --tp {tp} x --dp {dp} = {tp * dp}")
    if "table" in given and not bound:
        raise FirstlightError("--table is for our own providers, which --bound prices; give that as well, or neither")
    hardware = gpu_of(gpu)
    if dollars:
        hardware = replace(hardware, dollars_per_hour=dollars)
    fp8_kv = fp8_kv or engine_options.kv_dtype == "float8_e4m3fn"
    bf16_state = bf16_state or engine_options.state_dtype == "bfloat16"
    layout = Layout(tp, dp, ep, fp8_weights, fp8_head, fp8_kv, bf16_state)
    checkpoint = open_checkpoint(options.model)
    config = checkpoint.config
    try:
        built = build(config, layout)
    except ConfigError:
        raise
    except ValueError as error:  # these ranks can't split the model
        flags = " ".join(f"--{name} {size}" for name, size in (("tp", tp), ("ep", ep)) if size > 1)
        raise FirstlightError(f"{flags}: {error}" if flags else str(error)) from error
    conditions = Conditions(graph=not eager, skew=skew, two_batch_overlap=overlap, tuned=not bound)
    tokens = batch * (1 + drafts) + prefill
    bucket = Bucket(0, tokens, max(batch, 1), max(prefill, 1), max(context, prompt), max(batch, 1)) if bound else None
    timings = timings_of(options.table, hardware) if bound else None
    priced = step_model(
        built, hardware, layout, conditions, page_size=resolve_options(engine_options, hardware).page_size, bucket=bucket,
        table=timings.table if timings else None,
    )  # fmt: skip
    shape = StepShape.of_decode(batch, context, 1 + drafts) if batch else StepShape()
    if prefill:
        length = min(prompt, prefill)
        shape = shape + StepShape.of_prefill(prefill / length, length, prompt - length)
    step = priced.time(shape)

    console = table_console()
    requests, longest = max(batch, 1), max(context, prompt if prefill else 1)
    memory = engine_memory(built, hardware, engine_options, requests, longest, workspace=priced.model.workspace)
    fits = memory.requests(longest) >= requests
    if not fits:
        memory = engine_memory(built, hardware, engine_options, 1, longest, workspace=priced.model.workspace)
        ways = what_would_fit(config, layout, hardware, engine_options, requests, longest)
        console.print(report.misfit_line(memory, hardware, requests, longest, ways))
    if config.get("model_type") in PREDICTED_ONLY:
        console.print(f"Model type {config['model_type']} can be predicted, not run yet.", style="yellow")
    console.print(
        (hardware.name if priced.mesh.size == 1 else f"{priced.mesh.size} of {hardware.name}")
        + (f", {report.counted(batch, 'request')} at {report.counted(context, 'token')}" if batch else "")
        + (f", {report.counted(prefill, 'prompt token')}" if prefill else "")
    )
    if isinstance(checkpoint, GgufCheckpoint):
        console.print(
            "Priced with bfloat16 weights, not with the GGUF file's packed blocks"
            + ("; FP8 where asked for." if fp8_weights or fp8_head else "."),
            style="yellow",
        )
    if unserved := report.unserved_line(priced.model.choices):
        console.print(unserved, style="yellow")
    gained = 1.0
    if drafts:
        guess = Speculation(drafts, acceptance)
        spent = drafts * draft_seconds(priced, batch, context)
        gained = guess.tokens
        step = replace(
            step,
            seconds=step.seconds + spent,
            low=step.low + spent,
            high=step.high + spent,
            overhead=step.overhead + spent,
        )
        console.print(
            f"{report.counted(drafts, 'draft')} a step, made in {report.duration(float(spent[0]))}: {gained:.2f} tokens a step and request"
        )
    for line in report.summary(step, priced, batch + prefill, batch, gained):
        console.print(line)
    if fits:
        console.print(report.memory_line(memory, longest))
    console.print(report.step_table(step))
    for line in report.legend(step):
        console.print(line)
    console.print()
    for bar in report.picture(step):
        console.print(bar)
    if what_if and not drafts:
        now = Change("", float(step.seconds[0]), priced.mesh.size, False, layout.data_parallel)
        console.print(report.change_table(changes(config, built, priced, layout, shape), now))
