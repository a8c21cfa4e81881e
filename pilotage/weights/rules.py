"""The rules a WeightMap is made of: how checkpoint tensors become parameters, and back.

Names are patterns: `{i}` stands for a number (a layer, an expert) and `{*rest}` for anything; a placeholder has the
same value on both sides. `*` alone, in a Drop, stands for one part between dots. Every rule is a bijection; what it
does to values is moving them, never arithmetic.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pilotage.core.errors import WeightError


class Rule(Protocol):
    """What every moving rule offers. Tensors are in the order of the patterns."""

    @property
    def hf_patterns(self) -> tuple[str, ...]:
        """Checkpoint names it consumes."""

    @property
    def native_patterns(self) -> tuple[str, ...]:
        """Parameter names it writes."""

    def to_native(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Checkpoint tensors -> parameters."""

    def to_hf(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Parameters -> checkpoint tensors."""


@dataclass(frozen=True)
class Rename:
    """One tensor under another name: `Rename("transformer.h.{i}.{*rest}", "model.layers.{i}.{*rest}")`."""

    hf: str
    native: str

    @property
    def hf_patterns(self) -> tuple[str, ...]:
        return (self.hf,)

    @property
    def native_patterns(self) -> tuple[str, ...]:
        return (self.native,)

    def to_native(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return list(parts)

    def to_hf(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return list(parts)


@dataclass(frozen=True)
class Identity(Rename):
    """Every tensor that no other rule names keeps its name."""

    hf: str = "{*name}"
    native: str = "{*name}"


@dataclass(frozen=True)
class Fuse:
    """Several tensors, concatenated, are one parameter.

    Args:
        hf: checkpoint names, in order.
        native: the parameter.
        sizes: of each along `dim`; needed for the way back.
        dim: along which they are concatenated.
    """

    hf: tuple[str, ...]
    native: str
    sizes: tuple[int, ...]
    dim: int = 0

    def __post_init__(self) -> None:
        _check_sizes(self.native, self.hf, self.sizes)

    @property
    def hf_patterns(self) -> tuple[str, ...]:
        return self.hf

    @property
    def native_patterns(self) -> tuple[str, ...]:
        return (self.native,)

    def to_native(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [_concatenate(parts, self.hf, self.sizes, self.dim)]

    def to_hf(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return _cut(parts[0], self.native, self.sizes, self.dim)


@dataclass(frozen=True)
class Stack:
    """Tensors that a checkpoint holds once an expert are one parameter with experts as its first dimension.

    Args:
        hf: checkpoint names of one expert, with `{e}` for its number; several are concatenated along `dim`.
        native: the parameter, [count, ...].
        count: number of experts.
        sizes: of each of `hf` along `dim`.
        dim: of one expert's tensor.
    """

    hf: tuple[str, ...]
    native: str
    count: int
    sizes: tuple[int, ...]
    dim: int = 0

    def __post_init__(self) -> None:
        _check_sizes(self.native, self.hf, self.sizes)
        if not all("{e}" in pattern for pattern in self.hf):
            raise WeightError("an expert's tensor without {e} in its name", where=self.native)

    @functools.cached_property
    def hf_patterns(self) -> tuple[str, ...]:
        return tuple(pattern.replace("{e}", str(e)) for e in range(self.count) for pattern in self.hf)

    @property
    def tensors_per_expert(self) -> int:
        """How many of `hf_patterns` belong to one expert."""
        return len(self.hf)

    @property
    def native_patterns(self) -> tuple[str, ...]:
        return (self.native,)

    def to_native(self, parts: Sequence[Tensor]) -> list[Tensor]:
        step = len(self.hf)
        members = [parts[at : at + step] for at in range(0, len(parts), step)]
        names = [self.hf_patterns[at : at + step] for at in range(0, len(parts), step)]
        found = [_concatenate(m, n, self.sizes, self.dim) for m, n in zip(members, names, strict=True)]
        return [torch.stack(found)]

    def to_hf(self, parts: Sequence[Tensor]) -> list[Tensor]:
        if parts[0].shape[0] != self.count:
            raise WeightError(f"{parts[0].shape[0]} experts, the rule says {self.count}", where=self.native)
        return [piece for one in parts[0] for piece in _cut(one, self.native, self.sizes, self.dim)]


@dataclass(frozen=True)
class Split:
    """One tensor is cut into several parameters.

    Args:
        hf: the checkpoint name.
        native: parameters, in order.
        sizes: of each along `dim`.
        dim: along which it is cut.
    """

    hf: str
    native: tuple[str, ...]
    sizes: tuple[int, ...]
    dim: int = 0

    def __post_init__(self) -> None:
        _check_sizes(self.hf, self.native, self.sizes)

    @property
    def hf_patterns(self) -> tuple[str, ...]:
        return (self.hf,)

    @property
    def native_patterns(self) -> tuple[str, ...]:
        return self.native

    def to_native(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return _cut(parts[0], self.hf, self.sizes, self.dim)

    def to_hf(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [_concatenate(parts, self.native, self.sizes, self.dim)]


@dataclass(frozen=True)
class Transpose:
    """One tensor with two dimensions exchanged."""

    hf: str
    native: str
    dims: tuple[int, int] = (0, 1)

    @property
    def hf_patterns(self) -> tuple[str, ...]:
        return (self.hf,)

    @property
    def native_patterns(self) -> tuple[str, ...]:
        return (self.native,)

    def to_native(self, parts: Sequence[Tensor]) -> list[Tensor]:
        if not all(-parts[0].ndim <= dim < parts[0].ndim for dim in self.dims):
            raise WeightError(f"cannot exchange dimensions {self.dims} of {list(parts[0].shape)}", where=self.hf)
        return [parts[0].transpose(*self.dims).contiguous()]

    def to_hf(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return self.to_native(parts)


@dataclass(frozen=True)
class Permute:
    """One tensor viewed with more dimensions, permuted, and flattened to its shape again.

    For rotary halves stored interleaved, q rows of `heads` heads of size `H`:
    `Permute(..., view=(heads, H // 2, 2, -1), order=(0, 2, 1, 3))`.

    Args:
        hf: the checkpoint name.
        native: the parameter.
        view: shape to view it as; one entry may be -1.
        order: permutation of the dimensions of `view`.
    """

    hf: str
    native: str
    view: tuple[int, ...]
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(len(self.view))) or self.view.count(-1) > 1:
            raise WeightError(f"order {self.order} is no permutation of view {self.view}", where=self.native)

    @property
    def hf_patterns(self) -> tuple[str, ...]:
        return (self.hf,)

    @property
    def native_patterns(self) -> tuple[str, ...]:
        return (self.native,)

    def to_native(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [self._viewed(parts[0], self.hf).permute(self.order).reshape(parts[0].shape).contiguous()]

    def to_hf(self, parts: Sequence[Tensor]) -> list[Tensor]:
        whole = self._viewed(torch.empty(parts[0].shape, device="meta"), self.native).shape
        permuted = parts[0].reshape([whole[dim] for dim in self.order])
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return [permuted.permute(back).reshape(parts[0].shape).contiguous()]

    def _viewed(self, tensor: Tensor, name: str) -> Tensor:
        try:
            return tensor.reshape(self.view)
        except RuntimeError:
            raise WeightError(f"{list(tensor.shape)} cannot be viewed as {list(self.view)}", where=name) from None


@dataclass(frozen=True)
class Tie:
    """A parameter that is loaded from a checkpoint tensor another parameter is loaded from: the tied head.

    A checkpoint that stores the tied tensor a second time, under the parameter's own name, must hold the same bytes.

    Args:
        native: the parameter.
        source: the checkpoint name it is read from.
    """

    native: str
    source: str


@dataclass(frozen=True)
class Drop:
    """Checkpoint tensors that no parameter needs, and why.

    Args:
        hf_pattern: their names.
        reason: for the ledger.
        first: they are dropped also where the pattern of another rule would take them.
    """

    hf_pattern: str
    reason: str
    first: bool = False

    def __post_init__(self) -> None:
        if not self.reason.strip():
            raise WeightError("a tensor is dropped only with a reason", where=self.hf_pattern)


@functools.lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    seen: set[str] = set()

    def group(match: re.Match[str]) -> str:
        star, name = match[1], match[2]
        if name in seen:
            return f"(?P={name})"
        seen.add(name)
        return f"(?P<{name}>{'.+' if star else '[0-9]+'})"

    def literal(text: str) -> str:
        return re.escape(text).replace(re.escape("*"), "[^.]+")

    parts = re.split(r"(\{\*?\w+\})", pattern)
    return re.compile("".join(re.sub(r"\{(\*?)(\w+)\}", group, p) if p[:1] == "{" else literal(p) for p in parts))


def match(pattern: str, name: str) -> dict[str, str] | None:
    """Return the placeholders' values where `name` matches `pattern`, else None."""
    found = _compiled(pattern).fullmatch(name)
    return found.groupdict() if found else None


def fill(pattern: str, values: dict[str, str]) -> str:
    """Return `pattern` with its placeholders replaced.

    Raises:
        WeightError: a placeholder has no value: it is on one side of a rule only.
    """

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise WeightError(f"placeholder {match[1]!r} is on one side of the rule only", where=pattern)
        return values[match[1]]

    return re.sub(r"\{\*?(\w+)\}", value, pattern)


def _check_sizes(whole: str, parts: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    if len(parts) != len(sizes) or not parts or min(sizes) < 1:
        raise WeightError(f"{len(parts)} parts with sizes {sizes}", where=whole, do="give one positive size a part")


def _concatenate(parts: Sequence[Tensor], names: tuple[str, ...], sizes: tuple[int, ...], dim: int) -> Tensor:
    for part, name, size in zip(parts, names, sizes, strict=True):
        if part.ndim <= dim or part.shape[dim] != size:
            raise WeightError(f"{list(part.shape)} along dimension {dim}, the rule says {size}", where=name)
    return torch.cat(list(parts), dim=dim)


def _cut(whole: Tensor, name: str, sizes: tuple[int, ...], dim: int) -> list[Tensor]:
    if whole.ndim <= dim or whole.shape[dim] != sum(sizes):
        raise WeightError(f"{list(whole.shape)} along dimension {dim}, the rule says {sum(sizes)}", where=name)
    return [part.contiguous() for part in whole.split(list(sizes), dim=dim)]
