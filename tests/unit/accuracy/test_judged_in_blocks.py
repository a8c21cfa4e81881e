"""Gradients that are too large to be judged in one go are judged block by block, and each block counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pilotage.accuracy import training
from pilotage.core.nouns import Status, Verdict, worst


def tensors(dtype: torch.dtype, rows: int = 203) -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    truth = torch.randn(rows, 24, generator=draws)
    if dtype is torch.float32:
        return truth + 1e-8 * torch.randn(truth.shape, generator=draws), truth, truth.clone()
    ours, theirs = (
        (truth + 2**-9 * torch.randn(truth.shape, generator=draws) * truth.abs()).to(dtype).float() for _ in "ab"
    )
    return ours, truth, theirs


def judged(arm: str, *values: Tensor) -> list[Verdict]:
    return training._judge(arm, "gradient", *values)


@pytest.mark.parametrize("arm", ["float32", "bfloat16"])
def test_blocks_pass_and_name_their_rows(arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = tensors(getattr(torch, arm))
    whole = judged(arm, *values)
    monkeypatch.setattr(training, "JUDGED_AT_ONCE", 24 * 40)
    parts = judged(arm, *values)
    assert worst([v.status for v in whole]) is worst([v.status for v in parts]) is Status.PASS
    starts = {int(v.claim.split("rows from ")[1].split(":")[0]) for v in parts}
    assert starts == {0, 40, 80, 120, 160, 200}


@pytest.mark.parametrize("arm", ["float32", "bfloat16"])
@pytest.mark.parametrize("row", [0, 39, 121, 202])
def test_one_wrong_block_fails(arm: str, row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, truth, theirs = tensors(getattr(torch, arm))
    ours[row] = 0
    monkeypatch.setattr(training, "JUDGED_AT_ONCE", 24 * 40)
    parts = judged(arm, ours, truth, theirs)
    wrong = {v.claim.split("rows from ")[1].split(":")[0] for v in parts if v.status is Status.FAIL}
    assert wrong == {str(row // 40 * 40)}
