"""What `generate` draws for a line doesn't depend on which lines were answered before."""

from __future__ import annotations

import json
import subprocess
import sys

from reference import save_checkpoint


def test_a_run_that_goes_on_draws_what_it_would_have_drawn(tmp_path):
    checkpoint = save_checkpoint("qwen3", tmp_path / "checkpoint")
    line = json.dumps({"prompt_token_ids": [5, 6, 7], "max_tokens": 12, "temperature": 1.0, "return_token_ids": True})
    (tmp_path / "in").write_text(f"{line}\n" * 6)

    def run(output):
        command = ["generate", str(checkpoint), "-i", str(tmp_path / "in"), "-o", str(output), "--cache-gib", "0.02"]
        subprocess.run([sys.executable, "-m", "firstlight", *command], check=True, timeout=60)
        answers = [json.loads(text) for text in output.read_text().splitlines()]
        return {answer["index"]: answer["token_ids"] for answer in answers}

    whole = run(tmp_path / "whole")
    kept = (tmp_path / "whole").read_text().splitlines()[:3]
    (tmp_path / "rest").write_text("".join(f"{text}\n" for text in kept))
    assert run(tmp_path / "rest") == whole
    assert len(set(map(tuple, whole.values()))) == 6
