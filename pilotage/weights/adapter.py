"""A state-dict adapter made from a WeightMap: whole or sharded parameters to Hugging Face tensors, and back.

On sharded parameters (DTensors) a `Stack` of experts keeps its sharding: each rank gives the experts that it holds, and
no others, and nothing is communicated unless gate and up rows are themselves divided. Other rules that move values
gather the tensors of one application, apply the rule, and divide the result as the parameter was.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from pilotage.core.errors import Unsupported, WeightError
from pilotage.weights.map import Step, WeightMap
from pilotage.weights.rules import Stack


class StateDictAdapter:
    """Converts state dicts between a model's parameters and its Hugging Face checkpoint, both ways exactly.

    Nothing changes its argument. What `to_hf` returns may share storage with it.

    Attributes:
        supports_low_memory_dcp_load: whether all that `to_hf` gives are parts of the parameters' own storage, so that
            a distributed checkpoint which is read into it is in the model already.

    Args:
        weight_map: of the model.
        parameters: gives the model's parameters with their names, asked for when `from_hf` needs to know how they are
            sharded.
    """

    def __init__(
        self, weight_map: WeightMap, parameters: Callable[[], Iterable[tuple[str, Tensor]]] | None = None
    ) -> None:
        self.weight_map = weight_map
        self._parameters = parameters or list
        self.supports_low_memory_dcp_load = all(_gives_views(rule) for rule in weight_map.rules)

    def from_hf(
        self, hf_state_dict: Mapping[str, Any], device_mesh: DeviceMesh | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Turn checkpoint tensors into parameters.

        Args:
            hf_state_dict: whole tensors, or what `to_hf` gives of a sharded model on this rank.
            device_mesh: over which experts are dealt out (its dimension "ep", or its only one) where the model's own
                parameters do not say it by being DTensors.
            kwargs: of other adapters' interfaces; none is known here.

        Returns:
            Parameters by name; DTensors where the model's are, or with `device_mesh`.

        Raises:
            WeightError: a tensor is missing, extra or of another shape; names it.
        """
        _refuse_unknown(kwargs)
        ties = {tie.native: tie.source for tie in self.weight_map.ties}
        layouts = {name: value for name, value in self._parameters() if isinstance(value, DTensor)}
        whole = layouts or device_mesh is not None or any(isinstance(v, DTensor) for v in hf_state_dict.values())
        if not whole:
            return dict(self.weight_map.to_native(hf_state_dict))
        result: dict[str, Any] = {}
        for step in self._steps(hf_state_dict):
            spec = _layout(step, layouts, device_mesh)
            if isinstance(step.rule, Stack) and spec is not None:
                result[step.native[0]] = _stack(step, hf_state_dict, spec)
                continue
            lost = next((name for name in step.hf if name not in hf_state_dict), None)
            if lost is not None:
                raise WeightError(f"{step.native[0]} needs it", where=lost)
            parts = [_full(hf_state_dict[name]) for name in step.hf]
            moved = step.rule.to_native(parts) if _moves(step) else [hf_state_dict[step.hf[0]]]
            for name, value in zip(step.native, moved, strict=True):
                like = layouts.get(name)
                result[name] = _divided(value, like.device_mesh, like.placements) if like is not None else value
        for name, source in ties.items():
            owner = next((step.native[0] for step in self._steps(hf_state_dict) if step.hf == (source,)), None)
            if owner in result:
                result[name] = result[owner]
        return result

    def to_hf(
        self,
        state_dict: Mapping[str, Any],
        exclude_key_regex: str | None = None,
        quantization: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Turn parameters into checkpoint tensors.

        Args:
            state_dict: parameters by name, whole or DTensors.
            exclude_key_regex: checkpoint names that match it in full or from their start are left out.
            quantization: give the tensors as a quantised checkpoint holds them.
            kwargs: of other adapters' interfaces; none is known here.

        Returns:
            Checkpoint tensors by name; of experts that are dealt out over ranks, those of this rank.

        Raises:
            WeightError: a parameter that no rule knows, or a tied one that differs from its source.
            Unsupported: `quantization`.
        """
        _refuse_unknown(kwargs)
        if quantization:
            raise Unsupported(
                "quantised checkpoints are read, not written", where="to_hf, quantization", do="leave it False"
            )
        if not any(isinstance(value, DTensor) for value in state_dict.values()):
            result: dict[str, Any] = dict(self.weight_map.to_hf(state_dict))
        else:
            tied = {tie.native for tie in self.weight_map.ties}
            result = {}
            for step in self.weight_map.native_steps(name for name in state_dict if name not in tied):
                result |= _step_to_hf(step, [state_dict[name] for name in step.native])
        excluded = re.compile(exclude_key_regex) if exclude_key_regex else None
        return {name: value for name, value in result.items() if excluded is None or not excluded.match(name)}

    def convert_single_tensor_to_hf(self, fqn: str, tensor: Any, **kwargs: Any) -> list[tuple[str, Any]]:
        """Turn one parameter into its checkpoint tensors.

        Args:
            fqn: the parameter's name.
            tensor: its value, whole or a DTensor.
            kwargs: `exclude_key_regex`, as for `to_hf`.

        Returns:
            (checkpoint name, tensor) pairs; none for a tied parameter, which has no tensor of its own.

        Raises:
            WeightError: no rule knows it, or its checkpoint tensor needs other parameters as well.
        """
        if any(tie.native == fqn for tie in self.weight_map.ties):
            return []
        return list(self.to_hf({fqn: tensor}, **kwargs).items())

    def _steps(self, hf_state_dict: Mapping[str, Any]) -> list[Step]:
        """Group the names; experts of other ranks may be missing."""
        dropped = {name for name in hf_state_dict if self.weight_map.drops_name(name)}
        ties = {tie.native for tie in self.weight_map.ties}
        return self.weight_map.hf_steps(
            (name for name in hf_state_dict if name not in dropped and name not in ties), partial=(Stack,)
        )


def _refuse_unknown(kwargs: Mapping[str, Any]) -> None:
    # What trainers pass along to every adapter and concerns none of the rules.
    odd = sorted(set(kwargs) - {"device_mesh", "exclude_key_regex"})
    if odd:
        raise Unsupported(f"unknown option {odd[0]!r}", where="state-dict adapter", do="leave it out")


def _moves(step: Step) -> bool:
    return len(step.hf) > 1 or len(step.native) > 1 or type(step.rule).__name__ not in ("Rename", "Identity")


def _gives_views(rule: Any) -> bool:
    """Whether the checkpoint tensors of the rule are contiguous parts of the parameter."""
    return type(rule).__name__ in ("Rename", "Identity") or (isinstance(rule, Stack) and rule.dim == 0)


def _full(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _layout(
    step: Step, layouts: Mapping[str, DTensor], mesh: DeviceMesh | None
) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
    """Return how the parameter of a step is sharded: as the model has it, else its experts over `mesh`."""
    like = layouts.get(step.native[0])
    if like is not None:
        return like.device_mesh, tuple(like.placements)
    if mesh is None or not isinstance(step.rule, Stack):
        return None
    names = mesh.mesh_dim_names or ()
    at = names.index("ep") if "ep" in names else 0
    if "ep" not in names and mesh.ndim > 1:
        raise WeightError("several mesh dimensions, none of them 'ep'", where="from_hf, device_mesh", do="name one")
    return mesh, tuple(Shard(0) if i == at else Replicate() for i in range(mesh.ndim))


def _divided(full: Any, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Divide a whole tensor that every rank has; nothing is communicated."""
    if isinstance(full, DTensor):
        return full if tuple(full.placements) == tuple(placements) else full.redistribute(mesh, placements)
    shape, offset = compute_local_shape_and_global_offset(full.shape, mesh, placements)
    local = full[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))].contiguous()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def _step_to_hf(step: Step, parts: Sequence[Any]) -> dict[str, Any]:
    sharded = next((part for part in parts if isinstance(part, DTensor)), None)
    if sharded is None or not _moves(step):
        return dict(zip(step.hf, step.rule.to_hf(parts), strict=True))
    if isinstance(step.rule, Stack):
        return _unstack(step, sharded)
    mesh, placements = sharded.device_mesh, sharded.placements
    return {
        name: _divided(value, mesh, [p if _fits(p, value) else Replicate() for p in placements])
        for name, value in zip(step.hf, step.rule.to_hf([_full(part) for part in parts]), strict=True)
    }


