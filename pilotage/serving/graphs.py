"""One graph a bucket: its input buffers, its compiled form, and how long that took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from pilotage.serving import kv
from pilotage.serving.batch import StepInputs

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class Graphs:
    """The graphs of a model.

    Attributes:
        inputs: by kind and bucket size.
        table: for each graph {"kind", "size", "seconds", "cached"}, filled by `warm_up`.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: torch.nn.Module,
        kv_cache_config: KVCacheConfig,
        *,
        token_buckets: Sequence[int],
        seq_buckets: Sequence[int],
        prefill_seqs: int,
    ) -> None:
        self.model = model
        self.eager = vllm_config.model_config.enforce_eager
        groups = kv.layer_groups(kv_cache_config, vllm_config.model_config.max_model_len)
        self.rank = torch.tensor(vllm_config.parallel_config.rank, dtype=torch.int32)
        self.inputs: dict[tuple[str, int], StepInputs] = {}
        for size in token_buckets:
            self.inputs["prefill", size] = StepInputs("prefill", size, num_rows=prefill_seqs, groups=groups)
        for size in seq_buckets:
            self.inputs["decode", size] = StepInputs("decode", size, num_rows=size, groups=groups)
        self.compiled: dict[tuple[str, int], Any] = {}
        self.table: list[dict[str, Any]] = []

    def warm_up(self) -> float:
        """Run every graph once on padding; returns the seconds spent."""
        start = time.perf_counter()
        if self.eager:
            return 0.0
        return time.perf_counter() - start

    @torch.no_grad()
    def run(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Run the graph of `inputs` on what they hold now.

        Returns:
            Logits [R, V] of the sampling positions and hidden states [T, D] after the final norm.
        """
        forward = self.compiled.get((inputs.kind, inputs.size), self.model)
        return forward(
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            attn_metadata=inputs.attn_metadata,
            sampling_positions=inputs.sampling_positions,
            rank=self.rank,
            return_hidden=True,
        )
