"""DeepSeek-V3: the architecture.

Latent attention (MLA, arXiv:2405.04434): keys and values of all heads are made from one narrow row per token, and that
row is what is cached. The key's half of the projection that makes them is applied to the queries instead and the
value's half to what attention returns, so that attention itself runs over the cached rows as over one key head.
Experts (arXiv:2412.19437; transformers modeling_deepseek_v3.py): sigmoid scores with a bias that only takes part in
the choice, first of groups, then of experts in these, beside experts that every token goes to.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import pilotage.functional as NF
from pilotage.core.tap import tap
from pilotage.models.common import (
    BackendConfig,
    CausalLM,
    DecoderBackbone,
    GatedMLP,
    initialize_linear_module,
    initialize_lm_head_module,
    initialize_rms_norm_module,
)
from pilotage.models.common.face import training_face
from pilotage.models.deepseek_v3.config import DeepseekV3Config
from pilotage.models.deepseek_v3.weights import weight_map
from pilotage.nn import Experts, Router, pack
from pilotage.parallel import enter, get_component, per_rank

_LATENT_NORM_EPS = 1e-6  # of both latents, whatever `rms_norm_eps` says


class LatentAttention(nn.Module):
    """Attention whose keys and values are made from a latent row.

    Attributes:
        layer_name: address of its cache and metadata, e.g. "layers.0.self_attn".
        component: the ranks of attention.
        num_heads: query heads on this rank.
        num_kv_heads: 1, the cached row, on every rank.
        head_size: of the cached row, the latent and then the rotated channels that all heads share.
        window: None; every token sees all before it.
        one_row: what is cached is key and value at once.
        kv_cache: pages of the rows, once bound.
    """

    one_row = True
    kv_cache: tuple[Tensor, Tensor]

    def __init__(self, config: DeepseekV3Config, layer_idx: int, backend: BackendConfig) -> None:
        super().__init__()
        self.layer_name = f"layers.{layer_idx}.self_attn"
        self.name = f"model.{self.layer_name}"
        self.component = get_component("attention")
        self.num_heads = per_rank(config.num_heads, self.component.tp.world_size, "num_attention_heads")
        self.nope, self.rotated, self.latent = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
        self.num_kv_heads, self.head_size, self.window = 1, self.latent + self.rotated, None
        self.scale, self.interleaved = config.attn_scale, config.rope_interleave
        linear = partial(initialize_linear_module, backend.linear)
        norm = partial(initialize_rms_norm_module, backend.rms_norm, eps=_LATENT_NORM_EPS)
        hidden, bias, width = config.hidden_size, config.attention_bias, config.num_heads * (self.nope + self.rotated)
        self.q_lora_rank = config.q_lora_rank
        if config.q_lora_rank is None:
            self.q_proj = linear(hidden, width, shard="column")
        else:
            self.q_a_proj = linear(hidden, config.q_lora_rank, bias)
            self.q_a_layernorm = norm(config.q_lora_rank)
            self.q_b_proj = linear(config.q_lora_rank, width, shard="column")
        self.kv_a_proj_with_mqa = linear(hidden, self.head_size, bias)
        self.kv_a_layernorm = norm(self.latent)
        out = config.num_heads * (self.nope + config.v_head_dim)
        self.kv_b_proj = linear(self.latent, out, shard="column")
        self.o_proj = linear(config.num_heads * config.v_head_dim, hidden, config.attention_output_bias, shard="row")

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], ctx: Any) -> Tensor:
        """Attend: x [..., D] -> [..., D]."""
        q = self.q_proj(x) if self.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        plain, turned = q.unflatten(-1, (self.num_heads, -1)).split([self.nope, self.rotated], dim=-1)
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.latent, self.rotated], dim=-1)
        # Each rank made the rows that it has; attention wants all of them.
        latent, shared = enter(torch.cat((self.kv_a_layernorm(latent), shared), dim=-1)).split(
            [self.latent, self.rotated], dim=-1
        )
        weight: Any = self.kv_b_proj.weight
        turned, shared = NF.rotary(self._pairs(turned), self._pairs(shared)[..., None, :], *rope)
        q = tap(f"{self.name}.q_rope", torch.cat((plain, turned), dim=-1))
        plain, turned = q.split([self.nope, self.rotated], dim=-1)
        q = torch.cat((NF.latent_queries(plain, weight), turned), dim=-1)
        row = torch.cat((latent[..., None, :], shared), dim=-1)
        # What attention makes of the rotated channels as values is not looked at.
        heads = ctx.attend(self, q, row, row, scale=self.scale)[..., : self.latent]
        heads = NF.latent_values(heads, weight, skip=self.nope)
        return self.o_proj(tap(f"{self.name}.heads", heads).flatten(-2))

    def _pairs(self, x: Tensor) -> Tensor:
        """Put the channels that are rotated together half a head apart, where they are neighbours: [..., R]."""
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if self.interleaved else x


class DeepseekV3MoE(nn.Module):
    """Routed experts, and one MLP for the shared ones."""

    def __init__(self, config: DeepseekV3Config, layer_idx: int, backend: BackendConfig) -> None:
        super().__init__()
        self.name = f"model.layers.{layer_idx}.mlp"
        self.top_k, self.renormalize, self.scale = (
            config.num_experts_per_token,
            config.norm_topk_prob,
            config.routed_scaling,
        )
        self.num_groups, self.top_groups = config.num_expert_groups, config.num_expert_groups_per_token
        self.gate = Router(config.hidden_size, config.num_experts, fp32=True, correction=True)
        self.experts = Experts(
            config.num_experts,
            config.hidden_size,
            config.moe_intermediate_size,
            top_k=self.top_k,
            activation=config.activation,
            name=self.name,
        )
        width = config.moe_intermediate_size * config.num_shared_experts
        self.shared_experts = GatedMLP(dataclasses.replace(config, intermediate_size=width), backend)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        logits = tap(f"{self.name}.router", self.gate(x))
        affinities = NF.expert_affinities(
            logits,
            top_k=self.top_k,
            rule="sigmoid_groups",
            renormalize=self.renormalize,
            correction=self.gate.e_score_correction_bias,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            scale=self.scale,
        )
        return tap(f"{self.name}.experts", self.experts(x, affinities)) + self.shared_experts(x)


class DeepseekV3DecoderLayer(nn.Module):
    """Attention and experts (in the first layers a dense MLP), each on the normalised stream and added back."""

    def __init__(self, config: DeepseekV3Config, layer_idx: int, backend: BackendConfig) -> None:
        super().__init__()
        self.name = f"model.layers.{layer_idx}"
        self.self_attn = LatentAttention(config, layer_idx, backend)
        sparse = config.mlp_layer_types[layer_idx] == "sparse"
        self.mlp = DeepseekV3MoE(config, layer_idx, backend) if sparse else GatedMLP(config, backend)
        norm = partial(initialize_rms_norm_module, backend.rms_norm, config.hidden_size, eps=config.norm_eps)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], ctx: Any) -> Tensor:
        """x [..., D] -> [..., D]."""
        x = tap(f"{self.name}.mid", x + self.self_attn(self.input_layernorm(x), rope, ctx))
        return x + self.mlp(self.post_attention_layernorm(x))


class DeepseekV3ForCausalLM(CausalLM):
    """The backbone of these layers, and the head."""

    config_class = DeepseekV3Config
    weight_map = staticmethod(weight_map)
    serves_8bit_cache = False  # one scale for a row that is a latent and rotated channels: no checkpoint says which

    def __init__(
        self,
        config: DeepseekV3Config,
        backend: BackendConfig | None = None,
        layer_class: type[nn.Module] = DeepseekV3DecoderLayer,
    ) -> None:
        super().__init__(config, backend)
        self.model = DecoderBackbone(config, self.backend, layer_class)
        self.lm_head = initialize_lm_head_module(self.backend.linear, config.hidden_size, config.vocab_size)

    def pack(self) -> None:
        """Let gate and up projections share one product; after `to` or `load_state_dict`, pack again."""
        for layer in self.model.layers:
            mlp = getattr(layer.mlp, "shared_experts", layer.mlp)
            pack(mlp.gate_proj, mlp.up_proj)
        if self.config.tie_word_embeddings and self.lm_head.weight.shape == self.model.embed_tokens.weight.shape:
            self.lm_head.weight = self.model.embed_tokens.weight


__getattr__ = training_face(__name__)
