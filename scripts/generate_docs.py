"""Fill the generated parts of the documentation from the code, so that the two can't drift.

    python scripts/generate_docs.py            rewrite what is stale
    python scripts/generate_docs.py --check    change nothing; exit status 1 if anything is stale

A page is prose with generated blocks in it. A block stands between two comments that name it,

    <!-- generated: options -->
    <!-- end -->

and everything between them is replaced. What a block holds is made by the function of that name in `BLOCKS`.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

ROOT = Path(__file__).resolve().parent.parent
OPENING = re.compile(r"^<!-- generated: (?P<name>[\w-]+) -->$", re.MULTILINE)
BLOCK = re.compile(r"^(<!-- generated: (?P<name>[\w-]+) -->\n).*?^(<!-- end -->)$", re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    """Every page that may hold generated blocks."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def regenerated(text: str) -> str:
    """The text of a page with its blocks as the code has them now. Raises SystemExit for a block that nobody makes."""
    if len(OPENING.findall(text)) != len(BLOCK.findall(text)):
        raise SystemExit("a generated block is not closed by <!-- end -->")

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in BLOCKS:
            raise SystemExit(f"there is no generated block {name!r}; there are: {', '.join(sorted(BLOCKS))}")
        return f"{match[1]}\n{made(name)}\n\n{match[3]}"

    return BLOCK.sub(fill, text)


@cache
def made(name: str) -> str:
    """The content of a block."""
    return BLOCKS[name]()


def stale_pages(candidates: Iterable[Path] | None = None) -> list[Path]:
    """Pages whose generated blocks differ from what the code says."""
    return [page for page in candidates or pages() if page.read_text() != regenerated(page.read_text())]


