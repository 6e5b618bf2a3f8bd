"""Command-line options made from the fields of `config`: names, defaults and help come from there, so they can't drift.

Values stay strings here; pydantic converts and checks them, as it does with the environment's, and its errors are
shown one a line.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from firstlight.config import ENVIRONMENT_PREFIX, Options, unknown_variables

ARGUMENTS = frozenset({"model"})
"""Fields that are given by position."""
SECRETS = frozenset({"api_key"})
"""Fields whose values no error repeats."""

Kind = TypeVar("Kind", bound=Options)


def options_of(*kinds: type[Options]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a command `f(given, ...)`: the fields of `kinds` become its options.

    given: {field: value} of those that were on the command line; `load` makes the options of them.
    The other parameters of the command are typer's, as usual.
    """
    fields = {name: (kind, field) for kind in kinds for name, field in kind.model_fields.items()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            _check_environment()
            given = {name: value for name in fields if (value := values.pop(name)) not in (None, [])}
            command(given, **values)

        parameters = [_parameter(name, kind, field) for name, (kind, field) in fields.items()]
        parameters.sort(key=lambda parameter: parameter.name not in ARGUMENTS)
        parameters += [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapper

    return decorate


def load(kind: type[Kind], given: dict[str, Any]) -> Kind:
    """The options, from what was given, the environment and the defaults; exits with status 2 if they are wrong."""
    try:
        return kind.load({name: value for name, value in given.items() if name in kind.model_fields})
    except ValidationError as error:
        for line in error_lines(error):
            print(f"firstlight: error: {line}", file=sys.stderr)
        raise typer.Exit(2) from None


def _check_environment() -> None:
    """Exits with status 2 if a variable looks like an option and is none: a typo is not ignored in silence."""
    if unknown := unknown_variables(os.environ):
        for name, nearest in unknown.items():
            print(
                f"firstlight: error: {name} sets no option; unset it, or set {nearest} if that is meant",
                file=sys.stderr,
            )
        raise typer.Exit(2)


def error_lines(error: ValidationError) -> list[str]:
    """Each error on a line that names the option, the value and what is legal."""
    lines = []
    for item in error.errors(include_url=False):
        name = str(item["loc"][0])
        option = f"{name.upper()}" if name in ARGUMENTS else f"--{name.replace('_', '-')}"
        variable = f"{ENVIRONMENT_PREFIX}{name.upper()}"
        if item["type"] == "missing":
            lines.append(f"{option} is missing: give it on the command line or as {variable}")
        else:
            message = item["msg"][:1].lower() + item["msg"][1:]
            shown = "" if name in SECRETS else f"; it is {item['input']!r}"
            lines.append(f"{option} (or {variable}): {message}{shown}")
    return lines


def _parameter(name: str, kind: type[Options], field: FieldInfo) -> inspect.Parameter:
    """The typer parameter of a field. Its default is None, "not given"; the real one is shown in the help."""
    help_text = field.description or ""
    panel = kind.__name__.removesuffix("Options")
    flag = f"--{name.replace('_', '-')}"
    annotation: Any
    if name in ARGUMENTS:
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, typer.Argument(help=help_text, show_default=False, metavar=name.upper())],
        )
    if field.annotation is bool:
        off = f"--no-{flag[2:]}"
        help_text += f" (default: {flag if field.default else off})"
        option = typer.Option(f"{flag}/{off}", help=help_text, show_default=False, rich_help_panel=panel)
        annotation = Annotated[bool | None, option]
    else:
        if field.default not in (None, ()):
            help_text += f" (default: {field.default})"
        several = get_origin(field.annotation) is tuple
        metavar = _metavar(field.annotation)
        option = typer.Option(flag, help=help_text, show_default=False, metavar=metavar, rich_help_panel=panel)
        annotation = Annotated[list[str] | None if several else str | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _metavar(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    names = {int: "INTEGER", float: "NUMBER"}
    return names.get(annotation, "TEXT")
