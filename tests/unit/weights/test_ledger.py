"""Loading a model and accounting for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pilotage.core.errors import BadInput, WeightError
from pilotage.core.nouns import Status
from pilotage.weights import (
    Drop,
    Fuse,
    Identity,
    Rename,
    SafetensorsWeightLoader,
    Split,
    Tie,
    Transpose,
    WeightMap,
    load_into,
    set_weight_loader,
    sharding_weight_loader,
)
from pilotage.weights.folding import fold
from pilotage.weights.ledger import ledger


class Net(nn.Module):
    def __init__(self, vocab: int = 6, ranks: int = 1) -> None:
        super().__init__()
        self.embed = nn.Linear(3, vocab // ranks, bias=False)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.head = nn.Linear(3, vocab // ranks, bias=False)
        for module in (self.embed, self.head) if ranks > 1 else ():
            set_weight_loader(module.weight, sharding_weight_loader(0, vocab // ranks, ranks))


MAP = WeightMap([Identity(), Tie("head.weight", "embed.weight"), Drop("layers.*.inv_freq", "computed")])


def tensors() -> dict[str, Tensor]:
    found = {"embed.weight": torch.randn(6, 3)}
    for i in range(2):
        found |= {f"layers.{i}.weight": torch.randn(3, 3), f"layers.{i}.bias": torch.randn(3)}
        found[f"layers.{i}.inv_freq"] = torch.randn(2)
    return found


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    content = tensors()
    save_file(content, tmp_path / "model.safetensors")
    return tmp_path, content


def meta(ranks: int = 1) -> Net:
    with torch.device("meta"):
        return Net(ranks=ranks)


def test_a_meta_model_with_a_tied_head_gets_every_value(saved: tuple) -> None:
    path, content = saved
    model = meta()
    result = load_into(model, path, MAP)
    assert torch.equal(model.embed.weight, content["embed.weight"])
    assert torch.equal(model.head.weight, content["embed.weight"])
    assert torch.equal(model.layers[1].bias, content["layers.1.bias"])
    assert isinstance(model.head.weight, nn.Parameter) and not any(p.is_meta for p in model.parameters())
    # One tensor, held once, although the model declares two parameters.
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    assert result.counts()["written_once"] == 6 and result.counts()["dropped"] == 2
    assert result.round_trip.status is Status.NOT_MEASURED


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tied_sharded_head_gets_its_ranks_rows(saved: tuple, rank: int) -> None:
    path, content = saved
    model = meta(ranks=2)
    load_into(model, path, MAP, rank=rank, world_size=2)
    rows = content["embed.weight"][rank * 3 : rank * 3 + 3]
    assert torch.equal(model.embed.weight, rows) and torch.equal(model.head.weight, rows)
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()


def test_dtype_is_the_parameters_or_the_one_asked_for(saved: tuple) -> None:
    path, content = saved
    model = meta()
    load_into(model, path, MAP, dtype=torch.bfloat16)
    assert torch.equal(model.layers[0].weight, content["layers.0.weight"].bfloat16())
    model = meta().half()
    load_into(model, path, MAP)
    assert model.embed.weight.dtype == torch.float16


def test_loaders_and_requires_grad_survive(saved: tuple) -> None:
    path, content = saved
    model = meta(ranks=2)
    model.embed.weight.requires_grad_(False)
    load_into(model, path, MAP, rank=0, world_size=2)
    load_into(model, path, MAP, rank=1, world_size=2)  # again, through the loaders of the replaced parameters
    assert torch.equal(model.embed.weight, content["embed.weight"][3:])
    assert not model.embed.weight.requires_grad and model.head.weight.requires_grad


def test_a_head_tied_on_the_meta_device_is_not_left_out(saved: tuple) -> None:
    path, content = saved
    model = meta()
    model.head.weight = model.embed.weight
    for _ in range(2):  # and again, when it holds values
        load_into(model, path, MAP)
        assert torch.equal(model.head.weight, content["embed.weight"])
        assert torch.equal(model.embed.weight, content["embed.weight"])
        model.head.weight = model.embed.weight
    with pytest.raises(WeightError, match=r"head\.weight: missing"):
        load_into(model, path, WeightMap([Identity(), *MAP.drops]))


def test_a_buffer_left_on_meta_is_an_error(saved: tuple) -> None:
    model = meta()
    model.register_buffer("inv_freq", torch.empty(2, device="meta"), persistent=False)
    with pytest.raises(WeightError, match="inv_freq: a buffer stayed on the meta device"):
        load_into(model, saved[0], MAP)


FAULTS = {
    "missing": (lambda t: t.pop("layers.1.bias"), "layers.1.bias: missing"),
    "extra": (lambda t: t.update({"layers.2.bias": torch.zeros(3)}), "layers.2.bias: extra"),
    "misshapen": (lambda t: t.update({"layers.0.weight": torch.zeros(3, 4)}), r"layers.0.weight: shape: .*\[3, 4\]"),
    "transposed": (lambda t: t.update({"embed.weight": torch.zeros(3, 6)}), r"embed.weight: shape: .*\[3, 6\]"),
    "integers": (lambda t: t.update({"layers.0.bias": torch.zeros(3).int()}), "layers.0.bias: dtype: is I32"),
    "fp8": (lambda t: t.update({"layers.0.bias": torch.zeros(3).to(torch.float8_e4m3fn)}), "layers.0.bias: dtype"),
    "tied copy differs": (lambda t: t.update({"head.weight": torch.zeros(6, 3)}), "head.weight: tie: must repeat"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_stops_the_load_and_is_in_the_ledger(tmp_path: Path, fault: str) -> None:
    content = tensors()
    change, message = FAULTS[fault]
    change(content)
    save_file(content, tmp_path / "model.safetensors")
    model = meta()
    with pytest.raises(WeightError, match=message):
        load_into(model, tmp_path, MAP)
    assert all(p.is_meta for p in model.parameters()), "a refused load must write nothing"
    result = ledger(tmp_path, MAP, meta())
    assert result.status is Status.FAIL
    name, kind = message.split(":")[0], message.split(":")[1].strip()
    assert any(problem.name == name and problem.kind == kind for problem in result.problems), result.problems
    assert result.counts()["errors"] == len(result.problems) > 0


def test_a_stored_copy_of_the_tied_head_is_dropped_with_a_reason(tmp_path: Path) -> None:
    content = tensors()
    save_file({**content, "head.weight": content["embed.weight"].clone()}, tmp_path / "model.safetensors")
    model = meta()
    load_into(model, tmp_path, MAP)
    assert torch.equal(model.head.weight, content["embed.weight"])
    entry = next(e for e in ledger(tmp_path, MAP, meta()).tensors if e.key == "head.weight")
    assert entry.action == "drop" and entry.reason == "repeats embed.weight (tied)"


def test_a_clean_ledger_passes_and_says_everything(saved: tuple) -> None:
    path, content = saved
    data = ledger(path, MAP, meta()).to_json()
    assert data["status"] == "pass"
    assert {t["key"] for t in data["tensors"]} == set(content)
    by_key = {t["key"]: t for t in data["tensors"]}
    assert by_key["embed.weight"]["targets"] == ["embed.weight", "head.weight"]
    assert by_key["layers.0.inv_freq"] == {
        "key": "layers.0.inv_freq", "shape": [2], "dtype": "F32", "bytes": 8, "action": "drop", "targets": [],
        "reason": "computed",
    }  # fmt: skip
    assert {p["name"]: p["sources"] for p in data["parameters"]}["head.weight"] == ["embed.weight"]
    assert data["counts"] == {
        "tensors": 7, "loaded": 5, "dropped": 2, "errors": 0, "parameters": 6, "written_once": 6,
        "bytes": sum(t.numel() * 4 for t in content.values()),
    }  # fmt: skip
    assert data["round_trip"] == {"status": "pass", "compared": 5, "differing": []}
    assert [v["status"] for v in data["verdicts"]] == ["pass"] * 3


@dataclass(frozen=True)
class Lossy(Rename):
    """A rule that is no bijection."""

    def to_native(self, parts: list[Tensor]) -> list[Tensor]:
        return [parts[0].bfloat16().to(parts[0].dtype)]


def test_a_map_that_changes_bytes_fails_the_round_trip(saved: tuple) -> None:
    broken = WeightMap([*MAP.rules, *MAP.ties, *MAP.drops, Lossy("layers.0.weight", "layers.0.weight")])
    result = ledger(saved[0], broken, meta())
    assert result.round_trip.differing == ("layers.0.weight",)
    assert result.status is Status.FAIL


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.empty(5, 4))
        self.gate, self.up = nn.Parameter(torch.empty(2, 4)), nn.Parameter(torch.empty(3, 4))
        self.t = nn.Parameter(torch.empty(4, 2))


FUSED_MAP = WeightMap(
    [Fuse(("q", "k"), "qk", (3, 2)), Split("gu", ("gate", "up"), (2, 3)), Transpose("t", "t"), Drop("x", "unused")]
)


@pytest.mark.parametrize("own_loader", [False, True])
def test_rules_that_move_values_are_applied_while_loading(tmp_path: Path, own_loader: bool) -> None:
    content = {"q": torch.randn(3, 4), "k": torch.randn(2, 4), "gu": torch.randn(5, 4), "t": torch.randn(2, 4)}
    save_file(content, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Fused()
    if own_loader:
        # A fusing loader gets the checkpoint's tensors; one on a moved tensor gets the moved one.
        set_weight_loader(model.qk, SafetensorsWeightLoader(transform=lambda s, _: torch.cat([s[0][:], s[1][:]])))
        set_weight_loader(model.t, SafetensorsWeightLoader(transform=lambda s, _: s[0][0 : s[0].get_shape()[0]]))
    load_into(model, tmp_path, FUSED_MAP)
    native = FUSED_MAP.to_native(content)
    assert all(torch.equal(parameter, native[name]) for name, parameter in model.named_parameters())
    assert ledger(tmp_path, FUSED_MAP, Fused()).status is Status.PASS


def test_an_unreadable_checkpoint_is_an_error_not_a_ledger(saved: tuple) -> None:
    path, _ = saved
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(BadInput, match="truncated"):
        ledger(path, MAP, meta())


def test_folding_joins_layers_with_equal_values_only() -> None:
    names = [("a.layers.0.w", 1), ("a.layers.1.w", 1), ("a.layers.3.w", 1), ("a.layers.2.w", 2), ("norm", 1)]
    rows = [(row.name, row.value, row.members) for row in fold(names)]
    assert rows == [("a.layers.0-1,3.w", 1, 3), ("a.layers.2.w", 2, 1), ("norm", 1, 1)]
