"""The weight map of models that keep Hugging Face's names and layouts, or most of them."""

from __future__ import annotations

from pilotage.weights import Drop, Identity, Tie, WeightMap
from pilotage.weights.dequantise import Fp8Scheme
from pilotage.weights.rules import Rule

# What checkpoints call the scales of an 8-bit cache, below the attention module: one a layer for keys, one for values.
KV_SCALES = {
    "k": ("k_scale", "k_proj.k_scale", "k_proj.output_scale"),
    "v": ("v_scale", "v_proj.v_scale", "v_proj.output_scale"),
}


def same_names(*others: Rule | Drop, tied: bool, fp8: Fp8Scheme | None = None) -> WeightMap:
    """Map every tensor to the parameter of its own name.

    Args:
        others: rules for the tensors that are named or laid out differently.
        tied: the head has no tensor of its own and is loaded from the embedding's.
        fp8: how linear layers are stored in 8-bit floats; None where they are plain.
    """
    head = [Tie("lm_head.weight", "model.embed_tokens.weight")] if tied else []
    drop = Drop("model.layers.{i}.self_attn.rotary_emb.inv_freq", "computed from the config")
    scales = [
        Drop(f"model.layers.{{i}}.self_attn.{name}", "read by the key/value cache where it has 8 bits", first=True)
        for name in (*KV_SCALES["k"], *KV_SCALES["v"])
    ]
    quantised = fp8.rules() if fp8 is not None else []
    return WeightMap([*head, drop, *scales, *quantised, *others, Identity()])
