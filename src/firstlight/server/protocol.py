"""The requests of the API, checked.

Types are strict (the string "5" is no number), fields that nobody knows are refused, and every error names its field.
`fields.py` lists what OpenAI has and we don't, yet.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from firstlight.scheduling.sampling import ServiceClass
from firstlight.server.errors import ApiError, bad_request
from firstlight.server.fields import MESSAGE_FIELDS, REQUEST_FIELDS, STREAM_OPTIONS_FIELDS, check_extra_fields

MAX_STOP_STRINGS = 4
MAX_STOP_STRING_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_PROMPTS = 128
TEMPLATE_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "self"})
"""What a chat template gets from us and no client may replace."""
SEED_LIMIT = 2**63
"""Seeds are signed 64-bit integers."""


class Body(BaseModel):
    """Strict, frozen; extra fields are kept for check_extra_fields."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", allow_inf_nan=False)


def _stop_strings(value: Any) -> Any:
    """`stop` may be null, a string, or a list of strings."""
    values = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(values, list) or not all(isinstance(text, str) for text in values):
        raise PydanticCustomError("stop", "must be a string or a list of strings")
    if len(values) > MAX_STOP_STRINGS:
        raise PydanticCustomError("stop", f"{len(values)} stop strings; at most {MAX_STOP_STRINGS} are accepted")
    if any(not 0 < len(text) <= MAX_STOP_STRING_CHARACTERS for text in values):
        raise PydanticCustomError("stop", f"a stop string has 1 to {MAX_STOP_STRING_CHARACTERS} characters")
    return values


def _prompts(value: Any) -> Any:
    """`prompt`, in any of its four forms, as a list of strings or a list of lists of token ids."""
    forms = "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise PydanticCustomError("prompt", forms)
    if not value:
        raise PydanticCustomError("prompt", "is empty")
    if _all_of(int, value):
        value = [value]
    if not _all_of(str, value) and not all(isinstance(ids, list) and _all_of(int, ids) for ids in value):
        raise PydanticCustomError("prompt", forms)
    if len(value) > MAX_PROMPTS:
        raise PydanticCustomError("prompt", f"{len(value)} prompts; at most {MAX_PROMPTS} are accepted in a request")
    return value


def _all_of(kind: type, values: list[Any]) -> bool:
    return set(map(type, values)) <= {kind}


class StreamOptions(Body):
    """include_usage: a last chunk with the token counts and no choices."""

    include_usage: bool = False


class GenerationRequest(Body):
    """What chat and completion requests share. A null is as good as leaving the field out."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None  # 0 and -1: all tokens
    seed: Annotated[int, Field(ge=-SEED_LIMIT, lt=SEED_LIMIT)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stop_strings)] = []
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    service_class: Literal["online", "offline"] | None = None

    def check(self) -> None:
        """What types alone can't say. Raises ApiError."""
        check_extra_fields(self.model_extra, REQUEST_FIELDS)
        if self.stream_options is not None:
            check_extra_fields(self.stream_options.model_extra, STREAM_OPTIONS_FIELDS, "stream_options.")
            if not self.stream:
                raise bad_request("`stream_options` needs `stream: true`", "stream_options")

    @property
    def new_tokens(self) -> int | None:
        """The limit of new tokens that the client asked for."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def service(self, header: str | None) -> ServiceClass:
        """The service class: the field's, else the X-Service-Class header's, else online. Raises ApiError."""
        name = self.service_class or (header or ServiceClass.ONLINE).strip().lower()
        try:
            return ServiceClass(name)
        except ValueError:
            legal = " or ".join(ServiceClass)
            raise bad_request(f"X-Service-Class is {header!r}; it must be {legal}", "X-Service-Class") from None


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions. `prompt` is normalised: all strings, or all lists of token ids."""

    prompt: Annotated[list[str] | list[list[int]], BeforeValidator(_prompts)]

    @property
    def new_tokens(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens


class TextPart(Body):
    """A part of a message's content."""

    type: str
    text: str | None = None


class Message(Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None

    def for_template(self, where: str) -> dict[str, str]:
        """role and content as chat templates expect them: text parts joined, `developer` as `system`. Raises
        ApiError."""
        check_extra_fields(self.model_extra, MESSAGE_FIELDS, f"{where}.")
        content = self.content
        if isinstance(content, list):
            texts = []
            for number, part in enumerate(content):
                if part.type != "text" or part.text is None:
                    path = f"{where}.content[{number}]"
                    raise bad_request(
                        f"`{path}` is of type `{part.type}`; only parts with type `text` and a text are supported yet",
                        path,
                        "unsupported_field",
                    )
                check_extra_fields(part.model_extra, {}, f"{where}.content[{number}].")
                texts.append(part.text)
            content = "\n".join(texts)
        if content is None:
            raise bad_request(f"`{where}.content` is missing", f"{where}.content")
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check(self) -> None:
        super().check()
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise bad_request(
                f"`max_tokens` is {self.max_tokens}, `max_completion_tokens` {self.max_completion_tokens}; give one",
                "max_tokens",
            )

    def template_variables(self) -> dict[str, Any]:
        """Further names for the chat template, such as enable_thinking. Raises ApiError."""
        variables = self.chat_template_kwargs or {}
        if taken := sorted(TEMPLATE_NAMES & variables.keys()):
            raise bad_request(f"`chat_template_kwargs` can't set `{taken[0]}`", "chat_template_kwargs")
        return variables

    def conversation(self) -> list[dict[str, str]]:
        """The messages as chat templates expect them. Raises ApiError."""
        return [message.for_template(f"messages[{number}]") for number, message in enumerate(self.messages)]


Request = TypeVar("Request", bound=GenerationRequest)


def parse(kind: type[Request], body: bytes) -> Request:
    """The request in a JSON body. Raises ApiError (400) that names the first field that is wrong."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _named(error) from None
    request.check()
    return request


def _named(error: ValidationError) -> ApiError:
    """The first error of a validation, for people."""
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return bad_request(
            f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}", code="invalid_json"
        )
    path = _path(first["loc"])
    if not path:
        return bad_request("the body must be a JSON object")
    if first["type"] == "missing":
        return bad_request(f"`{path}` is required", path, "missing_field")
    message = first["msg"][:1].lower() + first["msg"][1:]
    return bad_request(f"`{path}`: {message} (got {_shown(first['input'])})", path)


def _path(location: tuple[int | str, ...]) -> str:
    """('messages', 0, 'role') as messages[0].role, without pydantic's names of union members."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "TextPart"):
            path += f".{part}" if path else part
    return path


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def load(kind: type[Request], fields: dict[str, Any]) -> Request:
    """The request in an object that is already parsed, as `parse`: NaN, which some parsers let through, is refused too."""
    return parse(kind, json.dumps(fields, ensure_ascii=False).encode())
