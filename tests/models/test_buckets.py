"""The ladder of buckets: what rises, and where prompts may run."""

from __future__ import annotations

import pytest

from firstlight.config import EngineOptions
from firstlight.hardware import GPUS, Hardware
from firstlight.models.buckets import bucket_ladder

CPU = Hardware("a CPU", "cpu", "avx2")


def ladder(hardware, running, tokens, context=512, **options):
    return bucket_ladder(
        EngineOptions(model="-", max_running=running, step_tokens=tokens), context, hardware, **options
    )


@pytest.mark.parametrize("tokens", [1, 2, 64, 100])
@pytest.mark.parametrize("running", [1, 3, 32, 256])
@pytest.mark.parametrize("hardware", [CPU, GPUS["h200"]], ids=["cpu", "gpu"])
def test_decode_rises_by_rows_and_prompts_by_tokens(hardware, running, tokens):
    buckets = ladder(hardware, running, tokens)
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    decode = [bucket for bucket in buckets if bucket.query == 1]
    assert list(buckets[: len(decode)]) == decode
    assert [bucket.requests for bucket in decode] == sorted({bucket.requests for bucket in decode})
    assert decode[-1].requests == running
    prefill = buckets[len(decode) :]
    assert [bucket.query for bucket in prefill] == sorted({bucket.query for bucket in prefill})
    assert prefill[-1].query == max(tokens, 2)


@pytest.mark.parametrize(("running", "requests"), [(1, 2), (4, 8), (32, 64), (256, 288)])
def test_a_gpus_prompts_run_beside_all_decode_rows(running, requests):
    for bucket in ladder(GPUS["h200"], running, 128):
        if bucket.query > 1:
            assert (bucket.requests, bucket.tokens) == (requests, running + bucket.query)


@pytest.mark.parametrize("hardware", [CPU, GPUS["h200"]], ids=["cpu", "gpu"])
def test_no_bucket_has_more_prompt_tokens_than_all_rows_can_have(hardware):
    assert ladder(hardware, 4, 8192, context=100)[-1].query == 400
    assert ladder(hardware, 1, 8192, context=1)[-1].query == 2
    assert ladder(hardware, 4, 200, context=100)[-1].query == 200
    assert ladder(hardware, 4, 8192, context=100, fillable=False)[-1].query == 8192
