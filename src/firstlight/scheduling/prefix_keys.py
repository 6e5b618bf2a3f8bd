"""Keys of prefixes: equal keys mean equal tokens from the first one on, and equal everything else that counts.

    key(page i) = hash(key(page i-1), token ids of page i, digests of media that reach into it)
    key(page -1) = hash(tenant, adapter)

The hash is cryptographic, since a collision would show one tenant's text to another.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from firstlight.scheduling.request import CacheIdentity

KEY_BYTES = 16


class KeyChain:
    """The keys of one request's full pages, extended as its tokens become known.

    `keys[i]` stands for the tokens [0, (i + 1) * page_size); `root` for no token at all.
    """

    def __init__(self, identity: CacheIdentity, page_size: int) -> None:
        text = f"{identity.adapter}:{identity.tenant}".encode()
        self.root = blake2b(text, digest_size=KEY_BYTES).digest()
        self.keys: list[bytes] = []
        self._page_size = page_size
        self._media = identity.media

    def extend(self, tokens: np.ndarray) -> None:
        """Adds the keys of pages that `tokens` ([n] int32, from position 0 on) fills. Known ones aren't made again."""
        size = self._page_size
        for page in range(len(self.keys), len(tokens) // size):
            self.keys.append(self._key(self.before(page), tokens, page * size, (page + 1) * size))

    def before(self, page: int) -> bytes:
        """The key of everything before a page."""
        return self.keys[page - 1] if page else self.root

    def at(self, tokens: np.ndarray, length: int) -> bytes:
        """The key of tokens [0, length), whose full pages have keys already; length >= 1."""
        size = self._page_size
        page = (length - 1) // size
        if length == (page + 1) * size and page < len(self.keys):
            return self.keys[page]
        return self._key(self.before(page), tokens, page * size, length)

    def _key(self, before: bytes, tokens: np.ndarray, start: int, end: int) -> bytes:
        digest = blake2b(before, digest_size=KEY_BYTES)
        digest.update(tokens[start:end].tobytes())
        for media in self._media:
            if media.start < end and start < media.start + media.count:
                digest.update(b"%d:%d:" % (media.start - start, len(media.digest)) + media.digest)
        return digest.digest()
