"""What every causal language model does around its layers when it serves: the runner's side of the contract."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

import pilotage.functional as NF
from pilotage import weights
from pilotage.core.errors import ConfigError, Unsupported
from pilotage.core.tap import tapped
from pilotage.models.common.backend import BackendConfig
from pilotage.models.common.blocks import AUX_HIDDEN_STATES
from pilotage.models.common.context import PagedContext
from pilotage.models.common.kv import KVSpec, LayerSpec
from pilotage.nn import pack
from pilotage.parallel import enter, get_tp_group, rows_divided


class CausalLM(nn.Module):
    """Base of the models: forward for flat tokens, cache binding, loading.

    A subclass sets `config_class` and `weight_map`, and in its constructor `model` (the backbone: called with token
    rows [T, D], positions and a context) and `lm_head`.

    Attributes:
        config_class: has `from_configs(hf_config, neuron_config)`; its instances have `logit_softcap`.
        weight_map: from a config to the WeightMap of its checkpoints.
    """

    config_class: ClassVar[Any]
    weight_map: ClassVar[Any]
    model: Any
    lm_head: Any
    # Which parameters of a request the graph applies where it samples; see `core.config.TargetConfig`.
    on_device_sampling: frozenset[str] = frozenset({"temperature", "top_k", "top_p"})
    # Whether the hidden states of single layers can be handed out for an EAGLE3 head: vLLM's SupportsEagle3.
    supports_eagle3: ClassVar[bool] = False
    # Of keys and values where it is not that of the weights; 8-bit floats need the layers' scales.
    kv_cache_dtype: torch.dtype | None = None
    # Whether attention goes through the context with the keys and values that are cached, which can then be rounded.
    serves_8bit_cache: ClassVar[bool] = True

    def __init__(self, config: Any, backend: BackendConfig | None = None) -> None:
        super().__init__()
        self.config = config
        self.backend = backend or BackendConfig()

    @classmethod
    def from_configs(cls, hf_config: Any, neuron_config: Any = None) -> Self:
        """Build the model for one rank, in the current default dtype and device.

        Args:
            hf_config: the Hugging Face config.
            neuron_config: the target's `TargetConfig`, or None for its defaults.

        Raises:
            Unsupported: a value that the model does not implement, named by its key.
        """
        return cls(cls.config_class.from_configs(hf_config, neuron_config))

    @classmethod
    def from_config(cls, config: Any, backend: BackendConfig | None = None, **kwargs: Any) -> Any:
        """Build the class that trains this architecture, `ModelClass` of the package's `hf.py`; see there."""
        return cls._training_class().from_config(config, backend, **kwargs)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load the class that trains this architecture, `ModelClass` of the package's `hf.py`; see there."""
        return cls._training_class().from_pretrained(*args, **kwargs)

    @classmethod
    def _training_class(cls) -> Any:
        return importlib.import_module(f"{cls.__module__.rpartition('.')[0]}.hf").ModelClass

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attn_metadata: Mapping[str, Any],
        sampling_positions: Tensor,
        sampling_params: Tensor | None = None,
        spec_decode_metadata: Any = None,
        logit_mask: Tensor | None = None,
        rank: int | Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_token_ids: Tensor | None = None,
        return_hidden: bool = False,
        sampling_noise: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Compute logits of the sampled rows for a step of flat tokens.

        Args:
            input_ids: [T] integers, padded to the bucket.
            positions: [T] int32.
            attn_metadata: see `PagedContext`.
            sampling_positions: [num_reqs] rows of T that need logits.
            sampling_params: [num_reqs, 3] fp32, top_k, top_p and temperature; the graph then samples. None: it does
                not.
            spec_decode_metadata: None; rows to verify are given by `sampling_positions`.
            logit_mask: [num_reqs, V] bool, False for tokens that may not be sampled; None for no mask.
            rank: the caller's rank; checked against the group's where it is a number.
            inputs_embeds: [T, D], used where `is_token_ids` is False.
            is_token_ids: [T] bool; given with `inputs_embeds`.
            return_hidden: give the hidden rows as well.
            sampling_noise: [num_reqs] fp64 in [0, 1), for `sampling_params`; drawn in the graph where it is None.

        Returns:
            logits [num_reqs, V] in the model's dtype, whole on every rank; with `sampling_params` the sampled tokens
            [num_reqs] int64 before them; with `return_hidden` the hidden states [T, D] after the final norm behind
            them, and behind those the ones of `aux_hidden_state_layers`, [T, layers * D], where there are any.

        Raises:
            Unsupported: `spec_decode_metadata` is given.
            ConfigError: one of `inputs_embeds` and `is_token_ids` without the other, or another process's rank.
        """
        self._check_arguments(spec_decode_metadata, rank, inputs_embeds, is_token_ids)
        context = attn_metadata
        if not isinstance(context, PagedContext):
            context = PagedContext(context, positions=positions)
        # Taps see whole tensors: with them neither ranks nor replicas share rows.
        num_rows = None if tapped() else input_ids.shape[0]
        ends = context[self.attention_layers()[0].layer_name]["query_start_loc"]
        divided = rows_divided(inputs_embeds is None and self._divides_rows(context, input_ids.shape[0]), num_rows)
        with divided, NF.padded(input_ids.shape[0], ends):
            x = self.embed_input_ids(input_ids)
            if inputs_embeds is not None and is_token_ids is not None:
                x = torch.where(is_token_ids[:, None], x, inputs_embeds.to(x.dtype))
            hidden = enter(self.model(x, positions, context))
            aux = enter(context[AUX_HIDDEN_STATES]) if self.aux_hidden_state_layers else None
        likely = NF.likely_only(context.get("likely_only"))
        with likely, NF.padded(input_ids.shape[0], ends):  # in a decode graph, whose sampled rows are its tokens
            logits = self.compute_logits(hidden[sampling_positions])
        if logit_mask is not None:
            logits = logits.masked_fill(~logit_mask, float("-inf"))
        found: tuple[Tensor, ...] = (logits, hidden) if return_hidden else (logits,)
        if return_hidden and aux is not None:
            found = (*found, aux)
        if sampling_params is not None:
            found = (self._sample(logits, sampling_params, sampling_noise), *found)
        return found if len(found) > 1 else logits

    def _sample(self, logits: Tensor, sampling_params: Tensor, noise: Tensor | None) -> Tensor:
        stages = self.on_device_sampling
        if "temperature" not in stages:
            return logits.float().argmax(-1)
        if noise is None:
            noise = torch.rand(logits.shape[0], dtype=torch.float64, device=logits.device)
        return NF.sample_tokens(logits, sampling_params, noise, top_k="top_k" in stages, top_p="top_p" in stages)

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        """After how many layers the hidden states are handed out too; none unless they were asked for."""
        layers: tuple[int, ...] = getattr(self.model, "aux_hidden_state_layers", ())
        return layers

    def set_aux_hidden_state_layers(self, layers: Sequence[int]) -> None:
        """Hand out the hidden states after so many layers, 0 being the embedding.

        Raises:
            Unsupported: the architecture does not do that, or has not so many layers.
        """
        where = type(self).__name__
        if not self.supports_eagle3:
            raise Unsupported("its layers' hidden states are not handed out, which EAGLE3 needs", where=where)
        if not layers or min(layers) < 0 or max(layers) > len(self.model.layers):
            raise Unsupported(
                f"hidden states after {list(layers)} layers; the model has {len(self.model.layers)}", where=where
            )
        self.model.aux_hidden_state_layers = tuple(sorted(set(layers)))

    def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
        """The layers that EAGLE3's authors take where a head does not say which."""
        count = len(self.model.layers)
        return 2, count // 2, count - 3

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embed input_ids [T] -> [T, D]."""
        return self.model.embed_tokens(input_ids)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Project hidden rows [rows, D], after the final norm, to logits [rows, V]."""
        logits = self.lm_head(hidden)
        if self.config.logit_softcap is not None:
            logits = NF.softcap(logits, cap=self.config.logit_softcap)
        return logits

    def attention_layers(self) -> list[Any]:
        """The attention modules, in layer order; each has `layer_name`, `num_kv_heads`, `head_size` and `window`."""
        return [layer.self_attn for layer in self.model.layers]

    def get_kv_spec(self) -> KVSpec:
        """Say what each layer caches, in `kv_cache_dtype` or else the dtype of the weights."""
        dtype = self.kv_cache_dtype or self.model.embed_tokens.weight.dtype
        return KVSpec(
            layers=[
                LayerSpec(
                    layer.layer_name,
                    layer.num_kv_heads,
                    layer.head_size,
                    dtype,
                    layer.window,
                    one_row=getattr(layer, "one_row", False),
                )
                for layer in self.attention_layers()
            ]
        )

    def bind_kv_cache(self, kv_caches: Mapping[str, Sequence[Tensor]]) -> None:
        """Give every layer its pages: {layer name: [k_cache, v_cache]}, each [P, K, C, H].

        Raises:
            ConfigError: a layer without pages, pages without a layer, or pages of another shape.
        """
        layers = {layer.layer_name: layer for layer in self.attention_layers()}
        if layers.keys() != kv_caches.keys():
            odd = sorted(layers.keys() ^ kv_caches.keys())
            raise ConfigError(f"layers and pages do not match: {', '.join(odd)}", where="bind_kv_cache")
        for name, (k_cache, v_cache) in kv_caches.items():
            layer = layers[name]
            for cache in (k_cache, v_cache):
                if cache.ndim != 4 or (cache.shape[1], cache.shape[3]) != (layer.num_kv_heads, layer.head_size):
                    raise ConfigError(
                        f"pages have shape {list(cache.shape)}",
                        where=f"bind_kv_cache, {name}",
                        do=f"expected [blocks, {layer.num_kv_heads}, block size, {layer.head_size}]",
                    )
            layer.kv_cache = (k_cache, v_cache)

    def load_weights(
        self, checkpoint_path: str | Path, device: torch.device | str = "cpu", cache_dir: str | Path | None = None
    ) -> Any:
        """Load this rank's share of a checkpoint, then pack the projections.

        Args:
            checkpoint_path: directory of safetensors files.
            device: where the weights go.
            cache_dir: see `weights.SafetensorsCheckpoint`.

        Returns:
            The ledger: what became of every tensor.

        Raises:
            WeightError: the checkpoint does not match the model.
        """
        group = get_tp_group()
        ledger = weights.load_into(
            self,
            checkpoint_path,
            type(self).weight_map(self.config),
            rank=group.rank,
            world_size=group.world_size,
            device=torch.device(device),
            dtype=self.model.embed_tokens.weight.dtype,
            cache_dir=cache_dir,
        )
        self.pack()
        return ledger

    def pack(self) -> None:
        """Let projections that share their input share one product; after `to` or `load_state_dict`, pack again."""
        for layer in self.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            pack(attention.q_proj, attention.k_proj, attention.v_proj)
            if hasattr(mlp, "gate_proj"):  # experts have no projections that share an input
                pack(mlp.gate_proj, mlp.up_proj)
        if self.config.tie_word_embeddings and self.lm_head.weight.shape == self.model.embed_tokens.weight.shape:
            # Both were loaded from one tensor, to the same shard; hold it once. With other data-parallel sizes than the
            # embedding's the head has another shard.
            self.lm_head.weight = self.model.embed_tokens.weight

    def _divides_rows(self, context: PagedContext, num_tokens: int) -> bool:
        """Whether this step is sequence parallel: a prefill on several ranks, its rows divisible and not tapped."""
        ranks = get_tp_group().world_size
        if ranks == 1 or num_tokens % ranks or tapped() or self.backend.linear == "torch":
            return False
        return not context.decodes(self.attention_layers()[0].layer_name)

    @staticmethod
    def _check_arguments(spec_decode_metadata: Any, rank: Any, inputs_embeds: Any, is_token_ids: Any) -> None:
        if spec_decode_metadata is not None:
            raise Unsupported(
                "spec_decode_metadata inside the graph is not implemented", where="forward", do="pass None"
            )
        if (inputs_embeds is None) != (is_token_ids is None):
            raise ConfigError("inputs_embeds and is_token_ids go together", where="forward")
        if isinstance(rank, int) and rank != get_tp_group().rank:
            raise ConfigError(f"rank {rank} was passed in a process of rank {get_tp_group().rank}", where="forward")
