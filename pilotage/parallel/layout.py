"""How the parts of a model use the tensor-parallel ranks: as one group, or as replicas of smaller groups.

A component with a data-parallel size of d is held d times: `world_size / d` neighbouring ranks divide its weights, and
each such replica does its share of the token rows. Rank r is rank `r % (world_size / d)` of replica
`r // (world_size / d)`, so that a replica's rows are neighbours wherever rows are divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch.distributed as dist

from pilotage.core.errors import ConfigError
from pilotage.parallel.group import TensorParallelGroup, get_tp_group
from pilotage.parallel.sharding import divisors_text

COMPONENTS = ("attention", "mlp", "embedding", "lm_head")


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Sizes within the tensor-parallel group.

    Attributes:
        attention_dp_size, mlp_dp_size, embedding_dp_size, lm_head_dp_size: replicas of each component.
        ep_degree: ranks of a replica of the MLPs over which whole experts are dealt out; the others of that replica
            divide each expert.
    """

    attention_dp_size: int = 1
    mlp_dp_size: int = 1
    embedding_dp_size: int = 1
    lm_head_dp_size: int = 1
    ep_degree: int = 1

    def check(self, world_size: int, where: str = "parallel layout") -> None:
        """Refuse sizes that do not fit `world_size` ranks.

        Raises:
            ConfigError: a size does not divide; names the numbers that would work.
        """
        for item in fields(self):
            size = getattr(self, item.name)
            whole = world_size // self.mlp_dp_size if item.name == "ep_degree" else world_size
            if not isinstance(size, int) or isinstance(size, bool) or size < 1 or whole % size:
                of = f"tensor_parallel_size={world_size}"
                if item.name == "ep_degree" and self.mlp_dp_size > 1:
                    of = f"the {whole} ranks that tensor_parallel_size={world_size} and mlp_dp_size leave an MLP"
                raise ConfigError(
                    f"{item.name}={size!r} does not divide {of}", where=where, do=f"use {divisors_text(max(whole, 1))}"
                )


@dataclass(frozen=True)
class Component:
    """The ranks as one component of the model sees them.

    Attributes:
        tp: ranks that divide its weights.
        dp: ranks with the same share of the weights in the other replicas.
    """

    tp: TensorParallelGroup
    dp: TensorParallelGroup


_LAYOUT = ParallelLayout()
_GROUPS: dict[tuple[int, ...], dist.ProcessGroup] = {}


def get_parallel_layout() -> ParallelLayout:
    """Return the sizes that models are built with."""
    return _LAYOUT


def set_parallel_layout(layout: ParallelLayout | None) -> None:
    """Choose the sizes of models built from now on; every rank must. None: one group for everything.

    Raises:
        ConfigError: a size does not divide the tensor-parallel group, which is set before.
    """
    global _LAYOUT
    layout = layout or ParallelLayout()
    layout.check(get_tp_group().world_size)
    _LAYOUT = layout
    for name in COMPONENTS:
        get_component(name)  # all ranks make the groups now, in the same order


def get_component(name: str) -> Component:
    """Return the ranks of a component: "attention", "mlp", "embedding" or "lm_head"."""
    whole = get_tp_group()
    sizes: Mapping[str, int] = {item: getattr(_LAYOUT, f"{item}_dp_size") for item in COMPONENTS}
    replicas = sizes[name]
    if whole.process_group is None or replicas == 1:
        return Component(tp=whole, dp=TensorParallelGroup())
    ranks = dist.get_process_group_ranks(whole.process_group)
    width = whole.world_size // replicas
    replica, place = divmod(whole.rank, width)
    return Component(
        tp=_group(ranks[replica * width : (replica + 1) * width], place),
        dp=_group(ranks[place::width], replica),
    )


def _group(ranks: list[int], rank: int) -> TensorParallelGroup:
    if len(ranks) == 1:
        return TensorParallelGroup()
    key = tuple(ranks)
    if key not in _GROUPS:
        _GROUPS[key] = dist.new_group(ranks, use_local_synchronization=True)
    return TensorParallelGroup(rank=rank, world_size=len(ranks), process_group=_GROUPS[key])
