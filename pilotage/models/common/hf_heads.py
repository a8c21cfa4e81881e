"""What stands on the backbone of a training face: the head of a language model, and the scores of sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MoeCausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.utils.generic import can_return_tuple

import pilotage.functional as NF
from pilotage.core.errors import BadInput
from pilotage.models.common.backend import BackendConfig
from pilotage.models.common.tied import one_gradient
from pilotage.nn import Experts
from pilotage.weights import StateDictAdapter


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
        with one_gradient(self.model.embed_tokens, self.lm_head):
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
