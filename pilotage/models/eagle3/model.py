"""EAGLE3's draft head (arXiv:2503.01840): the architecture.

The served model's hidden states at a few depths are projected to one row a token. A single Llama layer reads that row
beside the embedding of the next token, and its head names the token after that; its own output takes the place of the
served model's hidden states for the tokens that do not exist yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import pilotage.functional as NF
from pilotage.models.common import (
    BackendConfig,
    initialize_embedding_module,
    initialize_linear_module,
    initialize_lm_head_module,
    initialize_rms_norm_module,
)
from pilotage.models.common.blocks import GatedMLP, Rope
from pilotage.models.common.context import PagedContext
from pilotage.models.common.kv import KVSpec, LayerSpec
from pilotage.models.eagle3.config import Eagle3Config
from pilotage.models.llama3.model import LlamaAttention
from pilotage.nn import pack


class Eagle3Attention(LlamaAttention):
    """Llama's attention over rows twice as wide: the next token's embedding, then the hidden state."""

    def __init__(self, config: Eagle3Config, layer_idx: int, backend: BackendConfig) -> None:
        super().__init__(dataclasses.replace(config, hidden_size=2 * config.hidden_size), layer_idx, backend)
        width, bias = config.num_heads * config.head_size, config.attention_output_bias
        self.o_proj = initialize_linear_module(backend.linear, width, config.hidden_size, bias, shard="row")


class Eagle3Layer(nn.Module):
    """One decoder layer whose attention reads two normalised rows a token."""

    def __init__(self, config: Eagle3Config, backend: BackendConfig) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = Eagle3Attention(config, 0, backend)
        self.mlp = GatedMLP(config, backend)
        norm = partial(initialize_rms_norm_module, backend.rms_norm, config.hidden_size, eps=config.norm_eps)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = norm(), norm(), norm()

    def forward(self, embedded: Tensor, hidden: Tensor, rope: Rope, ctx: Any) -> Tensor:
        """Embedded tokens and hidden states [T, D] -> [T, D]."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        x = residual + self.self_attn(torch.cat((self.input_layernorm(embedded), normed), dim=-1), rope, ctx)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3DraftHead(nn.Module):
    """Projection, layer, norm and head.

    Args:
        config: of the checkpoint.
        num_states: hidden states of the served model that a token brings.
        vocab_size: of the served model.
        own_embedding: whether the checkpoint has one; else the served model's is to be put in `embed_tokens`.
        backend: what the layers are built from.

    Attributes:
        hidden_states_width: what `forward` takes beside tokens, D.
        target_ids: [draft vocabulary] the served model's token of each of the head's; None where they are the same.
    """

    embed_tokens: nn.Module
    target_ids: Tensor | None

    def __init__(
        self,
        config: Eagle3Config,
        *,
        num_states: int,
        vocab_size: int,
        own_embedding: bool,
        backend: BackendConfig | None = None,
    ) -> None:
        super().__init__()
        backend = backend or BackendConfig()
        self.config, self.vocab_size, self.hidden_states_width = config, vocab_size, config.hidden_size
        self.fc = initialize_linear_module(backend.linear, num_states * config.target_hidden_size, config.hidden_size)
        self.layer = Eagle3Layer(config, backend)
        self.norm = initialize_rms_norm_module(backend.rms_norm, config.hidden_size, eps=config.norm_eps)
        self.lm_head = initialize_lm_head_module(backend.linear, config.hidden_size, config.draft_vocab_size)
        if own_embedding:
            self.embed_tokens = initialize_embedding_module(backend.linear, vocab_size, config.hidden_size)
        self.register_buffer("target_ids", None, persistent=False)

    def combine(self, aux_hidden_states: Tensor) -> Tensor:
        """Project the served model's hidden states, [T, states * D'], to the rows that `forward` takes, [T, D]."""
        return self.fc(aux_hidden_states)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attn_metadata: Mapping[str, Any],
        sampling_positions: Tensor,
        hidden_states: Tensor,
        rank: int | Tensor | None = None,
        return_hidden: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Compute logits of the sampled rows for a step of flat tokens.

        Args:
            input_ids: [T], the token after each position.
            positions: [T] int32.
            attn_metadata: see `PagedContext`.
            sampling_positions: [R] rows of T that need logits.
            hidden_states: [T, D], of the served model (combined) or this head's own, at each position.
            rank, return_hidden: of the runner's contract; both outputs are always returned.

        Returns:
            Logits [R, V] over the served model's vocabulary, minus infinity for tokens that the head cannot name, and
            the hidden states [T, D] to go on from.
        """
        context = PagedContext(attn_metadata, positions=positions)
        embedded = self.embed_tokens(input_ids)
        rope = NF.rope_table(positions, self.config.rope["full_attention"], embedded.dtype)
        x = self.layer(embedded, hidden_states, rope, context)
        normed = self.norm(x)
        return self.compute_logits(normed[sampling_positions]), normed if self.config.norm_output else x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Project normalised rows [rows, D] to logits [rows, V] of the served model's vocabulary."""
        logits = self.lm_head(hidden)
        if self.target_ids is None:
            return logits
        wide = logits.new_full((logits.shape[0], self.vocab_size), float("-inf"))
        return wide.index_copy(1, self.target_ids, logits)

    def get_kv_spec(self) -> KVSpec:
        """Say what the layer caches."""
        attention, dtype = self.layer.self_attn, self.lm_head.weight.dtype
        assert isinstance(dtype, torch.dtype)
        return KVSpec([LayerSpec(attention.layer_name, attention.num_kv_heads, attention.head_size, dtype)])

    def bind_kv_cache(self, kv_caches: Mapping[str, Sequence[Tensor]]) -> None:
        """Give the layer its pages."""
        ((_, (k_cache, v_cache)),) = kv_caches.items()
        self.layer.self_attn.kv_cache = (k_cache, v_cache)

    def pack(self) -> None:
        """Let projections that share their input share one product."""
        attention, mlp = self.layer.self_attn, self.layer.mlp
        pack(attention.q_proj, attention.k_proj, attention.v_proj)
        pack(mlp.gate_proj, mlp.up_proj)
