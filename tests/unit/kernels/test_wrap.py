"""Wrapped kernels: one operator in eager, traced, exported and differentiated graphs; the kernel runs only for real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pilotage.core.errors import BadInput, ConfigError, PilotageError, Unsupported
from pilotage.kernels import Sharding, launch_numpy, wrap_kernel, wrap_nki

RUNS: list[tuple[int, ...]] = []


def scaled_sum(x: Tensor, weight: Tensor, *, factor: float, bias: Tensor | None = None) -> Tensor:
    """[..., D] times [D], summed over D."""
    y = (x * weight).sum(-1) * factor
    return y if bias is None else y + bias


def scaled_sum_numpy(x, weight, *, factor, bias=None, grid=()):  # type: ignore[no-untyped-def]
    assert isinstance(x, np.ndarray), "never anything without data"
    RUNS.append(grid)
    y = (x * weight).sum(-1) * np.float32(factor)
    return y if bias is None else y + bias


def write_rows(cache: Tensor, rows: Tensor, at: Tensor) -> None:
    cache.index_copy_(0, at, rows)


def write_rows_numpy(cache, rows, at):  # type: ignore[no-untyped-def]
    cache[at] = rows


def halves(x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    first, second = x.split(sizes, dim=-1)
    return first, second.argsort(-1)


SUM = wrap_kernel(scaled_sum_numpy, scaled_sum, launch=launch_numpy)
WRITE = wrap_kernel(write_rows_numpy, write_rows, mutates_args=("cache",), launch=launch_numpy)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    RUNS.clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield


def inputs(rows: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 5, generator=generator), torch.randn(5, generator=generator)


def model(x: Tensor, weight: Tensor) -> Tensor:
    return SUM[2](x + 1, weight, factor=0.5) * 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_the_kernel_is_one_node_of_a_whole_graph_and_runs_only_when_the_graph_does(backend: str) -> None:
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for rows in (3, 7):
        x, weight = inputs(rows)
        before = len(RUNS)
        torch.testing.assert_close(compiled(x, weight), scaled_sum(x + 1, weight, factor=0.5) * 2)
        assert RUNS[before:] == [(2,)], "once a call, not while tracing"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "the batch is dynamic"


def test_opcheck_finds_nothing() -> None:
    x, weight = inputs()
    x.requires_grad_()
    weight.requires_grad_()
    torch.library.opcheck(SUM.op, (x, weight, 0.5, None, [2]))
    torch.library.opcheck(WRITE.op, (torch.zeros(6, 5), x.detach(), torch.tensor([4, 0, 1]), []))


def test_the_gradient_is_the_fallbacks() -> None:
    x, weight = inputs()
    found = []
    for function in (model, lambda x, w: scaled_sum(x + 1, w, factor=0.5) * 2, torch.compile(model, fullgraph=True)):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        function(*leaves).square().sum().backward()
        found.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[2], found[1])


def test_results_that_are_integers_and_tuples_of_sizes() -> None:
    wrapped = wrap_kernel(
        lambda x, sizes: (x[..., : sizes[0]].clone(), x[..., sizes[0] :].argsort(-1)), halves, name="h"
    )
    x = torch.randn(2, 7, requires_grad=True)
    first, order = torch.compile(lambda x: wrapped(x, (3, 4)), backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(order, halves(x, (3, 4))[1])
    first.sum().backward()
    assert torch.equal(x.grad, torch.tensor([1.0, 1, 1, 0, 0, 0, 0]).expand(2, 7))


def test_export_keeps_the_operator() -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return model(x, weight)

    x, weight = inputs(4)
    program = torch.export.export(
        Module(), (x, weight), dynamic_shapes={"x": {0: torch.export.Dim("rows", min=2, max=64)}, "weight": None}
    )
    assert not RUNS
    assert [str(node.target) for node in program.graph.nodes].count(f"pilotage_kernels.{SUM.name}.default") == 1
    x = inputs(9)[0]
    torch.testing.assert_close(program.module()(x, weight), model(x, weight))


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_arguments_written_in_place_are_seen_by_what_follows(backend: str | None) -> None:
    def step(cache: Tensor, rows: Tensor, at: Tensor) -> Tensor:
        before = cache.sum()
        WRITE(cache, rows * 2, at)
        return cache.sum() - before

    run = step if backend is None else torch.compile(step, backend=backend, fullgraph=True)
    cache, (rows, _) = torch.ones(6, 5), inputs()
    at = torch.tensor([4, 0, 1])
    grown = run(cache, rows, at)
    torch.testing.assert_close(cache[at], rows * 2)
    torch.testing.assert_close(cache[[2, 3, 5]], torch.ones(3, 5))
    torch.testing.assert_close(grown, rows.sum() * 2 - 15, rtol=1e-4, atol=1e-4)


def test_a_kernel_that_writes_its_arguments_has_no_gradient_and_says_so() -> None:
    rows = inputs()[0].requires_grad_()
    with pytest.raises(Unsupported, match="rows needs a gradient"):
        WRITE(torch.ones(6, 5), rows, torch.tensor([4, 0, 1]))
    with torch.no_grad():
        WRITE(torch.ones(6, 5), rows, torch.tensor([4, 0, 1]))


def test_without_a_fallback_it_runs_eagerly_and_says_what_it_cannot_do() -> None:
    wrapped = wrap_nki(lambda x: x + 1, name="plus_one")
    x = inputs()[0]
    assert torch.equal(wrapped(x), x + 1)
    with pytest.raises(Unsupported, match=r"plus_one: .*no gradient.*give one"):
        wrapped(x.clone().requires_grad_())
    with pytest.raises(Unsupported, match=r"cannot be traced"):
        wrapped(x.to("meta"))
    with pytest.raises(Exception, match="cannot be traced"):
        torch.compile(wrapped, backend="eager", fullgraph=True)(x)


def test_bf16_goes_through_arrays_and_back() -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    wrapped = wrap_nki(lambda x: x * x.dtype.type(2), double, name="double_bf16")
    x = inputs()[0].bfloat16()
    assert torch.equal(wrapped(x), x * 2)


def test_a_kernel_that_disagrees_with_its_fallback_on_shapes_is_stopped() -> None:
    wrapped = wrap_kernel(lambda x, weight, factor, bias: x, scaled_sum, name="wrong_axis")
    with pytest.raises(BadInput, match=r"result 0 is \(3, 5\).*the fallback's \(3,\)"):
        wrapped(*inputs(), factor=1.0)


def test_a_result_that_is_an_argument_is_copied() -> None:
    def same(x: Tensor) -> Tensor:
        return x.clone()

    x = inputs()[0]
    assert wrap_kernel(lambda x: x, same, name="same")(x).data_ptr() != x.data_ptr()


def unannotated(x, y: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    return x


def open_ended(*x: Tensor) -> Tensor:
    return x[0]


def odd_type(x: Tensor, options: dict[str, int]) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("fallback", "message"),
    [
        (unannotated, "'x' of the fallback has no annotation"),
        (open_ended, r"takes \*x"),
        (odd_type, "make no schema"),
    ],
)
def test_a_fallback_that_makes_no_schema_is_refused(fallback: Callable[..., Tensor], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wrap_kernel(lambda *a: a[0], fallback, name="refused")


def test_other_mistakes_are_sentences() -> None:
    with pytest.raises(ConfigError, match="mutates_args names 'chache'"):
        wrap_kernel(write_rows_numpy, write_rows, mutates_args=("chache",))
    with pytest.raises(PilotageError, match="a grid of"):
        wrap_kernel(write_rows_numpy, name="no_grid")[2](torch.ones(1), torch.ones(1), torch.ones(1))
    with pytest.raises(BadInput, match="made of integers"):
        SUM[1.5]
    with pytest.raises(TypeError, match="missing argument 'factor'"):
        SUM(*inputs())


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"tensors": {"x": "T D"}, "results": ("T",)}, r"tensors \['x'\] for the arguments \['bias', 'weight', 'x'\]"),
        ({"results": ("T", "T")}, "2 results of 1"),
        ({"split": ("D",)}, "D is split, and a result has no D"),
        ({"sums": ("T",)}, "T is summed over, and a result has it"),
    ],
)
def test_a_sharding_rule_that_does_not_fit_is_refused(rule: dict[str, Any], message: str) -> None:
    right = {"tensors": {"x": "T D", "weight": "D", "bias": "T"}, "results": ("T",)}
    with pytest.raises(ConfigError, match=message):
        wrap_kernel(scaled_sum_numpy, scaled_sum, name="ruled", sharding=Sharding(**{**right, **rule}))
    with pytest.raises(ConfigError, match="sharding says nothing without a fallback"):
        wrap_kernel(scaled_sum_numpy, name="ruled", sharding=Sharding(**right))


def test_the_documented_path() -> None:
    from pilotage.utils import nki_utils

    assert nki_utils.wrap_nki is wrap_nki


def test_an_nki_kernel_runs_in_the_interpreter_as_one_node_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    from pilotage.kernels import nki as interpreter

    monkeypatch.setenv("NKI_SIMULATOR", "1")
    nl, nisa = interpreter.language, interpreter.isa
    launched = []

    @interpreter.jit
    def halves(x, out):  # type: ignore[no-untyped-def]
        """Each core doubles its half of the rows, in place."""
        launched.append(nl.program_id(0))
        rows = x.shape[0] // nl.num_programs(0)
        first = nl.program_id(0) * rows
        tile = nl.ndarray((rows, x.shape[1]), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=x[first : first + rows, :])
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
        nisa.dma_copy(dst=out[first : first + rows, :], src=tile)

    def halves_torch(x: Tensor, out: Tensor) -> None:
        out.copy_(x * 2)

    wrapped = wrap_nki(halves, fallback=halves_torch, mutates_args=("out",))

    def step(x: Tensor, out: Tensor) -> Tensor:
        wrapped[2](x + 1, out)
        return out - 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for dtype in (torch.float32, torch.bfloat16):
        x, out = inputs(4)[0].to(dtype), torch.zeros(4, 5, dtype=dtype)
        launched.clear()
        assert torch.equal(compiled(x, out), (x + 1) * 2 - 1)
        assert torch.equal(out, (x + 1) * 2)
        assert sorted(launched) == [0, 1], "on both cores, once, not while tracing"
