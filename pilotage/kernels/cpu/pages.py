"""Huge pages for what every step reads.

A step reads all weights once. On pages of 4 KiB the processor spends a good part of that time looking addresses up,
more so in a virtual machine, where each look-up is two. Where Linux leaves huge pages to the program (`madvise`), this
asks for them.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable

from torch import Tensor

SIZE = 2 << 20
_WANTED, _NOW = 14, 25  # MADV_HUGEPAGE; MADV_COLLAPSE, from Linux 6.1 on


def use_huge_pages(tensors: Iterable[Tensor], *, now: bool = True) -> int:
    """Move the storages of `tensors` to huge pages, in place: addresses and values stay.

    Whatever lies in the same 2 MiB moves along. Where there are no huge pages, or none free, nothing changes.

    Args:
        tensors: on any device; only the CPU's are looked at.
        now: move what is there and take memory for what is not; False leaves it to the first write.

    Returns:
        Bytes of huge pages that were granted.
    """
    if not sys.platform.startswith("linux"):
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    advice = (_WANTED, _NOW) if now else (_WANTED,)
    # One by one: a range is granted as a whole or not at all, and the ends of a storage may reach past what is mapped.
    granted = [page for page in huge_pages_of(tensors) if not any(madvise(page, SIZE, how) for how in advice)]
    return len(granted) * SIZE


def huge_pages_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return the addresses of the huge pages that the tensors' storages lie in, ascending."""
    pages: set[int] = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type == "cpu" and storage.nbytes() >= SIZE // 8:
            first = storage.data_ptr()
            pages.update(range(first // SIZE * SIZE, first + storage.nbytes(), SIZE))
    return sorted(pages)
