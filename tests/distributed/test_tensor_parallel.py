"""Tensor parallelism in real processes: collectives in compiled graphs, and models whose logits equal one rank's.

One pair of processes answers everything that is asked of two ranks: starting them takes longest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run

from pilotage.core.errors import Unsupported
from pilotage.models.common.paging import PagedSession
from pilotage.parallel import get_tp_group, heads_per_rank

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
from twins import NAMES, hf_logits, hf_model, our_model, paged_logits, prompts

pytestmark = pytest.mark.distributed

STREAMS = prompts((41, 6, 22))
SAME = [name for name in NAMES if name not in ("mistral", "mixtral")]  # layers of the others


def everything(rank: int, paths: dict[str, Path]) -> dict[str, Any]:
    """What a rank of two finds."""
    names = [*SAME, "one key head"]
    return {
        "collectives": collectives(),
        "counts": count_collectives(paths["llama3"]),
        "eager": dict(zip(names, logits_of_rank(rank, [paths[name] for name in names], False), strict=True)),
        "compiled": logits_of_rank(rank, [paths["compiled"]], True)[0],
    }


@pytest.fixture(scope="module")
def paths(tiny: Callable[..., Path]) -> dict[str, Path]:
    compiled = {"num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
    return {
        **{name: tiny(name) for name in SAME},
        "one key head": tiny("qwen2", num_key_value_heads=1),
        "compiled": tiny("gemma3", **compiled),
    }


@pytest.fixture(scope="module")
def two(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(everything, 2, tmp_path_factory.mktemp("ranks"), paths)


def collectives() -> dict[str, tuple[torch.Tensor, ...]]:
    group = get_tp_group()

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2  # the collective must not write into what is used again
        reduced = group.all_reduce(y)
        return reduced, y, group.all_gather(y, dim=-1), group.all_gather(y, dim=0), group.reduce_scatter(y, dim=0)

    x = torch.arange(8.0).reshape(4, 2) + 100 * group.rank
    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    compiled(x)
    return {"eager": step(x), "compiled": compiled(x)}


def test_collectives_are_right_eager_and_compiled(two: list[dict[str, Any]]) -> None:
    base = torch.arange(8.0).reshape(4, 2)
    doubled = [base * 2, (base + 100) * 2]
    total = doubled[0] + doubled[1]
    for rank, results in enumerate(found["collectives"] for found in two):
        expected = (
            total,
            doubled[rank],
            torch.cat(doubled, dim=-1),
            torch.cat(doubled, dim=0),
            total[2 * rank : 2 * rank + 2],
        )
        for how, got in results.items():
            for one, reference in zip(got, expected, strict=True):
                assert torch.equal(one, reference), how


def logits_of_rank(rank: int, paths: list[Path], compiled: bool) -> list[dict[str, Any]]:
    results = []
    for path in paths:
        model = our_model(path)
        call = torch.compile(model, fullgraph=True, dynamic=False) if compiled else None
        session = PagedSession(model=model, num_requests=4, max_tokens=48, call=call)
        results.append(
            {
                "logits": paged_logits(session, STREAMS, chunk=17, bucket=48),
                "parameters": sum(p.numel() for p in model.parameters()),
                "kv_heads": model.get_kv_spec().layers[0].num_kv_heads,
            }
        )
    return results


def assert_logits(got: list[torch.Tensor], path: Path) -> None:
    for one, reference in zip(got, hf_logits(hf_model(path), STREAMS), strict=True):
        torch.testing.assert_close(one, reference, rtol=0, atol=6e-5)


def count_collectives(path: Path) -> dict[str, dict[str, int]]:
    """Count the collectives in the prefill and in the decode graph."""
    model = our_model(path)
    counts: list[dict[str, int]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        names = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
        targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        counts.append({name: sum(f".{name}." in f".{t}." for t in targets) for name in names})
        return graph

    call = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    session = PagedSession(model=model, num_requests=4, max_tokens=48, call=call)
    session.step({0: [1, 2, 3]}, bucket=16)
    session.step({0: [4]}, bucket=4, decode=True)
    return {"prefill": counts[0], "decode": counts[1]}


def test_prefill_divides_rows_and_decode_reduces(two: list[dict[str, Any]]) -> None:
    """Twice a layer, once for the embedding or the last hidden states, and one gather of the logits."""
    for counts in (found["counts"] for found in two):
        layers = 4
        assert counts["prefill"] == {
            "all_gather_into_tensor": 2 * layers + 2,
            "reduce_scatter_tensor": 2 * layers + 1,
            "all_reduce": 0,
        }
        assert counts["decode"] == {
            "all_gather_into_tensor": 1,
            "reduce_scatter_tensor": 0,
            "all_reduce": 2 * layers + 1,
        }


@pytest.mark.parametrize("name", [*SAME, "one key head"])
def test_two_ranks_give_the_logits_of_one(name: str, two: list[dict[str, Any]], paths: dict[str, Path]) -> None:
    """Also of more ranks than key heads, each of which then holds the one."""
    for result in (found["eager"][name] for found in two):
        assert result["kv_heads"] == 1
        assert_logits(result["logits"], paths[name])
        assert result["parameters"] < 0.6 * sum(p.numel() for p in our_model(paths[name]).parameters())


def test_compiled_ranks_give_the_logits_of_one(two: list[dict[str, Any]], paths: dict[str, Path]) -> None:
    for found in two:
        assert_logits(found["compiled"]["logits"], paths["compiled"])


@pytest.mark.slow
def test_four_ranks_of_two_key_value_heads(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny("qwen2", num_attention_heads=8)
    for (result,) in run(logits_of_rank, 4, tmp_path, [path], False):
        assert result["kv_heads"] == 1
        assert_logits(result["logits"], path)


def test_a_group_that_does_not_divide_is_refused_with_the_sizes_that_do() -> None:
    assert heads_per_rank(8, 2, 4) == (2, 1)
    with pytest.raises(Unsupported, match=r"6 query and 2 key/value heads.*tensor_parallel_size=3.*use 1, 2, 6"):
        heads_per_rank(6, 2, 3)
