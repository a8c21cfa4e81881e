"""The squared length of gradients, by which all of them are scaled."""

from __future__ import annotations

import pytest
import torch

from pilotage.training.engine import PIECE, squares


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
def test_large_tensors_keep_their_digits(dtype: torch.dtype, bound: float) -> None:
    """Summed in one go in fp32, the first would be off by more than 1e-5."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(size, generator=generator).to(dtype) for size in ((50, PIECE), (7, 5), (PIECE + 1,))]
    values.append(values[0].view(PIECE, 50).t())  # as tensor parallelism leaves some
    for value, square in zip(values, squares(values), strict=True):
        exact = value.double().square().sum()
        assert square.dtype == torch.float64
        assert abs(square - exact) <= bound * exact
    if dtype is torch.float32:
        at_once = values[0].norm().double().square()
        assert abs(at_once - values[0].double().square().sum()) > 1e-5 * at_once


def test_nothing_and_an_empty_share_have_no_length() -> None:
    assert squares([]) == []
    assert float(squares([torch.zeros(0, 4)])[0]) == 0.0
