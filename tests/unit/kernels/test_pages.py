"""Huge pages: which are asked for, and that values survive the move."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from pilotage.kernels.cpu.pages import SIZE, huge_pages_of, use_huge_pages


def test_every_byte_of_a_storage_lies_in_a_page_that_is_asked_for() -> None:
    whole = torch.zeros(5 * SIZE, dtype=torch.uint8)
    part = whole[3 * SIZE :]  # a view stands for its storage
    pages = huge_pages_of([part, whole, torch.zeros(3), torch.zeros(4, device="meta")])
    assert pages == sorted(set(pages))
    assert all(page % SIZE == 0 for page in pages)
    assert pages[0] <= whole.data_ptr() < pages[0] + SIZE
    assert pages[-1] < whole.data_ptr() + whole.numel() <= pages[-1] + SIZE
    assert len(pages) in (5, 6)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")
def test_values_and_addresses_stay() -> None:
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    x = torch.arange(3 * SIZE, dtype=torch.int32)
    before, address = x.clone(), x.data_ptr()
    granted = use_huge_pages([x])
    assert x.data_ptr() == address
    assert torch.equal(x, before)
    if mode.exists() and "[never]" not in mode.read_text():
        assert granted >= 2 * SIZE
