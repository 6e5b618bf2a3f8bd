"""A Jinja environment for templates that nobody vouches for: sandboxed, and bounded in work and memory.

Jinja's sandbox keeps a template from Python's internals, not from working for ever: two nested loops, a string doubled
forty times or a list that holds itself twice, forty levels deep, stop a server. Here everything that can take time or
memory is charged to a budget, and overdrawing it is an error:

    loops        each turn, with the fixed text inside the loop
    values       that operators, filters, tests and calls take and give, by their length (characters, items)
    contents     of what is compared, made by a literal, printed or turned into text: everything inside it
    output       each piece

What grows by a factor that its arguments state (padding to a width, repetition, replacing) is priced before it is done.
The hooks are the sandbox's own (operators, calls), `finalize` (output), wrapped filters and tests, and a rewrite of the
parsed template that puts loops, literals, comparisons and slices through filters of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from firstlight.weights.template_budget import (
    MACRO,
    MAX_INTEGER_BITS,
    PRICES,
    TURN,
    Budget,
    OverBudget,
    current_budget,
    price_format,
    price_join,
    price_replace,
)

ITERATE, CONCATENATE, CHARGE_CONTENTS, CHARGE_LENGTH = "iterate ", "concatenate ", "charge contents ", "charge length "
"""Our own filters; the spaces keep their names out of a template's grammar."""

MAX_FILTER_OPTION = 10_000

UNWANTED_FILTERS = ("center", "pprint", "random", "urlize", "wordwrap", "xmlattr")
KEPT_GLOBALS = ("range", "joiner", "cycler")
# fmt: off
LENGTH_FILTERS = frozenset((
    "attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "reject",
    "rejectattr", "reverse", "select", "selectattr", "slice",
))
"""Filters that don't look into what they hand on: they cost its length. All others cost its contents."""
CONTENT_TESTS = frozenset((
    "==", "!=", "eq", "equalto", "ne", "in", ">", ">=", "<", "<=", "gt", "ge", "lt", "le", "greaterthan", "lessthan",
))
"""Tests that compare, and so look into values; all others cost a length."""

