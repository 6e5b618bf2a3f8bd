"""One of two ranks on GPUs, for test_tensor_parallel.py: `python two_ranks.py RANK STORE CHECKPOINT`.

Captures all graphs, as a rank of the engine does, and compares the logits of each with those of the same padded step run op by op.
In bfloat16: no provider for many tokens' experts in float32 can be captured.
"""

from __future__ import annotations

import sys

import torch

from firstlight.config import EngineOptions
from firstlight.engine.executor import Executor
from firstlight.engine.loading import allocate_caches, cache_geometry, load_model
from firstlight.engine.ranks import join, rank_device


def main() -> None:
    rank, store, checkpoint = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    given = {"dtype": "bfloat16", "cache_gib": 0.02, "max_running": 8, "step_tokens": 128}
    options = EngineOptions(model=checkpoint, device="cuda", tensor_parallel=2, **given)
    loaded = load_model(options, join(options, rank, store), rank_device(options, rank))
    pool = allocate_caches(loaded, cache_geometry(loaded.options, loaded))
    executor = Executor(loaded, pool, options.max_running, poison=True)
    graphs = executor.graphs
    assert graphs is not None
    assert not graphs.reasons, graphs.reasons
    assert {bool(graph.room.prompts) for graph in graphs.graphs} == {False, True}
    with torch.inference_mode(), torch.cuda.stream(executor.stream):
        for graph in graphs.graphs:
            step, _, _ = graphs.step_of(graph.memory, graph.room)
            want = loaded.model(step).clone()
            graph.forward.replay()
            assert torch.equal(graph.logits, want), graph.room
    print(f"{len(graphs.graphs)} graphs are equal")
    executor.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
