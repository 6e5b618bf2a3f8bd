"""What the API process and the engine process say to each other.

Each direction is one tagged union of msgspec structs, sent as msgpack over a private socket: never pickle, so a
message can only be one of the structs below with fields of the stated types. Traffic is by step, not by token: the
engine answers a step with one `Tokens` message that carries what every request of the step got.

    API process                     engine process
      Generate, Abort, GetStats,      Started | Failed     once, when the model is loaded or could not be
      Shutdown                        Accepted, Rejected   the fate of each Generate, before its first tokens
                                      Tokens               one a step
                                      EngineStats          one for each GetStats
                                      Failed               the engine can't go on, and exits
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np

from firstlight.scheduling.request import Request
from firstlight.scheduling.sampling import FinishReason, SamplingParams, ServiceClass

MAX_MESSAGE_BYTES = 64 << 20
"""Neither side sends or accepts a longer message."""


class MessageError(ValueError):
    """Bytes that are not a message of the expected direction, or too many of them."""


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Run a request.

    id: chosen by the sender, and not in use.
    prompt: token ids as int32 in this machine's byte order, see `pack_tokens`.
    """

    id: str
    prompt: bytes
    sampling: SamplingParams
    service_class: ServiceClass = ServiceClass.ONLINE

    def request(self) -> Request:
        """The request as the scheduler knows it. Raises ValueError for bytes that are not whole int32 values."""
        return Request(self.id, np.frombuffer(self.prompt, np.int32), self.sampling, self.service_class)


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Forget these requests; ids that are unknown or finished are ignored."""

    ids: list[str]


class GetStats(msgspec.Struct, frozen=True, tag=True):
    """Ask for EngineStats."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Drop every request and exit."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded. `facts` are for people: device, dtype, pages, ..."""

    max_context: int
    vocab_size: int
    facts: dict[str, str]


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """These requests are in the queue."""

    ids: list[str]


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """This request is not, and the others are unharmed; `status` and `message` as in scheduling's RequestRefusedError."""

    id: str
    status: int
    message: str


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """What one request got in one step.

    tokens: the new ones, in order; may be empty when the request ends.
    finish_reason: set in a request's last delta.
    cached_tokens: prompt tokens that were not computed, since the prefix cache had them.
    """

    id: str
    tokens: list[int]
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """What a step brought, at most one delta a request."""

    deltas: list[Delta]


class EngineStats(msgspec.Struct, frozen=True, tag=True):
    """The engine's state now, and its sums since the start. Token counts of the prefix cache are prompt tokens."""

    running: dict[ServiceClass, int] = {}
    waiting: dict[ServiceClass, int] = {}
    pages_used: int = 0
    pages_capacity: int = 0
    page_size: int = 0
    slots_used: int = 0
    slots_capacity: int = 0
    steps: int = 0
    preemptions: int = 0
    prefix_queried_tokens: int = 0
    prefix_matched_tokens: int = 0
    prefix_lost_tokens: int = 0  # matched by pages, lost for want of a state checkpoint
    prefix_evicted_tokens: int = 0
    device_reserved_bytes: int = 0  # held by the GPU's allocator; 0 on a CPU, which has none of ours
    allocator_retries: int = 0  # times that it had to give memory back to find some


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start, or can't go on; it exits after this. The message is for people."""

    message: str


ToEngine = Generate | Abort | GetStats | Shutdown
FromEngine = Started | Accepted | Rejected | Tokens | EngineStats | Failed
Message = TypeVar("Message")


def pack_tokens(ids: Sequence[int]) -> bytes:
    """Token ids as Generate carries them. Raises OverflowError for one that doesn't fit in int32."""
    return array("i", ids).tobytes()


_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """The message's bytes. Raises MessageError when they are more than MAX_MESSAGE_BYTES."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(
            f"a {type(message).__name__} message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are sent"
        )
    return data


def decode_to_engine(data: bytes) -> ToEngine:
    """A message for the engine. Raises MessageError."""
    return _decode(_to_engine, data)


def decode_from_engine(data: bytes) -> FromEngine:
    """A message from the engine. Raises MessageError."""
    return _decode(_from_engine, data)


def _decode(decoder: msgspec.msgpack.Decoder[Message], data: bytes) -> Message:
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"a message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are accepted")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"malformed message ({len(data)} bytes): {error}") from None
