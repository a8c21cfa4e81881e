"""Clean controls of a site: Hugging Face's own code, computed in ways that differ in rounding alone.

Sums in another order, another attention implementation, partial sums as tensor parallelism has them. What these make of
a site is what a faultless port may make of it, measured on the same model, weights and tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pilotage.accuracy.arms import hf

ROW_PARALLEL = ("o_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to compute a Hugging Face model.

    Attributes:
        name: what the result lists.
        other_attention: with the model's other attention implementation, see `arms.hf.attention_of`.
        order: seed of the order in which linear layers sum; None for the natural one.
        ranks: partial sums of the row-parallel layers.
        fused: an activation and the product with it are rounded once, as one kernel computes both.
    """

    name: str
    other_attention: bool = False
    order: int | None = None
    ranks: int = 1
    fused: bool = False

    @contextlib.contextmanager
    def applied(self, model: Any) -> Iterator[None]:
        """Compute `model` this way inside the block."""
        before = model.config._attn_implementation
        with contextlib.ExitStack() as stack:
            if self.other_attention:
                hf.set_attention(model, "eager")
                stack.callback(model.set_attn_implementation, before)
            if self.ranks > 1:
                stack.enter_context(_partial_sums(model, self.ranks))
            if self.order is not None:
                stack.enter_context(_Reordered(self.order))
            if self.fused:
                stack.enter_context(_Fused())
            yield


def variants(dtype: torch.dtype, ranks: int = 1) -> Sequence[Variant]:
    """List the controls of one arm.

    Args:
        dtype: of the arm; in float32 the model as it is, is the reference itself and no control.
        ranks: of the target; with several, its row-parallel sums are rounded once a rank, and so are a control's.
    """
    found = [] if dtype is torch.float32 else [Variant(name="as it is")]
    found += [
        Variant(name="other attention", other_attention=True),
        Variant(name="sums in another order", order=1),
        Variant(name="sums in a third order", order=2),
        Variant(name="other attention, sums in another order", other_attention=True, order=3),
    ]
    if dtype is not torch.float32:
        found.append(Variant(name="activations rounded once", fused=True))
    if ranks > 1:
        found.append(Variant(name=f"sums in {ranks} parts", ranks=ranks))
        found.append(Variant(name=f"sums in {ranks} parts, in another order", ranks=ranks, order=4))
    return found


class _Reordered(TorchFunctionMode):
    """Permutes what every linear layer sums over."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.orders: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear or kwargs:
            return func(*args, **(kwargs or {}))
        x, weight, *bias = args
        width = weight.shape[1]
        if width not in self.orders:
            self.orders[width] = torch.randperm(width, generator=torch.Generator().manual_seed(self.seed))
        order = self.orders[width]
        return func(x[..., order], weight[:, order], *bias)


_ACTIVATIONS = (F.silu, F.gelu, F.relu, F.mish, F.hardswish)
_PRODUCTS = (torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__)


class _Fused(TorchFunctionMode):
    """Keeps an activation in fp32 until it is multiplied; whatever else takes it gets it rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.rounded: dict[int, tuple[Tensor, Tensor]] = {}  # id of a rounded activation -> itself, and in fp32

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ACTIVATIONS and isinstance(result, Tensor) and result.dtype is not torch.float32:
            self.rounded[id(result)] = (result, func(args[0].float(), *args[1:], **(kwargs or {})))
        elif func in _PRODUCTS and self.rounded and isinstance(result, Tensor):
            kept = [self.rounded.pop(id(x), None) for x in args]
            if any(kept):
                exact = [x if found is None else found[1] for x, found in zip(args, kept, strict=True)]
                return (exact[0] * exact[1]).to(result.dtype)
        return result


@contextlib.contextmanager
def _partial_sums(model: Any, ranks: int) -> Iterator[None]:
    changed = []
    for name, module in model.named_modules():
        if name.split(".")[-1] in ROW_PARALLEL and isinstance(module, torch.nn.Linear):
            module.__dict__["forward"] = _in_parts(module, ranks)
            changed.append(module)
    try:
        yield
    finally:
        for module in changed:
            del module.__dict__["forward"]


def _in_parts(module: torch.nn.Linear, ranks: int) -> Any:
    def forward(x: Tensor) -> Tensor:
        parts = zip(x.chunk(ranks, dim=-1), module.weight.chunk(ranks, dim=1), strict=True)
        products = [F.linear(some, weight) for some, weight in parts]
        total = products[0]
        for product in products[1:]:
            total = total + product
        return total if module.bias is None else total + module.bias

    return forward
