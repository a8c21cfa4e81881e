"""An 8-bit copy of the LM head, on which a greedy step finds the few tokens that can be the most likely.

Most of what a decoding step reads is the head. Its copy is half as large, and products with it come with bounds that
hold (kernels/cpu/screen.h has the argument): the tokens that are left are then computed from the head itself, so that
the most likely one is the one that the whole product gives. What a `CausalLM` returns for the others is -inf, and only
where the caller said that nobody reads more than the largest logit (`padding.likely_only`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

PANEL = 64  # rows that lie together
LEADING = 32  # directions that are kept in bf16
_ROWS_AT_A_TIME = 2048  # small enough to stay in the processor's cache from one operation to the next
_ROWS_LOOKED_AT = 8192  # to find the directions; a worse choice makes bounds wider, never wrong
_SAFE = 1.001  # on lengths, whose own sums are rounded


class Screen(nn.Module):
    """The copy of a head's weight [V, D].

    Attributes:
        codes: [panels, (D - LEADING) / 4, PANEL, 4] uint8, 128 more than the code.
        leading: [panels, LEADING / 2, PANEL, 2] bf16.
        scale: [panels, PANEL] fp32, a row's step of codes.
        length: [panels, PANEL] fp32, of a row's codes times its step.
        basis: [D / 64 rounded up, D, 64] fp32, the orthonormal basis of the copy, column block by column block.
        bounds: [4] fp32: what a row loses to codes at most, over its step; the longest leading part; what a leading
            part loses to bf16 at most; the longest row.
    """

    codes: Tensor
    leading: Tensor
    scale: Tensor
    length: Tensor
    basis: Tensor
    bounds: Tensor

    def __init__(self, weight: Tensor) -> None:
        """Copy a weight [V, D], finite, with D a multiple of 4 above LEADING."""
        super().__init__()
        vocab, width = weight.shape
        basis = _basis(weight)
        panels = -(-vocab // PANEL)
        codes = torch.empty(panels, (width - LEADING) // 4, PANEL, 4, dtype=torch.uint8)
        leading = torch.empty(panels, LEADING // 2, PANEL, 2, dtype=torch.bfloat16)
        scale, length = torch.empty(panels, PANEL), torch.empty(panels, PANEL)
        bounds = torch.zeros(4)
        for first in range(0, panels, _ROWS_AT_A_TIME // PANEL):
            some = slice(first, first + _ROWS_AT_A_TIME // PANEL)
            rows = weight[first * PANEL : some.stop * PANEL].float()
            count = rows.shape[0] // PANEL + bool(rows.shape[0] % PANEL)
            rows = nn.functional.pad(rows, (0, 0, 0, count * PANEL - rows.shape[0])) @ basis
            lead, rest = rows[:, :LEADING], rows[:, LEADING:]
            step = (rest.abs().amax(1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
            code = (rest / step).round().clamp(-127, 127)
            kept = lead.to(torch.bfloat16)
            off = torch.linalg.vector_norm(rest - code * step, dim=1) / step[:, 0]
            found = (
                off,
                torch.linalg.vector_norm(kept.float(), dim=1),
                torch.linalg.vector_norm(lead - kept.float(), dim=1),
                torch.linalg.vector_norm(rows, dim=1),
            )
            bounds = torch.maximum(bounds, torch.stack([values.max() for values in found]))
            codes[some] = _panels((code + 128).to(torch.uint8), count, 4)
            leading[some] = _panels(kept, count, 2)
            scale[some] = step.view(count, PANEL)
            length[some] = (torch.linalg.vector_norm(code, dim=1) * step[:, 0]).view(count, PANEL)
        blocks = -(-width // PANEL)
        columns = nn.functional.pad(basis, (0, blocks * PANEL - width))
        for name, value in (
            ("codes", codes),
            ("leading", leading),
            ("scale", scale),
            ("length", length * _SAFE),
            ("basis", columns.view(width, blocks, PANEL).transpose(0, 1).contiguous()),
            ("bounds", bounds * _SAFE),
        ):
            self.register_buffer(name, value, persistent=False)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return what the operator takes, in its order."""
        return self.codes, self.leading, self.scale, self.length, self.basis, self.bounds

    @staticmethod
    def fits(width: int) -> bool:
        """Tell whether a weight of this many columns can be copied."""
        return width % 4 == 0 and width >= 2 * LEADING


class _State:
    screen: Screen | None = None


@contextlib.contextmanager
def screened(screen: Screen | None) -> Iterator[None]:
    """Say that the head which is called inside the block has this copy."""
    before, _State.screen = _State.screen, screen
    try:
        yield
    finally:
        _State.screen = before


def screen() -> Screen | None:
    """Return the copy of the head that is being called."""
    return _State.screen


def _basis(weight: Tensor) -> Tensor:
    """Return an orthonormal basis [D, D] whose first columns are the directions in which rows are long.

    The other columns are a random turn of what is left: outlying channels, which a few models have and which would
    decide the step of all codes, are spread over all of them.
    """
    width = weight.shape[1]
    some = weight[:: max(1, weight.shape[0] // _ROWS_LOOKED_AT)].double()
    leading = torch.linalg.eigh(some.T @ some)[1][:, -LEADING:].flip(1)
    numbers = torch.Generator().manual_seed(0)
    rest = torch.randn(width, width - LEADING, generator=numbers, dtype=torch.float64)
    return torch.linalg.qr(torch.cat([leading, rest], 1))[0].float()


def _panels(rows: Tensor, count: int, together: int) -> Tensor:
    """Lay rows [count * PANEL, C] out as [count, C / together, PANEL, together]."""
    return rows.view(count, PANEL, rows.shape[1] // together, together).transpose(1, 2)
