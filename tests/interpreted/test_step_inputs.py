"""The request table's kernels, and rotary angles, under the interpreter: integers are equal, angles nearly."""

from __future__ import annotations

import pytest
from ops.examples_d import STEPS
from request_checks import check_advance, check_angles, check_step_inputs


@pytest.mark.parametrize("name", STEPS)
def test_step_inputs(name: str) -> None:
    check_step_inputs("cpu", STEPS[name])


def test_advance_rows() -> None:
    check_advance("cpu")


@pytest.mark.parametrize("sections", [None, (11, 11, 10)])
def test_rope_angles(sections: tuple[int, int, int] | None) -> None:
    check_angles("cpu", sections)
