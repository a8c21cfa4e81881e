"""Rotary position parameters, from whichever place and generation of config they are in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pilotage.core.errors import ConfigError

# Layers of these kinds have no softmax attention, so no rotary embedding either.
ROPELESS_LAYERS = frozenset({"linear_attention", "conv", "moe", "mamba"})


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of one kind of layer.

    Attributes:
        theta: base of the frequencies.
        kind: "default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", or another that the
            config names. "default" is unscaled.
        factor: context extension factor; None where the kind has none.
        low_freq_factor, high_freq_factor: bounds of the llama3 kind.
        original_max_position: context length before extension (llama3, yarn, longrope).
        attention_factor: factor on cos and sin (yarn, longrope); None means the kind's own formula.
        beta_fast, beta_slow, mscale, mscale_all_dim: further YaRN parameters.
        partial_rotary_factor: share of the head that is rotated, 1.0 for all of it.
        raw: the parameters as Hugging Face holds them, for kinds that this class does not spell out.
    """

    theta: float
    kind: str = "default"
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    partial_rotary_factor: float = 1.0
    raw: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any], where: str) -> RopeSpec:
        """Read one `rope_parameters` mapping.

        Args:
            parameters: Hugging Face's mapping for one kind of layer.
            where: the config key it came from, for the error.

        Raises:
            ConfigError: it gives no theta; a base that nobody stated is never made up here.
        """
        theta = parameters.get("rope_theta")
        if theta is None:
            raise ConfigError(
                "the base of the rotary embedding is neither stated nor defaulted by its config class",
                where=where,
                do="add rope_theta to it",
            )
        share = parameters.get("partial_rotary_factor")
        return cls(
            theta=float(theta),
            kind=parameters.get("rope_type") or parameters.get("type") or "default",
            factor=parameters.get("factor"),
            low_freq_factor=parameters.get("low_freq_factor"),
            high_freq_factor=parameters.get("high_freq_factor"),
            original_max_position=parameters.get("original_max_position_embeddings"),
            attention_factor=parameters.get("attention_factor"),
            beta_fast=parameters.get("beta_fast"),
            beta_slow=parameters.get("beta_slow"),
            mscale=parameters.get("mscale"),
            mscale_all_dim=parameters.get("mscale_all_dim"),
            partial_rotary_factor=1.0 if share is None else float(share),
            raw=dict(parameters),
        )

    def to_json(self) -> dict[str, Any]:
        """The parameters that are set, without `raw`."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "raw"}
        return {name: value for name, value in values.items() if value is not None}


def ropes_by_layer_type(
    parameters: Mapping[str, Any] | None, layer_types: tuple[str, ...], partial_rotary_factor: float | None, where: str
) -> dict[str, RopeSpec]:
    """One `RopeSpec` for each kind of layer that has one.

    Args:
        parameters: `rope_parameters` of a transformers 5 config, flat or nested by layer type; None or empty for a
            model without rotary embedding.
        layer_types: the kind of each layer.
        partial_rotary_factor: share of the head to rotate where `parameters` does not say (GPT-NeoX's `rotary_pct`).
        where: the config key `parameters` came from.

    Raises:
        ConfigError: parameters without theta, or none for a kind of layer that the model has.
    """
    if not parameters:
        return {}
    kinds = [kind for kind in dict.fromkeys(layer_types) if kind not in ROPELESS_LAYERS]
    nested = any(isinstance(value, Mapping) or value is None for value in parameters.values()) and not (
        "rope_theta" in parameters or "rope_type" in parameters
    )
    found = {}
    for kind in kinds:
        one = parameters.get(kind) if nested else parameters
        if one is None:
            continue  # a kind of layer without position encoding
        if partial_rotary_factor is not None and one.get("partial_rotary_factor") is None:
            one = {**one, "partial_rotary_factor": partial_rotary_factor}
        found[kind] = RopeSpec.from_parameters(one, f"{where}.{kind}" if nested else where)
    if nested and not found:
        # Names of their own (DeepSeek V4): keep them rather than lose them.
        found = {
            name: RopeSpec.from_parameters(one, f"{where}.{name}")
            for name, one in parameters.items()
            if isinstance(one, Mapping)
        }
    return found
