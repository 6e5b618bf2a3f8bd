"""Modules' names by regular expression, as a config.json may give them.

A config is untrusted, and some patterns take backtracking matchers, Python's too, a time exponential in the name. So these are matched
by an automaton (pydantic's), in a time linear in the name; what it can't do, look-around and references back, is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from pydantic_core import SchemaError, SchemaValidator, core_schema

from firstlight.errors import InputError


@cache
def matcher(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Whether any of the patterns matches a name, from its beginning on.

    Raises InputError, naming the pattern, if one is no regular expression, can't be matched in linear time, or is too large.
    """
    try:
        return _compiled("|".join(f"(?:{pattern})" for pattern in patterns)) if patterns else lambda name: False
    except SchemaError as error:
        for pattern in patterns:
            try:
                _compiled(pattern)
            except SchemaError as own:
                raise InputError(
                    f"quantization_config: ignore has {_short(pattern)}, which is no regular expression that can be matched in linear time: "
                    f"{_reason(own)}"
                ) from own
        raise InputError(
            f"quantization_config: the {len(patterns)} regular expressions of ignore are too large together: {_reason(error)}"
        ) from error


def _compiled(pattern: str) -> Callable[[str], bool]:
    return SchemaValidator(core_schema.str_schema(pattern=f"^(?:{pattern})")).isinstance_python


def _short(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 100 else pattern[:100] + "...")


def _reason(error: SchemaError) -> str:
    """The last line of what the compiler says; those before it draw the place."""
    return str(error).strip().splitlines()[-1].strip().removeprefix("error: ").removeprefix("SchemaError: ")
