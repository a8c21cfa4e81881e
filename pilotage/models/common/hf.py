"""The training face of a model: Hugging Face's interface around the backbone that is served.

A model package's `hf.py` names its layer with gradient checkpointing and its `PreTrainedModel`; what runs the backbone
is here, what stands on it in `hf_heads`. The face contains the backbone and the head that `model.py` builds, so that
attention, MLP and RoPE exist once.
"""

from __future__ import annotations

import enum
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from pilotage.core.errors import BadInput, Unsupported
from pilotage.models.common.backend import BackendConfig
from pilotage.models.common.combined import combined
from pilotage.models.common.dense import DenseContext, masks, refuse_ignored
from pilotage.nn import Experts, RMSNorm, Router
from pilotage.weights import WeightMap


class TieSupport(enum.Enum):
    """Which heads an architecture may have: tied to the embedding, of their own, or either as the config says."""

    BOTH = "both"
    TIED_ONLY = "tied only"
    UNTIED_ONLY = "untied only"

    def check(self, tied: bool, where: str) -> None:
        """Refuse a config that asks for the other kind.

        Raises:
            Unsupported: it does.
        """
        if (self is TieSupport.TIED_ONLY and not tied) or (self is TieSupport.UNTIED_ONLY and tied):
            raise Unsupported(
                f"tie_word_embeddings={tied}, and heads of {where} are {self.value}",
                where="config.json, tie_word_embeddings",
                do=f"set it to {not tied}",
            )


class DecoderPreTrainedModel(PreTrainedModel):
    """What the `PreTrainedModel` of every architecture shares.

    A subclass sets `config_class`, `architecture` and `layer_class`; `_no_split_modules` follows from the last.

    Attributes:
        architecture: the model that is served; built for its backbone and head.
        layer_class: its decoder layer with gradient checkpointing.
        tie_word_embeddings_support: heads that it may have.
        can_combine: q, k and v, and gate and up, may each be one layer; see `BackendConfig.combined`.
        untrained: last part of the name of parameters that are loaded and get no gradient (buffers in transformers).
    """

    can_combine: ClassVar[bool] = True
    untrained: ClassVar[tuple[str, ...]] = ("layer_scalar", "e_score_correction_bias")
    architecture: ClassVar[Any]
    layer_class: ClassVar[type[nn.Module]]
    tie_word_embeddings_support: ClassVar[TieSupport] = TieSupport.BOTH

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement: Any = ("past_key_values",)
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        layer = cls.__dict__.get("layer_class")
        if layer is not None:
            cls._no_split_modules = [layer.__name__]
            cls._can_record_outputs = {"hidden_states": layer, "router_logits": OutputRecorder(Router, index=0)}

    def __init__(self, config: Any, backend: BackendConfig | None = None) -> None:
        backend = BackendConfig.of(backend).for_training()
        if backend.combined and not self.can_combine:
            raise Unsupported(
                "this architecture's projections are not all of one input",
                where=f"BackendConfig.combined, {type(self).__name__}",
                do="leave it False",
            )
        if backend.attn is not None:
            config._attn_implementation = backend.attn_implementation
        super().__init__(config)
        self.backend = backend
        self.tie_word_embeddings_support.check(bool(config.tie_word_embeddings), type(self).__name__)

    @classmethod
    def map_of(cls, config: Any, backend: BackendConfig | None = None) -> WeightMap:
        """Return the WeightMap between checkpoints with this Hugging Face config and the parameters."""
        own = cls.architecture.config_class.from_configs(config)
        found: WeightMap = cls.architecture.weight_map(own)
        return combined(found, own) if backend is not None and backend.combined else found

    def _build(self) -> Any:
        """Build the served model and prepare its backbone for Hugging Face's machinery."""
        config = self.config
        built = self.architecture(self.architecture.config_class.from_configs(config), self.backend, self.layer_class)
        backbone = built.model
        for module in backbone.modules():
            if isinstance(module, nn.Embedding):
                module.padding_idx = getattr(config, "pad_token_id", None)
        for index, layer in enumerate(backbone.layers):
            attention = layer.self_attn
            # What Hugging Face's attention functions look for on the module that calls them.
            attention.layer_idx, attention.is_causal = index, True
            attention.num_key_value_groups = attention.num_heads // attention.num_kv_heads
            refuse_ignored(
                config._attn_implementation,
                softcap=getattr(attention, "softcap", None) is not None,
                sinks=getattr(attention, "sinks", None) is not None,
            )
        # A share of the rows of combined projections is not a share of each: no plan divides them.
        backbone._tp_plan = {} if self.backend.combined else dict(config.base_model_tp_plan or {})
        backbone._pp_plan = dict(config.base_model_pp_plan or {})
        backbone._ep_plan = dict(config.base_model_ep_plan or {})
        return built

    def post_init(self) -> None:
        """Initialise the weights, and say which of them are not trained."""
        super().post_init()
        self.freeze()

    def new_parameters(self) -> frozenset[str]:
        """Parameters that a checkpoint of the base model does not have and that are initialised then."""
        return frozenset()

    def freeze(self) -> None:
        """Take `untrained` parameters out of training; loading forgets it."""
        for name, parameter in self.named_parameters():
            if name.rpartition(".")[2] in self.untrained:
                parameter.requires_grad_(False)

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding."""
        return self.model.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding."""
        self.model.embed_tokens = value

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, RMSNorm):
            (init.zeros_ if module.unit_offset else init.ones_)(module.weight)
        elif isinstance(module, Experts):
            for name, parameter in module.named_parameters(recurse=False):
                init.zeros_(parameter) if name.endswith("bias") else init.normal_(parameter, mean=0.0, std=std)
        elif isinstance(module, Router):
            init.normal_(module.weight, mean=0.0, std=std)
            for name, parameter in module.named_parameters(recurse=False):
                if name != "weight":
                    init.zeros_(parameter)

    @merge_with_config_defaults
    @capture_outputs
    def decode(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run the backbone: what `forward` of the base model is elsewhere in Hugging Face; see there for the arguments.

        Returns:
            `last_hidden_state` [B, S, D] after the final norm, and the cache.

        Raises:
            BadInput: not exactly one of `input_ids` and `inputs_embeds`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise BadInput("give exactly one of input_ids and inputs_embeds", where="forward")
        x = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.training and self.is_gradient_checkpointing:
            # The second forward of a layer would put its keys and values into the cache again.
            use_cache, past_key_values = False, None
        # Hugging Face takes a row for one sequence where there is a cache, and packs are told apart by positions alone;
        # an empty one changes no mask.
        cached = past_key_values
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = (
                torch.arange(x.shape[1] if input_ids is None else input_ids.shape[1], device=x.device) + seen
            )[None]
        # Masks follow the shape of the ids: embedded rows may be one rank's share of a sequence.
        like = x if input_ids is None else x.new_empty((*input_ids.shape, 0))
        found = masks(
            self.config,
            self.model.layer_types,
            like,
            attention_mask=attention_mask,
            cache=cached,
            position_ids=position_ids,
        )
        context = DenseContext(
            self.config,
            found,
            positions=position_ids,
            input_ids=input_ids,
            cache=past_key_values,
            options=kwargs,
            keep_weights=bool(kwargs.get("output_attentions", self.config.output_attentions)),
        )
        hidden = self.model(x, position_ids, context)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=past_key_values,
            attentions=None if context.weights is None else cast(Any, tuple(context.weights)),
        )
