"""A predicted step as a table and a picture in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from firstlight.hardware import Hardware
from firstlight.ops.op import PRODUCTS, REFERENCE
from firstlight.predict.kernel_time import KernelTime
from firstlight.predict.memory import Memory
from firstlight.predict.step_time import StepModel, StepTime
from firstlight.predict.what_if import Change

COLOURS = {"memory": "cyan", "compute": "magenta", "link": "yellow", "start": "grey50"}
BAR = 40
"""Characters of the picture's longest bar."""
ORIGINS = {"interpolated": "i", "transferred": "t", "datasheet": "d"}
"""What the table's last column shows for where an efficiency comes from; `legend` says what each is."""


def amount(value: float, unit: str) -> str:
    """A figure with three digits and a prefix: 12.3 GB, 392 B."""
    if float(value).is_integer() and abs(value) < 1000:
        return f"{value:.0f} {unit}".rstrip()
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5:
            return f"{three_digits(value)} {prefix}{unit}".rstrip()
        value /= 1000
    return f"{three_digits(value)} P{unit}"


def three_digits(value: float) -> str:
    """A figure with three digits, and more where the whole part has more: 1.23, 12.3, 1,234."""
    return f"{value:,.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f}"


def counted(number: int, noun: str) -> str:
    """1 request, 1,234 requests."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def duration(seconds: float) -> str:
    """Seconds for people: 12.3 ms."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * scale:
            return f"{three_digits(seconds / scale)} {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds >= 0.5e-9 else "<1 ns"


def _bound(item: KernelTime) -> str:
    """What most of the time goes to: the floor's side, or the start where that is less than half."""
    bound = item.bound[0]
    return bound if bound == "link" or float(item.floor[0]) * 2 >= float(item.seconds[0]) else "start"


def unserved_line(choices: Mapping[tuple[str, str], str] | None) -> str | None:
    """Which products are left to the reference, which isn't priced as such; None if kernels serve all. choices: of a walked model."""
    ops = sorted({op for (_, op), provider in (choices or {}).items() if op in PRODUCTS and provider == REFERENCE})
    if not ops:
        return None
    return (
        f"No kernel of ours serves {' or '.join(ops)} everywhere in this step. The reference would, and takes many times as long as is "
        "predicted here; firstlight ops says why."
    )


def step_table(step: StepTime) -> Table:
    """A row for each kind of kernel, the longest first."""
    table = _table("The step, by kernel")
    table.add_column("kernel", overflow="fold")
    for name in ("count", "flops", "bytes", "time", "floor", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound", no_wrap=True)
    table.add_column("from", no_wrap=True)
    total = float(step.seconds[0])
    for item in _ordered(step):
        table.add_row(
            item.kernel.name,
            str(item.kernel.count),
            amount(float(item.flops[0]), "") if float(item.flops[0]) else "-",
            amount(float(item.moved[0]), "B") if float(item.moved[0]) else "-",
            duration(float(item.seconds[0])),
            duration(float(item.floor[0])),
            f"{float(item.seconds[0]) / total:.1%}",
            _bound(item),
            ORIGINS[item.origin],
        )
    table.add_row(
        "the step's own",
        "1",
        "-",
        "-",
        duration(float(step.overhead[0])),
        "-",
        f"{float(step.overhead[0]) / total:.1%}",
        "start",
        ORIGINS["datasheet"],
    )
    if float(step.hidden[0]):
        table.add_row(
            "hidden by overlap",
            "",
            "",
            "",
            f"-{duration(float(step.hidden[0]))}",
            "",
            f"-{float(step.hidden[0]) / total:.1%}",
            "",
            "",
        )
    return table


def _table(title: str) -> Table:
    """One that spends no width on lines, so that it fits a narrow terminal."""
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)


def legend(step: StepTime) -> Iterator[Text]:
    """What the codes of the step's table mean, and whose timings its efficiencies are."""
    yield Text(
        "bound: what most of the time goes to; start: launching the kernel, more than its memory, compute or link"
    )
    yield Text(
        "from: what the efficiency comes from; i: interpolated, timings on this GPU; t: transferred from others'; d: datasheet"
    )
    sources: dict[str, list[str]] = {}
    for item in _ordered(step):
        if item.origin != "datasheet":
            sources.setdefault(item.source, []).append(item.kernel.name)
    for source, names in sources.items():
        yield Text(f"  {source}: {', '.join(dict.fromkeys(names))}")


