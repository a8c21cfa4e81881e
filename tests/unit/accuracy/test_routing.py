"""A token whose experts rounding may change is left out of a comparison, by whatever rule they are chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from pilotage.accuracy.arms.routing import Routing

EXPERTS = 8


@pytest.fixture
def by_group() -> Any:
    config = DeepseekV3Config(
        hidden_size=EXPERTS,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=1,
        num_local_experts=8,
    )
    router = DeepseekV3TopkRouter(config)
    torch.nn.init.eye_(router.weight)  # an input is its own logits
    return router


def routing(router: Any, rows: list[list[float]]) -> Routing:
    x = torch.tensor(rows)
    with torch.inference_mode():
        return Routing.seen(router, x, router(x))


def test_groups_that_are_wanted_alike_are_in_doubt_though_the_logits_are_far_apart(by_group: Any) -> None:
    clear = [3.0, 2.0, 0.5, 0.1, 1.0, 0.7, 0.2, 0.3]
    # sigmoid(3) + sigmoid(-1) against sigmoid(1) + sigmoid(x): equal, with the best three logits 1 and more apart.
    equal = float(torch.logit(torch.sigmoid(torch.tensor([3.0, -1.0])).sum() - torch.sigmoid(torch.tensor(1.0))))
    tied = [3.0, -1.0, 1.0, equal, -2.0, -2.5, -3.0, -2.2]
    found = routing(by_group, [clear, tied, clear])
    with torch.inference_mode():
        sure = found.beyond_doubt(found.logits + 1e-4 * torch.tensor([1.0, -1.0] * 4))
    assert sure.tolist() == [True, False, True]


def test_a_correction_that_makes_experts_alike_leaves_them_in_doubt(by_group: Any) -> None:
    row = [3.0, 2.0, 0.5, 0.1, 1.0, 0.7, 0.2, 0.3]
    by_group.e_score_correction_bias[4:6] = torch.sigmoid(torch.tensor(row[:2])) - torch.sigmoid(torch.tensor(row[4:6]))
    found = routing(by_group, [row])
    with torch.inference_mode():
        assert found.beyond_doubt(found.logits + 1e-4).tolist() == [False]


@pytest.mark.parametrize(("apart", "sure"), [(1e-5, False), (2e-4, False), (2e-3, True)])
def test_experts_of_a_plain_router(apart: float, sure: bool) -> None:
    """The noise is 1e-4: four times that is about where two experts are told apart."""
    router = Qwen3MoeTopKRouter(Qwen3MoeConfig(hidden_size=EXPERTS, num_experts=EXPERTS, num_experts_per_tok=2))
    torch.nn.init.eye_(router.weight)
    found = routing(router, [[3.0, 2.0, 2.0 - apart, 0.1, 1.0, 0.7, 0.2, 0.3]])
    assert found.experts is not None
    with torch.inference_mode():
        assert found.beyond_doubt(found.logits + 1e-4 * torch.tensor([1.0, -1.0] * 4)).tolist() == [sure]
