"""What environment variables say to the plugins: whether they are on, and what they leave to the host. Imports no host and no torch."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping

from pydantic import ValidationError

from firstlight.config import ENVIRONMENT_PREFIX, EngineOptions, PluginOptions, unknown_variables
from firstlight.errors import FirstlightError

INSIDE_HOSTS = ("plugin", "plugin_skip", "op", "invariant", "table")
"""Options that hold inside a host; what the others say, the host's own options do."""
VARIABLES = tuple(ENVIRONMENT_PREFIX + name.upper() for name in INSIDE_HOSTS)


def switches(environment: Mapping[str, str] | None = None) -> PluginOptions:
    """The plugins' options.

    Raises FirstlightError, naming the variable, for a value that isn't legal, and for a name that looks like one of `INSIDE_HOSTS`
    mistyped. Other names may be a cluster's, for a service that is called as we are: they don't keep a host from starting.
    """
    environment = os.environ if environment is None else environment
    held = {name: environment[name] for name in VARIABLES if name in environment}
    if held.get("FIRSTLIGHT_PLUGIN") != "off":
        for name in unknown_variables(environment):
            if nearest := difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.9):
                raise FirstlightError(f"{name} sets no option; unset it, or set {nearest[0]} if that is meant")
    try:
        EngineOptions.load(
            {"model": "-"}, held
        )  # read when a model is built; looked at here, where the error can be said
        return PluginOptions.load({}, held)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        variable = ENVIRONMENT_PREFIX + str(wrong["loc"][0]).upper()
        raise FirstlightError(f"{variable}: {wrong['msg']}; it is {environment[variable]!r}") from None


def active(served: Iterable[str]) -> tuple[str, ...]:
    """Those of the architectures that we serve which FIRSTLIGHT_PLUGIN_SKIP doesn't name.

    Raises FirstlightError if it names others, and what `switches` does.
    """
    served, skip = tuple(served), switches().plugin_skip
    if unknown := sorted(set(skip) - set(served)):
        raise FirstlightError(f"FIRSTLIGHT_PLUGIN_SKIP: {', '.join(unknown)}: we serve {', '.join(served)}")
    return tuple(name for name in served if name not in skip)


def without_effect(environment: Mapping[str, str] | None = None) -> str | None:
    """A line on variables with our prefix that mean nothing inside a host, or None."""
    environment = os.environ if environment is None else environment
    rest = sorted(name for name in environment if name.startswith(ENVIRONMENT_PREFIX) and name not in VARIABLES)
    return f"{', '.join(rest)}: of no effect here; the host's own options hold" if rest else None
