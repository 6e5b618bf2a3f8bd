"""What is refused, how it is said, and that nobody else is harmed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server.fake_engine import REFUSED, VOCAB_SIZE
from server.served import RunningServer

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object, which must have OpenAI's four fields."""
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 10}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"min_p": 0.1}, "min_p"),
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"store": True}, "store"),
        ({"n": True}, "n"),
        ({"messages": [{"role": "user", "content": "a", "name": "bob"}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ],
)
def test_fields_not_supported_yet(server: RunningServer, fields: dict[str, Any], name: str) -> None:
    error = error_of(server.post(CHAT, json={**HELLO, **fields}))
    assert error["param"] == name
    assert f"`{name}`" in error["message"]
    assert error["code"] == "unsupported_field"
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("fields", [{"best_of": 3}, {"echo": True}, {"suffix": "end"}, {"logprobs": 1}])
def test_completion_fields_not_supported_yet(server: RunningServer, fields: dict[str, Any]) -> None:
    error = error_of(server.post(COMPLETIONS, json={"prompt": "a", **fields}))
    assert error["param"] in fields
    assert error["code"] == "unsupported_field"


def test_values_that_change_nothing_are_accepted(server: RunningServer) -> None:
    """What real clients send without meaning anything by it."""
    fields = {
        "n": 1,
        "logprobs": False,
        "top_logprobs": None,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "user": "somebody",
        "metadata": {"a": "b"},
        "stop": None,
        "stream": None,
        "seed": None,
        "service_class": None,
        "temperature": 0,
        "top_k": -1,
    }
    history = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": []}
    messages = [*HELLO["messages"], history, {"role": "user", "content": "y"}]  # type: ignore[misc]
    response = server.post(CHAT, json={**fields, "messages": messages})
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == "hi"


@pytest.mark.parametrize(
    ("fields", "name", "said"),
    [
        ({"temprature": 0.5}, "temprature", "unknown field"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"temperature": float("inf")}, "temperature", "finite"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_p": 1.5}, "top_p", "less than or equal to 1"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"seed": 1.5}, "seed", "integer"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "give one"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "at most 4"),
        ({"stop": ""}, "stop", "1 to 256 characters"),
        ({"stop": 5}, "stop", "a string or a list of strings"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids", f"0 to {VOCAB_SIZE - 1}"),
        ({"service_class": "batch"}, "service_class", "'online' or 'offline'"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "can't set `messages`"),
        ({"messages": [{"role": "user", "content": "refuse me"}]}, "messages", "roles must alternate"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": None}, "messages", "array"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role", "'user'"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "missing"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages", "may have 512"),
    ],
)
def test_wrong_values(server: RunningServer, fields: dict[str, Any], name: str, said: str) -> None:
    body = json.dumps({**HELLO, **fields}).replace("Infinity", "1e999")
    error = error_of(server.post(CHAT, content=body))
    assert error["param"] == name
    assert said in error["message"]


@pytest.mark.parametrize(
    ("prompt", "code", "said"),
    [
        ("", "empty_prompt", "`prompt` is empty"),
        ([], "invalid_value", "is empty"),
        ([[]], "empty_prompt", "`prompt` is empty"),
        ([[1], []], "empty_prompt", "`prompt[1]` is empty"),
        ([1, VOCAB_SIZE], "token_id_out_of_range", f"has the token id {VOCAB_SIZE}"),
        ([-1], "token_id_out_of_range", "has the token id -1"),
        ([2**70], "token_id_out_of_range", str(2**70)),
        ([1.5], "invalid_value", "list of token ids"),
        ([True], "invalid_value", "list of token ids"),
        (["a", 1], "invalid_value", "list of token ids"),
        (None, "invalid_value", "list of token ids"),
        ({"a": 1}, "invalid_value", "list of token ids"),
        ([[1]] * 129, "invalid_value", "at most 128"),
        ([1] * 512, "context_length_exceeded", "512 tokens and 16 more"),
        ([1] * 100_000, "context_length_exceeded", "100000 tokens"),
        ([REFUSED], "request_refused", "900 pages"),
        ([[1], [REFUSED]], "request_refused", "900 pages"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_prompts(server: RunningServer, prompt: Any, code: str, said: str, stream: bool) -> None:
    error = error_of(server.post(COMPLETIONS, json={"prompt": prompt, "stream": stream}))
    assert error["code"] == code
    assert said in error["message"]
    assert server.live() == 0


def test_the_client_raises_the_right_exceptions(server: RunningServer) -> None:
    client = server.client()
    with pytest.raises(openai.NotFoundError, match="the model `gpt-9` is not served here; `echo` is"):
        client.completions.create(model="gpt-9", prompt="a")
    with pytest.raises(openai.BadRequestError, match="`best_of` is not supported yet") as caught:
        client.completions.create(model="echo", prompt="a", best_of=2)
    assert caught.value.param == "best_of"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"prompt": "\\ud800"}', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b"[]", "invalid_value"),
        (b"null", "invalid_value"),
        (b"{}", "missing_field"),
    ],
)
def test_bodies_that_are_no_request(server: RunningServer, body: bytes, code: str) -> None:
    assert error_of(server.post(COMPLETIONS, content=body))["code"] == code


def test_unknown_paths_and_methods(server: RunningServer) -> None:
    assert "/v1/nothing" in error_of(server.get("/v1/nothing"), 404)["message"]
    error_of(server.get(COMPLETIONS), 405)


def test_service_class_header_must_be_known(server: RunningServer) -> None:
    response = server.post(COMPLETIONS, json={"prompt": "a"}, headers={"X-Service-Class": "gold"})
    assert error_of(response)["param"] == "X-Service-Class"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(
    ["prompt", "messages", "model", "stream", "stream_options", "stop", "seed", "max_tokens", "n", "service_class", "x"]
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from([CHAT, COMPLETIONS]), body=st.dictionaries(names, json_values, max_size=5) | json_values)
def test_any_json_gets_an_answer_or_a_clear_error(server: RunningServer, path: str, body: Any) -> None:
    response = server.post(path, content=json.dumps(body).encode("utf-8", "surrogatepass"))
    if response.status_code != 200:
        assert response.status_code in (400, 404), response.text
        error_of(response, response.status_code)


def test_after_all_that_nothing_is_left_and_others_are_served(server: RunningServer) -> None:
    assert server.live() == 0
    assert server.metric("firstlight_pages_used") == 0
    assert server.post(CHAT, json=HELLO).json()["choices"][0]["message"]["content"] == "hi"
    assert server.get("/health").json() == {"status": "ok"}
    assert "Traceback" not in server.log