def _ordered(step: StepTime) -> Iterable[KernelTime]:
    active = [item for item in step.kernels if float(item.seconds[0]) > 0]
    return sorted(active, key=lambda item: -float(item.seconds[0]))


def picture(step: StepTime) -> Iterator[Text]:
    """A bar for each kernel of a percent or more: solid up to its floor, dotted to its time."""
    longest = max(float(item.seconds[0]) for item in step.kernels)
    width = max(len(item.kernel.name) for item in step.kernels)
    total = float(step.seconds[0])
    for item in _ordered(step):
        seconds, floor = float(item.seconds[0]), float(item.floor[0])
        if seconds < total / 100:
            return
        whole = max(round(seconds / longest * BAR), 1)
        solid = min(round(floor / longest * BAR), whole)
        line = Text(f"{item.kernel.name:>{width}} ")
        line.append("█" * solid + "░" * (whole - solid), style=COLOURS[item.bound[0]])
        line.append(f" {duration(seconds)}")
        yield line


def summary(
    step: StepTime, priced: StepModel, tokens: float, requests: float, drafts: float = 1.0
) -> list[RenderableType]:
    """The step in a few lines: its time with an interval, its floor, tokens a second, money, and where figures come from."""
    seconds, gpus = float(step.seconds[0]), priced.mesh.size
    rate = tokens * drafts / seconds / priced.mesh.tp.size
    lines = [
        f"{duration(seconds)} a step (80% interval {duration(float(step.low[0]))} to {duration(float(step.high[0]))}); "
        f"no implementation takes less than {duration(float(step.floor[0]))}: {float(step.floor[0]) / seconds:.0%} of it",
        f"{rate:,.0f} tokens/s/GPU, {drafts / seconds:,.0f} tokens/s for each request"
        if requests == tokens
        else f"{rate:,.0f} tokens/s/GPU",
    ]
    dollars = priced.hardware.dollars_per_hour
    if dollars:
        lines.append(
            f"${dollars / 3600 / rate * 1e6:,.3f} per million tokens at ${dollars:.2f} an hour for {'the GPU' if gpus == 1 else f'each of {gpus} GPUs'}"
        )
    shares = ", ".join(f"{share:.0%} {origin}" for origin, share in step.origins.items())
    lines.append(f"Efficiencies, by time: {shares}. Nothing here was measured on this model.")
    return [Text(line) for line in lines]


def misfit_line(memory: Memory, hardware: Hardware, requests: int, context: int, ways: Sequence[str]) -> Text:
    """That the batch doesn't fit, and what would make it; `ways` are options of the command."""
    text = f"Doesn't fit: weights take {amount(memory.weights, 'B')} of a GPU's {amount(hardware.memory, 'B')}"
    if most := min(memory.requests(context), requests - 1):
        text += f", the rest holds {counted(most, 'request')} of {counted(context, 'token')}, not {requests:,}"
        ways = (*ways, f"--batch {most}")
    elif memory.weights < hardware.memory:
        text += f", the rest is too little for a request of {counted(context, 'token')}"
    remedy = f"what would: {', or '.join(ways)}" if ways else "nor would it on more GPUs, or in FP8"
    return Text(f"{text}; {remedy}. Priced as if it did.", style="red")


def memory_line(memory: Memory, context: int) -> Text:
    """What the pools are, and what they hold."""
    assert memory.geometry is not None
    fits = memory.requests(context)
    slots = f", {counted(memory.geometry.slots, 'state slot')}" if memory.geometry.has_state else ""
    text = f"Weights {amount(memory.weights, 'B')} a GPU; {counted(memory.geometry.pages, 'page')} of {memory.geometry.page_size} tokens{slots}: "
    text += f"{counted(fits, 'request')} of {counted(context, 'token')} fit{'s' * (fits == 1)}"
    return Text(text)


def change_table(found: Iterable[Change], now: Change) -> Table:
    """Each change with its time, and tokens a GPU against the step as it is."""
    table = _table("What if")
    table.add_column("change", overflow="fold")
    for name in ("time", "latency", "tokens/s/GPU"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for change in sorted(found, key=lambda change: -change.rate(1.0)):
        table.add_row(
            change.name,
            duration(change.seconds),
            f"{change.seconds / now.seconds - 1:+.1%}",
            f"{change.rate(1.0) / now.rate(1.0) - 1:+.1%}",
            "changes answers" if change.lossy else "",
        )
    return table
