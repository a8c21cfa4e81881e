"""How this engine's ranks are used: component data parallelism, expert parallelism, replicas of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pilotage.core.config import TargetConfig
from pilotage.core.errors import ConfigError, Unsupported
from pilotage.parallel import ParallelLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SECTION = "additional_config.pilotage"


def parallel_layout(vllm_config: VllmConfig) -> ParallelLayout:
    """Read the sizes within the tensor-parallel group from the configurations.

    With `enable_expert_parallel` and no `ep_degree`, experts are dealt out over all ranks of a replica of the MLPs.

    Raises:
        ConfigError: a size does not divide the ranks, or experts shall be dealt out and vLLM was not told; names the
            numbers that would work.
    """
    config = TargetConfig.from_additional_config(vllm_config.additional_config)
    parallel = vllm_config.parallel_config
    ranks, degree = parallel.tensor_parallel_size, config.ep_degree
    if not parallel.enable_expert_parallel:
        if degree is not None and degree > 1:
            raise ConfigError(
                f"ep_degree={degree} without expert parallelism",
                where=_SECTION,
                do="give enable_expert_parallel=True (--enable-expert-parallel), or ep_degree=1",
            )
        degree = 1
    replicas = config.mlp_dp_size
    layout = ParallelLayout(
        attention_dp_size=config.attention_dp_size,
        mlp_dp_size=replicas,
        embedding_dp_size=config.embedding_dp_size,
        lm_head_dp_size=config.lm_head_dp_size,
        ep_degree=degree if degree is not None else max(1, ranks // replicas),
    )
    layout.check(ranks, where=_SECTION)
    return layout


def require_own_model(layout: ParallelLayout, architectures: list[str]) -> None:
    """Refuse sizes for a model whose modules are not ours and would not read them.

    Raises:
        Unsupported: any size but 1.
    """
    if layout != ParallelLayout():
        raise Unsupported(
            f"{', '.join(architectures)} has no model package: its layers cannot be replicated or dealt out",
            where=_SECTION,
            do="remove the sizes, or port the model with `pilotage new`",
        )


def ranks_on_this_machine(vllm_config: VllmConfig) -> int:
    """Count the processes that compute here, over all replicas of the engine: they share cores and memory."""
    parallel = vllm_config.parallel_config
    return parallel.world_size * max(1, parallel.data_parallel_size_local)