METHODS: dict[type, frozenset[str]] = {
    str: frozenset((
        "capitalize", "casefold", "count", "endswith", "find", "format", "index", "isalnum", "isalpha", "isascii",
        "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle",
        "isupper", "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind",
        "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase",
        "title", "upper",
    )),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
}
# fmt: on
"""Methods of plain values that a template may call; none of them can make much out of little, but for those priced."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """See the module's text. Compile and render within `spending`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_charge_output, **options)
        self.globals = {name: self.globals[name] for name in KEPT_GLOBALS}
        self.globals["namespace"] = _TemplateNamespace
        self.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)
        for name in UNWANTED_FILTERS:
            del self.filters[name]
        for name in list(self.filters):
            function: Any = self.filters[name]
            self.filters[name] = _charged(function, name not in LENGTH_FILTERS, PRICES.get(name))
        for name in list(self.tests):
            test: Any = self.tests[name]
            self.tests[name] = _charged(test, name in CONTENT_TESTS, None)
        self.filters[ITERATE] = _iterate
        self.filters[CHARGE_CONTENTS] = _charge_contents
        self.filters[CHARGE_LENGTH] = _charge_length
        self.filters[CONCATENATE] = _concatenate

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """A filter of our own: it costs the contents of what it takes and gives."""
        self.filters[name] = _charged(function, True, None)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        _rewrite(source)
        self.fixed_text = _fixed_text(source)
        return super()._generate(source, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator that can grow things, priced."""
        budget = current_budget.get()
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
                    budget.charge(len(sequence) * max(times, 0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * max(right, 0) > MAX_INTEGER_BITS:
                raise OverBudget(f"a power has more than {MAX_INTEGER_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            price_format(left, right)
        budget.charge(TURN)
        budget.charge_length(left, right)
        result = super().call_binop(context, operator, left, right)
        budget.charge_length(result)
        return result

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """A call, priced by its arguments and its result."""
        budget = current_budget.get()
        budget.charge(MACRO + __self.fixed_text if isinstance(__obj, Macro) else TURN)
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, (str, bytes, list, tuple, dict, set, int, float)):
            args = _priced_method(budget, owner, name, args, kwargs)
        budget.charge_length(*args, *kwargs.values())
        result = super().call(__context, __obj, *args, **kwargs)
        budget.charge_length(result)
        return result


def _priced_method(
    budget: Budget, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Charge for a method of a plain value; returns the arguments to call it with. Raises SecurityError if refused."""
    kind = next((kind for kind in METHODS if isinstance(owner, kind)), None)
    if kind is None or name not in METHODS[kind]:
        raise jinja2.exceptions.SecurityError(f"{type(owner).__name__}.{name} may not be called in a template")
    if kind in (list, tuple):  # index and count compare
        budget.charge_contents((owner, args))
    else:
        budget.charge_length(owner)
    if name == "replace":
        price_replace(owner, *args)
    elif name == "join" and args:
        args = (_listed(args[0]),)
        price_join(args[0], owner)
    elif name == "format":
        price_format(owner, *args, *kwargs.values())
    return args


class _TemplateNamespace(Namespace):
    """Jinja's namespace, printed without its contents (printing could be endless: a namespace may hold itself)."""

    def __repr__(self) -> str:
        return "<namespace>"

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace can't have an attribute {name!r}")
        super().__setitem__(name, value)


def _charge_output(value: Any) -> Any:
    return current_budget.get().charge_contents(value)


def _charged(function: Callable[..., Any], contents: bool, price: Callable[..., None] | None) -> Callable[..., Any]:
    """A filter or test that pays for its arguments and its result: all their contents, or their lengths."""
    context_arguments = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        budget = current_budget.get()
        budget.charge(TURN)
        values = [*args[context_arguments:], *kwargs.values()]
        if price is not None and values:
            values[0] = _listed(values[0])
            args = (*args[:context_arguments], values[0], *args[context_arguments + 1 :])
        for option in values[1:]:  # a width or a count: a large one makes much out of little
            if isinstance(option, int) and abs(option) > MAX_FILTER_OPTION:
                raise OverBudget(f"{option} is too large for a filter's option")
        if price is not None:
            price(*args[context_arguments:], **kwargs)
        if contents:
            budget.charge_contents(values)
            return budget.charge_contents(function(*args, **kwargs))
        budget.charge_length(*values)
        result = function(*args, **kwargs)
        budget.charge_length(result)
        return result

    return charged


def _listed(value: Any) -> Any:
    """A generator's items as a list, paid for one by one; anything else as it is."""
    return list(_iterate(None, value)) if isinstance(value, Iterator) else value


@jinja2.pass_context  # keeps Jinja from evaluating it once and for all at compile time; so for the next three
def _iterate(context: Context | None, values: Any, fixed_text: int = 0) -> Iterator[Any]:
    """The items of a loop, each paid for."""
    budget = current_budget.get()
    for value in values:
        budget.charge(TURN + fixed_text)
        yield value


@jinja2.pass_context
def _charge_contents(context: Context, value: Any) -> Any:
    return current_budget.get().charge_contents(value)


@jinja2.pass_context
def _charge_length(context: Context, value: Any) -> Any:
    current_budget.get().charge_length(value)
    return value


@jinja2.pass_context
def _concatenate(context: Context, parts: list[Any]) -> str:
    """The ~ operator."""
    current_budget.get().charge_contents(parts)
    return "".join(map(str, parts))


def _refuse(node: nodes.Node, what: str) -> NoReturn:
    raise jinja2.exceptions.TemplateSyntaxError(f"{what} not supported in a chat template", node.lineno)


def _fixed_text(node: nodes.Node) -> int:
    """Characters of literal text below a node."""
    constants = sum(len(const.value) for const in node.find_all(nodes.Const) if isinstance(const.value, str))
    return constants + sum(len(data.data) for data in node.find_all(nodes.TemplateData))


def _filtered(node: Any, name: str, *options: int) -> nodes.Filter:
    arguments: list[nodes.Expr] = [nodes.Const(option) for option in options]
    return nodes.Filter(node, name, arguments, [], None, None, lineno=node.lineno)


def _rewrite(node: nodes.Node) -> None:
    """Put all loops, literals, comparisons and slices below a node through the filters that charge for them."""
    for child in node.iter_child_nodes():
        _rewrite(child)
    if isinstance(node, nodes.For):
        if node.recursive:
            _refuse(node, "recursive loops are")
        node.iter = _filtered(node.iter, ITERATE, _fixed_text(node))
    elif isinstance(node, (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
        _refuse(node, "other templates are")
    elif isinstance(node, nodes.Compare):
        node.expr = _filtered(node.expr, CHARGE_CONTENTS)
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, CHARGE_CONTENTS)
    elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        node.node = _filtered(node.node, CHARGE_LENGTH)
    for name, value in list(node.iter_fields()):
        if isinstance(value, list):
            setattr(node, name, [_charged_literal(item) for item in value])
        else:
            setattr(node, name, _charged_literal(value))


def _charged_literal(node: Any) -> Any:
    """A literal collection or a concatenation, put through its filter; any other node or value as it is."""
    if isinstance(node, nodes.Concat):
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), CONCATENATE)
    if isinstance(node, (nodes.List, nodes.Dict)) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
        return _filtered(node, CHARGE_CONTENTS)
    return node
