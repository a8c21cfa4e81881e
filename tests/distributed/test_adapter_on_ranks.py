"""The state-dict adapter on DTensors in real processes: values, placements, and which rank holds which expert."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from pilotage.weights import Fuse, Identity, Stack, StateDictAdapter, WeightMap

pytestmark = pytest.mark.distributed

EXPERTS, INNER, WIDTH = 8, 6, 10
MAP = WeightMap(
    [
        Stack(("e.{e}.gate", "e.{e}.up"), "gate_up", EXPERTS, (INNER, INNER)),
        Stack(("e.{e}.down",), "down", EXPERTS, (WIDTH,)),
        Fuse(("q", "k", "v"), "qkv", (6, 3, 3)),
        Identity(),
    ]
)


def whole() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "gate_up": (EXPERTS, 2 * INNER, WIDTH),
        "down": (EXPERTS, WIDTH, INNER),
        "qkv": (12, WIDTH),
        "norm": (WIDTH,),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def outcome(rank: int) -> list[dict[str, Any]]:
    expected = StateDictAdapter(MAP).to_hf(whole())
    ep = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
    layouts: list[tuple[Any, dict[str, Any]]] = [
        (ep, {"gate_up": [Shard(0)], "down": [Shard(0)], "qkv": [Shard(0)], "norm": [Shard(0)]}),
        (
            both,
            {
                "gate_up": [Shard(1), Shard(0)],  # rows of gate and up are divided: they have to be gathered
                "down": [Shard(2), Shard(0)],
                "qkv": [Shard(0), Replicate()],
                "norm": [Replicate(), Replicate()],
            },
        ),
        (both, {"gate_up": [Shard(2), Replicate()], "down": [Shard(1), Shard(2)], "qkv": [Shard(1), Shard(0)]}),
    ]
    results = []
    for mesh, placements in layouts:
        values = whole()
        state = {
            name: distribute_tensor(values[name], mesh, placements[name]) if name in placements else values[name]
            for name in values
        }
        adapter = StateDictAdapter(MAP, lambda state=state: state.items())  # type: ignore[misc]
        before = {name: copy.deepcopy(value) for name, value in state.items()}
        found = adapter.to_hf(state)
        back, from_whole = adapter.from_hf(found), adapter.from_hf(expected)
        result: dict[str, Any] = {"names": sorted(found), "placements": {}, "equal": True}
        for name, value in found.items():
            full = value
            if isinstance(value, DTensor):
                result["placements"][name] = (value.device_mesh.mesh_dim_names, tuple(map(str, value.placements)))
                full = value.full_tensor()
            result["equal"] &= torch.equal(full, expected[name])
        for made in (back, from_whole):
            result["equal"] &= made.keys() == state.keys()
            for name, value in state.items():
                one = made[name]
                if isinstance(value, DTensor):
                    result["equal"] &= isinstance(one, DTensor) and one.placements == value.placements
                    result["equal"] &= torch.equal(one.to_local(), value.to_local())
                    result["equal"] &= torch.equal(value.to_local(), before[name].to_local())
                else:
                    result["equal"] &= torch.equal(one, value)
        results.append(result)
    dealt = StateDictAdapter(MAP).from_hf(expected, device_mesh=ep)
    results.append(
        {
            "equal": torch.equal(dealt["down"].to_local(), whole()["down"][2 * rank : 2 * rank + 2])
            and torch.equal(dealt["qkv"], whole()["qkv"]),
        }
    )
    return results


def test_values_placements_and_ownership(tmp_path: Path) -> None:
    by_rank = run(outcome, 4, tmp_path)
    for rank, results in enumerate(by_rank):
        assert [result["equal"] for result in results] == [True] * 4, f"rank {rank}"
        flat, both, replicated = results[:3]
        own = sorted(f"e.{e}.{part}" for e in (2 * rank, 2 * rank + 1) for part in ("gate", "up", "down"))
        assert [name for name in flat["names"] if name.startswith("e.")] == own
        assert flat["placements"] == {name: (("ep",), ("S(0)",)) for name in ("q", "k", "v", "norm")}
        half = range(4) if rank % 2 == 0 else range(4, 8)
        own = sorted(f"e.{e}.{part}" for e in half for part in ("gate", "up", "down"))
        assert [name for name in both["names"] if name.startswith("e.")] == own
        assert both["placements"][f"e.{half[0]}.gate"] == (("fsdp",), ("R",))
        assert both["placements"][f"e.{half[0]}.down"] == (("fsdp",), ("S(1)",))
        assert both["placements"]["k"] == (("fsdp", "ep"), ("S(0)", "R"))
        assert replicated["placements"]["e.7.up"] == (("fsdp", "ep"), ("S(1)", "R"))
        assert replicated["placements"]["e.7.down"] == (("fsdp", "ep"), ("S(0)", "S(1)"))
