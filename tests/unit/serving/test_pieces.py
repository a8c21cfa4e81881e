"""Equal layers share one compiled piece, unequal ones never do, and the result is the graph's."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from pilotage.serving import pieces


class Layer(nn.Module):
    def __init__(self, size: int, factor: float) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.cache = torch.zeros(3, size)
        self.factor = factor

    def forward(self, x: Tensor, row: Tensor) -> Tensor:
        self.cache.index_put_((row,), x[0])
        return x + torch.tanh(self.linear(x)) * self.factor + self.cache.sum(0)


class Model(nn.Module):
    def __init__(self, factors: list[float], size: int = 8) -> None:
        super().__init__()
        self.inward = nn.Linear(4, size)
        self.layers = nn.ModuleList(Layer(size, factor) for factor in factors)
        self.outward = nn.Linear(size, 5)

    def forward(self, x: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        x = self.inward(x)
        for layer in self.layers:
            x = layer(x, row)
        return self.outward(x), x


def captured(model: nn.Module, *arguments: Tensor) -> fx.GraphModule:
    """Return the graph that dynamo makes of `model`."""
    found: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, _examples: Any) -> Any:
        found.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(type(model).forward, backend=keep, fullgraph=True, dynamic=False)(model, *arguments)
    return found[0]


def hashes(graph: fx.GraphModule) -> list[str]:
    return [pieces.structure(nodes, *pieces._boundary(nodes)) for nodes in pieces.cut(graph.graph)]


def arguments() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 4), torch.tensor(1)


def test_layers_that_are_equal_have_one_hash() -> None:
    found = hashes(captured(Model([0.5, 0.5, 0.25, 0.5]), *arguments()))
    assert len(found) == 6  # inward, four layers, outward
    assert found[1] == found[2] == found[4]
    assert len(set(found)) == 4


@pytest.mark.parametrize("change", ["size", "dtype", "stride", "operator"])
def test_what_makes_a_layer_another_one(change: str) -> None:
    model = Model([0.5, 0.5, 0.5])
    odd: Any = model.layers[1]
    if change == "size":
        odd.cache = torch.zeros(7, 8)
    elif change == "dtype":
        odd.cache = torch.zeros(3, 8, dtype=torch.float64)
        odd.forward = lambda x, row: x + torch.tanh(odd.linear(x)) * 0.5 + odd.cache.sum(0).float()
    elif change == "stride":
        odd.linear.weight = nn.Parameter(odd.linear.weight.t().contiguous().t())
    else:
        odd.forward = lambda x, row: Layer.forward(odd, torch.sigmoid(x), row)
    found = hashes(captured(model, *arguments()))
    assert found[1] == found[3] != found[2]


def test_values_other_than_tensors_are_not_passed_between_pieces() -> None:
    class Odd(Model):
        def forward(self, x: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            pair = self.layers[0](self.inward(x), row).split(1)  # a tuple, taken apart in another layer
            return self.outward(pair[0]), pair[1]

    groups = pieces.cut(captured(Odd([0.5]), *arguments()).graph)
    for nodes in groups:
        inputs, outputs = pieces._boundary(nodes)
        assert all(isinstance(node.meta["example_value"], Tensor) for node in (*inputs, *outputs)) or len(groups) == 1


def test_compiled_and_restored_pieces_compute_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, x = Model([0.5, 0.5, 0.25, 0.5]).eval(), arguments()
    made: list[pieces.Stitched] = []

    def backend(graph: fx.GraphModule, _examples: Any) -> pieces.Stitched:
        made.append(pieces.compile_in_pieces(graph, {"fx_graph_cache": False}))
        return made[-1]

    with torch.no_grad():
        expected = model(*x)
        caches = [layer.cache.clone() for layer in model.layers]
        torch._dynamo.reset()
        with torch._dynamo.config.patch(enable_aot_compile=True):
            compiled = torch.compile(
                Model.forward, backend=backend, fullgraph=True, dynamic=False, options={"guard_filter_fn": no_guards}
            ).aot_compile(((model, *x), {}))
        assert [(len(one.pieces), len(one.steps)) for one in made] == [(4, 6)]
        stored = type(compiled).serialize(compiled).serialized_data
        restored = torch.compiler.load_compiled_function(io.BytesIO(stored))
        for function in (compiled.fn, restored.fn):
            for layer in model.layers:
                layer.cache.zero_()
            for mine, theirs in zip(function(model, *x), expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
            for layer, cache in zip(model.layers, caches, strict=True):
                torch.testing.assert_close(layer.cache, cache, rtol=1e-5, atol=1e-6)


def no_guards(guards: Any) -> list[bool]:
    return [False for _ in guards]
