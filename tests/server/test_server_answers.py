"""What a client gets, asked through the real `openai` client: text, counts and reasons."""

from __future__ import annotations

import openai
import pytest
from server.fake_engine import END
from server.served import RunningServer


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return server.client()


def test_chat(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "How are you?"}]
    reply = client.chat.completions.create(model="echo", messages=messages, temperature=0)
    [choice] = reply.choices
    assert choice.message.content == "How are you?"
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert reply.model == "echo"
    assert reply.object == "chat.completion"
    assert reply.id.startswith("chatcmpl-")
    # <|user|> and <|end|> and <|assistant|> are a token each, other characters one a byte; END is generated, too
    assert reply.usage.prompt_tokens == 15
    assert reply.usage.completion_tokens == 14
    assert reply.usage.total_tokens == 29


def test_chat_streamed(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="echo",
            messages=[{"role": "user", "content": [{"type": "text", "text": "Grüße, 世界"}]}],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    *content, last, usage = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in [*content, last]) == "Grüße, 世界"
    assert all(chunk.choices[0].finish_reason is None for chunk in content)
    assert last.choices[0].finish_reason == "stop"
    assert usage.choices == []
    assert usage.usage.completion_tokens == len("Grüße, 世界".encode()) + 2
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_without_usage_has_none(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="echo", prompt="abc", temperature=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abc"
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)


