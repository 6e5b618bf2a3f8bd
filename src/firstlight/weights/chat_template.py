"""Chat templates: Jinja text from a checkpoint that turns messages into a prompt.

The template comes with the checkpoint, so it is untrusted: it runs in `BoundedEnvironment`. What it may use is what
`transformers` gives it: the messages, the tools, `add_generation_prompt`, the special tokens by name, `raise_exception`,
`strftime_now`, a `tojson` that doesn't escape HTML, loop controls and the (here: empty) `generation` tag.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from firstlight.errors import ChatTemplateError
from firstlight.weights.bounded_jinja import BoundedEnvironment
from firstlight.weights.template_budget import OverBudget, measure, spending

MAX_TEMPLATE_CHARACTERS = 262_144
MAX_INPUT_UNITS = 100_000_000
BASE_UNITS = 10_000_000
UNITS_PER_INPUT = 40
"""What a template may spend: a base, enough for a million loop turns, and so much for each character of input."""


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %}: marks an assistant's text for training; here it only stands for itself."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Refused(Exception):  # noqa: N818 - it is what happened
    """The template called raise_exception."""


def _raise_exception(message: object) -> None:
    raise _Refused(str(message)[:1000])


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    if isinstance(indent, int) and indent > 16:
        raise OverBudget(f"tojson: an indent of {indent} is more than 16")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """special_tokens: text by name, such as {"bos_token": "<s>"}.

        Raises ChatTemplateError if the template is too long or not valid.
        """
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ChatTemplateError(
                f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARACTERS} are allowed"
            )
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.add_filter("tojson", _tojson)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            with spending(BASE_UNITS):
                self._template = environment.from_string(source)
        except Exception as error:  # whatever a hostile template provokes, RecursionError and MemoryError included
            raise ChatTemplateError(f"the chat template is not valid: {_short(error)}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt's text. `variables` are further names the template may use, such as enable_thinking.

        Raises ChatTemplateError if the template refuses the messages, fails on them or does too much work.
        """
        values = {
            **self.special_tokens,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        try:
            with spending(BASE_UNITS + UNITS_PER_INPUT * measure(values, MAX_INPUT_UNITS)):
                return self._template.render(values)
        except _Refused as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {error}") from error
        except OverBudget as error:
            raise ChatTemplateError(f"the chat template was stopped: {error}") from error
        except Exception as error:  # whatever a hostile template provokes, RecursionError and MemoryError included
            raise ChatTemplateError(f"the chat template failed on these messages: {_short(error)}") from error


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"
