"""A plan names every parameter of a layer, or the model is refused by the name of what no rule knows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from pilotage.core.errors import ConfigError, Unsupported
from pilotage.training import plans
from pilotage.training.mesh import Parallel, make_mesh
from pilotage.training.pipeline import cut_stage, layers_of_stage


def face(path: Path) -> Any:
    from pilotage.models import registry

    names = json.loads((path / "config.json").read_text())["architectures"]
    return registry.training_class(names).from_pretrained(path, dtype=torch.float32)


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_every_module_with_a_parameter_has_a_rule(name: str, tiny: Callable[..., Path]) -> None:
    model = face(tiny(name))
    plan = plans.tensor_parallel_plan(model, 2, sequence_parallel=True)
    owners = {path.rpartition(".")[0] for path, _ in model.named_parameters()}
    assert owners | {"lm_head"} <= set(plan)
    assert isinstance(plan["model.layers.1.self_attn.o_proj"], RowwiseParallel)
    assert isinstance(plan["model.layers.1.mlp.up_proj"], ColwiseParallel)
    if name == "gemma3":
        norm = plan["model.layers.1.self_attn.q_norm"]
        assert isinstance(norm, SequenceParallel) and norm.sequence_sharding == (Shard(2),), "over heads, not over rows"


def test_without_sequence_parallelism_only_norms_over_heads_need_a_rule(tiny: Callable[..., Path]) -> None:
    plan = plans.tensor_parallel_plan(face(tiny("gemma3")), 2)
    assert {name.rpartition(".")[2] for name in plan if "norm" in name} == {"q_norm", "k_norm"}


@pytest.mark.parametrize(
    ("name", "tp", "said"),
    [
        ("llama3", 4, r"num_attention_heads=6 does not divide over tp=4"),
        ("mixtral", 2, r"mlp.experts: experts are dealt out, not divided; set parallel.ep"),
        ("deepseek_v3", 2, r"self_attn.*no rule of the plan"),
        ("gpt_oss", 2, r"self_attn.*no rule of the plan"),
        ("gemma4", 2, r"train this model with dp alone"),
    ],
)
def test_what_no_rule_knows_is_named(name: str, tp: int, said: str, tiny: Callable[..., Path]) -> None:
    with pytest.raises(Unsupported, match=said):
        plans.tensor_parallel_plan(face(tiny(name)), tp)


def test_stages_have_all_layers_once_and_the_parts_between_them_nowhere(tiny: Callable[..., Path]) -> None:
    path = tiny("llama3", num_hidden_layers=3)
    names = [name for name, _ in face(path).named_parameters()]
    held = []
    for stage in range(2):
        cut = cut_stage(face(path), stage, 2)
        held += [name for name, _ in cut.inner.named_parameters()]
        assert ("lm_head.weight" in held) is (stage == 1)
    assert sorted(held) == sorted(names)
    assert [list(layers_of_stage(7, stage, 3)) for stage in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    with pytest.raises(ConfigError, match="3 layers do not fill pp=4"):
        layers_of_stage(3, 0, 4)


def test_a_model_with_more_than_layers_is_not_cut(tiny: Callable[..., Path]) -> None:
    with pytest.raises(Unsupported, match=r"parallel.pp: model.*dp alone"):
        cut_stage(face(tiny("gemma4")), 0, 2)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [({"tp": 2}, "tp=2 does not fit 1 process"), ({"ep": 3}, "ep=3 is neither 1 nor tp=1"), ({"dp": 2}, "dp=2")],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_mesh(Parallel(**sizes))
