"""The values of an EAGLE3 checkpoint's config.json that the draft head uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pilotage.core.errors import Unsupported
from pilotage.models.common.config import DecoderConfig
from pilotage.models.common.reading import read

_WHERE = "config.json of the EAGLE3 head"
# What is read here, beside a Llama config's own keys; the rest of them is refused unless it says nothing.
_OWN = (
    *("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids", "target_hidden_size"),
    *("num_aux_hidden_states", "norm_before_residual", "norm_output"),
)
_NEUTRAL: dict[str, Any] = {
    "norm_before_fc": False,
    "fc_norm": False,
    "logit_scale": 1.0,
    "parallel_drafting": False,
    "use_aux_hidden_state": True,
    "speculators_model_type": None,
}


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(DecoderConfig):
    """A Llama config of one layer, and how it is fed.

    Attributes:
        draft_vocab_size: tokens that the head can name.
        target_hidden_size: width of the served model's hidden states.
        aux_layers: the served model's hidden states after so many of its layers, 0 being the embedding; None for the
            served model's default.
        norm_before_residual: the residual stream starts from the normalised hidden state.
        norm_output: the hidden state handed on is the normalised one.
    """

    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...] | None
    norm_before_residual: bool
    norm_output: bool

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read the parsed config.json of a checkpoint.

        Raises:
            Unsupported: a variant of EAGLE3 that is not implemented, named by its key.
        """
        eagle = dict(values.get("eagle_config") or {})
        for key, neutral in _NEUTRAL.items():
            found = eagle.get(key, values.get(key, neutral))
            if found is not None and found != neutral:
                raise Unsupported(f"{key}={found!r} is not implemented", where=_WHERE)
        if values.get("num_hidden_layers", 1) != 1:
            raise Unsupported(f"{values['num_hidden_layers']} layers; EAGLE3's head has one", where=_WHERE)
        plain = {key: value for key, value in values.items() if key not in (*_OWN, *_NEUTRAL)}
        plain |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
        spec = read(plain, beyond=("attention_bias", "attention_output_bias", "mlp_bias"))
        layers = values.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
        return cls.from_spec(
            spec,
            draft_vocab_size=int(values.get("draft_vocab_size") or spec.vocab_size),
            target_hidden_size=int(values.get("target_hidden_size") or spec.hidden_size),
            aux_layers=tuple(sorted(set(layers))) if layers else None,
            norm_before_residual=bool(values.get("norm_before_residual", False)),
            norm_output=bool(values.get("norm_output", False)),
        )
