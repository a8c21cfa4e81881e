"""Loaders of expert parallelism: a rank gets its own experts from all three layouts, and reads no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pilotage.core.errors import WeightError
from pilotage.weights import (
    SafetensorsCheckpoint,
    SafetensorsWeightLoader,
    Stack,
    WeightMap,
    expert_parallel_grouped_loader,
    expert_parallel_interleaved_loader,
    expert_parallel_tensor_dim_loader,
    load_into,
    padded_sharding_weight_loader,
    set_weight_loader,
    sharding_weight_loader,
)

E, F, D = 6, 4, 3
GATE, UP = (torch.arange(E * F * D).reshape(E, F, D) + offset for offset in (0.0, 1000.0))


class Slice:
    """A tensor in memory that counts what is read."""

    def __init__(self, whole: Tensor) -> None:
        self.whole, self.read = whole, 0

    def get_shape(self) -> list[int]:
        return list(self.whole.shape)

    def __getitem__(self, index: Any) -> Tensor:
        part = self.whole[index]
        self.read += part.numel()
        return part


def stacked(kinds: int) -> SafetensorsWeightLoader:
    """Stacks one tensor an expert, [gate; up] of each."""

    def transform(slices: Any, rank: int) -> Tensor:
        count = len(slices) // 2
        pairs = [(slices[e], slices[count + e]) if kinds else (slices[2 * e], slices[2 * e + 1]) for e in range(count)]
        return torch.stack([torch.cat((gate[:], up[:])) for gate, up in pairs])

    return SafetensorsWeightLoader(transform=transform)


EXPECTED = torch.cat((GATE, UP), dim=1)[2:4]


def test_experts_along_a_dimension() -> None:
    whole = Slice(torch.cat((GATE, UP), dim=1))
    loader = expert_parallel_tensor_dim_loader(range(2, 4), SafetensorsWeightLoader())
    assert torch.equal(loader.load([whole], 0), EXPECTED)
    assert whole.read == EXPECTED.numel()
    # Of the second dimension, and each expert divided over two ranks as well.
    turned = Slice(GATE.transpose(0, 1).contiguous())
    loader = expert_parallel_tensor_dim_loader([2, 3], sharding_weight_loader(0, 2, 2), expert_dim=1)
    assert torch.equal(loader.load([turned], 1), GATE[2:4, 2:].transpose(0, 1))
    assert turned.read == 2 * 2 * D


@pytest.mark.parametrize("grouped", [True, False])
def test_one_tensor_an_expert(grouped: bool, tmp_path: Path) -> None:
    """Through a checkpoint on disk, with the mapping that the guide documents."""
    tensors = {f"{name}.{e}": x[e].clone() for name, x in (("gate", GATE), ("up", UP)) for e in range(E)}
    save_file(tensors, tmp_path / "model.safetensors")
    keys = [f"{name}.{e}" for name in ("gate", "up") for e in range(E)]
    wrap = expert_parallel_grouped_loader
    if not grouped:
        keys = [f"{name}.{e}" for e in range(E) for name in ("gate", "up")]
        wrap = expert_parallel_interleaved_loader
    model = nn.Module()
    model.experts = nn.Parameter(torch.empty(2, 2 * F, D, device="meta"))
    set_weight_loader(model.experts, wrap([2, 3], stacked(grouped), E))
    found = SafetensorsCheckpoint(tmp_path).load_sharded_pipelined(1, 3, model, {"experts": keys}, torch.device("cpu"))
    assert torch.equal(found.state_dict["experts"], EXPECTED)


def test_a_rank_reads_the_tensors_of_its_own_experts_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pilotage.weights.lazy import LazyTensor

    tensors = {f"{name}.{e}": x[e].clone() for name, x in (("gate", GATE), ("up", UP)) for e in range(E)}
    save_file(tensors, tmp_path / "model.safetensors")
    model = nn.Module()
    model.experts = nn.Parameter(torch.empty(2, 2 * F, D, device="meta"))
    set_weight_loader(model.experts, expert_parallel_tensor_dim_loader([2, 3], SafetensorsWeightLoader()))
    read: list[str] = []
    real = LazyTensor.__getitem__

    def noted(self: LazyTensor, index: Any) -> Tensor:
        read.append(self.name)
        return real(self, index)

    monkeypatch.setattr(LazyTensor, "__getitem__", noted)
    rule = Stack(("gate.{e}", "up.{e}"), "experts", E, (F, F))
    load_into(model, tmp_path, WeightMap([rule]), rank=1, world_size=3)
    assert torch.equal(model.experts.data, EXPECTED)
    assert sorted(read) == ["gate.2", "gate.3", "up.2", "up.3"]


def test_what_is_no_range_or_does_not_fit_is_refused() -> None:
    plain = SafetensorsWeightLoader()
    with pytest.raises(WeightError, match=r"local experts \[0, 2\] are no contiguous ascending range"):
        expert_parallel_tensor_dim_loader([0, 2], plain)
    with pytest.raises(WeightError, match="expert 6 of 6"):
        expert_parallel_grouped_loader([5, 6], plain, E)
    with pytest.raises(WeightError, match="7 tensors are no multiple of 6 experts"):
        expert_parallel_interleaved_loader([0], plain, E).load([Slice(GATE)] * 7, 0)
    with pytest.raises(WeightError, match="holds 6 experts, the rank's are 6 to 7"):
        expert_parallel_tensor_dim_loader([6, 7], plain).load([Slice(GATE)], 0)


def test_shares_of_a_whole_that_does_not_divide() -> None:
    whole = torch.arange(10.0).reshape(5, 2)
    loader = padded_sharding_weight_loader(0, 2, 4)
    shares = [loader.load([Slice(whole)], rank) for rank in range(4)]
    assert torch.equal(torch.cat(shares), torch.cat((whole, torch.zeros(3, 2))))
    with pytest.raises(WeightError, match=r"dimension 0 of \[5, 2\] does not give 4 shares of 3"):
        padded_sharding_weight_loader(0, 3, 4).load([Slice(whole)], 0)
