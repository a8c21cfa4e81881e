"""Domains as data: layouts bind letters, limits refuse with the number, kinds of refusal make fallbacks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import pilotage.functional as NF
from pilotage.core.errors import BadInput, ConfigError
from pilotage.functional import layout, registry
from pilotage.functional.call import TensorSpec
from pilotage.functional.domain import ELSEWHERE, MISSING, NO_GRADIENT, NOT_WORTH, OUTSIDE, Domain, Emulator, Limit
from pilotage.functional.registry import call_of

NAME = "tilted_for_test"


@pytest.fixture
def tilted() -> Iterator[str]:
    @NF.operator
    def tilted_for_test(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, slope: float = 1.0) -> Tensor:
        return x @ weight.t() * slope

    NF.describe(NAME, {"x": "... D", "weight": "2*F D", "bias": "2*F"}, slope=(1.0, 2.0))
    yield NAME
    for table in (registry._OPERATORS, registry._SIGNATURES, registry._DESCRIBED):
        del table[NAME]
    registry._decide.cache_clear()
    NF.reset_receipt()


def test_a_target_that_is_none_is_refused_when_it_is_stated() -> None:
    with pytest.raises(ConfigError, match="no target named 'trn2'"):
        Domain(targets=("trn2",))


def spec(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", grad: bool = False) -> TensorSpec:
    return TensorSpec(dtype, shape, device, grad)


def test_letters_are_bound_and_conflicts_said() -> None:
    tensors = {"x": "... D", "weight": "2*F D", "starts": "B+1", "flat": "N*H"}
    dims, conflicts = layout.bind(tensors, {"x": (2, 3, 8), "weight": (10, 8), "starts": (5,), "flat": (12,)})
    assert (dims, conflicts) == ({"T": 6, "D": 8, "F": 5, "B": 4}, [])
    assert layout.bind(tensors, {"x": (3, 8), "weight": (10, 9)})[1] == ["weight: D is 8 elsewhere, and 9 here"]
    assert layout.bind(tensors, {"weight": (11, 8)})[1] == ["weight: no F makes 2*F = 11"]
    assert layout.bind(tensors, {"weight": (11,)})[1] == ["weight has 1 dimensions, not 2 (2*F D)"]


@given(st.dictionaries(st.sampled_from("TDFN"), st.integers(1, 50), min_size=4))
def test_a_shape_made_of_letters_binds_to_them(dims: dict[str, int]) -> None:
    tensors = {"a": "... D", "b": "2*F D", "c": "N*(F+D) 3"}
    shapes = {name: layout.shape(words, dims) for name, words in tensors.items()}
    assert layout.bind(tensors, shapes) == (dims, [])


def test_expressions_are_arithmetic_and_nothing_else() -> None:
    assert layout.evaluate("2*T*K - E", {"T": 3, "K": 2, "E": 12}) == 0
    assert layout.evaluate("N//K", {"N": 3}) is None
    assert layout.evaluate("N//K", {"N": 3, "K": 0}) is None
    for wrong in ("open('x')", "T if D else F", "T +"):
        with pytest.raises(BadInput, match="no expression of dimensions"):
            layout.evaluate(wrong, {"T": 1, "D": 1, "F": 1})


def test_each_kind_of_refusal(tilted: str) -> None:
    domain = Domain(
        targets=("cuda",),
        dtypes=(torch.float32,),
        one_dtype=("x", "weight"),
        limits={"D": Limit(at_most=8, multiple_of=4)},
        worth={"T": Limit(at_most=2, why="torch is as fast")},
        options={"slope": (1.0,), "bias": (None,)},
        other=lambda call: "F is thirteen" if call.dims["F"] == 13 else None,
        machine=lambda: "no compiler",
    )

    def judge(x: TensorSpec, weight: TensorSpec, **options: object) -> tuple[str, str] | None:
        refusal = domain.judge(call_of(tilted, x, weight, **options))
        return None if refusal is None else tuple(refusal)

    def on(*shape: int, **facts: object) -> TensorSpec:
        return spec(*shape, device="cuda", **facts)  # type: ignore[arg-type]

    assert judge(spec(2, 8), spec(4, 8)) == (ELSEWHERE, "x is on cpu, not cuda")
    assert judge(on(2, 8, dtype=torch.bfloat16), on(4, 8)) == (OUTSIDE, "x is torch.bfloat16")
    assert judge(on(2, 6), on(4, 6)) == (OUTSIDE, "D is 6, not <= 8, multiple of 4")
    assert judge(on(2, 12), on(4, 12)) == (OUTSIDE, "D is 12, not <= 8, multiple of 4")
    assert judge(on(2, 8), on(4, 8), slope=2.0) == (OUTSIDE, "slope is 2.0, not 1.0")
    assert judge(on(2, 8), on(4, 8), bias=on(4)) == (OUTSIDE, "bias is a tensor, not None")
    assert judge(on(2, 8), on(26, 8)) == (OUTSIDE, "F is thirteen")
    assert judge(on(2, 8, grad=True), on(4, 8)) == (NO_GRADIENT, "x needs a gradient")
    assert judge(on(3, 8), on(4, 8)) == (NOT_WORTH, "T is 3, not <= 2: torch is as fast")
    assert judge(on(2, 8), on(4, 8)) == (MISSING, "no compiler")
    assert domain.judge(call_of(tilted, on(3, 8), on(4, 8)), here=False, worth=False) is None


def test_an_emulator_runs_it_on_the_cpu_in_the_dtypes_it_knows(tilted: str) -> None:
    on = False
    emulator = Emulator(name="the interpreter", how="X=1", active=lambda: on, dtypes=(torch.float32,))
    domain = Domain(targets=("neuron",), emulator=emulator)
    call = call_of(tilted, spec(2, 8), spec(4, 8))
    assert domain(call) == "x is on cpu, not neuron (X=1 runs it in the interpreter)"
    on = True
    assert domain(call) is None
    half = call_of(tilted, spec(2, 8, dtype=torch.bfloat16), spec(4, 8, dtype=torch.bfloat16))
    assert domain(half) == "x is torch.bfloat16, which the interpreter computes wrongly"
    assert domain(call_of(tilted, spec(2, 8, device="xla"), spec(4, 8, device="xla"))) is None


def test_only_what_is_made_for_this_device_counts_as_a_fallback(tilted: str) -> None:
    def torch_definition(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, slope: float = 1.0) -> Tensor:
        return x @ weight.t() * slope

    NF.register(NAME, "gpu", torch_definition, domain=Domain(targets=("cuda",)), priority=9)
    x, weight = torch.ones(5, 8), torch.ones(4, 8)
    run = getattr(registry, "_OPERATORS")[NAME]  # noqa: B009
    assert NF.explain(NAME, x, weight)["fallback"] is False
    NF.register(NAME, "few", torch_definition, domain=Domain(worth={"T": Limit(at_most=2)}), priority=8)
    assert NF.explain(NAME, x, weight)["fallback"] is False
    NF.register(NAME, "narrow", torch_definition, domain=Domain(limits={"D": Limit(at_most=4)}), priority=7)
    answer = NF.explain(NAME, x, weight)
    assert (answer["fallback"], answer["implementation"]) == (True, "torch")
    assert set(answer["refused"]) == {"gpu", "few", "narrow"} and len(run) == 4
    rows = {NAME: [{"selections": 3, "fallback": True}, {"selections": 2, "fallback": False}], "other": []}
    assert NF.count_fallbacks(rows) == {NAME: 3}


def test_edges_are_the_bounds_and_their_neighbours() -> None:
    assert Limit(at_most=128).edges() == [127, 128, 129]
    assert Limit(at_least=2, at_most=8, multiple_of=2).edges() == [2, 4, 5, 6, 8, 10]


def test_every_operator_is_described_and_the_description_is_of_its_arguments() -> None:
    for name in registry.operators():
        described = registry.layout_of(name)
        parameters = registry.signature_of(name).parameters
        tensors = {key for key, item in parameters.items() if "Tensor" in str(item.annotation)}
        assert set(described) == tensors, name
        needed = {
            key
            for key, item in parameters.items()
            if item.default is inspect.Parameter.empty and key not in tensors and key != "sizes"
        }
        assert needed <= set(registry.examples_of(name)), name


def test_a_description_of_what_is_not_there_is_refused(tilted: str) -> None:
    with pytest.raises(ConfigError, match=r"no argument named 'wieght'.*weight"):
        NF.describe(NAME, {"wieght": "D"})
    with pytest.raises(ConfigError, match="no operator named 'rms_nrom'; is it rms_norm"):
        NF.describe("rms_nrom", {})
