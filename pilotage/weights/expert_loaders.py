"""Loaders for expert parallelism: a rank reads its own experts, and no others.

Each wraps the loader that would make the parameter if the checkpoint held this rank's experts alone. Ranges of experts
are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pilotage.core.errors import WeightError
from pilotage.weights.loaders import LazySlice, SafetensorsWeightLoader


class ExpertSlice:
    """A tensor's experts [first, first + count) along one dimension, as a tensor of its own that stays on disk."""

    def __init__(self, source: LazySlice, first: int, count: int, dim: int) -> None:
        self.source, self.first, self.count, self.dim = source, first, count, dim
        self.name = getattr(source, "name", "a tensor")

    def get_shape(self) -> list[int]:
        """Return the shape with the chosen experts only."""
        shape = list(self.source.get_shape())
        shape[self.dim] = self.count
        return shape

    def __getitem__(self, index: object) -> Tensor:
        """Read a part; slices only, as loaders use them."""
        parts = list(index) if isinstance(index, tuple) else [index]
        parts += [slice(None)] * (len(self.source.get_shape()) - len(parts))
        chosen = parts[self.dim]
        if not isinstance(chosen, slice):
            raise WeightError("experts are read in ranges", where=self.name)
        start, stop, step = chosen.indices(self.count)
        parts[self.dim] = slice(self.first + start, self.first + stop, step)
        return self.source[tuple(parts)]


def expert_parallel_tensor_dim_loader(
    local_expert_indices: Sequence[int], original_loader: SafetensorsWeightLoader, expert_dim: int = 0
) -> SafetensorsWeightLoader:
    """Return a loader for tensors that hold all experts along `expert_dim`: it reads the local ones.

    Args:
        local_expert_indices: this rank's experts, a contiguous ascending range.
        original_loader: makes the parameter from tensors with the local experts only.
        expert_dim: dimension of the experts, in the checkpoint's layout.

    Raises:
        WeightError: the indices are no range; when it runs, if a tensor does not have them.
    """
    first, count = _range(local_expert_indices)

    def transform(slices: Sequence[LazySlice], rank: int) -> Tensor:
        chosen = []
        for source in slices:
            shape = source.get_shape()
            if not -len(shape) <= expert_dim < len(shape):
                raise WeightError(f"expert_dim={expert_dim} of a tensor {shape}", where=getattr(source, "name", None))
            dim = expert_dim % len(shape)
            if first + count > shape[dim]:
                raise WeightError(
                    f"dimension {dim} of {shape} holds {shape[dim]} experts, the rank's are {first} to "
                    f"{first + count - 1}",
                    where=getattr(source, "name", None),
                )
            chosen.append(ExpertSlice(source, first, count, dim))
        return original_loader.load(chosen, rank)

    return SafetensorsWeightLoader(transform=transform)


def expert_parallel_grouped_loader(
    local_expert_indices: Sequence[int], original_loader: SafetensorsWeightLoader, total_num_experts: int
) -> SafetensorsWeightLoader:
    """Return a loader for one tensor an expert, kind by kind: [gate_0 .. gate_E, up_0 .. up_E].

    Args:
        local_expert_indices: this rank's experts, a contiguous ascending range.
        original_loader: makes the parameter from the local experts' tensors in the same order.
        total_num_experts: E.

    Raises:
        WeightError: the indices are no range of E; when it runs, if the tensors are no multiple of E.
    """
    first, count = _range(local_expert_indices, total_num_experts)

    def transform(slices: Sequence[LazySlice], rank: int) -> Tensor:
        kinds = _kinds(slices, total_num_experts, "expert_parallel_grouped_loader")
        starts = [kind * total_num_experts + first for kind in range(kinds)]
        return original_loader.load([part for start in starts for part in slices[start : start + count]], rank)

    return SafetensorsWeightLoader(transform=transform)


def expert_parallel_interleaved_loader(
    local_expert_indices: Sequence[int], original_loader: SafetensorsWeightLoader, total_num_experts: int
) -> SafetensorsWeightLoader:
    """Return a loader for one tensor an expert, expert by expert: [gate_0, up_0, gate_1, up_1, ...].

    Arguments and errors as for `expert_parallel_grouped_loader`.
    """
    first, count = _range(local_expert_indices, total_num_experts)

    def transform(slices: Sequence[LazySlice], rank: int) -> Tensor:
        kinds = _kinds(slices, total_num_experts, "expert_parallel_interleaved_loader")
        return original_loader.load(slices[first * kinds : (first + count) * kinds], rank)

    return SafetensorsWeightLoader(transform=transform)


def _range(indices: Sequence[int], total: int | None = None) -> tuple[int, int]:
    """Return (first, count) of a contiguous ascending range."""
    found = list(indices)
    if not found or found != list(range(found[0], found[0] + len(found))) or found[0] < 0:
        raise WeightError(
            f"local experts {found} are no contiguous ascending range",
            where="local_expert_indices",
            do="give each rank neighbouring experts, e.g. range(rank * n, (rank + 1) * n)",
        )
    if total is not None and found[-1] >= total:
        raise WeightError(f"expert {found[-1]} of {total}", where="local_expert_indices")
    return found[0], len(found)


def _kinds(slices: Sequence[LazySlice], total: int, where: str) -> int:
    if not slices or len(slices) % total:
        raise WeightError(f"{len(slices)} tensors are no multiple of {total} experts", where=where)
    return len(slices) // total
