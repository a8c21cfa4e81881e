"""Load one rank's share of a checkpoint into a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pilotage.core.errors import WeightError
from pilotage.core.nouns import Status
from pilotage.core.progress import track
from pilotage.weights import ledger as ledgers
from pilotage.weights.checkpoint import SafetensorsCheckpoint
from pilotage.weights.ledger import Ledger, RoundTrip
from pilotage.weights.loaders import LazySlice, copy_weight_loader, has_weight_loader
from pilotage.weights.map import Plan, WeightMap, raise_problems, same_bytes
from pilotage.weights.reading import read_shares
from pilotage.weights.rules import Fuse, Rename, Rule, Stack


def load_into(
    model: nn.Module,
    path: str | Path,
    weight_map: WeightMap,
    *,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    cache_dir: str | Path | None = None,
) -> Ledger:
    """Give every parameter of `model` its values, or raise before the first is written.

    Names, and at one rank shapes and dtypes, are checked against the file headers before any data is read. Parameters
    are replaced (those on the meta device have no storage) and keep their loaders. Each is read through its loader: by
    `Rename`, `Identity`, `Tie` and `Fuse` it gets the checkpoint's own slices; by the rules that move values within a
    tensor it gets slices of the result.

    Args:
        model: built for this rank, any device.
        path: the checkpoint's directory.
        weight_map: of the model's package.
        rank: this rank of `world_size`.
        world_size: ranks that divide the model.
        device: where the weights go.
        dtype: of floating parameters; None keeps each parameter's.
        cache_dir: see `SafetensorsCheckpoint`.

    Returns:
        The ledger; its round trip is not measured here (`ledger.ledger` does).

    Raises:
        BadInput: the checkpoint cannot be read.
        WeightError: it does not fit the model; names the tensor.
    """
    if not 0 <= rank < world_size:
        raise WeightError(f"rank {rank} of {world_size}", where="load_into")
    checkpoint = SafetensorsCheckpoint(path, cache_dir)
    # Two names of one Parameter count as two: each is written, so a head tied on the meta device is not left out.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    plan = weight_map.plan(checkpoint.keys(), parameters)
    problems = list(plan.problems)
    if world_size == 1 and not any(has_weight_loader(parameter) for parameter in parameters.values()):
        problems += ledgers.fit_problems(plan, checkpoint, parameters)
    if not problems:
        problems += ledgers.copy_problems(plan, checkpoint)
    raise_problems(problems)

    sources = _sources(plan, checkpoint, parameters)
    repeats = _repeats(plan, parameters)
    order = _order(plan, {name: parameter for name, parameter in parameters.items() if name not in repeats})
    shares = read_shares(order, sources, rank=rank, device=torch.device(device), dtype=dtype)
    loaded: dict[str, Tensor] = {}
    for name, tensor in track(shares, "loading weights", total=len(order)):
        loaded[name] = _shared(name, tensor, plan, loaded)
    loaded |= {name: loaded[owner] for name, owner in repeats.items()}
    for name, tensor in loaded.items():
        _assign(model, name, parameters[name], tensor)
    left = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if left:
        raise WeightError("a buffer stayed on the meta device: nothing computes its values", where=left[0])
    trip = RoundTrip(status=Status.NOT_MEASURED)
    return ledgers.account(str(path), plan, checkpoint, parameters, [], trip)


class MovedSlice:
    """A parameter made by a rule that moves values, as a slice: reading any part reads the rule's whole tensors."""

    def __init__(self, rule: Rule, tensors: list[Any], position: int, name: str) -> None:
        self.rule, self.tensors, self.position, self.name = rule, tensors, position, name

    def get_shape(self) -> list[int]:
        """Return the parameter's whole shape."""
        made = self.rule.to_native([torch.empty(tensor.get_shape(), device="meta") for tensor in self.tensors])
        return list(made[self.position].shape)

    def __getitem__(self, index: object) -> Tensor:
        """Read a part of the parameter."""
        return self.rule.to_native([tensor[:] for tensor in self.tensors])[self.position][index].clone()  # type: ignore[index]


