"""Options, help, and errors, as a user meets them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from firstlight.cli.options import error_lines
from firstlight.config import EngineOptions, ServerOptions, VerifyOptions, unknown_variables

HEAVY = ("torch", "transformers", "fastapi", "uvicorn", "starlette", "zmq", "tokenizers", "numpy", "safetensors")


def run(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "firstlight", *arguments],
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["generate", "--help"]])
def test_help_is_light(arguments: list[str]) -> None:
    """Help loads none of the heavy packages, so it is there at once."""
    script = f"""
import sys
from firstlight.cli import main
sys.argv = ["firstlight", *{arguments!r}]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print("heavy:", [name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("heavy: []\n"), done.stdout[-300:] + done.stderr


def test_every_field_is_an_option_of_serve() -> None:
    text = run("serve", "--help").stdout
    for kind in (EngineOptions, ServerOptions):
        for name, field in kind.model_fields.items():
            assert (name.upper() if name == "model" else f"--{name.replace('_', '-')}") in text
            words = (field.description or "").split()[:3]
            assert " ".join(words) in " ".join(text.split())
    assert "(default: 256)" in text
    assert "(default: --prefix-cache)" in text
    assert "auto|float32|bfloat16|float16" in text


@pytest.mark.parametrize(
    ("arguments", "environment", "lines"),
    [
        ([], {}, ["MODEL is missing: give it on the command line or as FIRSTLIGHT_MODEL"]),
        (
            ["m", "--max-running", "0", "--dtype", "int3"],
            {},
            [
                "--dtype (or FIRSTLIGHT_DTYPE): input should be 'auto', 'float32', 'bfloat16' or 'float16'; it is 'int3'",
                "--max-running (or FIRSTLIGHT_MAX_RUNNING): input should be greater than or equal to 1; it is '0'",
            ],
        ),
        (
            ["m"],
            {"FIRSTLIGHT_PORT": "http"},
            [
                "--port (or FIRSTLIGHT_PORT): input should be a valid integer, unable to parse string as an integer; "
                "it is 'http'"
            ],
        ),
        *(
            (["m", "--api-key", key], {}, [f"--api-key (or FIRSTLIGHT_API_KEY): {said}"])
            for key, said in (
                (
                    " \n",
                    "value error, is empty or all white space; give a key, or leave the option and its variable out",
                ),
                (
                    "secret\nkey",
                    "value error, has characters inside that a header can't carry; only printable ones and spaces are legal",
                ),
            )
        ),
    ],
)
def test_wrong_options(arguments: list[str], environment: dict[str, str], lines: list[str]) -> None:
    done = run("serve", *arguments, environment=environment)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"firstlight: error: {line}" for line in lines]


def test_unknown_variables_are_errors_that_name_the_nearest_option() -> None:
    done = run("serve", "m", environment={"FIRSTLIGHT_MAX_RUNING": "7", "FIRSTLIGHT_THREAD": "x"})
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"firstlight: error: FIRSTLIGHT_{name} sets no option; unset it, or set FIRSTLIGHT_{nearest} if that is meant"
        for name, nearest in (("MAX_RUNING", "MAX_RUNNING"), ("THREAD", "THREADS"))
    ]


def test_every_field_is_a_known_variable() -> None:
    names = [*EngineOptions.model_fields, *ServerOptions.model_fields, *VerifyOptions.model_fields]
    assert unknown_variables({f"FIRSTLIGHT_{name.upper()}": "" for name in names} | {"PATH": ""}) == {}


def test_the_command_line_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = options_seen_by_serve(
        monkeypatch,
        ["here", "--max-running", "7", "--no-prefix-cache", "--op", "a=b", "--op", "c=d"],
        {"FIRSTLIGHT_MAX_RUNNING": "9", "FIRSTLIGHT_PORT": "1234", "FIRSTLIGHT_MODEL": "there"},
    )
    engine_options, server_options = seen
    assert engine_options == EngineOptions(model="here", max_running=7, prefix_cache=False, op=("a=b", "c=d"))
    assert server_options == ServerOptions(port=1234)


def test_defaults_are_those_of_the_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = options_seen_by_serve(monkeypatch, [], {"FIRSTLIGHT_MODEL": "there", "FIRSTLIGHT_PREFIX_CACHE": "false"})
    assert seen == [EngineOptions(model="there", prefix_cache=False), ServerOptions()]


def options_seen_by_serve(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], environment: dict[str, str]
) -> list[Any]:
    """What `firstlight serve ARGUMENTS` would serve with."""
    from firstlight import cli
    from firstlight.server import launch

    seen: list[Any] = []
    monkeypatch.setattr(launch, "serve", lambda *options: seen.extend(options))
    monkeypatch.setattr(sys, "argv", ["firstlight", "serve", *arguments])
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    return seen


def test_errors_name_option_value_and_legal_values() -> None:
    with pytest.raises(ValidationError) as caught:
        EngineOptions(model="m", offline_share=2.0)
    [line] = error_lines(caught.value)
    assert line == ("--offline-share (or FIRSTLIGHT_OFFLINE_SHARE): input should be less than or equal to 1; it is 2.0")


def test_mistakes_are_one_line_without_a_traceback() -> None:
    done = run("serve", "--host", "0.0.0.0", "m")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("firstlight: error: --host 0.0.0.0 can be reached from other machines")
