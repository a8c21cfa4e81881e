"""Dispatch: who is chosen, why, what is recorded, and that it leaves nothing in a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import pilotage.functional as NF
from pilotage.core.errors import ConfigError, Unsupported
from pilotage.functional import registry

NAME = "doubled_for_test"


@pytest.fixture
def doubled() -> Iterator[Callable[..., Tensor]]:
    """An operator of one's own, removed after the test."""

    @NF.operator
    def doubled_for_test(x: Tensor, *, offset: float = 0.0) -> Tensor:
        return x * 2 + offset

    yield doubled_for_test
    for table in (registry._OPERATORS, registry._SIGNATURES):
        del table[NAME]
    registry._decide.cache_clear()
    NF.reset_receipt()


def test_the_highest_priority_that_accepts_runs(doubled: Callable[..., Tensor]) -> None:
    NF.register(NAME, "low", lambda x, offset=0.0: x * 0 + 1, domain=lambda call: None, priority=1)
    NF.register(
        NAME,
        "high",
        lambda x, offset=0.0: x * 0 + 9,
        domain=lambda call: None if call["x"].shape[0] > 2 and call["offset"] == 0 else "too few rows",
        priority=5,
    )
    assert doubled(torch.ones(3))[0] == 9
    assert doubled(torch.ones(2))[0] == 1
    assert doubled(torch.ones(3), offset=1.0)[0] == 1
    rows = {row["implementation"]: row for row in NF.receipt()[NAME]}
    assert rows["high"]["selections"] == 1
    assert rows["low"]["selections"] == 2
    assert rows["low"]["refused"] == {"high": "too few rows"}


def test_explain_judges_a_call_without_running_it(doubled: Callable[..., Tensor]) -> None:
    NF.register(NAME, "bf16", lambda x: x, domain=lambda c: c.refuse_unless(dtypes=(torch.bfloat16,)), priority=3)
    assert NF.explain(NAME) == {NAME: ["bf16", "torch"]}
    answer = NF.explain(NAME, torch.ones(2))
    assert (answer["implementation"], answer["refused"]) == ("torch", {"bf16": "x is torch.float32"})
    assert NF.explain(NAME, torch.ones(2, dtype=torch.bfloat16))["implementation"] == "bf16"
    assert NAME not in NF.receipt()


def test_a_gradient_is_a_reason_to_refuse(doubled: Callable[..., Tensor]) -> None:
    NF.register(NAME, "opaque", lambda x: x.detach(), domain=lambda c: c.refuse_unless(device="cpu"), priority=3)
    x = torch.ones(2, requires_grad=True)
    doubled(x).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))
    with torch.no_grad():
        assert doubled(x)[0] == 1


def test_forced_fails_instead_of_falling_back(doubled: Callable[..., Tensor]) -> None:
    NF.register(NAME, "never", lambda x: x, domain=lambda c: "not here", priority=3)
    with NF.forced({NAME: "never"}), pytest.raises(Unsupported, match="'never' was asked for, and not here"):
        doubled(torch.ones(2))
    assert doubled(torch.ones(2))[0] == 2
    with pytest.raises(ConfigError, match="no implementation 'absent'"), NF.forced({NAME: "absent"}):
        pass


def test_the_environment_switches_everything_but_definitions_off(
    doubled: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    NF.register(NAME, "fast", lambda x: x * 0, domain=lambda c: None, priority=3)
    monkeypatch.setenv("VLLM_NEURON_DISABLE_KERNELS", "1")
    assert doubled(torch.ones(2))[0] == 2
    assert "switched off" in NF.receipt()[NAME][0]["refused"]["fast"]


def test_unknown_operators_and_taken_names_are_refused(doubled: Callable[..., Tensor]) -> None:
    with pytest.raises(ConfigError, match=r"no operator named 'rms_nrom'.*rms_norm"):
        NF.register("rms_nrom", "x", lambda: None, domain=lambda c: None, priority=1)
    with pytest.raises(ConfigError, match="already registered"):
        NF.register(NAME, "torch", lambda x: x, domain=lambda c: None, priority=1)


def test_a_graph_holds_the_choice_and_nothing_of_the_choosing(doubled: Callable[..., Tensor]) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    NF.register(NAME, "ninth", lambda x, offset=0.0: x + 9, domain=lambda c: None, priority=3)
    compiled = torch.compile(doubled, backend=backend, fullgraph=True, dynamic=False)
    NF.reset_receipt()
    for _ in range(3):
        assert compiled(torch.ones(2))[0] == 10
    assert NF.receipt()[NAME][0]["selections"] == 1  # while tracing, not in each call
    assert [node.op for node in graphs[0].graph.nodes] == ["placeholder", "call_function", "output"]
