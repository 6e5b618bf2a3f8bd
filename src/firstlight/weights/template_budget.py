"""What a template may spend, and what things cost.

A `Budget` holds units; loops, calls and values are charged to the one that `spending` has put in force. Operations whose
result can be much larger than what goes in (replacing, joining, indenting, formatting) have a price of their own, to be
charged before they are done.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import ContextVar
from itertools import chain
from typing import Any

TURN, ITEM, MACRO = 10, 4, 200
"""Prices in units: a loop's turn, operator, filter, test or call; a value looked at; a macro's call. A character of text
is 1. They are near enough the time these take for 10 million units to be spent in about two seconds."""

MAX_INTEGER_BITS = 4096
MAX_FORMAT_WIDTH_DIGITS = 4


class OverBudget(Exception):  # noqa: N818 - it is what happened
    """The template did more than its budget allows."""


class Budget:
    """Units left to spend."""

    def __init__(self, units: int) -> None:
        self.left = units

    def charge(self, units: int) -> None:
        """Spend `units`. Raises OverBudget if there are not so many."""
        self.left -= units
        if self.left < 0:
            raise OverBudget("it loops too long or makes too much text")

    def charge_length(self, *values: Any) -> None:
        """Spend the lengths of values, whatever their items are."""
        for value in values:
            if isinstance(value, (str, list, tuple, dict)):
                self.charge(1 + len(value))
            elif isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
                raise OverBudget(f"an integer has more than {MAX_INTEGER_BITS} bits")

    def charge_contents(self, value: Any) -> Any:
        """Spend the size of all that is in a value, by a walk that stops when the budget does; returns the value."""
        pending = [value]
        while pending:
            item = pending.pop()
            if isinstance(item, str):
                self.charge(1 + len(item))
            elif isinstance(item, (list, tuple, set, frozenset)):
                self.charge(ITEM * (1 + len(item)))
                pending.extend(item)
            elif isinstance(item, dict):
                self.charge(ITEM * (1 + 2 * len(item)))
                pending.extend(chain(item.keys(), item.values()))
            elif isinstance(item, int) and item.bit_length() > MAX_INTEGER_BITS:
                raise OverBudget(f"an integer has more than {MAX_INTEGER_BITS} bits")
            else:
                self.charge(1)
        return value


current_budget: ContextVar[Budget] = ContextVar("budget")


class spending:  # noqa: N801 - used as a statement
    """`with spending(units): ...` gives what is compiled or rendered inside a budget of its own."""

    def __init__(self, units: int) -> None:
        self._units = units

    def __enter__(self) -> Budget:
        budget = Budget(self._units)
        self._token = current_budget.set(budget)
        return budget

    def __exit__(self, *error: object) -> None:
        current_budget.reset(self._token)


def measure(value: Any, limit: int) -> int:
    """Size of a value in units, at most `limit`. Raises OverBudget if it is larger."""
    budget = Budget(limit)
    budget.charge_contents(value)
    return limit - budget.left


def price_replace(text: Any, old: Any = "", new: Any = "", *count: Any) -> None:
    current_budget.get().charge(str(text).count(str(old)) * len(str(new)))


def price_join(items: Any, d: Any = "", attribute: Any = None) -> None:
    current_budget.get().charge((len(items) if hasattr(items, "__len__") else 0) * len(str(d)))


def price_indent(s: Any, width: Any = 4, *options: Any, **more: Any) -> None:
    step = len(width) if isinstance(width, str) else int(width)
    current_budget.get().charge((1 + str(s).count("\n")) * max(step, 0))


def price_sum(iterable: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, (int, float)):
        raise OverBudget("the sum filter is for numbers")


def price_format(text: str, *values: Any, **more: Any) -> None:
    """Both ways of formatting: a width of five digits or from an argument is refused; each field may hold any value."""
    if re.search(rf"\d{{{MAX_FORMAT_WIDTH_DIGITS + 1}}}|%[-+ #0]*\*|%.*\.\*|\{{[^}}]*\{{", text):
        raise OverBudget("a format states too large a width")
    fields = text.count("{") + text.count("%")
    budget = current_budget.get()
    budget.charge(fields * (measure((values, more), max(budget.left, 0)) + 10**MAX_FORMAT_WIDTH_DIGITS))


PRICES: dict[str, Callable[..., None]] = {
    "replace": price_replace,
    "join": price_join,
    "indent": price_indent,
    "sum": price_sum,
    "format": price_format,
}
"""What filters that can grow things cost beyond their contents."""
