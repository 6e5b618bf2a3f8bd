"""Who may import whom: the order of the house, and what stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "firstlight"
LAYERS = [
    {"errors", "config"},
    {"hardware", "bench"},
    {"parallel", "quant"},
    {"ops"},
    {"step", "cache"},
    {"nn"},
    {"models"},
    {"weights", "scheduling"},
    {"engine", "verify", "predict"},
    {"calibrate"},
    {"server", "plugin", "cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
SIDEWAYS = {
    ("hardware", "bench"),
    ("bench", "hardware"),
    ("server", "cli"),
    ("plugin", "cli"),
    ("predict", "engine"),
    ("verify", "engine"),
    ("engine", "verify"),
}
"""Pairs of one level that may not meet: (importer, imported)."""


def imports():
    """(file, folder, imported folder) for every import of our own package."""
    for path in sorted(SOURCE.rglob("*.py")):
        folder = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if folder == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                parts = name.split(".")
                if parts[0] == "firstlight" and len(parts) > 1 and parts[1] != folder:
                    yield str(path.relative_to(SOURCE)), folder, parts[1]


def test_imports_go_up_only():
    wrong = [
        f"{file} imports {imported}"
        for file, folder, imported in imports()
        if LEVEL[imported] > LEVEL[folder] or (folder, imported) in SIDEWAYS
    ]
    assert not wrong


def test_scheduling_knows_only_config():
    assert {imported for _, folder, imported in imports() if folder == "scheduling"} <= {"config"}
    text = "\n".join(path.read_text() for path in (SOURCE / "scheduling").glob("*.py"))
    assert "import torch" not in text


def test_bench_knows_only_config_and_errors():
    assert {imported for _, folder, imported in imports() if folder == "bench"} <= {"config", "errors"}


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("firstlight.scheduling.scheduler", ["torch", "transformers"]),
        ("firstlight.hardware", ["torch"]),
        ("firstlight.cli", ["torch", "transformers", "fastapi", "numpy", "aiohttp"]),
        ("firstlight.server.app", ["torch", "transformers"]),
        ("firstlight.bench.bench", ["torch", "transformers", "tokenizers", "fastapi", "zmq"]),
        ("firstlight.engine.engine", ["transformers", "fastapi", "triton"]),
    ],
)
def test_what_stays_light(module, forbidden):
    code = f"import sys, {module}; print(*[name for name in {forbidden!r} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert loaded.stdout.split() == []
