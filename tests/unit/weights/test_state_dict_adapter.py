"""The state-dict adapter on whole tensors: exact both ways, pure, and honest about whose storage it returns."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from pilotage.core.errors import Unsupported, WeightError
from pilotage.weights import (
    Drop,
    Fuse,
    Identity,
    Permute,
    Rename,
    Split,
    Stack,
    StateDictAdapter,
    Tie,
    Transpose,
    WeightMap,
)

LAYER = "model.layers.{i}"
EXPERTS = Stack(
    (f"{LAYER}.experts.{{e}}.gate.weight", f"{LAYER}.experts.{{e}}.up.weight"), f"{LAYER}.experts.gate_up", 3, (4, 4)
)
DOWN = Stack((f"{LAYER}.experts.{{e}}.down.weight",), f"{LAYER}.experts.down", 3, (5,))
QKV = Fuse((f"{LAYER}.q.weight", f"{LAYER}.k.weight", f"{LAYER}.v.weight"), f"{LAYER}.qkv.weight", (6, 2, 2))


def weight_map() -> WeightMap:
    return WeightMap(
        [
            Tie("lm_head.weight", "model.embed.weight"),
            Drop(f"{LAYER}.inv_freq", "computed from the config"),
            EXPERTS,
            DOWN,
            QKV,
            Rename(f"{LAYER}.ln.weight", f"{LAYER}.norm.weight"),
            Transpose(f"{LAYER}.conv.weight", f"{LAYER}.proj.weight"),
            Permute(f"{LAYER}.rope.weight", f"{LAYER}.turned.weight", (2, 3, 2, -1), (0, 2, 1, 3)),
            Split(f"{LAYER}.both.weight", (f"{LAYER}.a.weight", f"{LAYER}.b.weight"), (3, 2)),
            Identity(),
        ]
    )


def checkpoint() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed.weight": (11, 5)}
    for i in range(2):
        name = f"model.layers.{i}"
        for e in range(3):
            shapes |= {f"{name}.experts.{e}.{part}.weight": (4, 5) for part in ("gate", "up")}
            shapes[f"{name}.experts.{e}.down.weight"] = (5, 4)
        shapes |= {f"{name}.q.weight": (6, 5), f"{name}.k.weight": (2, 5), f"{name}.v.weight": (2, 5)}
        shapes |= {f"{name}.ln.weight": (5,), f"{name}.conv.weight": (5, 7), f"{name}.rope.weight": (12, 5)}
        shapes |= {f"{name}.both.weight": (5, 5), f"{name}.inv_freq": (3,)}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_both_ways_are_exact_and_arguments_stay_as_they_were() -> None:
    adapter, given = StateDictAdapter(weight_map()), checkpoint()
    before = copied(given)
    native = adapter.from_hf(given)
    assert same(given, before)
    assert native["model.layers.1.experts.gate_up"].shape == (3, 8, 5)
    assert torch.equal(native["lm_head.weight"], given["model.embed.weight"])
    held = copied(native)
    back = adapter.to_hf(native)
    assert same(native, held)
    assert same(back, {name: tensor for name, tensor in before.items() if "inv_freq" not in name})
    assert same(adapter.from_hf(back), held)


def test_single_tensors_say_what_the_whole_says() -> None:
    adapter = StateDictAdapter(weight_map())
    native = adapter.from_hf(checkpoint())
    whole = adapter.to_hf(native)
    found: dict[str, Tensor] = {}
    for name in native:
        if name.endswith((".a.weight", ".b.weight")):
            continue
        for key, tensor in adapter.convert_single_tensor_to_hf(name, native[name]):
            assert key not in found
            found[key] = tensor
    assert same(found, {key: tensor for key, tensor in whole.items() if ".both." not in key})
    assert adapter.convert_single_tensor_to_hf("lm_head.weight", native["lm_head.weight"]) == []
    with pytest.raises(WeightError, match="needs it beside it"):
        adapter.convert_single_tensor_to_hf("model.layers.0.a.weight", native["model.layers.0.a.weight"])


def test_what_is_excluded_quantised_or_unknown() -> None:
    adapter = StateDictAdapter(weight_map())
    native = adapter.from_hf(checkpoint())
    kept = adapter.to_hf(native, exclude_key_regex=r".*experts.*")
    assert kept and not any("experts" in name for name in kept)
    with pytest.raises(Unsupported, match="quantised"):
        adapter.to_hf(native, quantization=True)
    with pytest.raises(Unsupported, match="colour"):
        adapter.to_hf(native, colour="red")
    with pytest.raises(WeightError, match=r"layers\.0\.q\.weight"):
        adapter.from_hf({name: t for name, t in checkpoint().items() if name != "model.layers.0.q.weight"})


def test_low_memory_is_claimed_where_the_result_is_the_storage() -> None:
    stacked = StateDictAdapter(WeightMap([EXPERTS, DOWN, Identity()]))
    assert stacked.supports_low_memory_dcp_load
    native = stacked.from_hf(
        {name: t for name, t in checkpoint().items() if ".experts." in name or name == "model.embed.weight"}
    )
    for tensor in stacked.to_hf(native).values():
        tensor.fill_(7.0)
    assert all(bool((tensor == 7.0).all()) for tensor in native.values())
    for rule in (QKV, Transpose("x.{i}", "y.{i}"), Stack(EXPERTS.hf, EXPERTS.native, 3, (4, 4), dim=1)):
        assert not StateDictAdapter(WeightMap([rule, Identity()])).supports_low_memory_dcp_load


def test_identity_is_known() -> None:
    assert WeightMap([Tie("lm_head.weight", "model.embed.weight"), Drop("x", "unused"), Identity()]).is_identity
    assert not weight_map().is_identity


# Peak of the resident memory while a distributed checkpoint is read, over what the model holds.
_PEAK = """
import re, sys, tempfile, torch
import torch.distributed.checkpoint as dcp
from pilotage.weights import Identity, Stack, StateDictAdapter, WeightMap
MB, E, D = 2**20, 32, 1024
adapter = StateDictAdapter(WeightMap([Stack(("e.{e}.w",), "experts", E, (D,)), Identity()]))
def status(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
state = {"experts": torch.randn(E, D, D)}
wanted = state["experts"].sum(dtype=torch.float64)
with tempfile.TemporaryDirectory() as folder:
    dcp.save(adapter.to_hf(state), checkpoint_id=folder, no_dist=True)
    state["experts"].zero_()
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    if sys.argv[1] == "views":
        dcp.load(adapter.to_hf(state), checkpoint_id=folder, no_dist=True)
    else:
        hf = {name: torch.empty_like(t) for name, t in adapter.to_hf(state).items()}
        dcp.load(hf, checkpoint_id=folder, no_dist=True)
        state = adapter.from_hf(hf)
    peak = status("VmHWM") - before
assert torch.equal(state["experts"].sum(dtype=torch.float64), wanted)
print(peak / (4 * E * D * D))
"""


@pytest.mark.slow
def test_low_memory_load_needs_no_second_copy() -> None:
    peaks = {
        way: float(
            subprocess.run([sys.executable, "-c", _PEAK, way], check=True, capture_output=True, text=True).stdout
        )
        for way in ("views", "copies")
    }
    print(f"peak over the model's own storage, in models of 128 MiB: {peaks}")
    # One tensor is in flight; copies need the checkpoint's tensors and the stacked ones beside the model.
    assert peaks["views"] < 0.5 < 1.5 < peaks["copies"]
