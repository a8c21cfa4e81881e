"""Fallback models over several ranks: vLLM's transformers backend shards the modules, our pages hold the keys.

The backend replaces linear layers, embedding and head by parallel ones and loads each rank's part. Its attention layers
are left out: our attention function serves here as on one rank, and learns from a forward what each rank's heads are.
The proof is held against Hugging Face's own, unsharded forward, which rank 0 runs before the backend changes the
classes of transformers in this process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pilotage.core.errors import PilotageError, Unsupported
from pilotage.serving.fallback import check
from pilotage.serving.fallback.model import WRITE, FallbackForCausalLM, in_a_line

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ShardedModel(nn.Module):
    """vLLM's transformers backend with the face of a causal language model of transformers.

    Attributes:
        inner: the backend's model.
        architecture: of the checkpoint.
    """

    base_model_prefix = "model"

    inner: Any

    def __init__(self, inner: nn.Module, architecture: str) -> None:
        super().__init__()
        self.inner = inner
        self.architecture = architecture
        self.config = inner.config

    @property
    def model(self) -> Any:
        """The backbone."""
        return self.inner.model

    def get_input_embeddings(self) -> nn.Module:
        """The embedding, of which each rank has a part of the rows."""
        embedding: nn.Module = self.model.get_input_embeddings()
        return embedding

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: Tensor | None = None,
        return_dict: bool = True,
    ) -> Any:
        """Compute logits [1, kept, V] of input_ids [1, T] on every rank."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        hidden = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, return_dict=False)[0][0]
        rows = hidden if logits_to_keep is None else hidden[logits_to_keep]
        return SimpleNamespace(logits=self.inner.compute_logits(rows)[None])


def load(full: Callable[[], Any], *, max_model_len: int, free_bytes: int) -> FallbackForCausalLM:
    """Load this rank's part of vLLM's current model and prove all parts together.

    Args:
        full: loads Hugging Face's model as a whole, on rank 0 and for as long as the references take.
        max_model_len: longest request.
        free_bytes: memory to spare for the proof, see `check.draw`.

    Raises:
        Unsupported: it cannot be served this way; the same on every rank.
    """
    from vllm.config import get_current_vllm_config
    from vllm.distributed import get_tp_group

    config, group = get_current_vllm_config(), get_tp_group()
    drawn: check.Probe | Callable[[], PilotageError] | None = None
    if group.rank_in_group == 0:
        try:
            drawn = check.draw(FallbackForCausalLM(full()), max_model_len=max_model_len, free_bytes=free_bytes)
        except PilotageError as error:
            drawn = partial(type(error), error.what, where=error.where, do=error.do)
    probe = group.broadcast_object(drawn, src=0)
    if not isinstance(probe, check.Probe):  # an error, to be raised by every rank
        raise probe()
    model = FallbackForCausalLM(_build(config))
    model.proof = check.prove(model, max_model_len=max_model_len, probe=probe)
    return model


def _build(config: VllmConfig) -> ShardedModel:
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.models.transformers import TransformersForCausalLM

    class Sharded(TransformersForCausalLM):
        """The backend without attention layers of its own and without compilation."""

        def _create_attention_instances(self, prefix: str = "") -> None:
            """Leave attention to the function that the fallback registers with transformers."""

        def _decorate_for_torch_compile(self) -> None:
            """Leave the class as it is: nothing is compiled."""

    name = config.model_config.architectures[0]
    before = torch.get_default_dtype()
    dtype: Any = config.model_config.dtype
    torch.set_default_dtype(dtype)
    try:
        make: Any = Sharded
        inner = make(vllm_config=config)
        loader = get_model_loader(config.load_config)
        loader.load_weights(inner, config.model_config)
    except Exception as error:
        raise Unsupported(
            f"vLLM's transformers backend does not shard it ({in_a_line(error)})",
            where=f"{name}, tensor_parallel_size={config.parallel_config.tensor_parallel_size}",
            do="serve it on one rank, or " + WRITE,
        ) from error
    finally:
        torch.set_default_dtype(before)
    return ShardedModel(inner.eval().requires_grad_(False), name)
