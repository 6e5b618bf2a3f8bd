"""What a compiled kernel reads while the kernels before it may still run. For the scripts beside it."""

from __future__ import annotations

import re

LOAD = re.compile(r"\bld\.global|\bcp\.async\.c[ag]")
LABEL, BRANCH = re.compile(r"^(\$\w+):", re.MULTILINE), re.compile(r"\bbra\S*\s+(\$\w+);")


def early_loads(assembly: str) -> tuple[int, int]:
    """Loads from global memory above the wait for the kernels before, and below it; none are above where there is no wait.

    Fails if it stores above, or if the wait is in a loop, where the order of lines tells nothing: what stands above may be read after
    it, and Triton's pipeline moves loads that should stand below.
    """
    above, _, below = assembly.partition("griddepcontrol.wait")
    if not below:
        return 0, len(LOAD.findall(above))
    assert "st.global" not in above, "stores before it waits"
    assert not {*LABEL.findall(above)} & {*BRANCH.findall(below)}, "waits in a loop"
    return len(LOAD.findall(above)), len(LOAD.findall(below))
