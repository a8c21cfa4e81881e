"""From a whole checkpoint tensor to one rank's share of a parameter.

A loader gets lazy slices: nothing is read from disk until it indexes them, so a loader that takes rows 0 to 99 reads
those rows and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from pilotage.core.errors import WeightError

_ATTRIBUTE = "pilotage_weight_loader"
_KEEPS_DTYPE = "pilotage_keeps_dtype"


class LazySlice(Protocol):
    """What a loader reads from: a tensor that stays on disk until it is indexed."""

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""

    def __getitem__(self, index: object) -> Tensor:
        """Read a part, e.g. `s[2:4]`, `s[:, 8:16]` or all of it with `s[:]`."""


Transform = Callable[[Sequence[LazySlice], int], Tensor]


@dataclass(frozen=True)
class SafetensorsWeightLoader:
    """How one parameter is made from its checkpoint tensors.

    Args:
        transform: (slices, rank) -> this rank's tensor; `slices` has one entry for each mapped checkpoint key, in the
            order of the mapping. None: the one tensor as it is.
    """

    transform: Transform | None = None

    def load(self, slices: Sequence[LazySlice], rank: int) -> Tensor:
        """Read and return this rank's tensor.

        Raises:
            WeightError: several tensors and no transform, or what the transform refuses.
        """
        if self.transform is not None:
            return self.transform(slices, rank)
        return _only(slices, "a parameter without a loader")[:]


def set_weight_loader(param: nn.Parameter, loader: SafetensorsWeightLoader) -> None:
    """Attach `loader` to `param`; a later call replaces it. Without one a tensor is loaded as it is."""
    setattr(param, _ATTRIBUTE, loader)


def get_weight_loader(param: nn.Parameter) -> SafetensorsWeightLoader:
    """Return the loader attached to `param`, else one that loads the tensor as it is."""
    loader: SafetensorsWeightLoader | None = getattr(param, _ATTRIBUTE, None)
    return loader if loader is not None else SafetensorsWeightLoader()


def has_weight_loader(param: nn.Parameter) -> bool:
    """Whether a loader was attached to `param`."""
    return hasattr(param, _ATTRIBUTE)


def keep_dtype(param: nn.Parameter) -> None:
    """Load `param` in the dtype that it was built with, whatever dtype the model is loaded in."""
    setattr(param, _KEEPS_DTYPE, True)


def keeps_dtype(param: nn.Parameter) -> bool:
    """Whether `keep_dtype` was called for `param`."""
    return bool(getattr(param, _KEEPS_DTYPE, False))


def copy_weight_loader(source: nn.Parameter, target: nn.Parameter) -> None:
    """Attach the loader of `source`, if it has one, to `target`; and that it keeps its dtype, if it does."""
    if keeps_dtype(source):
        keep_dtype(target)
    if has_weight_loader(source):
        set_weight_loader(target, getattr(source, _ATTRIBUTE))


def sharding_weight_loader(
    shard_dim: int, shard_size: int, num_shards: int, is_storage_transposed: bool = False
) -> SafetensorsWeightLoader:
    """Return a loader that reads rank r's contiguous share `[r * shard_size, (r + 1) * shard_size)`.

    Args:
        shard_dim: dimension that is divided, in the parameter's layout.
        shard_size: its size on one rank.
        num_shards: number of shares; `shard_size * num_shards` must be the whole.
        is_storage_transposed: the checkpoint holds the matrix transposed (HF keeps [out, in]); one-dimensional tensors
            are never transposed.

    Raises:
        WeightError: when it runs, if the tensor is not of that size or the rank has no share.
    """

    def transform(slices: Sequence[LazySlice], rank: int) -> Tensor:
        source = _only(slices, "sharding_weight_loader")
        return _share(source, shard_dim, shard_size, num_shards, rank, is_storage_transposed)

    return SafetensorsWeightLoader(transform=transform)


def padded_sharding_weight_loader(shard_dim: int, shard_size: int, num_shards: int) -> SafetensorsWeightLoader:
    """Return a loader like `sharding_weight_loader` for a whole that does not divide: what is missing becomes zeros.

    Args:
        shard_dim: dimension that is divided.
        shard_size: its size on one rank, the whole divided by `num_shards` and rounded up.
        num_shards: number of shares.

    Raises:
        WeightError: when it runs, if that is not the tensor's size rounded up, or the rank has no share.
    """

    def transform(slices: Sequence[LazySlice], rank: int) -> Tensor:
        source = _only(slices, "padded_sharding_weight_loader")
        _check_rank(rank, num_shards)
        shape = source.get_shape()
        dim = _dim(shard_dim, len(shape))
        if -(-shape[dim] // num_shards) != shard_size:
            raise WeightError(
                f"dimension {dim} of {shape} does not give {num_shards} shares of {shard_size}",
                where=getattr(source, "name", None),
                do="check the model's configuration against the checkpoint",
            )
        start, stop = (min(at * shard_size, shape[dim]) for at in (rank, rank + 1))
        part = source[(*[slice(None)] * dim, slice(start, stop))]
        missing = list(part.shape)
        missing[dim] = shard_size - (stop - start)
        return torch.cat((part, part.new_zeros(missing)), dim=dim) if missing[dim] else part

    return SafetensorsWeightLoader(transform=transform)


def fused_qkv_weight_loader(
    q_size: int,
    kv_size: int,
    shard_dim: int,
    num_shards: int,
    is_storage_transposed: bool = False,
    num_kv_replicas: int = 1,
) -> SafetensorsWeightLoader:
    """Return a loader that reads rank r's share of q, k and v and concatenates them along `shard_dim`.

    With more ranks than key/value heads, `num_kv_replicas` neighbouring ranks hold the same keys and values: rank r
    reads share `r // num_kv_replicas` of `num_shards / num_kv_replicas`.

    Args:
        q_size: features of q on one rank.
        kv_size: features of k, and of v, on one rank.
        shard_dim: dimension that is divided and concatenated, in the parameter's layout.
        num_shards: ranks.
        is_storage_transposed: as for `sharding_weight_loader`. Biases (one dimension) work too.
        num_kv_replicas: ranks that share one set of keys and values.

    Raises:
        WeightError: at once, if the replicas do not divide the ranks; when it runs, if a tensor is not of that size.
    """
    if num_kv_replicas < 1 or num_shards % num_kv_replicas:
        raise WeightError(
            f"num_kv_replicas={num_kv_replicas} does not divide num_shards={num_shards}",
            where="fused_qkv_weight_loader",
        )

    def transform(slices: Sequence[LazySlice], rank: int) -> Tensor:
        if len(slices) != 3:
            raise WeightError(
                f"needs the three checkpoint keys of q, k and v, got {len(slices)}", where="fused_qkv_weight_loader"
            )
        _check_rank(rank, num_shards)
        kv_shards, kv_rank = num_shards // num_kv_replicas, rank // num_kv_replicas
        query, key, value = slices
        parts = [
            _share(query, shard_dim, q_size, num_shards, rank, is_storage_transposed),
            _share(key, shard_dim, kv_size, kv_shards, kv_rank, is_storage_transposed),
            _share(value, shard_dim, kv_size, kv_shards, kv_rank, is_storage_transposed),
        ]
        return torch.cat(parts, dim=_dim(shard_dim, parts[0].ndim))

    return SafetensorsWeightLoader(transform=transform)


def with_rank_override(loader: SafetensorsWeightLoader, rank: int) -> SafetensorsWeightLoader:
    """Return `loader` that always loads the share of `rank`.

    For components that are divided differently from the model, e.g. `dp_rank + tp_rank * dp_size` under component data
    parallelism.
    """

    def transform(slices: Sequence[LazySlice], _rank: int) -> Tensor:
        return loader.load(slices, rank)

    return SafetensorsWeightLoader(transform=transform)


def _share(source: LazySlice, shard_dim: int, shard_size: int, num_shards: int, rank: int, transposed: bool) -> Tensor:
    _check_rank(rank, num_shards)
    shape = source.get_shape()
    name = getattr(source, "name", None)
    if transposed and len(shape) not in (1, 2):
        raise WeightError(f"is_storage_transposed needs a matrix, the tensor is {shape}", where=name)
    dim = _dim(shard_dim, len(shape))
    if transposed and len(shape) == 2:
        dim = 1 - dim
    if shape[dim] != shard_size * num_shards:
        # A longer tensor would be cut short in silence, a shorter one leave a rank with too little.
        raise WeightError(
            f"dimension {dim} of {shape} is {shape[dim]}, {num_shards} shares of {shard_size} need "
            f"{shard_size * num_shards}",
            where=name,
            do="check the model's configuration against the checkpoint",
        )
    index = [slice(None)] * dim + [slice(rank * shard_size, (rank + 1) * shard_size)]
    part = source[tuple(index)]
    return part.t().contiguous() if transposed and part.ndim == 2 else part


def _dim(shard_dim: int, ndim: int) -> int:
    # A bias is divided along its one dimension, whatever the matrix beside it does.
    dim = 0 if ndim == 1 else shard_dim
    if not -ndim <= dim < ndim:
        raise WeightError(f"shard_dim={shard_dim} of a tensor with {ndim} dimensions", where="shard_dim")
    return dim % ndim


def _only(slices: Sequence[LazySlice], who: str) -> LazySlice:
    if len(slices) != 1:
        names = [str(getattr(part, "name", "?")) for part in slices]
        raise WeightError(f"takes one checkpoint tensor, got {len(slices)}: {', '.join(names)}", where=who)
    return slices[0]


def _check_rank(rank: int, num_shards: int) -> None:
    if not 0 <= rank < num_shards:
        raise WeightError(
            f"rank {rank} has no share of {num_shards}",
            where="rank",
            do="pass the rank within the group, or with_rank_override",
        )
