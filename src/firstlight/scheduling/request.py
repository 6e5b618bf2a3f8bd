"""What the server asks of the engine: one prompt and how to continue it.

A `Request` is plain data and never changes; what the scheduler knows of its progress lives in `progress.py`. The key
under which its KV and state may be shared is made of its token ids and of `CacheIdentity`: whatever else changes what
the model computes from the same ids (an adapter, images), or who may share it (a tenant).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from firstlight.scheduling.sampling import SamplingParams, ServiceClass


@dataclass(frozen=True, slots=True)
class Media:
    """An image (or another insert) that stands in the prompt at placeholder tokens.

    start, count: the placeholder positions it fills, in tokens.
    digest: hash of its content; two prompts share a page only if the media that reach into it are equal.
    """

    start: int
    count: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """What besides token ids must agree before two requests share a cache.

    tenant: salt of whoever may share with whom; "" shares with everyone.
    adapter: index of the adapter, 0 for the base model.
    media: the prompt's images, in order of `start`.
    """

    tenant: str = ""
    adapter: int = 0
    media: tuple[Media, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt to be continued.

    id: unique among the requests the scheduler holds.
    prompt: [n] int32 token ids, n >= 1; never written to.
    sampling: how its tokens are chosen, and when it ends.
    service: its class; see `ServiceClass`.
    identity: what besides the tokens its cache depends on.
    """

    id: str
    prompt: np.ndarray
    sampling: SamplingParams
    service: ServiceClass = ServiceClass.ONLINE
    identity: CacheIdentity = field(default_factory=CacheIdentity)

    def __post_init__(self) -> None:
        if self.prompt.dtype != np.int32 or self.prompt.ndim != 1:
            raise TypeError(f"prompt must be one row of int32 token ids; got {self.prompt.dtype} {self.prompt.shape}")
