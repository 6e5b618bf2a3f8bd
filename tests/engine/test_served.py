"""The whole way: real server, real engine, real client; streamed = not streamed; nothing is left behind."""

from __future__ import annotations

import asyncio
import random
import time

import httpx
import openai
import pytest
from driver import prompts, reference_answer
from reference import reference_model, save_checkpoint
from served_model import metrics, served


@pytest.mark.parametrize("name", ["smollm2", "qwen3_5_moe_text"])
def test_streamed_is_not_streamed_is_transformers(name, tmp_path):
    asked = prompts((20, 70))
    want = [reference_answer(reference_model(name), prompt) for prompt in asked]
    with served(save_checkpoint(name, tmp_path), "--dtype", "float32", "--cache-gib", "0.05") as (url, _, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        model = client.models.list().data[0].id
        for prompt, tokens in zip(asked, want, strict=True):
            body = {
                "model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0,
                "extra_body": {"return_token_ids": True, "ignore_eos": True},
            }  # fmt: skip
            whole = client.completions.create(**body)
            streamed = [chunk for chunk in client.completions.create(**body, stream=True) if chunk.choices]
            assert whole.choices[0].token_ids == tokens
            assert [token for chunk in streamed for token in chunk.choices[0].token_ids] == tokens
            assert whole.usage.prompt_tokens == len(prompt)
            assert whole.usage.completion_tokens == 16
            again = client.completions.create(**body)
            assert again.choices[0].token_ids == tokens
            assert 0 < again.usage.prompt_tokens_details.cached_tokens < len(prompt) or len(prompt) < 64


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "qwen3_next"])
def test_two_thousand_short_requests_with_disconnects_give_everything_back(name, tmp_path):
    chance = random.Random(7)
    finished = dropped = 0

    async def one(client: httpx.AsyncClient, number: int, model: str, gate: asyncio.Semaphore) -> None:
        nonlocal finished, dropped
        prompt = [chance.randrange(3, 480) for _ in range(chance.randrange(1, 40))]
        body = {
            "model": model, "prompt": prompt, "max_tokens": chance.randrange(1, 12), "temperature": 0.0,
            "stream": number % 2 == 0, "ignore_eos": True, "return_token_ids": True,
            "service_class": "offline" if number % 5 == 0 else "online",
        }  # fmt: skip
        async with gate:
            if chance.random() < 0.2:
                try:
                    await asyncio.wait_for(client.post("/v1/completions", json=body), chance.uniform(0.001, 0.3))
                    finished += 1
                except (TimeoutError, httpx.HTTPError):
                    dropped += 1
            else:
                reply = await client.post("/v1/completions", json=body)
                assert reply.status_code == 200, reply.text
                finished += 1

    async def load(url: str, model: str) -> None:
        gate = asyncio.Semaphore(64)
        limits = httpx.Limits(max_connections=80)
        async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
            await asyncio.gather(*(one(client, i, model, gate) for i in range(2000)))

    with served(save_checkpoint(name, tmp_path), "--dtype", "float32", "--cache-gib", "0.02") as (url, process, log):
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        asyncio.run(load(url, model))
        assert finished + dropped == 2000
        assert dropped > 50
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            now = metrics(httpx.get(f"{url}/metrics").text)
            busy = {key: value for key, value in now.items() if "running" in key or "waiting" in key}
            if busy and not any(busy.values()):
                break
            time.sleep(0.2)
        assert busy
        assert not any(busy.values())
        # One more request after the accounts' quiet-time check is due: it runs, and nothing has leaked.
        time.sleep(11)
        reply = httpx.post(
            f"{url}/v1/completions", json={"model": model, "prompt": [5, 6], "max_tokens": 2, "return_token_ids": True}
        )
        assert reply.status_code == 200
        assert "don't add up" not in log.read_text()
        assert process.poll() is None
