"""Expert parallelism and replicas of components in real processes: the logits of one rank, with weights divided."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run

from pilotage.core.errors import ConfigError
from pilotage.models.common.paging import PagedSession
from pilotage.parallel import ParallelLayout, set_parallel_layout

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
from twins import hf_logits, hf_model, our_model, paged_logits, prompts

pytestmark = pytest.mark.distributed

STREAMS = prompts((41, 6, 22), vocab_size=319)


def outcome(rank: int, cases: list[tuple[Path, dict[str, int]]]) -> list[dict[str, Any]]:
    results = []
    for path, sizes in cases:
        set_parallel_layout(ParallelLayout(**sizes))
        model = our_model(path)
        session = PagedSession(model=model, num_requests=4, max_tokens=48)
        results.append(
            {
                "logits": paged_logits(session, STREAMS, chunk=17, bucket=48),
                "shapes": {name: tuple(p.shape) for name, p in model.named_parameters()},
            }
        )
    set_parallel_layout(None)
    return results


def check(ranks: int, cases: list[tuple[Path, dict[str, int]]], tmp_path: Path) -> list[list[dict[str, Any]]]:
    found = run(outcome, ranks, tmp_path, cases)
    for results in found:
        for (path, sizes), result in zip(cases, results, strict=True):
            expected = hf_logits(hf_model(path), STREAMS)
            for one, reference in zip(result["logits"], expected, strict=True):
                torch.testing.assert_close(
                    one, reference, rtol=0, atol=6e-5, msg=lambda text, at=sizes: f"{at}: {text}"
                )
    return found


def test_two_ranks(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Experts dealt out; replicas, each rank with everything and half of the rows; a vocabulary that is filled up."""
    replicas = {f"{name}_dp_size": 2 for name in ("attention", "mlp", "embedding", "lm_head")}
    odd = tiny("qwen2", vocab_size=319)
    cases: list[tuple[Path, dict[str, int]]] = [
        (tiny("qwen3_moe"), {"ep_degree": 2}),
        (tiny("deepseek_v3"), {"ep_degree": 2}),
        (tiny("gpt_oss", num_local_experts=8), {"ep_degree": 2}),
        (odd, replicas),
        (odd, {}),
        (tiny("gemma3", vocab_size=319), {"lm_head_dp_size": 2}),
    ]
    for results in check(2, cases, tmp_path):
        shapes = [result["shapes"] for result in results]
        assert shapes[0]["model.layers.1.mlp.experts.gate_up_proj"] == (4, 88, 60)
        assert shapes[1]["model.layers.1.mlp.experts.down_proj"] == (4, 60, 44)
        assert shapes[2]["model.layers.1.mlp.experts.gate_up_proj_bias"] == (4, 184)
        assert shapes[3]["model.layers.0.self_attn.k_proj.weight"] == (40, 60)
        assert shapes[3]["model.embed_tokens.weight"] == (319, 60)
        assert shapes[4]["model.embed_tokens.weight"] == (160, 60)
        assert shapes[5]["lm_head.weight"] == (319, 60)
        assert shapes[5]["model.embed_tokens.weight"] == (160, 60)


@pytest.mark.slow
def test_four_ranks_in_every_arrangement(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Experts over two groups of two; replicas of each component, alone and all at once, also of one rank each."""
    moe, gpt, latent = (
        tiny("qwen3_moe"),
        tiny("gpt_oss", num_local_experts=8, num_attention_heads=8),
        tiny("deepseek_v3", num_attention_heads=8, num_key_value_heads=8),
    )
    wide = tiny("qwen3", num_attention_heads=8)
    tied = tiny("qwen2", num_attention_heads=8)
    everything = {f"{name}_dp_size": 2 for name in ("attention", "mlp", "embedding", "lm_head")}
    alone = {name: 4 for name in everything}
    cases: list[tuple[Path, dict[str, int]]] = [
        (moe, {"attention_dp_size": 2, "ep_degree": 2}),
        (moe, {"attention_dp_size": 2, "ep_degree": 4}),
        (moe, {"attention_dp_size": 2, "mlp_dp_size": 2, "ep_degree": 2}),
        (gpt, {"ep_degree": 2, **everything}),
        (latent, {"ep_degree": 4}),
        (latent, {"attention_dp_size": 4, "ep_degree": 2}),
        *((wide, {name: 2}) for name in everything),
        (wide, everything),
        (wide, alone),
        (tied, {"embedding_dp_size": 2}),
        (tied, everything),
    ]
    found = check(4, cases, tmp_path)
    for results in found:
        shapes = [result["shapes"] for result in results]
        # Two groups of two ranks: half of the experts, each divided over two.
        assert shapes[0]["model.layers.1.mlp.experts.gate_up_proj"] == (4, 44, 60)
        assert shapes[1]["model.layers.1.mlp.experts.gate_up_proj"] == (2, 88, 60)
        assert shapes[2]["model.layers.1.mlp.experts.gate_up_proj"] == (4, 88, 60)


def test_layouts_that_do_not_fit_are_refused_with_the_sizes_that_do() -> None:
    ParallelLayout(attention_dp_size=2, mlp_dp_size=2, ep_degree=2).check(4)
    with pytest.raises(ConfigError, match=r"attention_dp_size=3 does not divide tensor_parallel_size=4.*use 1, 2 or 4"):
        ParallelLayout(attention_dp_size=3).check(4)
    with pytest.raises(ConfigError, match=r"ep_degree=4 does not divide the 2 ranks that tensor_parallel_size=4 and"):
        ParallelLayout(mlp_dp_size=2, ep_degree=4).check(4)
