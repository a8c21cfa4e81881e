"""Captures on disk: what is written is read back, by request, position and site."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pilotage.core.errors import BadInput
from pilotage.core.nouns import TensorKey
from pilotage.probe import Captures, CaptureWriter

LAYER, HEAD = "model.layers.0", "lm_head"


def write(directory: Path) -> None:
    """Two requests in three steps: a packed prefill, a decode of both, and position 2 of "a" once more."""
    with CaptureWriter(directory, arm="target", notes={"dtype": "bfloat16"}) as writer:
        writer.request("a", [5, 6, 7])
        writer.request("b", [8, 9])
        writer.add(
            {LAYER: torch.arange(10.0).view(5, 2), HEAD: torch.tensor([[2.0], [4.0]])},
            requests=["a", "a", "a", "b", "b"],
            positions=[0, 1, 2, 0, 1],
            tokens=[5, 6, 7, 8, 9],
            sampled=[2, 4],
        )
        writer.add(
            {LAYER: torch.tensor([[30.0, 31], [20, 21]]), HEAD: torch.tensor([[30.0], [20]])},
            requests=["b", "a"],
            positions=[2, 3],
            tokens=[1, 2],
            sampled=[0, 1],
        )
        writer.add({LAYER: torch.tensor([[-4.0, -5]])}, requests=["a"], positions=[2], tokens=[7])


def test_rows_come_back_by_request_and_position(tmp_path: Path) -> None:
    write(tmp_path)
    captures = Captures.open(tmp_path)
    assert (captures.arm, captures.complete, len(captures)) == ("target", True, 3)
    assert captures.requests == {"a": [5, 6, 7], "b": [8, 9]}
    assert captures.notes == {"dtype": "bfloat16"}
    assert list(captures.sites) == [LAYER, HEAD]
    positions, rows = captures.get("a", LAYER)
    assert positions.tolist() == [0, 1, 2, 3]
    assert rows.tolist() == [[0, 1], [2, 3], [-4, -5], [20, 21]], "the row computed last counts"
    positions, rows = captures.get("b", HEAD + ".output")
    assert positions.tolist() == [1, 2] and rows.tolist() == [[4], [30]]
    assert captures.positions("a", HEAD).tolist() == [2, 3]
    assert [part.tolist() for part in captures.tokens("b")] == [[0, 1, 2], [8, 9, 1]]
    assert captures.find([8, 9]) == ["b"] and captures.find([8]) == []
    key = TensorKey("target", "b", 2, LAYER, "output")
    assert captures.row(key).tolist() == [30, 31]
    keys = list(captures.keys())
    assert key in keys and len(keys) == len(set(keys)) == 4 + 2 + 3 + 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool])
def test_every_dtype_and_shape_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    rows = torch.arange(24).view(4, 3, 2).to(dtype)
    with CaptureWriter(tmp_path, arm="x") as writer:
        writer.request("r", [1])
        writer.add({"s": rows[:, :2]}, requests=["r"] * 4, positions=torch.arange(4))  # not contiguous
    _, found = Captures.open(tmp_path).get("r", "s")
    assert found.dtype == dtype and torch.equal(found, rows[:, :2])


def test_what_was_interrupted_is_whole_and_can_be_continued(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path, arm="target")
    writer.request("a", [1])
    writer.add({"s": torch.ones(1, 2)}, requests=["a"], positions=[0])
    (tmp_path / ".000001.safetensors.99.part").write_bytes(b"half a step")
    found = Captures.open(tmp_path)
    assert not found.complete and found.requests == {"a": [1]} and found.get("a", "s")[0].tolist() == [0]
    with CaptureWriter(tmp_path, arm="target") as again:
        again.request("a", [1])
        again.request("b", [2])
        again.add({"s": torch.zeros(2, 2)}, requests=["a", "b"], positions=[1, 0])
    found = Captures.open(tmp_path)
    assert found.complete and found.get("a", "s")[0].tolist() == [0, 1] and found.get("b", "s")[1].tolist() == [[0, 0]]


def test_mistakes_are_named(tmp_path: Path) -> None:
    write(tmp_path)
    captures = Captures.open(tmp_path)
    with pytest.raises(BadInput, match=r"nearest is 'model\.layers\.0'"):
        captures.get("a", "model.layer.0")
    with pytest.raises(BadInput, match="no request 'c'"):
        captures.get("c", LAYER)
    with pytest.raises(BadInput, match=r"the arm 'target'"):
        CaptureWriter(tmp_path, arm="hf_fp32")
    with pytest.raises(BadInput, match="another prompt"):
        CaptureWriter(tmp_path, arm="target").request("a", [1])
    with pytest.raises(BadInput, match="no such file"):
        Captures.open(tmp_path / "nothing")
    with (
        pytest.raises(BadInput, match="3 rows for a step of 2"),
        CaptureWriter(tmp_path / "new", arm="x") as writer,
    ):
        writer.request("r", [1])
        writer.add({"s": torch.ones(3, 1)}, requests=["r", "r"], positions=[0, 1])
