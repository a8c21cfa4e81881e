"""What training computes is what the real engine sampled with; bit by bit where both go row by row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pilotage.accuracy import one_row
from pilotage.accuracy.consistency import consistency
from pilotage.core.nouns import Status

# Keys of these in bf16, in Gemma 3's last layer, depend on whether the product gives queries and values as well.
ROUNDS_BY_WIDTH = [2, 118, 262, 107, 36, 260, 105, 317, 112, 115, 115, 104, 119, 318, 115, 290, 36]


def face(path: Path, dtype: torch.dtype) -> torch.nn.Module:
    from pilotage.models import registry

    names = json.loads((path / "config.json").read_text())["architectures"]
    return registry.training_class(names).from_pretrained(path, dtype=dtype)


@pytest.mark.slow
@pytest.mark.engine
def test_exact_is_exact_and_the_plain_way_is_not(tiny: Callable[..., Path]) -> None:
    path = str(tiny("gemma3", num_hidden_layers=3))
    exact = consistency(path, arms=["bfloat16"], exact=True, new_tokens=12)
    assert exact.status is Status.PASS
    for row in exact.arms[0].phases.values():
        assert row["equal"] == row["n"] > 0
        assert row["max_ratio"] == 1.0
    # The same engine settings against a forward over whole sequences: the rounding that `exact` removes is there.
    usual = consistency(path, arms=["bfloat16"], eager=True, new_tokens=12)
    assert usual.status is Status.PASS
    assert all(row["equal"] < row["n"] for row in usual.arms[0].phases.values())
    assert exact.arms[0].cost["train"] > usual.arms[0].cost["train"], "exactness is paid for"


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("name", ["llama3", "gemma3", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("exact", [False, True])
def test_both_dtypes_and_ways(name: str, exact: bool, tiny: Callable[..., Path]) -> None:
    found = consistency(str(tiny(name)), exact=exact)
    assert found.status is Status.PASS, [
        v.claim for arm in found.arms for v in arm.verdicts if v.status.value != "pass"
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_rows_of_training_are_bit_by_bit_those_of_the_served_class(
    name: str, dtype: torch.dtype, tiny: Callable[..., Path]
) -> None:
    """The class that vLLM is given, its projections packed, over scattered pages, against ours with gradients."""
    from pilotage.models.common.paging import PagedSession

    path = tiny(name)
    tokens = ROUNDS_BY_WIDTH + torch.randint(4, 300, (23,), generator=torch.Generator().manual_seed(1)).tolist()
    with one_row.definitions():
        session = PagedSession(model=served(path, dtype), num_requests=1, max_tokens=96, block_size=32)
        expected = torch.cat([session.step({0: [token]}, decode=True)[0] for token in tokens])
        trained = one_row.one_row_logits(face(path, dtype), tokens, max_tokens=96, block_size=32)
    assert trained.requires_grad
    assert torch.equal(trained, expected)
    whole = face(path, dtype)(input_ids=torch.tensor([tokens])).logits[0]
    assert not torch.equal(whole, expected), "a forward over the sequence rounds otherwise"


def served(path: Path, dtype: torch.dtype) -> Any:
    from pilotage.arch.source import load_config
    from pilotage.models import registry

    config = load_config(str(path))
    torch.set_default_dtype(dtype)
    try:
        model = registry.find(config.architectures).load().from_configs(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.load_weights(path)
    return model


def test_the_row_by_row_way_has_the_gradients_of_the_usual_one(tiny: Callable[..., Path]) -> None:
    model = face(tiny("gemma3", num_hidden_layers=3), torch.float32)
    tokens = torch.randint(4, 300, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    gradients = []
    for row_by_row in (True, False):
        model.zero_grad()
        if row_by_row:
            logits = one_row.one_row_logits(model, tokens, max_tokens=64, block_size=16)
        else:
            logits = model(input_ids=torch.tensor([tokens])).logits[0]
        one_row.token_logprobs(logits, tokens).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, value in gradients[1].items():
        assert float((gradients[0][name] - value).norm()) < 2e-5 * float(value.norm()), name
