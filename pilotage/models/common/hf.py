"""The training face of a model: Hugging Face's interface around the backbone that is served.

A model package's `hf.py` names its layer with gradient checkpointing and its `PreTrainedModel`; everything else is
here. The face contains the backbone and the head that `model.py` builds, so that attention, MLP and RoPE exist once.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MoeCausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

import pilotage.functional as NF
from pilotage.core.errors import BadInput, Unsupported
from pilotage.models.common.backend import BackendConfig
from pilotage.models.common.combined import combined
from pilotage.models.common.dense import DenseContext, masks, refuse_ignored
from pilotage.nn import Experts, RMSNorm, Router
from pilotage.weights import StateDictAdapter, WeightMap


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
            cache=past_key_values,
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


class DecoderForCausalLM(GenerationMixin):
    """The backbone and the head; mixed in before the architecture's `PreTrainedModel`."""

    _tied_weights_keys: ClassVar[Any] = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan: Any = {"lm_head": "colwise_rep"}  # noqa: RUF012  transformers puts the instance's own in its place
    _pp_plan: Any = {"lm_head": (["hidden_states"], ["logits"])}  # noqa: RUF012

    @dataclass(frozen=True)
    class ModelCapabilities:
        """What NeMo AutoModel may do with the class in its own trainer, where none of these has been run."""

        supports_tp: bool = False
        supports_cp: bool = False
        supports_pp: bool = False
        supports_ep: bool = False

    @classmethod
    def can_generate(cls) -> bool:
        """Whether there is `generate`."""
        return True

    @classmethod
    def from_config(cls, config: Any, backend: BackendConfig | None = None, **kwargs: Any) -> Any:
        """Build a model with new weights.

        Args:
            config: the Hugging Face config.
            backend: what layers are built from; None for torch's.
            kwargs: `dtype` and `attn_implementation`, as for `AutoModelForCausalLM.from_config`.

        Raises:
            Unsupported: a value of the config that the model does not implement, named by its key.
        """
        build: Any = cls
        return build._from_config(config, backend=backend, **kwargs)

    def __init__(self: Any, config: Any, backend: BackendConfig | None = None) -> None:
        parent: Any = super()
        parent.__init__(config, backend)
        built = self._build()
        self.model, self.lm_head = built.model, built.lm_head
        self.vocab_size, self.logit_softcap = config.vocab_size, built.config.logit_softcap
        weight_map = self.map_of(config, self.backend)
        if not weight_map.is_identity:
            self.state_dict_adapter = StateDictAdapter(weight_map, self.named_parameters)
        self.post_init()
        if config.tie_word_embeddings:
            self.tie_weights()

    def get_output_embeddings(self: Any) -> nn.Module:
        """Return the head."""
        return self.lm_head

    def set_output_embeddings(self: Any, new_embeddings: nn.Module) -> None:
        """Replace the head."""
        self.lm_head = new_embeddings

    @can_return_tuple
    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        """Compute logits and, with labels, the loss.

        Args:
            input_ids: [B, S].
            attention_mask: [B, S] (cached tokens before it included), 0 for padding on either side; or masks that
                `generate` has made.
            position_ids: [B or 1, S]; None counts from what is cached. Positions that start again pack several
                sequences into a row, which do not see one another.
            past_key_values: Hugging Face's cache.
            inputs_embeds: [B, S, D], in place of ids.
            labels: [B, S], -100 where no loss is wanted; shifted here.
            use_cache: return a cache; None for the config's word. Never under gradient checkpointing.
            logits_to_keep: only the last so many positions, 0 for all; or the indices of those.
            kwargs: of the attention functions and the loss, among them `num_items_in_batch`, by which the sum of the
                token losses is divided instead of their own number.
        """
        outputs = self.decode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.compute_logits(outputs.last_hidden_state[:, kept, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return self._output(outputs, logits, loss, attention_mask)

    def _output(
        self: Any, outputs: BaseModelOutputWithPast, logits: Tensor, loss: Tensor | None, attention_mask: Any
    ) -> Any:
        return CausalLMOutputWithPast(
            loss=cast(Any, loss),
            logits=cast(Any, logits),
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def compute_logits(self: Any, hidden: Tensor) -> Tensor:
        """Project hidden rows [..., D], after the final norm, to logits [..., V]."""
        logits = self.lm_head(hidden)
        return logits if self.logit_softcap is None else NF.softcap(logits, cap=self.logit_softcap)


class SparseForCausalLM(DecoderForCausalLM):
    """The same for models with experts, whose loss may balance their use; mixed in before the `PreTrainedModel`.

    `output_router_logits`, in the config or a call, returns the scores of the experts [B * S, E] of each layer and
    adds `router_aux_loss_coef` times the unevenness of their use to the loss.
    """

    def __init__(self: Any, config: Any, backend: BackendConfig | None = None) -> None:
        super().__init__(config, backend)
        sparse = [module for module in self.modules() if isinstance(module, Experts)]
        self.num_experts, self.top_k = sparse[0].num_experts, sparse[0].top_k

    def _output(
        self: Any, outputs: BaseModelOutputWithPast, logits: Tensor, loss: Tensor | None, attention_mask: Any
    ) -> Any:
        scores = outputs.get("router_logits")
        aux_loss = None
        if scores:
            scores = tuple(layer.flatten(0, -2) for layer in scores)
            aux_loss = load_balancing_loss_func(scores, self.num_experts, self.top_k, attention_mask)
            if loss is not None:
                loss = loss + self.config.router_aux_loss_coef * aux_loss
        return MoeCausalLMOutputWithPast(
            loss=cast(Any, loss),
            aux_loss=cast(Any, aux_loss),
            logits=cast(Any, logits),
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=cast(Any, scores),
        )


class DecoderForSequenceClassification:
    """The backbone and a score of each sequence's last token; mixed in before the `PreTrainedModel`."""

    # A checkpoint of the language model has a head, which this does without.
    _keys_to_ignore_on_load_unexpected: Any = (r"^lm_head\.",)

    def __init__(self: Any, config: Any, backend: BackendConfig | None = None) -> None:
        parent: Any = super()
        parent.__init__(config, backend)
        self.model = self._build().model
        self.num_labels = config.num_labels
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    def new_parameters(self) -> frozenset[str]:
        """Parameters that a checkpoint of the base model does not have and that are initialised then."""
        return frozenset({"score.weight"})

    @can_return_tuple
    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Score sequences [B, S] -> [B, labels] at the last token that is not padding, and with labels the loss.

        Raises:
            BadInput: several sequences, and the config has no padding token.
        """
        outputs = self.decode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.score(outputs.last_hidden_state)
        rows, last = torch.arange(logits.shape[0], device=logits.device), self._last(input_ids, logits)
        pooled = logits[rows, last]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=pooled, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=pooled,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _last(self: Any, input_ids: Tensor | None, logits: Tensor) -> Any:
        pad = self.config.pad_token_id
        if pad is None and logits.shape[0] > 1:
            raise BadInput("several sequences, and no padding token is defined", where="config.json, pad_token_id")
        if pad is None or input_ids is None:
            return -1
        real = (input_ids != pad).to(torch.int32)
        return (torch.arange(input_ids.shape[-1], device=logits.device, dtype=torch.int32) * real).argmax(-1)