def test_system_and_developer_messages(client: openai.OpenAI) -> None:
    for role in ("system", "developer"):
        messages = [{"role": role, "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        reply = client.chat.completions.create(model="echo", messages=messages, temperature=0)
        assert reply.choices[0].message.content == "Be brief."


def test_chat_template_variables(client: openai.OpenAI) -> None:
    """The template of the test's checkpoint leaves out the generation prompt's mark when told to."""
    options = {"model": "echo", "messages": [{"role": "user", "content": "a"}], "temperature": 0}
    plain = client.chat.completions.create(**options)  # type: ignore[call-overload]
    told = client.chat.completions.create(**options, extra_body={"chat_template_kwargs": {"unmarked": True}})  # type: ignore[call-overload]
    assert (plain.usage.prompt_tokens, told.usage.prompt_tokens) == (4, 3)


def test_completion_forms_of_prompt(client: openai.OpenAI) -> None:
    for prompt, texts in (
        ("abc", ["abc"]),
        (["abc", "de"], ["abc", "de"]),
        ([104, 105], ["hi"]),
        ([[104, 105], [111]], ["hi", "o"]),
    ):
        reply = client.completions.create(model="echo", prompt=prompt, temperature=0)
        assert [choice.text for choice in reply.choices] == texts
        assert [choice.index for choice in reply.choices] == list(range(len(texts)))
        assert {choice.finish_reason for choice in reply.choices} == {"stop"}
        tokens = sum(map(len, texts))
        assert reply.usage.prompt_tokens == tokens
        assert reply.usage.completion_tokens == tokens + len(texts)


def test_streamed_prompts_come_side_by_side(client: openai.OpenAI) -> None:
    texts = ["", ""]
    reasons: list[str | None] = [None, None]
    for chunk in client.completions.create(model="echo", prompt=["abcdef", "gh"], temperature=0, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == ["abcdef", "gh"]
    assert reasons == ["stop", "stop"]


def test_max_tokens(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="echo", prompt="abcdef", temperature=0, max_tokens=3)
    assert reply.choices[0].text == "abc"
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 3
    messages = [{"role": "user", "content": "abcdef"}]
    chat = client.chat.completions.create(model="echo", messages=messages, temperature=0, max_completion_tokens=3)
    assert chat.choices[0].message.content == "ab"
    assert chat.choices[0].finish_reason == "length"


def test_completions_default_to_16_tokens(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="echo", prompt="abcdefghijklmnopqrstuvwxyz", temperature=0)
    assert reply.choices[0].text == "abcdefghijklmnop"
    assert reply.choices[0].finish_reason == "length"


def test_ignore_eos(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="echo", prompt="ab", temperature=0, max_tokens=8, extra_body={"ignore_eos": True}
    )
    assert reply.choices[0].text == "ababab"[:6]
    assert reply.usage.completion_tokens == 8
    assert reply.choices[0].finish_reason == "length"


def test_stop_token_ids(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="echo",
        prompt="abcdef",
        temperature=0,
        extra_body={"stop_token_ids": [ord("d")], "return_token_ids": True},
    )
    [choice] = reply.choices
    assert choice.text == "abc"
    assert choice.finish_reason == "stop"
    assert choice.token_ids == [97, 98, 99, 100]
    assert reply.usage.completion_tokens == 4


def test_token_ids_are_returned_on_demand(client: openai.OpenAI) -> None:
    extra = {"return_token_ids": True}
    whole = client.completions.create(model="echo", prompt="é", temperature=0, extra_body=extra)
    assert whole.choices[0].token_ids == [*"é".encode(), END]
    chunks = client.completions.create(model="echo", prompt="é", temperature=0, stream=True, extra_body=extra)
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == [*"é".encode(), END]
    assert not hasattr(client.completions.create(model="echo", prompt="a", temperature=0).choices[0], "token_ids")


def test_seeds(client: openai.OpenAI) -> None:
    def sample(**options: object) -> str:
        return client.completions.create(model="echo", prompt="x", max_tokens=12, **options).choices[0].text  # type: ignore[call-overload,no-any-return]

    assert sample(seed=5) == sample(seed=5, temperature=0.7, top_p=0.9)
    assert sample(seed=5) != sample(seed=6)
    assert sample(seed=-1) != sample(seed=1)
    assert sample() != sample(), "requests without a seed have one each"
    assert sample(temperature=0, seed=1) == sample(temperature=0, seed=2)


def test_cached_tokens(client: openai.OpenAI) -> None:
    prompt = "something that was never asked before"
    first, second = (client.completions.create(model="echo", prompt=prompt, temperature=0) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == len(prompt) - 1


@pytest.mark.parametrize("stop", ["cd", ["xx", "cd", "de"], ["cd", "bcd"]])
def test_stop_strings_across_tokens(client: openai.OpenAI, stop: str | list[str]) -> None:
    reply = client.completions.create(model="echo", prompt="abcdefgh", temperature=0, stop=stop)
    [choice] = reply.choices
    assert choice.text == ("a" if "bcd" in stop else "ab")
    assert choice.finish_reason == "stop"
    assert reply.usage.completion_tokens == 4, "tokens after the stop string are not counted"


def test_stop_string_that_does_not_come(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="echo", prompt="abcdef", temperature=0, stop="efg")
    assert reply.choices[0].text == "abcdef"
    assert reply.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("options", [{}, {"stop": ["wor", "ld!"]}, {"max_tokens": 9}, {"stop": "é w"}])
def test_streamed_equals_whole(client: openai.OpenAI, options: dict[str, object]) -> None:
    common = {"model": "echo", "prompt": "hélé wérld! 🙂🙂", "temperature": 0, "max_tokens": 64, **options}
    whole = client.completions.create(**common)  # type: ignore[call-overload]
    chunks = list(client.completions.create(**common, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert choices[-1].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == "echo"
    assert model.max_model_len == 512
    assert client.models.retrieve("echo").id == "echo"
    with pytest.raises(openai.NotFoundError, match="`other` is not served here"):
        client.models.retrieve("other")


def test_service_class_by_field_and_header(server: RunningServer, client: openai.OpenAI) -> None:
    def offline() -> float:
        return server.metric("firstlight_requests_total", service_class="offline", outcome="stop")

    before = offline()
    client.completions.create(model="echo", prompt="a", temperature=0, extra_body={"service_class": "offline"})
    client.completions.create(model="echo", prompt="a", temperature=0, extra_headers={"X-Service-Class": "Offline"})
    client.completions.create(model="echo", prompt="a", temperature=0)
    assert offline() == before + 2
