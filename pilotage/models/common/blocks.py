"""The parts that dense decoders share: projections of attention, the gated MLP, the backbone."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import pilotage.functional as NF
from pilotage.core.tap import tap
from pilotage.models.common.backend import (
    BackendConfig,
    initialize_embedding_module,
    initialize_linear_module,
    initialize_rms_norm_module,
)
from pilotage.models.common.config import DecoderConfig
from pilotage.nn import gated_mlp, project
from pilotage.parallel import get_component, heads_per_rank, kv_shards, per_rank

Rope = tuple[Tensor, Tensor]
WANTED_ROWS = "wanted_rows"  # of a context, see `PagedContext`
AUX_HIDDEN_STATES = "aux_hidden_states"  # of a context: [..., layers * D], the stream at the depths that were asked for


class GroupedQueryAttention(nn.Module):
    """Attention with rotary positions in which groups of query heads share a key/value head.

    This holds the projections; a model's own class says in `forward` what happens between them.

    Attributes:
        layer_name: address of its cache and metadata, e.g. "layers.0.self_attn".
        num_heads, num_kv_heads: on this rank.
        window: keys that a query sees, itself included; None for all.
        softcap: bound of the scores, None for none.
        sinks: a score per query head of this rank that takes part in the softmax and carries no value, or None.
        component: the ranks of attention; a context reads from it which rows of the queries are this rank's.
        kv_cache: (keys, values) pages [P, K, C, H], once bound.
        kv_source: name of the layer whose cache this one reads and does not write; None where it has its own.
    """

    kv_cache: tuple[Tensor, Tensor]
    softcap: float | None
    sinks: Tensor | None
    kv_source: str | None = None

    def __init__(self, config: DecoderConfig, layer_idx: int, backend: BackendConfig) -> None:
        super().__init__()
        self.component = get_component("attention")
        ranks = self.component.tp.world_size
        self.layer_name = f"layers.{layer_idx}.self_attn"
        self.name = f"model.{self.layer_name}"
        self.num_heads, self.num_kv_heads = heads_per_rank(config.num_heads, config.num_kv_heads, ranks)
        self.head_size, self.scale, self.window = config.head_size, config.attn_scale, config.window(layer_idx)
        self.softcap = None
        self.register_parameter("sinks", None)
        width, kv_width = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        bias, shards = config.attention_bias, kv_shards(config.num_kv_heads, ranks)
        linear = partial(initialize_linear_module, backend.linear)
        self.combined_sizes = (width, kv_width, kv_width) if backend.combines else None
        if self.combined_sizes is not None:
            self.qkv_proj = linear(config.hidden_size, sum(self.combined_sizes), bias, shard="column")
        else:
            self.q_proj = linear(config.hidden_size, width, bias, shard="column")
            self.k_proj = linear(config.hidden_size, kv_width, bias, shard="column", num_shards=shards)
            self.v_proj = linear(config.hidden_size, kv_width, bias, shard="column", num_shards=shards)
        self.o_proj = linear(width, config.hidden_size, config.attention_output_bias, shard="row")

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [..., D] to queries [..., N, H], keys and values [..., K, H]."""
        if self.combined_sizes is not None:
            made = self.qkv_proj(x).split(self.combined_sizes, dim=-1)
        else:
            made = project(x, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (y.unflatten(-1, (-1, self.head_size)) for y in made)
        return tap(f"{self.name}.q", q), tap(f"{self.name}.k", k), tap(f"{self.name}.v", v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Any) -> Tensor:
        """Attend from q to what the context holds, k and v included, and project back to [..., D]."""
        q, k = tap(f"{self.name}.q_rope", q), tap(f"{self.name}.k_rope", k)
        options = {"scale": self.scale, "window": self.window, "softcap": self.softcap, "sinks": self.sinks}
        heads = ctx.attend(self, q, k, v, **options)
        return self.o_proj(tap(f"{self.name}.heads", heads).flatten(-2))


class GatedMLP(nn.Module):
    """The gated feed-forward block: down(activation(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig, backend: BackendConfig) -> None:
        super().__init__()
        self.activation = config.activation
        per_rank(config.intermediate_size, get_component("mlp").tp.world_size, "intermediate_size")
        linear = partial(initialize_linear_module, backend.linear, component="mlp")
        self.combined = backend.combines
        if self.combined:
            self.gate_up_proj = linear(
                config.hidden_size, 2 * config.intermediate_size, config.mlp_bias, shard="column"
            )
        else:
            self.gate_proj = linear(config.hidden_size, config.intermediate_size, config.mlp_bias, shard="column")
            self.up_proj = linear(config.hidden_size, config.intermediate_size, config.mlp_bias, shard="column")
        self.down_proj = linear(config.intermediate_size, config.hidden_size, config.mlp_bias, shard="row")

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        if self.combined:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
            return self.down_proj(NF.gated_activation(gate, up, activation=self.activation))
        return gated_mlp(x, self.gate_proj, self.up_proj, self.down_proj, activation=self.activation)


class PreNormDecoderLayer(nn.Module):
    """Attention and MLP, each on the normalised stream and added back: the layer of Llama and its relatives.

    Attributes:
        attention_class: the model's attention; called with (config, layer index, backend).
        mlp: the feed-forward block; a layer with experts puts its own in its place.
    """

    attention_class: type[GroupedQueryAttention]
    mlp: nn.Module

    def __init__(self, config: DecoderConfig, layer_idx: int, backend: BackendConfig) -> None:
        super().__init__()
        self.name = f"model.layers.{layer_idx}"
        self.self_attn = self.attention_class(config, layer_idx, backend)
        self.mlp = GatedMLP(config, backend)
        norm = partial(initialize_rms_norm_module, backend.rms_norm, config.hidden_size, eps=config.norm_eps)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()

    def forward(self, x: Tensor, rope: Rope, ctx: Any) -> Tensor:
        """x [..., D] -> [..., D]."""
        x = tap(f"{self.name}.mid", x + self.self_attn(self.input_layernorm(x), rope, ctx))
        return x + self.mlp(self.post_attention_layernorm(x))


class DecoderBackbone(nn.Module):
    """Embedding, layers and final norm; the layers are the model's.

    Args:
        config: of the model.
        backend: what the layers are built from.
        layer_class: called with (config, layer index, backend); its instances with (x, rope, context).
        embedding_scale: factor on the embedded rows, None for none.
        unit_offset: norms store their weight minus one.

    Attributes:
        aux_hidden_state_layers: after how many layers, 0 being the embedding, the stream is put into the context too,
            ascending.
    """

    aux_hidden_state_layers: tuple[int, ...] = ()

    def __init__(
        self,
        config: DecoderConfig,
        backend: BackendConfig,
        layer_class: type[nn.Module],
        *,
        embedding_scale: float | None = None,
        unit_offset: bool = False,
    ) -> None:
        super().__init__()
        self.rope, self.layer_types = config.rope, config.layer_types
        self.embed_tokens = initialize_embedding_module(
            backend.linear, config.vocab_size, config.hidden_size, scale=embedding_scale
        )
        self.layers = nn.ModuleList(layer_class(config, i, backend) for i in range(config.num_layers))
        self.norm = initialize_rms_norm_module(
            backend.rms_norm, config.hidden_size, eps=config.norm_eps, unit_offset=unit_offset
        )

    def forward(self, x: Tensor, positions: Tensor, ctx: Any) -> Tensor:
        """Run the layers: embedded tokens x [..., D] and positions [...] -> normalised hidden states [..., D]."""
        tables = {kind: NF.rope_table(positions, frequencies, x.dtype) for kind, frequencies in self.rope.items()}
        kept = [x] if 0 in self.aux_hidden_state_layers else []
        wanted = ctx.get(WANTED_ROWS) if isinstance(ctx, dict) else None
        for done, (layer, kind) in enumerate(zip(self.layers, self.layer_types, strict=True), start=1):
            with NF.only_wanted(wanted if done == len(self.layers) else None):
                x = layer(x, tables[kind], ctx)
            if done in self.aux_hidden_state_layers:
                kept.append(x)
        if kept:
            ctx[AUX_HIDDEN_STATES] = torch.cat(kept, dim=-1)
        return self.norm(x)
