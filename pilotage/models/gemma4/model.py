"""Gemma 4 (text): the architecture.

Sliding-window and full-attention layers in a pattern; full ones have larger heads, fewer of them for keys and values,
may take values from the key projection, and rotate a part of the head at frequencies laid out over all of it. Queries,
keys and values are normalised per head and scores are not scaled. The last layers attend to the keys and values of an
earlier layer of their kind. Every layer gets an input of its own for each token, beside the residual stream, and ends
in a scalar factor. Some models run experts beside the dense block (transformers modeling_gemma4.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import pilotage.functional as NF
from pilotage.core.errors import Unsupported
from pilotage.core.tap import tap
from pilotage.models.common import (
    BackendConfig,
    CausalLM,
    DecoderBackbone,
    GatedMLP,
    GroupedQueryAttention,
    PagedContext,
    initialize_embedding_module,
    initialize_linear_module,
    initialize_lm_head_module,
    initialize_rms_norm_module,
)
from pilotage.models.common.face import training_face
from pilotage.models.gemma4.config import Gemma4Config
from pilotage.models.gemma4.weights import weight_map
from pilotage.nn import Experts, Router, pack, project

Rope = tuple[Tensor, Tensor]


def _norm(config: Gemma4Config, backend: BackendConfig, size: int | None = None) -> nn.Module:
    return initialize_rms_norm_module(
        backend.rms_norm, size or config.hidden_size, eps=config.norm_eps, round_once=True
    )


def _plain_norm(x: Tensor, eps: float) -> Tensor:
    """Normalise x [..., H] without a weight."""
    return NF.rms_norm(x, x.new_ones(x.shape[-1]), eps=eps, round_once=True)


class Gemma4Attention(GroupedQueryAttention):
    """Grouped-query attention over a layer's own keys and values, or an earlier layer's."""

    def __init__(self, config: Gemma4Config, layer_idx: int, backend: BackendConfig) -> None:
        super().__init__(config.of_layer(layer_idx), layer_idx, backend)
        self.eps, self.scale = config.norm_eps, 1.0
        source = config.kv_source(layer_idx)
        self.kind = config.layer_types[layer_idx]
        self.q_norm = _norm(config, backend, self.head_size)
        if source != layer_idx:
            self.kv_source = f"layers.{source}.self_attn"
            del self.k_proj, self.v_proj
            return
        self.k_norm = _norm(config, backend, self.head_size)
        if config.k_eq_v and self.window is None:
            del self.v_proj

    def projections(self) -> list[nn.Module]:
        """The projections of the layer's input that it has, of q, k and v in this order."""
        return [getattr(self, name) for name in ("q_proj", "k_proj", "v_proj") if hasattr(self, name)]

    def forward(self, x: Tensor, rope: Rope, ctx: Any, earlier: Any) -> Tensor:
        """Attend: x [..., D] -> [..., D].

        Args:
            x: normalised rows.
            rope: cos and sin of the layer's kind.
            ctx: the attention context.
            earlier: `KeysAndValues` of this step; read by layers without their own, else written.
        """
        q, *own = (y.unflatten(-1, (-1, self.head_size)) for y in project(x, *self.projections()))
        q = self.q_norm(tap(f"{self.name}.q", q))
        if self.kv_source is not None:
            k, v = earlier[self.kind]
            q, _ = NF.rotary(q, k, *rope)
        else:
            k = tap(f"{self.name}.k", own[0])
            v = tap(f"{self.name}.v", own[1]) if len(own) > 1 else k
            q, k = NF.rotary(q, self.k_norm(k), *rope)
            v = tap(f"{self.name}.v_norm", _plain_norm(v, self.eps))
            earlier[self.kind] = (k, v)
        return self.attend(q, k, v, ctx)


