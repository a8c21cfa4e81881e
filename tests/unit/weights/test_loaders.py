"""One rank's share: concatenated over the ranks it is the whole again, at any size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pilotage.core.errors import WeightError
from pilotage.weights import (
    SafetensorsWeightLoader,
    fused_qkv_weight_loader,
    get_weight_loader,
    set_weight_loader,
    sharding_weight_loader,
    with_rank_override,
)


class Slice:
    """A lazy slice over a tensor in memory that remembers what was read."""

    def __init__(self, tensor: Tensor, name: str = "w") -> None:
        self.tensor, self.name, self.read = tensor, name, 0

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index: object) -> Tensor:
        part = self.tensor[index]
        self.read += part.numel()
        return part.clone()


sizes = st.integers(1, 7)


@given(shards=st.integers(1, 5), share=sizes, other=sizes, dim=st.integers(0, 1), transposed=st.booleans())
def test_shares_concatenate_to_the_whole_and_nothing_else_is_read(
    shards: int, share: int, other: int, dim: int, transposed: bool
) -> None:
    shape = [other, other]
    shape[dim] = shards * share
    whole = torch.randn(shape)
    stored = Slice(whole.t().contiguous() if transposed else whole)
    loader = sharding_weight_loader(dim, share, shards, transposed)
    parts = [loader.load([stored], rank) for rank in range(shards)]
    assert torch.equal(torch.cat(parts, dim), whole)
    assert stored.read == whole.numel()
    assert all(part.is_contiguous() for part in parts)


@given(shards=st.integers(1, 5), share=sizes, dim=st.integers(0, 1), transposed=st.booleans())
def test_a_bias_is_divided_along_its_one_dimension(shards: int, share: int, dim: int, transposed: bool) -> None:
    whole = torch.randn(shards * share)
    loader = sharding_weight_loader(dim, share, shards, transposed)
    parts = [loader.load([Slice(whole)], rank) for rank in range(shards)]
    assert torch.equal(torch.cat(parts), whole)


@given(
    kv_shards=st.integers(1, 4),
    replicas=st.integers(1, 4),
    q_size=sizes,
    kv_size=sizes,
    hidden=sizes,
    transposed=st.booleans(),
    bias=st.booleans(),
)
def test_fused_qkv_gives_every_rank_its_queries_and_its_groups_keys(
    kv_shards: int, replicas: int, q_size: int, kv_size: int, hidden: int, transposed: bool, bias: bool
) -> None:
    shards = kv_shards * replicas
    tail = () if bias else (hidden,)
    q, k, v = (torch.randn(rows, *tail) for rows in (shards * q_size, kv_shards * kv_size, kv_shards * kv_size))
    # The checkpoint holds [out, in]; the parameter is [in, out] where it is transposed.
    loader = fused_qkv_weight_loader(q_size, kv_size, int(transposed), shards, transposed, replicas)
    for rank in range(shards):
        fused = loader.load([Slice(q), Slice(k), Slice(v)], rank)
        fused = fused.t() if transposed and not bias else fused
        got_q, got_k, got_v = fused.split([q_size, kv_size, kv_size])
        group = rank // replicas
        assert torch.equal(got_q, q[rank * q_size : (rank + 1) * q_size])
        assert torch.equal(got_k, k[group * kv_size : (group + 1) * kv_size])
        assert torch.equal(got_v, v[group * kv_size : (group + 1) * kv_size])


def test_a_tensor_longer_than_its_shares_is_refused_by_name() -> None:
    loader = sharding_weight_loader(0, 4, 2)
    with pytest.raises(WeightError, match=r"lm_head.*9.*2 shares of 4"):
        loader.load([Slice(torch.zeros(9, 3), "lm_head")], 0)


def test_a_rank_without_a_share_is_refused() -> None:
    with pytest.raises(WeightError, match="rank 2 has no share of 2"):
        sharding_weight_loader(0, 4, 2).load([Slice(torch.zeros(8, 3))], 2)


def test_fused_qkv_needs_three_tensors_and_replicas_that_divide() -> None:
    with pytest.raises(WeightError, match="three checkpoint keys"):
        fused_qkv_weight_loader(4, 2, 0, 1).load([Slice(torch.zeros(4, 3))], 0)
    with pytest.raises(WeightError, match="num_kv_replicas=3 does not divide num_shards=4"):
        fused_qkv_weight_loader(4, 2, 0, 4, num_kv_replicas=3)


def test_rank_override_wins() -> None:
    whole = torch.arange(8.0)
    # dp_rank + tp_rank * dp_size of a component divided over 4, seen from rank 0
    loader = with_rank_override(sharding_weight_loader(0, 2, 4), rank=1 + 1 * 2)
    assert torch.equal(loader.load([Slice(whole)], 0), whole[6:])


def test_a_parameter_without_a_loader_takes_the_one_tensor_as_it_is() -> None:
    parameter = nn.Parameter(torch.empty(3, device="meta"))
    whole = torch.randn(3)
    assert torch.equal(get_weight_loader(parameter).load([Slice(whole)], 0), whole)
    with pytest.raises(WeightError, match="takes one checkpoint tensor, got 2: a, b"):
        get_weight_loader(parameter).load([Slice(whole, "a"), Slice(whole, "b")], 0)


def test_the_last_attached_loader_counts() -> None:
    parameter = nn.Parameter(torch.empty(3))
    set_weight_loader(parameter, SafetensorsWeightLoader(transform=lambda slices, rank: slices[0][:] + rank))
    assert get_weight_loader(parameter).load([Slice(torch.zeros(3))], 2).tolist() == [2, 2, 2]
    set_weight_loader(parameter, SafetensorsWeightLoader())
    assert get_weight_loader(parameter).load([Slice(torch.zeros(3))], 2).tolist() == [0, 0, 0]
