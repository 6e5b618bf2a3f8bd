"""Files for results: refused before the work, and never touched by being looked at."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from firstlight.cli.output_file import check_output, write_output
from firstlight.errors import FirstlightError

TINY = Path(__file__).parents[1] / "tiny_configs"


def test_what_is_there_stays_and_what_is_not_is_not_made(tmp_path: Path) -> None:
    there, link = tmp_path / "there.json", tmp_path / "link.json"
    there.write_text("old")
    link.symlink_to(tmp_path / "new.json")
    for path in (there, link, tmp_path / "new.json"):
        check_output("--json", path)
    assert there.read_text() == "old"
    assert sorted(tmp_path.iterdir()) == [link, there]
    write_output("--json", link, "a result")
    assert (tmp_path / "new.json").read_bytes() == b"a result"


def test_pipes_and_devices_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # nobody reads from it
    check_output("--json", tmp_path / "pipe")
    check_output("--json", Path("/dev/null"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "this is a directory; name a file in it, such as "),
        ("no/x.json", "there is no folder "),
        ("file/x.json", "there is no folder "),
        ("loop", "it can't be written: "),
        ("n" * 300, "it can't be written: File name too long"),
        ("/proc/x.json", "it can't be written: "),
    ],
)
def test_what_cannot_be_written_is_refused_by_option_and_path(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(FirstlightError) as caught:
        check_output("--out", tmp_path / name)
    assert str(caught.value).startswith(f"--out {tmp_path / name}: {reason}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write what modes forbid")
def test_modes_are_kept_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "file").chmod(0o400)
    with pytest.raises(FirstlightError, match="Permission denied"):
        check_output("--out", tmp_path / "file")


def test_profile_refuses_before_it_loads(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "firstlight", "profile", str(TINY / "llama.json"), "--json", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(f"firstlight: error: --json {tmp_path}: this is a directory")