class KeysAndValues:
    """Keys and values of a step by kind of layer; no dictionary, of which `fully_shard` hands each layer a copy."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Tensor, Tensor]] = {}

    def __getitem__(self, kind: str) -> tuple[Tensor, Tensor]:
        return self._found[kind]

    def __setitem__(self, kind: str, states: tuple[Tensor, Tensor]) -> None:
        self._found[kind] = states


class Gemma4Router(nn.Module):
    """Scores of the experts: of rows normalised and scaled per channel; each expert has a factor of its own."""

    def __init__(self, config: Gemma4Config, num_experts: int, name: str) -> None:
        super().__init__()
        self.name, self.top_k, self.eps = name, config.num_experts_per_token or 1, config.norm_eps
        self.proj = Router(config.hidden_size, num_experts)
        self.scale = nn.Parameter(torch.ones(config.hidden_size))
        self.per_expert_scale = nn.Parameter(torch.ones(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> affinities [..., E]."""
        rows = _plain_norm(x, self.eps) * self.scale * x.shape[-1] ** -0.5
        logits = tap(f"{self.name}.router", self.proj(rows))
        affinities = NF.expert_affinities(logits, top_k=self.top_k, rule="softmax_topk", renormalize=True)
        return affinities * self.per_expert_scale


class Gemma4DecoderLayer(nn.Module):
    """Attention and feed-forward, each normalised before and after and added back; then the layer's own input."""

    def __init__(self, config: Gemma4Config, layer_idx: int, backend: BackendConfig) -> None:
        super().__init__()
        self.name = f"model.layers.{layer_idx}"
        self.self_attn = Gemma4Attention(config, layer_idx, backend)
        self.mlp = GatedMLP(config.of_layer(layer_idx), backend)
        norm = partial(_norm, config, backend)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()
        self.layer_scalar = nn.Parameter(torch.ones(1))
        self.has_experts, self.activation, size = (
            bool(config.num_experts),
            config.activation,
            config.per_layer_input_size,
        )
        if config.num_experts:
            self.router = Gemma4Router(config, config.num_experts, self.name)
            self.experts = Experts(
                config.num_experts,
                config.hidden_size,
                config.moe_intermediate_size or config.intermediate_size,
                top_k=self.router.top_k,
                activation=config.activation,
            )
            self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = norm(), norm()
            self.pre_feedforward_layernorm_2 = norm()
        if size:
            self.per_layer_input_gate = initialize_linear_module(backend.linear, config.hidden_size, size)
            self.per_layer_projection = initialize_linear_module(backend.linear, size, config.hidden_size)
            self.post_per_layer_input_norm = norm()

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        ctx: Any,
        earlier: Any,
        per_layer_input: Tensor | None = None,
    ) -> Tensor:
        """x [..., D] -> [..., D]; per_layer_input [..., P], `earlier`: see `Gemma4Attention`."""
        attended = self.self_attn(self.input_layernorm(x), rope, ctx, earlier)
        x = tap(f"{self.name}.mid", x + self.post_attention_layernorm(attended))
        x = x + self.post_feedforward_layernorm(self._feed_forward(x))
        if per_layer_input is not None:
            gated = NF.gated_activation(self.per_layer_input_gate(x), per_layer_input, activation=self.activation)
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return x * self.layer_scalar

    def _feed_forward(self, x: Tensor) -> Tensor:
        dense = self.mlp(self.pre_feedforward_layernorm(x))
        if not self.has_experts:
            return dense
        sparse = self.experts(self.pre_feedforward_layernorm_2(x), self.router(x))
        sparse = tap(f"{self.name}.experts", sparse)
        return self.post_feedforward_layernorm_1(dense) + self.post_feedforward_layernorm_2(sparse)