class StackedSlice(MovedSlice):
    """Experts stored one by one, as one slice: reading some of the experts reads the tensors of these only."""

    def __getitem__(self, index: object) -> Tensor:
        """Read a part of the parameter."""
        assert isinstance(self.rule, Stack)
        parts = index if isinstance(index, tuple) else (index,)
        if not parts or not isinstance(parts[0], slice) or parts[0].step not in (None, 1):
            return super().__getitem__(index)
        start, stop, _ = parts[0].indices(self.rule.count)
        if stop <= start:
            return super().__getitem__(index)
        kinds = self.rule.tensors_per_expert
        chosen = dataclasses.replace(self.rule, count=stop - start)
        whole = chosen.to_native([tensor[:] for tensor in self.tensors[start * kinds : stop * kinds]])[0]
        return whole[(slice(None), *parts[1:])].clone()


def _sources(
    plan: Plan, checkpoint: SafetensorsCheckpoint, parameters: Mapping[str, nn.Parameter]
) -> dict[str, list[LazySlice]]:
    sources: dict[str, list[LazySlice]] = {}
    for step in plan.steps:
        tensors: list[Any] = [checkpoint[key] for key in step.hf]
        for position, native in enumerate(step.native):
            fused_by_loader = isinstance(step.rule, Fuse) and has_weight_loader(parameters[native])
            if isinstance(step.rule, Rename) or fused_by_loader:
                sources[native] = tensors
            elif isinstance(step.rule, Stack):
                sources[native] = [StackedSlice(step.rule, tensors, position, native)]
            else:
                sources[native] = [MovedSlice(step.rule, tensors, position, native)]
    return sources | {native: [checkpoint[key]] for native, key in plan.ties.items()}


def _owners(plan: Plan) -> dict[str, str]:
    """Return checkpoint key -> the parameter that is that tensor as it is."""
    return {step.hf[0]: step.native[0] for step in plan.steps if isinstance(step.rule, Rename)}


def _repeats(plan: Plan, parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Return the tied parameters that are their source's parameter exactly, so that reading them again is in vain."""
    owners = _owners(plan)
    found = {}
    for name, key in plan.ties.items():
        owner = owners.get(key)
        if owner is not None:
            mine, theirs = parameters[name], parameters[owner]
            plain = not has_weight_loader(mine) and not has_weight_loader(theirs)
            if plain and (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype):
                found[name] = owner
    return found


def _order(plan: Plan, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Put tied parameters right after the one they repeat: what is the same is then held twice for a moment only."""
    owners = _owners(plan)
    followers: dict[str, list[str]] = {}
    for name, key in plan.ties.items():
        if name in parameters and key in owners:
            followers.setdefault(owners[key], []).append(name)
    late = {name for names in followers.values() for name in names}
    order: dict[str, nn.Parameter] = {}
    for name, parameter in parameters.items():
        if name not in late:
            order[name] = parameter
            order |= {follower: parameters[follower] for follower in followers.get(name, ())}
    return order


def _shared(name: str, tensor: Tensor, plan: Plan, loaded: Mapping[str, Tensor]) -> Tensor:
    """Return the storage of the parameter that `name` is tied to, where that holds the same bytes."""
    owner = _owners(plan).get(plan.ties[name]) if name in plan.ties else None
    if owner is not None and owner in loaded and same_bytes(loaded[owner], tensor):
        return loaded[owner]
    return tensor


def _assign(model: nn.Module, name: str, old: nn.Parameter, tensor: Tensor) -> None:
    module_name, _, leaf = name.rpartition(".")
    new = nn.Parameter(tensor, requires_grad=old.requires_grad)
    copy_weight_loader(old, new)
    setattr(model.get_submodule(module_name), leaf, new)