def _fits(placement: Placement, value: Tensor) -> bool:
    return not isinstance(placement, Shard) or placement.dim < value.ndim


class _Rest:
    """How one expert of a stacked parameter is sharded: over the mesh dimensions that do not deal out experts."""

    def __init__(self, step: Step, shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
        odd = next((p for p in placements if type(p) not in (Shard, Replicate)), None)
        if odd is not None:
            raise WeightError(f"experts placed as {odd} cannot be told apart", where=step.native[0])
        local, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
        self.experts = range(offset[0], offset[0] + local[0])
        rest = [i for i, p in enumerate(placements) if not p.is_shard(0)]
        if len(rest) == mesh.ndim or not rest:
            self.mesh = mesh if rest else None
        else:
            if mesh.mesh_dim_names is None:
                raise WeightError("a mesh of several dimensions without names", where=step.native[0])
            self.mesh = mesh[tuple(mesh.mesh_dim_names[i] for i in rest)]
        self.placements = [_of_one(placements[i]) for i in rest]

    def whole_along(self, dim: int) -> list[Placement]:
        """The placements with dimension `dim` of an expert undivided."""
        return [Replicate() if p.is_shard(dim) else p for p in self.placements]


def _of_one(placement: Placement) -> Placement:
    return Shard(placement.dim - 1) if isinstance(placement, Shard) else placement


def _unstack(step: Step, parameter: DTensor) -> dict[str, Any]:
    """Give this rank's experts."""
    rule = step.rule
    assert isinstance(rule, Stack)
    cut = rule.dim + 1
    if len(rule.hf) > 1 and any(p.is_shard(cut) for p in parameter.placements):
        # Gate and up lie one after the other: a share of the rows is not a share of each.
        parameter = parameter.redistribute(
            parameter.device_mesh, [Replicate() if p.is_shard(cut) else p for p in parameter.placements]
        )
    rest = _Rest(step, parameter.shape, parameter.device_mesh, parameter.placements)
    local, kinds = parameter.to_local(), len(rule.hf)
    found: dict[str, Any] = {}
    for at, expert in enumerate(rest.experts):
        parts = local[at].split(list(rule.sizes), dim=rule.dim) if kinds > 1 else [local[at]]
        for kind, part in enumerate(parts):
            shape = list(parameter.shape[1:])
            shape[rule.dim] = rule.sizes[kind]
            found[step.hf[expert * kinds + kind]] = _wrapped(part.contiguous(), rest.mesh, rest.placements, shape)
    return found


def _wrapped(local: Tensor, mesh: DeviceMesh | None, placements: Sequence[Placement], shape: Sequence[int]) -> Any:
    if mesh is None:
        return local
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _stack(step: Step, tensors: Mapping[str, Any], spec: tuple[DeviceMesh, tuple[Placement, ...]]) -> DTensor:
    """Put this rank's experts into one parameter, sharded as `spec` says."""
    rule, (mesh, placements) = step.rule, spec
    assert isinstance(rule, Stack)
    kinds, cut = len(rule.hf), rule.dim
    some = next(tensors[name] for name in step.hf if name in tensors)
    one = list(some.shape)
    one[cut] = sum(rule.sizes)
    shape = torch.Size([rule.count, *one])
    rest = _Rest(step, shape, mesh, placements)
    whole = rest.whole_along(cut) if kinds > 1 else rest.placements
    made = []
    for expert in rest.experts:
        names = step.hf[expert * kinds : (expert + 1) * kinds]
        lost = next((name for name in names if name not in tensors), None)
        if lost is not None:
            raise WeightError("this rank holds its expert, and it is not given", where=lost)
        parts = []
        for name, size in zip(names, rule.sizes, strict=True):
            wanted = [*one]
            wanted[cut] = size
            if list(tensors[name].shape) != wanted:
                raise WeightError(f"{list(tensors[name].shape)}, the rule says {wanted}", where=name)
            parts.append(_share(tensors[name], rest.mesh, whole))
        made.append(torch.cat(parts, dim=cut) if kinds > 1 else parts[0])
    local = torch.stack(made)
    if rest.mesh is not None and list(whole) != list(rest.placements):
        sizes, starts = compute_local_shape_and_global_offset(one, rest.mesh, rest.placements)
        local = local.narrow(cut + 1, starts[cut], sizes[cut])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride)


def _share(value: Any, mesh: DeviceMesh | None, placements: Sequence[Placement]) -> Tensor:
    """Return this rank's share of one expert's tensor, given whole or sharded."""
    if mesh is None:
        return _full(value)
    return _divided(value, mesh, placements).to_local()
