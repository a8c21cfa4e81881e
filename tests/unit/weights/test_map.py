"""The weight map: a bijection where it fits, an error that names the tensor where it does not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pilotage.core.errors import WeightError
from pilotage.weights import Drop, Fuse, Identity, Permute, Rename, Split, Stack, Tie, Transpose, WeightMap
from pilotage.weights.map import same_bytes

size = st.integers(1, 5)


@st.composite
def maps(draw: st.DrawFn) -> tuple[WeightMap, dict[str, Tensor]]:
    """A map with one rule of each drawn kind a layer, and a checkpoint that fits it."""
    kinds = draw(st.sets(st.sampled_from(["rename", "fuse", "split", "transpose", "permute", "tie", "drop"])))
    layers, a, b, c, heads = (draw(size) for _ in range(5))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    dim = draw(st.integers(0, 1))
    rules: list = [Identity()]
    tensors: dict[str, Tensor] = {"head.weight": torch.randn(3, 2)}

    def shape(along: int) -> list[int]:
        return [along, 4] if dim == 0 else [4, along]

    for i in range(layers):
        tensors[f"h.{i}.plain"] = torch.randn(a, b)
        if "rename" in kinds:
            tensors[f"h.{i}.old.weight"] = torch.randn(a)
        if "fuse" in kinds:
            tensors |= {f"h.{i}.{n}": torch.randn(shape(s)) for n, s in (("x", a), ("y", b), ("z", c))}
        if "split" in kinds:
            tensors[f"h.{i}.gate_up"] = torch.randn(shape(a + b))
        if "transpose" in kinds:
            tensors[f"h.{i}.t"] = torch.randn(a, b)
        if "permute" in kinds:
            tensors[f"h.{i}.p"] = torch.randn(heads * a * 2, b)
        if "drop" in kinds:
            tensors[f"h.{i}.inv_freq"] = torch.randn(a)
    if "rename" in kinds:
        rules.append(Rename("h.{i}.old.{*rest}", "layers.{i}.new.{*rest}"))
    if "fuse" in kinds:
        rules.append(Fuse(("h.{i}.x", "h.{i}.y", "h.{i}.z"), "layers.{i}.xyz", (a, b, c), dim))
    if "split" in kinds:
        rules.append(Split("h.{i}.gate_up", ("layers.{i}.gate", "layers.{i}.up"), (a, b), dim))
    if "transpose" in kinds:
        rules.append(Transpose("h.{i}.t", "layers.{i}.t"))
    if "permute" in kinds:
        # Any order: the rotary one is its own inverse, which would hide a wrong way back.
        turned = tuple(draw(st.permutations(range(4))))
        rules.append(Permute("h.{i}.p", "layers.{i}.p", view=(heads, a, 2, -1), order=turned))
    if "tie" in kinds:
        rules.append(Tie("lm_head", "head.weight"))
    if "drop" in kinds:
        rules.append(Drop("h.*.inv_freq", "computed"))
    order = draw(st.permutations(rules))
    return WeightMap(order), {name: tensor.to(dtype) for name, tensor in tensors.items()}


@settings(max_examples=60, deadline=None)
@given(drawn=maps())
def test_there_and_back_gives_the_same_bytes(drawn: tuple[WeightMap, dict[str, Tensor]]) -> None:
    weight_map, tensors = drawn
    native = weight_map.to_native(tensors)
    back = weight_map.to_hf(native)
    kept = {name for name in tensors if not name.endswith("inv_freq")}
    assert set(back) == kept
    assert all(same_bytes(back[name], tensors[name]) for name in kept)
    mapped = weight_map.mappings(tensors, native)
    used = {key for keys in mapped.values() for key in ([keys] if isinstance(keys, str) else keys)}
    assert set(mapped) == set(native) and used == kept


@settings(max_examples=40, deadline=None)
@given(drawn=maps(), data=st.data())
def test_a_lost_or_added_tensor_is_named(drawn: tuple[WeightMap, dict[str, Tensor]], data: st.DataObject) -> None:
    weight_map, tensors = drawn
    parameters = list(weight_map.to_native(tensors))
    lost = data.draw(st.sampled_from(sorted(name for name in tensors if not name.endswith("inv_freq"))))
    names = [name for name in tensors if name != lost]
    with pytest.raises(WeightError) as caught:
        weight_map.mappings(names, parameters)
    assert lost in str(caught.value)
    with pytest.raises(WeightError, match=r"h\.99\.surprise"):
        weight_map.mappings([*tensors, "h.99.surprise"], parameters)
    parameter = data.draw(st.sampled_from(parameters))
    with pytest.raises(WeightError):
        weight_map.mappings(tensors, [name for name in parameters if name != parameter])
    with pytest.raises(WeightError, match=r"layers\.0\.unknown"):
        weight_map.mappings(tensors, [*parameters, "layers.0.unknown"])


def test_permute_deinterleaves_rotary_halves() -> None:
    # Two heads of size 4 stored as pairs (x0 y0 x1 y1) become halves (x0 x1 y0 y1).
    rows = torch.arange(8).view(8, 1)
    rule = Permute("q", "q", view=(2, 2, 2, -1), order=(0, 2, 1, 3))
    assert rule.to_native([rows])[0].flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_fuse_and_split_keep_the_order_of_their_names() -> None:
    k, q = torch.zeros(2, 3), torch.ones(4, 3)
    native = WeightMap([Fuse(("q", "k"), "qk", (4, 2))]).to_native({"k": k, "q": q})
    assert torch.equal(native["qk"], torch.cat([q, k]))
    parts = WeightMap([Split("gu", ("g", "u"), (1, 2), dim=1)]).to_native({"gu": torch.arange(6).view(2, 3)})
    assert parts["g"].tolist() == [[0], [3]] and parts["u"].tolist() == [[1, 2], [4, 5]]


@pytest.mark.parametrize(
    ("rules", "names", "parameters", "message"),
    [
        ([Rename("a", "x"), Rename("a", "y")], ["a"], ["x", "y"], "a: double: 2 rules use it"),
        ([Rename("a", "x"), Rename("b", "x")], ["a", "b"], ["x"], "x: double: written 2 times: by a, b"),
        ([Rename("a", "x"), Drop("a", "why")], ["a"], ["x"], "a: double: a rule uses it and another drops it"),
        ([Identity(), Tie("b", "a")], ["a"], ["a", "b", "c"], "c: missing: the checkpoint has no such tensor"),
        ([Identity(), Tie("b", "a")], ["c"], ["b", "c"], "a: missing: the tied parameter b is read from it"),
        ([Identity(), Tie("b", "a")], ["a"], ["a"], "b: extra: tied, and the model has no such parameter"),
        ([Rename("old.{i}", "new.{i}")], ["old.0"], ["new.0", "new.1"], "old.1: missing: .* parameter new.1"),
        ([Fuse(("q", "k"), "qk", (1, 1))], ["q"], ["qk"], "k: missing: q needs it beside it"),
        ([Rename("a", "x")], ["a", "b"], ["x"], "b: extra: no rule uses it, and none drops it"),
        ([Identity()], ["a", "b"], ["a"], "b: extra: the model has no such parameter"),
        ([Identity()], ["a", "a"], ["a"], "a: double: the checkpoint holds it twice"),
    ],
)
def test_what_does_not_fit_is_named(rules: list, names: list, parameters: list, message: str) -> None:
    with pytest.raises(WeightError, match=message):
        WeightMap(rules).mappings(names, parameters)


@pytest.mark.parametrize(
    ("rule", "tensors", "message"),
    [
        (Fuse(("q", "k"), "qk", (2, 2)), {"q": torch.zeros(2, 1), "k": torch.zeros(3, 1)}, "k: .*the rule says 2"),
        (Split("gu", ("g", "u"), (2, 2)), {"gu": torch.zeros(5)}, "gu: .*the rule says 4"),
        (Permute("p", "p", (2, 2, -1), (1, 0, 2)), {"p": torch.zeros(3)}, "p: .*cannot be viewed"),
        (Transpose("t", "t"), {"t": torch.zeros(3)}, "t: cannot exchange dimensions"),
    ],
)
def test_a_misshapen_tensor_is_named(rule: object, tensors: dict, message: str) -> None:
    with pytest.raises(WeightError, match=message):
        WeightMap([rule]).to_native(tensors)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Drop("a", "  "),
        lambda: Fuse(("q", "k"), "qk", (2,)),
        lambda: Split("gu", ("g",), (0,)),
        lambda: Permute("p", "p", (2, -1, -1), (0, 1, 2)),
        lambda: Permute("p", "p", (2, 2), (0, 0)),
        lambda: WeightMap([Rename("a", "b.{i}")]).plan(["a"]),
    ],
)
def test_a_rule_that_cannot_work_is_refused(make: object) -> None:
    with pytest.raises(WeightError):
        make()


def test_a_stored_copy_of_a_tied_tensor_must_repeat_it() -> None:
    weight_map = WeightMap([Identity(), Tie("lm_head", "embed")])
    embed = torch.randn(3, 2)
    assert weight_map.to_native({"embed": embed, "lm_head": embed.clone()}).keys() == {"embed", "lm_head"}
    with pytest.raises(WeightError, match="lm_head: tied to embed, and holds other values"):
        weight_map.to_native({"embed": embed, "lm_head": embed + 1})
    with pytest.raises(WeightError, match="lm_head: tied to embed, and holds other values"):
        weight_map.to_hf({"embed": embed, "lm_head": embed + 1})


def test_same_bytes_tells_zeros_apart_and_nan_together() -> None:
    nan = torch.tensor([float("nan")])
    assert same_bytes(nan, nan.clone())
    assert not same_bytes(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bytes(torch.zeros(2), torch.zeros(2, dtype=torch.float16))
    assert not same_bytes(torch.zeros(2), torch.zeros(2, 1))


def test_experts_stored_one_by_one_are_stacked_and_come_back() -> None:
    rule = Stack(("e.{i}.{e}.gate", "e.{i}.{e}.up"), "e.{i}.gate_up", 3, (2, 4))
    weight_map = WeightMap([rule, Identity()])
    tensors = {f"e.7.{e}.{name}": torch.randn(rows, 5) for e in range(3) for name, rows in (("gate", 2), ("up", 4))}
    native = weight_map.to_native(dict(reversed(tensors.items())) | {"other": torch.ones(1)})
    assert set(native) == {"e.7.gate_up", "other"} and native["e.7.gate_up"].shape == (3, 6, 5)
    assert torch.equal(native["e.7.gate_up"][1], torch.cat([tensors["e.7.1.gate"], tensors["e.7.1.up"]]))
    back = weight_map.to_hf(native)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    del tensors["e.7.2.up"]
    with pytest.raises(WeightError, match=r"e\.7\.2\.up"):
        weight_map.to_native(tensors)
    with pytest.raises(WeightError, match="2 experts, the rule says 3"):
        weight_map.to_hf({"e.7.gate_up": torch.zeros(2, 6, 5)})
    with pytest.raises(WeightError, match=r"without \{e\}"):
        Stack(("e.{i}.gate",), "e.{i}.gate", 3, (2,))
