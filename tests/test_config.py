"""Options: defaults, environment, and errors that name the field."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from firstlight.config import LARGEST_SEED, EngineOptions, checked_url


def test_what_is_given_wins_over_the_environment_and_the_defaults():
    environment = {
        "FIRSTLIGHT_MAX_RUNNING": "7",
        "FIRSTLIGHT_STEP_TOKENS": "99",
        "FIRSTLIGHT_OP": "linear=torch,rope=reference",
    }
    options = EngineOptions.load({"model": "x", "step_tokens": 5, "seed": None}, environment)
    assert (options.max_running, options.step_tokens, options.seed) == (7, 5, 0)
    assert options.op == ("linear=torch", "rope=reference")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"max_running": "many"}, "max_running"),
        ({"page_size": 0}, "page_size"),
        ({"pages": 3}, "pages"),
        ({"seed": LARGEST_SEED + 1}, "seed"),
        ({"seed": -1}, "seed"),
        *(({"cache_gib": value}, "cache_gib\n.*should be") for value in ("inf", "nan", "1e9", "-1")),
        ({"checkpoint_gib": "inf"}, "checkpoint_gib\n.*finite"),
        *(
            ({name: "99999999999"}, f"{name}\n.*less than or equal to")
            for name in ("threads", "max_running", "step_tokens", "offline_step_tokens", "page_size", "depth")
        ),
    ],
)
def test_a_wrong_value_or_name_is_an_error_that_names_it(given, field):
    with pytest.raises(ValidationError, match=field):
        EngineOptions.load({"model": "x", **given}, {})


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("https://a.b/v1/", "https://a.b/v1"),
        ("http://[::1]:80/proxy/?a=1#b", "http://[::1]:80/proxy/v1"),
    ],
)
def test_an_address_is_taken_with_and_without_its_path(given, base):
    assert checked_url(given).geturl() == base