class Gemma4Backbone(DecoderBackbone):
    """The layers, and what each of them gets beside the residual stream."""

    def __init__(self, config: Gemma4Config, backend: BackendConfig, layer_class: type[nn.Module]) -> None:
        super().__init__(config, backend, layer_class, embedding_scale=config.embedding_scale)
        self.norm = _norm(config, backend)
        self.per_layer_size = size = config.per_layer_input_size
        if size:
            width = config.num_layers * size
            self.embed_tokens_per_layer = initialize_embedding_module(
                backend.linear, config.per_layer_vocab_size, width, scale=size**0.5
            )
            self.per_layer_model_projection = initialize_linear_module(backend.linear, config.hidden_size, width)
            self.per_layer_projection_norm = _norm(config, backend, size)

    def forward(self, x: Tensor, positions: Tensor, ctx: Any) -> Tensor:
        """Run the layers: embedded tokens x [..., D] and positions [...] -> normalised hidden states [..., D]."""
        tables = {kind: NF.rope_table(positions, frequencies, x.dtype) for kind, frequencies in self.rope.items()}
        earlier = KeysAndValues()
        inputs = self.per_layer_inputs(x, ctx["input_ids"]) if self.per_layer_size else None
        for index, (layer, kind) in enumerate(zip(self.layers, self.layer_types, strict=True)):
            x = layer(x, tables[kind], ctx, earlier, None if inputs is None else inputs[..., index, :])
        return self.norm(x)

    def per_layer_inputs(self, x: Tensor, input_ids: Tensor) -> Tensor:
        """Make each layer's input out of embedded tokens x [..., D] and their ids [...] -> [..., L, P]."""
        by_token = self.embed_tokens_per_layer(input_ids).unflatten(-1, (-1, self.per_layer_size))
        by_row = self.per_layer_model_projection(x) * x.shape[-1] ** -0.5
        by_row = self.per_layer_projection_norm(by_row.unflatten(-1, (-1, self.per_layer_size)))
        return (by_row + by_token) * 2.0**-0.5


class Gemma4ForCausalLM(CausalLM):
    """The backbone of these layers, and the head."""

    config_class = Gemma4Config
    weight_map = staticmethod(weight_map)

    def __init__(
        self,
        config: Gemma4Config,
        backend: BackendConfig | None = None,
        layer_class: type[nn.Module] = Gemma4DecoderLayer,
    ) -> None:
        super().__init__(config, backend)
        self.model = Gemma4Backbone(config, self.backend, layer_class)
        self.lm_head = initialize_lm_head_module(self.backend.linear, config.hidden_size, config.vocab_size)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attn_metadata: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Compute logits; see `CausalLM.forward`. Layers look at the token ids as well.

        Raises:
            Unsupported: embedded prompts for a model whose layers get an input by token.
        """
        if kwargs.get("inputs_embeds") is not None and self.config.per_layer_input_size:
            raise Unsupported(
                "a prompt of embeddings has no token ids, which this model's layers need",
                where="prompt_embeds",
                do="send token ids",
            )
        context = PagedContext(attn_metadata)
        context["positions"], context["input_ids"] = positions, input_ids
        return super().forward(input_ids, positions, context, *args, **kwargs)

    def attention_layers(self) -> list[Any]:
        """The attention modules that have keys and values of their own, in layer order."""
        return [layer.self_attn for layer in self.model.layers if layer.self_attn.kv_source is None]

    def bind_kv_cache(self, kv_caches: Mapping[str, Sequence[Tensor]]) -> None:
        """Give every layer its pages, or those of the layer that it reads; see `CausalLM.bind_kv_cache`."""
        super().bind_kv_cache(kv_caches)
        owners = {layer.layer_name: layer for layer in self.attention_layers()}
        for layer in self.model.layers:
            if layer.self_attn.kv_source is not None:
                layer.self_attn.kv_cache = owners[layer.self_attn.kv_source].kv_cache

    def pack(self) -> None:
        """Let projections that share their input share one product; after `to` or `load_state_dict`, pack again."""
        for layer in self.model.layers:
            if len(projections := layer.self_attn.projections()) > 1:
                pack(*projections)
            pack(layer.mlp.gate_proj, layer.mlp.up_proj)
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight


__getattr__ = training_face(__name__)
