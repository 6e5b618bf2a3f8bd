"""Example inputs of every op: `EXAMPLES[op name]` is a list of functions that make (args, kwargs)."""

from __future__ import annotations

from ops import examples_a, examples_b, examples_c, examples_d

EXAMPLES = {**examples_a.EXAMPLES, **examples_b.EXAMPLES, **examples_c.EXAMPLES, **examples_d.EXAMPLES}
