"""Llama 3: the architecture.

Pre-norm decoder with grouped-query attention, rotary positions and a SwiGLU MLP (Llama 3 herd, arXiv:2407.21783;
transformers modeling_llama.py). Module names and weight layouts are Hugging Face's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

import pilotage.functional as NF
from pilotage.core.tap import tap
from pilotage.models.common import (
    BackendConfig,
    CausalLM,
    initialize_embedding_module,
    initialize_linear_module,
    initialize_lm_head_module,
    initialize_rms_norm_module,
)
from pilotage.models.llama3.config import Llama3Config
from pilotage.models.llama3.weights import weight_map
from pilotage.nn import gated_mlp, project
from pilotage.parallel import get_tp_group, heads_per_rank, kv_shards


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: Llama3Config, layer_idx: int, backend: BackendConfig) -> None:
        super().__init__()
        ranks = get_tp_group().world_size
        self.layer_name = f"layers.{layer_idx}.self_attn"
        self.num_heads, self.num_kv_heads = heads_per_rank(config.num_heads, config.num_kv_heads, ranks)
        self.head_size, self.window = config.head_size, None
        self.scale = config.head_size**-0.5
        width, kv_width = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        bias, shards = config.attention_bias, kv_shards(config.num_kv_heads, ranks)
        linear = partial(initialize_linear_module, backend.linear)
        self.q_proj = linear(config.hidden_size, width, bias, shard="column")
        self.k_proj = linear(config.hidden_size, kv_width, bias, shard="column", num_shards=shards)
        self.v_proj = linear(config.hidden_size, kv_width, bias, shard="column", num_shards=shards)
        self.o_proj = linear(width, config.hidden_size, config.attention_output_bias, shard="row")

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], ctx: Any) -> Tensor:
        """Attend: x [..., D] -> [..., D]."""
        q, k, v = (y.unflatten(-1, (-1, self.head_size)) for y in project(x, self.q_proj, self.k_proj, self.v_proj))
        q, k = NF.rotary(q, k, *rope)
        heads = ctx.attend(self, q, k, v, scale=self.scale)
        return self.o_proj(heads.flatten(-2))


class LlamaMLP(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, config: Llama3Config, backend: BackendConfig) -> None:
        super().__init__()
        self.activation = config.activation
        linear = partial(initialize_linear_module, backend.linear)
        self.gate_proj = linear(config.hidden_size, config.intermediate_size, config.mlp_bias, shard="column")
        self.up_proj = linear(config.hidden_size, config.intermediate_size, config.mlp_bias, shard="column")
        self.down_proj = linear(config.intermediate_size, config.hidden_size, config.mlp_bias, shard="row")

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        return gated_mlp(x, self.gate_proj, self.up_proj, self.down_proj, activation=self.activation)


class LlamaDecoderLayer(nn.Module):
    """Attention and MLP, each on the normalised stream and added back."""

    def __init__(self, config: Llama3Config, layer_idx: int, backend: BackendConfig) -> None:
        super().__init__()
        self.name = f"model.layers.{layer_idx}"
        self.self_attn = LlamaAttention(config, layer_idx, backend)
        self.mlp = LlamaMLP(config, backend)
        norm = partial(initialize_rms_norm_module, backend.rms_norm, config.hidden_size, eps=config.norm_eps)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], ctx: Any) -> Tensor:
        """x [..., D] -> [..., D]."""
        x = x + tap(f"{self.name}.self_attn", self.self_attn(self.input_layernorm(x), rope, ctx))
        x = x + tap(f"{self.name}.mlp", self.mlp(self.post_attention_layernorm(x)))
        return tap(self.name, x)

    def packable(self) -> list[tuple[nn.Module, ...]]:
        """The projections that share their input."""
        attention, mlp = self.self_attn, self.mlp
        return [(attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)]


class LlamaModel(nn.Module):
    """The backbone: embedding, layers, final norm."""

    def __init__(
        self, config: Llama3Config, backend: BackendConfig, layer_class: type[nn.Module] = LlamaDecoderLayer
    ) -> None:
        super().__init__()
        self.rope = config.rope
        self.embed_tokens = initialize_embedding_module(backend.linear, config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layer_class(config, i, backend) for i in range(config.num_layers))
        self.norm = initialize_rms_norm_module(backend.rms_norm, config.hidden_size, eps=config.norm_eps)

    def forward(self, x: Tensor, positions: Tensor, ctx: Any) -> Tensor:
        """Run the layers: embedded tokens x [..., D] and positions [...] -> normalised hidden states [..., D]."""
        rope = NF.rope_table(positions, self.rope, x.dtype)
        for layer in self.layers:
            x = layer(x, rope, ctx)
        return tap("model.norm", self.norm(x))


class LlamaForCausalLM(CausalLM):
    """Llama 3 with its head."""

    config_class = Llama3Config
    weight_map = staticmethod(weight_map)

    def __init__(self, config: Llama3Config, backend: BackendConfig | None = None) -> None:
        super().__init__(config, backend)
        self.model = LlamaModel(config, self.backend)
        self.lm_head = initialize_lm_head_module(self.backend.linear, config.hidden_size, config.vocab_size)
