"""The recorder's files are what safetensors reads, whole or absent."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from pilotage.serving.batch import Forward
from pilotage.serving.record import Recorder


def test_rows_and_addresses(tmp_path: Path) -> None:
    head = torch.randn(6, 11)
    recorder = Recorder(tmp_path / "rows", write=True)
    prefill = Forward(kind="prefill", rows=(0, 2), num_tokens=(70, 3))
    hidden = torch.randn(80, 6)
    sampled = torch.randn(4, 11)  # deliberately other values than the head's: what the sampler saw is what counts
    recorder.add(prefill, ["a", "b"], [0, 5], sampled, hidden, lambda rows: rows @ head)
    decode = Forward(kind="decode", rows=(0, 2), num_tokens=(1, 1))
    more = torch.randn(2, 11, dtype=torch.bfloat16)
    recorder.add(decode, ["a", "b"], [70, 8], more, hidden, lambda rows: rows @ head)
    files = recorder.stop()

    assert [Path(file).name for file in files] == ["000000.safetensors", "000001.safetensors"]
    assert json.loads((tmp_path / "rows" / "requests.json").read_text()) == ["a", "b"]
    first, second = (load_file(file) for file in files)
    assert first["position"].tolist() == [*range(70), 5, 6, 7]
    assert first["request"].tolist() == [0] * 70 + [1] * 3
    expected = hidden[:73] @ head
    expected[69], expected[72] = sampled[0], sampled[1]
    torch.testing.assert_close(first["logits"], expected)
    assert second["position"].tolist() == [70, 8]
    assert torch.equal(second["logits"], more.float())


def test_a_rank_that_does_not_write_still_computes(tmp_path: Path) -> None:
    calls: list[int] = []

    def head(rows: torch.Tensor) -> torch.Tensor:
        calls.append(rows.shape[0])
        return rows

    recorder = Recorder(tmp_path / "rows", write=False)
    forward = Forward(kind="prefill", rows=(0,), num_tokens=(70,))
    recorder.add(forward, ["a"], [0], torch.zeros(1, 6), torch.zeros(80, 6), head)
    assert sum(calls) == 69  # the sampled row's logits are there already
    assert recorder.stop() == []
    assert not (tmp_path / "rows").exists()


def test_chosen_positions_only(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "rows", write=True, positions=[2, 70, 71])
    hidden, sampled = torch.randn(80, 6), torch.randn(1, 6)
    forward = Forward(kind="prefill", rows=(0,), num_tokens=(71,))
    recorder.add(forward, ["a"], [0], sampled, hidden, lambda rows: rows)
    decode = Forward(kind="decode", rows=(0,), num_tokens=(1,))
    recorder.add(decode, ["a"], [72], sampled, hidden, lambda rows: rows)
    (file,) = recorder.stop()
    stored = load_file(file)
    assert stored["position"].tolist() == [2, 70]
    assert torch.equal(stored["logits"], torch.stack([hidden[2], sampled[0]]))
