"""The fields of OpenAI's API that are not supported yet, with the values of them that change nothing.

Real clients send defaults (`n: 1`, `presence_penalty: 0`), so those are accepted. Any other value would be ignored in
silence, and its sender would find out from the output: it is refused with an error that names the field. So is a
field that nobody knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from firstlight.server.errors import bad_request

ANY = object()
"""Every value is accepted: the field says something about the sender, nothing about the answer."""

# null is accepted for each. Lists and objects are compared by value, and 0 == 0.0, but True is not 1.
REQUEST_FIELDS: dict[str, tuple[Any, ...]] = {
    "user": (ANY,),
    "safety_identifier": (ANY,),
    "metadata": (ANY,),
    "prompt_cache_key": (ANY,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "length_penalty": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "chat_template": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "priority": (0,),
}
MESSAGE_FIELDS: dict[str, tuple[Any, ...]] = {
    "name": (),
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "reasoning_content": (),
}
STREAM_OPTIONS_FIELDS: dict[str, tuple[Any, ...]] = {
    "include_obfuscation": (False,),
    "continuous_usage_stats": (False,),
}


def check_extra_fields(extra: Mapping[str, Any] | None, known: Mapping[str, tuple[Any, ...]], where: str = "") -> None:
    """Accept the fields of `extra` whose values change nothing. Raises ApiError (400) for the first other one."""
    for name, value in (extra or {}).items():
        path = f"{where}{name}"
        if name not in known:
            raise bad_request(f"unknown field `{path}`", path, "unknown_field")
        if value is None or any(allowed is ANY or _same(value, allowed) for allowed in known[name]):
            continue
        legal = ", ".join(f"`{allowed!r}`" for allowed in known[name])
        only = f"; only {legal} (or leaving it out) is accepted" if legal else "; leave it out"
        raise bad_request(f"`{path}` is not supported yet{only}", path, "unsupported_field")


def _same(value: Any, allowed: Any) -> bool:
    return isinstance(value, bool) == isinstance(allowed, bool) and value == allowed
