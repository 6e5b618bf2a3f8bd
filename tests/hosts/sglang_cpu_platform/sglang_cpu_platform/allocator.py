"""SGLang's allocator of KV pages with its two Triton kernels in plain torch; everything else is SGLang's."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_extend_naive
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.utils import get_num_new_pages


def allocator(size: int, page_size: int, dtype: torch.dtype, device: str, kvcache: Any, need_sort: bool) -> Any:
    """What SGLang makes of the same arguments on a GPU: token by token, or by pages."""
    if page_size == 1:
        return TokenToKVPoolAllocator(size, dtype, device, kvcache, need_sort)
    return TorchPagedAllocator(size, page_size, dtype, device, kvcache, need_sort)


class TorchPagedAllocator(PagedTokenToKVPoolAllocator):
    """Pages of more than one token."""

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Rows for the new tokens of prompts; None if there are too few pages."""
        count = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu)
        if count > len(self.free_pages):
            return None
        out = torch.empty(extend_num_tokens, dtype=torch.int64)
        alloc_extend_naive(prefix_lens, seq_lens, last_loc, self.free_pages, out, self.page_size, self.device)
        self.free_pages = self.free_pages[count:]
        return out

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """A row for one more token of each request; None if there are too few pages."""
        opens = (seq_lens - 1) % self.page_size == 0
        count = int(opens.sum())
        if count > len(self.free_pages):
            return None
        out = last_loc.long() + 1
        out[opens] = self.free_pages[:count] * self.page_size
        self.free_pages = self.free_pages[count:]
        return out
