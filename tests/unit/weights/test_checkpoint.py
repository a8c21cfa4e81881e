"""A checkpoint directory: single, indexed, numbered; and the documented loading call."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pilotage.core.errors import BadInput, PilotageError, WeightError
from pilotage.weights import SafetensorsCheckpoint, fused_qkv_weight_loader, set_weight_loader, sharding_weight_loader

A, B, C = torch.randn(4, 3), torch.randn(5), torch.randn(2, 2)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"a": A, "b": B}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"c": C}, tmp_path / "model-00002-of-00002.safetensors")
    places = {"a": 1, "b": 1, "c": 2}
    index = {"metadata": {}, "weight_map": {k: f"model-0000{n}-of-00002.safetensors" for k, n in places.items()}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def edit_index(path: Path, **places: str | None) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    for name, place in places.items():
        if place is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = place
    file.write_text(json.dumps(index))


def test_indexed_shards_read_as_one(sharded: Path) -> None:
    checkpoint = SafetensorsCheckpoint(sharded, None)
    assert sorted(checkpoint.keys()) == ["a", "b", "c"] and "c" in checkpoint and "d" not in checkpoint
    assert torch.equal(checkpoint["c"][:], C)
    assert checkpoint.bytes_read == C.numel() * 4
    with pytest.raises(WeightError, match=r"d in .*no such tensor"):
        _ = checkpoint["d"]


def test_numbered_shards_need_no_index_but_all_of_them(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    assert sorted(SafetensorsCheckpoint(sharded).keys()) == ["a", "b", "c"]
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(BadInput, match="shard is missing"):
        SafetensorsCheckpoint(sharded)


def test_the_single_file_wins_as_in_transformers(sharded: Path) -> None:
    save_file({"only": A}, sharded / "model.safetensors")
    assert SafetensorsCheckpoint(sharded).keys() == ["only"]


def test_bad_directories_are_explained(tmp_path: Path, sharded: Path) -> None:
    with pytest.raises(BadInput, match="no such checkpoint directory"):
        SafetensorsCheckpoint(tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(BadInput, match=r"holds no \*\.safetensors"):
        SafetensorsCheckpoint(empty)


def test_a_hub_id_is_looked_up_in_the_cache_that_is_named(tmp_path: Path) -> None:
    home = tmp_path / "models--acme--tiny"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("f00")
    (home / "snapshots" / "f00").mkdir(parents=True)
    save_file({"weight": torch.arange(3.0)}, home / "snapshots" / "f00" / "model.safetensors")
    assert SafetensorsCheckpoint("acme/tiny", tmp_path).keys() == ["weight"]
    with pytest.raises(BadInput, match="acme/other: no such checkpoint directory"):
        SafetensorsCheckpoint("acme/other", tmp_path)


def test_a_missing_shard_names_itself_and_what_it_held(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(BadInput, match=r"model-00002-of-00002\.safetensors: a shard is missing; it should hold c"):
        SafetensorsCheckpoint(sharded)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"c": "model-00001-of-00002.safetensors"}, "c: the index places it in model-00001"),
        ({"b": None}, "b: model-00001-of-00002.safetensors holds it, .* does not"),
        ({"z": "model-00001-of-00002.safetensors"}, "z: the index places it in model-00001"),
        ({"c": "../c.safetensors"}, "outside its directory"),
    ],
)
def test_an_index_that_disagrees_with_the_files_is_refused(sharded: Path, places: dict, message: str) -> None:
    edit_index(sharded, **places)
    with pytest.raises(PilotageError, match=message):
        SafetensorsCheckpoint(sharded)


def test_an_index_without_a_map_is_refused(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(BadInput, match="no weight_map"):
        SafetensorsCheckpoint(sharded)


def test_a_tensor_in_two_files_is_refused(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    save_file({"a": A}, sharded / "model-00002-of-00002.safetensors")
    with pytest.raises(WeightError, match="a: two files hold this tensor"):
        SafetensorsCheckpoint(sharded)


class Attention(nn.Module):
    """Fused and transposed, as a model written against the guide declares it."""

    def __init__(self, hidden: int, q_size: int, kv_size: int, ranks: int, replicas: int) -> None:
        super().__init__()
        self.qkv_proj = nn.Parameter(torch.empty(hidden, q_size + 2 * kv_size, device="meta"))
        self.o_proj = nn.Parameter(torch.empty(q_size, hidden, device="meta"))
        self.norm = nn.Parameter(torch.empty(hidden, device="meta", dtype=torch.bfloat16))
        set_weight_loader(self.qkv_proj, fused_qkv_weight_loader(q_size, kv_size, 1, ranks, True, replicas))
        set_weight_loader(self.o_proj, sharding_weight_loader(0, q_size, ranks, is_storage_transposed=True))


MAPPINGS = {
    "qkv_proj": ["attn.q.weight", "attn.k.weight", "attn.v.weight"],
    "o_proj": "attn.o.weight",
    "norm": "norm.weight",
}


@pytest.fixture
def attention(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    tensors = {
        "attn.q.weight": torch.randn(12, 5),
        "attn.k.weight": torch.randn(6, 5),
        "attn.v.weight": torch.randn(6, 5),
        "attn.o.weight": torch.randn(5, 12),
        "norm.weight": torch.randn(5),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path, tensors


@pytest.mark.parametrize("rank", range(4))
def test_the_documented_call_loads_a_ranks_share(attention: tuple, rank: int) -> None:
    path, tensors = attention
    model = Attention(5, 3, 3, ranks=4, replicas=2)
    result = SafetensorsCheckpoint(path, None).load_sharded_pipelined(rank, 4, model, MAPPINGS, "cpu")
    model.load_state_dict(result.state_dict, strict=True, assign=True)
    q, k, v = (tensors[f"attn.{name}.weight"] for name in "qkv")
    group = slice(rank // 2 * 3, rank // 2 * 3 + 3)
    expected = torch.cat([q[rank * 3 : rank * 3 + 3], k[group], v[group]]).t()
    assert torch.equal(model.qkv_proj, expected)
    assert torch.equal(model.o_proj, tensors["attn.o.weight"][:, rank * 3 : rank * 3 + 3].t())
    # In the parameter's own dtype, whatever the checkpoint's is.
    assert torch.equal(model.norm, tensors["norm.weight"].bfloat16())


def test_what_no_mapping_names_is_an_error_or_listed(attention: tuple) -> None:
    path, _ = attention
    checkpoint, model = SafetensorsCheckpoint(path), Attention(5, 12, 6, 1, 1)
    some = {"norm": "norm.weight"}
    with pytest.raises(WeightError, match="qkv_proj: no mapping writes"):
        checkpoint.load_sharded_pipelined(0, 1, model, some, "cpu")
    result = checkpoint.load_sharded_pipelined(0, 1, model, some, "cpu", strict=False)
    assert list(result.state_dict) == ["norm"]
    assert result.missing_keys == ["qkv_proj", "o_proj"]
    assert sorted(result.unexpected_keys) == [f"attn.{name}.weight" for name in "koqv"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nose": "norm.weight"}, "nose: the model has no such parameter"),
        ({"norm": "nrom.weight"}, "nrom.weight in .*: the checkpoint has no such tensor"),
        ({"norm": "attn.o.weight"}, r"norm: attn.o.weight \[5, 12\] gives \[5, 12\], the parameter is \[5\]"),
        ({"norm": ["norm.weight", "attn.o.weight"]}, "takes one checkpoint tensor, got 2"),
    ],
)
def test_a_wrong_mapping_is_an_error_that_names_it(attention: tuple, change: dict, message: str) -> None:
    path, _ = attention
    with pytest.raises(WeightError, match=message):
        SafetensorsCheckpoint(path).load_sharded_pipelined(
            0, 1, Attention(5, 12, 6, 1, 1), {**MAPPINGS, **change}, "cpu", strict=False
        )


def test_an_integer_tensor_for_a_float_parameter_is_refused(attention: tuple) -> None:
    path, tensors = attention
    save_file({**tensors, "norm.weight": torch.ones(5, dtype=torch.int32)}, path / "model.safetensors")
    with pytest.raises(WeightError, match=r"norm: norm\.weight \[5\] is I32 in model\.safetensors"):
        SafetensorsCheckpoint(path).load_sharded_pipelined(0, 1, Attention(5, 12, 6, 1, 1), MAPPINGS, "cpu")


_MEASURE = """
import re, sys, torch
from torch import nn
from pilotage.weights import Identity, WeightMap, load_into, set_weight_loader, sharding_weight_loader

def peak(): return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

model = nn.Module()
with torch.device("meta"):
    for layer in range(16):
        shape = (512, 1024) if layer % 2 else (2048, 256)
        parameter = nn.Parameter(torch.empty(shape))
        set_weight_loader(parameter, sharding_weight_loader(0 if layer % 2 else 1, shape[0 if layer % 2 else 1], 4))
        model.register_parameter(f"w{layer}", parameter)
(torch.zeros(4 << 20) + 1).sum()  # warm up the allocator and the thread pools
before = peak()
load_into(model, sys.argv[1], WeightMap([Identity()]), rank=2, world_size=4)
assert all(torch.equal(p, torch.full_like(p, i)) for i, p in enumerate(model.parameters()))
print(peak() - before)
"""


def test_a_ranks_peak_memory_is_near_its_own_share(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.full((2048, 1024), float(i)) for i in range(16)}
    save_file(tensors, tmp_path / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    grown_mb, share_mb, whole_mb = float(done.stdout), 32, 128
    # The share, one tensor read ahead (2 MB), the buffer that columns pass through (4 MB), and some slack.
    assert grown_mb < share_mb + 16 < whole_mb, f"grew by {grown_mb:.0f} MB for a share of {share_mb} MB"
