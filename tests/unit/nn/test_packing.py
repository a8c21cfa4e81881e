"""Packed projections are views of one storage, equal to separate ones, and never stale."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pilotage.nn import ColumnParallelLinear, RowParallelLinear, gated_mlp, pack, project, unpack

SIZES = (24, 8, 8)


class Group(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = (ColumnParallelLinear(12, size, bias) for size in SIZES)
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    @property
    def members(self) -> tuple[nn.Module, ...]:
        return self.q, self.k, self.v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(project(x, *self.members), dim=-1)


def separate(group: Group, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([nn.functional.linear(x, m.weight, m.bias) for m in group.members], dim=-1)


def is_packed(group: Group) -> bool:
    return group.q.__dict__.get("packed") is not None


@pytest.mark.parametrize("bias", [True, False])
def test_one_product_equals_three(bias: bool) -> None:
    group, x = Group(bias), torch.randn(5, 12)
    before = group(x)
    names = list(group.state_dict())
    parameters = [id(p) for p in group.parameters()]
    assert pack(*group.members)
    torch.testing.assert_close(group(x), before)
    assert list(group.state_dict()) == names
    assert [id(p) for p in group.parameters()] == parameters
    storage = group.q.weight.untyped_storage().data_ptr()
    assert group.v.weight.untyped_storage().data_ptr() == storage
    assert pack(*group.members) and group.q.weight.untyped_storage().data_ptr() == storage


def test_writing_into_a_packed_parameter_is_seen() -> None:
    group, x = Group(), torch.randn(5, 12)
    pack(*group.members)
    with torch.no_grad():
        group.k.weight.mul_(3)
        group.v.bias.add_(1)
    torch.testing.assert_close(group(x), separate(group, x))


def reload(group: Group, assign: bool) -> Group:
    group.load_state_dict({name: torch.randn_like(value) for name, value in group.state_dict().items()}, assign=assign)
    return group


def replace(group: Group) -> Group:
    group.k.weight = nn.Parameter(torch.randn(8, 12))
    return group


WAYS: dict[str, Callable[[Group], Any]] = {
    "deepcopy": copy.deepcopy,
    "deepcopy, then changed": lambda group: reload(copy.deepcopy(group), assign=False),
    "to another dtype and back": lambda group: group.to(torch.float64).to(torch.float32),
    "load_state_dict": lambda group: reload(group, assign=False),
    "load_state_dict, assigned": lambda group: reload(group, assign=True),
    "assigned, then reloaded": lambda group: reload(reload(group, assign=True), assign=False),
    "a parameter replaced": replace,
    "to_empty and reloaded": lambda group: reload(group.to_empty(device="cpu"), assign=False),
}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_packed_group_is_never_stale(way: str, again: bool) -> None:
    group, x = Group(), torch.randn(5, 12)
    pack(*group.members)
    changed = WAYS[way](group)
    if again:
        assert pack(*changed.members) and is_packed(changed)
    torch.testing.assert_close(changed(x), separate(changed, x))


def test_one_member_alone_and_other_groups_are_not_the_packed_group() -> None:
    group, x = Group(), torch.randn(5, 12)
    pack(*group.members)
    (alone,) = project(x, group.q)
    torch.testing.assert_close(alone, nn.functional.linear(x, group.q.weight, group.q.bias))
    swapped = project(x, group.q, group.v, group.k)
    torch.testing.assert_close(swapped[1], nn.functional.linear(x, group.v.weight, group.v.bias))
    unpack(group.k)
    assert not is_packed(group)


def test_mixed_biases_are_not_packed() -> None:
    first, second = ColumnParallelLinear(4, 4, True), ColumnParallelLinear(4, 4, False)
    assert not pack(first, second)


@pytest.mark.parametrize("bias", [True, False])
def test_the_fused_mlp_equals_its_modules(bias: bool) -> None:
    gate, up, down = (
        ColumnParallelLinear(12, 20, bias),
        ColumnParallelLinear(12, 20, bias),
        RowParallelLinear(20, 12, bias),
    )
    for module in (gate, up, down):
        for parameter in module.parameters():
            nn.init.normal_(parameter)
    x = torch.randn(5, 12)
    before = gated_mlp(x, gate, up, down, activation="silu")
    assert pack(gate, up)
    torch.testing.assert_close(gated_mlp(x, gate, up, down, activation="silu"), before)
    plain = [nn.Linear(12, 20, bias), nn.Linear(12, 20, bias), nn.Linear(20, 12, bias)]
    for module, source in zip(plain, (gate, up, down), strict=True):
        module.load_state_dict(source.state_dict())
    torch.testing.assert_close(gated_mlp(x, *plain, activation="silu"), before)


def test_a_packed_group_keeps_its_gradients() -> None:
    group, x = Group(), torch.randn(5, 12)
    separate(group, x).square().sum().backward()
    expected = [p.grad.clone() for p in group.parameters()]
    group.zero_grad()
    pack(*group.members)
    group(x).square().sum().backward()
    for parameter, reference in zip(group.parameters(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, reference)


def test_plain_linear_layers_are_not_packed() -> None:
    assert not pack(nn.Linear(4, 4), nn.Linear(4, 4))
