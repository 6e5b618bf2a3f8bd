"""The documentation says what the code does: generated blocks are current, and links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "scripts" / "generate_docs.py")
assert spec is not None
assert spec.loader is not None
generate_docs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate_docs)

PAGES = generate_docs.pages()


def test_generated_blocks_are_current():
    stale = [str(page.relative_to(ROOT)) for page in generate_docs.stale_pages()]
    assert not stale, "run `make docs`"


def test_a_stale_block_is_noticed_and_rewritten(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- generated: gguf -->\n\nold\n\n<!-- end -->\nafter\n")
    assert generate_docs.stale_pages([page]) == [page]
    text = generate_docs.regenerated(page.read_text())
    assert text.startswith("before\n<!-- generated: gguf -->\n")
    assert text.endswith("\n<!-- end -->\nafter\n")
    assert "`Q4_0`" in text
    assert "old" not in text
    page.write_text(text)
    assert generate_docs.stale_pages([page]) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- generated: nothing -->\n<!-- end -->\n", "no generated block 'nothing'; there are: commands"),
        ("<!-- generated: gguf -->\n", "not closed"),
    ],
)
def test_wrong_blocks_are_refused(text, message):
    with pytest.raises(SystemExit, match=message):
        generate_docs.regenerated(text)


def test_every_block_is_on_a_page():
    used = {name for page in PAGES for name in generate_docs.OPENING.findall(page.read_text())}
    assert used == set(generate_docs.BLOCKS)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", prose)
    broken = []
    for link in links:
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_every_command_and_option_is_documented():
    from firstlight.cli import COMMANDS
    from firstlight.config import EngineOptions, ServerOptions

    commands = (ROOT / "docs" / "cli.md").read_text()
    assert all(f"## {name}\n" in commands for name in COMMANDS)
    options = (ROOT / "docs" / "configuration.md").read_text()
    names = [*EngineOptions.model_fields, *ServerOptions.model_fields]
    assert all(f"`FIRSTLIGHT_{name.upper()}`" in options for name in names)
