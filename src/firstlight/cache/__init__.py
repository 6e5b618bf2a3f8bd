"""Where KV and state live: what modules ask for, pools that hold it, and moves between places."""

from firstlight.cache.pool import CachePool
from firstlight.cache.spec import CacheSpec, PagedSpec, SlotSpec, page_bytes, slot_bytes

__all__ = ["CachePool", "CacheSpec", "PagedSpec", "SlotSpec", "page_bytes", "slot_bytes"]