# Pieces


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; a bar in a cell is escaped, also within code, as GitHub's tables want it."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def first_sentence(documentation: str | None) -> str:
    """The first sentence of a docstring, on one line."""
    paragraph = " ".join(inspect.cleandoc(documentation or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", paragraph)[0]


def code(text: str) -> str:
    """Text as Markdown code, whether or not it has backticks in it."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


# Blocks


def families() -> str:
    """Model types, their families, the classes in transformers that they equal, and whether they run."""
    from firstlight.models import registry

    by_file: dict[str, list[str]] = {}
    for model_type, file in registry.FAMILIES.items():
        by_file.setdefault(file, []).append(model_type)
    rows = []
    for file, model_types in by_file.items():
        module = import_module(f"firstlight.models.{file}")
        classes = re.findall(r"\w+For\w+", first_sentence(module.Model.__doc__))
        what = first_sentence(module.__doc__).rstrip(".")
        state = "predicted only, so far" if registry.PREDICTED_ONLY.issuperset(model_types) else "runs"
        rows.append([", ".join(map(code, model_types)), what, ", ".join(map(code, classes)), state])
    return table(["`model_type`", "what it is", "class in transformers", "state"], rows)


def gguf() -> str:
    """Architectures and tensor types of GGUF files."""
    from firstlight.quant.gguf_blocks import GGML_TYPES
    from firstlight.weights.gguf_config import ARCHITECTURES

    rows = [
        [code(name), str(block.weights), str(block.bytes), f"{8 * block.bytes / block.weights:g}"]
        for name, block in GGML_TYPES.items()
    ]
    names = ", ".join(map(code, ARCHITECTURES))
    header = ["tensor type", "weights in a block", "bytes of a block", "bits a weight"]
    return f"Architectures: {names}.\n\n{table(header, rows)}"


def ops() -> str:
    """Every op, what it is for, its contract's first line, and what a composite is made of."""
    from firstlight.ops import REGISTRY

    rows = []
    for name, op in sorted(REGISTRY.items()):
        what = first_sentence(sys.modules[op.body.__module__].__doc__).rstrip(".")
        contract = inspect.cleandoc(op.body.__doc__ or "").splitlines()[0].rstrip(".")
        rows.append([code(name), what, code(contract), ", ".join(map(code, op.parts))])
    return table(["op", "what it is", "contract, first line", "made of"], rows)


def providers() -> str:
    """Every provider, the ops that it computes, and how."""
    from firstlight.ops import REGISTRY

    rows = []
    for name, op in sorted(REGISTRY.items()):
        for provider in sorted(op.providers.values(), key=lambda provider: -provider.rank):
            layouts = ", ".join(f"{argument}: {layout}" for argument, layout in provider.layout.items())
            how = _how(name, provider.run) + (f" Lossy: {provider.lossy}." if provider.lossy else "")
            how += " *Gives its result packed on demand.*" if provider.emits else ""
            how += " *Reads packed activations.*" if provider.wants else ""
            rows.append([code(name), code(provider.name), str(provider.rank), layouts, how])
    return table(["op", "provider", "rank", "layout", "how"], rows)


def _how(op: str, run: Callable[..., Any]) -> str:
    """What the docstring of a provider's file says first; of its folder's, where a file serves several ops."""
    while isinstance(run, partial):
        run = run.func
    module = sys.modules[run.__module__]
    if not module.__name__.startswith(f"firstlight.ops.{op}."):
        module = sys.modules[module.__name__.rpartition(".")[0]]
    return first_sentence(module.__doc__)


def options() -> str:
    """Every field of `config`, as an option and as an environment variable."""
    from firstlight.config import EngineOptions, ServerOptions

    titles = {
        EngineOptions: "`serve`, `chat`, `generate`, `ops`, `profile`, `calibrate`: how a model is loaded and run",
        ServerOptions: "`serve`: how the API listens",
    }
    return "\n\n".join(f"## {kind.__name__}\n\n{title}.\n\n{_options_of(kind)}" for kind, title in titles.items())


def _options_of(kind: Any) -> str:
    from firstlight.cli.options import ARGUMENTS
    from firstlight.config import ENVIRONMENT_PREFIX

    rows = []
    for name, field in kind.model_fields.items():
        flag = name.upper() if name in ARGUMENTS else f"--{name.replace('_', '-')}"
        default = "required" if field.is_required() else _default(field.default)
        variable = code(ENVIRONMENT_PREFIX + name.upper())
        rows.append([code(flag), variable, _legal(field), default, field.description or ""])
    return table(["option", "environment variable", "values", "default", "meaning"], rows)


def plugin_options() -> str:
    """The switches of the plugins, which have no command line of ours."""
    from firstlight.config import ENVIRONMENT_PREFIX, PluginOptions

    rows = [
        [code(ENVIRONMENT_PREFIX + name.upper()), _legal(field), _default(field.default), field.description or ""]
        for name, field in PluginOptions.model_fields.items()
    ]
    return table(["environment variable", "values", "default", "meaning"], rows)


def _default(value: Any) -> str:
    if value is None or value == ():
        return "none"
    return code(str(value).lower() if isinstance(value, bool) else str(value))


def _legal(field: Any) -> str:
    """The values that a field accepts, for people."""
    annotation = field.annotation
    if get_origin(annotation) is Literal:
        return ", ".join(map(code, get_args(annotation)))
    if get_origin(annotation) is tuple:
        return "text, several"
    names = {bool: "`true`, `false`", int: "whole number", float: "number"}
    limits = [
        f"{sign} {getattr(limit, attribute)}"
        for limit in field.metadata
        for attribute, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
        if hasattr(limit, attribute)
    ]
    return " ".join([names.get(annotation, "text"), ", ".join(limits)]).strip()


def commands() -> str:
    """Every command: what it does, its arguments, and the options that it has beside those of `config`."""
    import typer

    from firstlight.cli import COMMANDS

    app = typer.Typer(add_completion=False)
    for name in COMMANDS:
        app.command(name)(import_module(f"firstlight.cli.{name}").command)
    group: Any = typer.main.get_command(app)
    return "\n\n".join(_command(name, group.commands[name]) for name in COMMANDS)


SHARED_PANELS = {"Engine": "EngineOptions", "Server": "ServerOptions"}
"""Groups of options that docs/configuration.md lists, once for all commands."""


def _command(name: str, command: Any) -> str:
    parameters = [parameter for parameter in command.params if parameter.name != "help"]
    arguments = [parameter for parameter in parameters if parameter.param_type_name == "argument"]
    own, shared = [], []
    for parameter in parameters:
        panel = getattr(parameter, "rich_help_panel", None)
        if panel in SHARED_PANELS:
            shared.append(panel)
        elif parameter not in arguments:
            own.append(parameter)
    usage = " ".join(["firstlight", name, *(_metavar(argument) for argument in arguments), "[OPTIONS]"])
    parts = [f"## {name}", f"```\n{usage}\n```", inspect.cleandoc(command.help or "")]
    if arguments:
        parts.append("\n".join(f"{code(_metavar(argument))}: {argument.help}" for argument in arguments))
    if own:
        parts.append(table(["option", "default", "meaning"], map(_option, own)))
    if shared:
        links = [
            f"[{panel}Options](configuration.md#{SHARED_PANELS[panel].lower()})" for panel in dict.fromkeys(shared)
        ]
        parts.append(f"{'Further options' if own else 'Options'}: {' and '.join(links)}.")
    return "\n\n".join(parts)


def _metavar(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _option(parameter: Any) -> list[str]:
    names = ", ".join(map(code, [*parameter.opts, *parameter.secondary_opts]))
    meaning = parameter.help or ""
    stated = re.search(r" \(default: (.*)\)$", meaning)  # options made from `config` say it themselves
    if stated:
        return [names, code(stated[1]), meaning[: stated.start()]]
    if parameter.required:
        return [names, "required", meaning]
    shown = parameter.default not in (None, False, "", ())
    return [names, code(str(parameter.default)) if shown else "", meaning]


BLOCKS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "families": families,
    "gguf": gguf,
    "ops": ops,
    "options": options,
    "plugin-options": plugin_options,
    "providers": providers,
}


def main() -> int:
    """Rewrite, or check; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if anything is stale")
    check = parser.parse_args().check
    stale = stale_pages()
    for page in stale:
        print(f"{page.relative_to(ROOT)} {'is stale' if check else 'rewritten'}")
        if not check:
            page.write_text(regenerated(page.read_text()))
    if check and stale:
        print("run `make docs`", file=sys.stderr)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
