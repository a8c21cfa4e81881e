"""The dense attention context: Hugging Face's masks, cache and attention functions behind the call that models make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pilotage.core.errors import Unsupported

_MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


class DenseContext:
    """What attention needs beside queries, keys and values when sequences lie in rows of a batch.

    It answers to the top-level keys `positions` [B or 1, S] and `input_ids` [B, S], like `PagedContext`, and is no
    dictionary: `fully_shard` makes a plain one of any that is handed to a layer.

    Attributes:
        config: the Hugging Face config; its `_attn_implementation` names the attention function.
        masks: kind of layer -> what that function takes as a mask.
        cache: Hugging Face's cache of keys and values, or None.
        options: further keywords of the attention functions.
        weights: attention weights of each layer in turn, where they were asked for; else None.
    """

    def __init__(
        self,
        config: Any,
        masks: Mapping[str, Any],
        *,
        positions: Tensor,
        input_ids: Tensor | None,
        cache: Any = None,
        options: Mapping[str, Any] | None = None,
        keep_weights: bool = False,
    ) -> None:
        self._values = {"positions": positions, "input_ids": input_ids}
        self.config, self.masks, self.cache, self.options = config, masks, cache, dict(options or {})
        self.weights: list[Tensor] | None = [] if keep_weights else None
        self.dropout = float(getattr(config, "attention_dropout", None) or 0.0)
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def attend(
        self,
        layer: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend from q to k and v and what the cache holds before them, as the layer's mask says.

        Args:
            layer: the attention module; has `layer_idx`, `num_key_value_groups` and `is_causal`, which Hugging Face's
                functions look for. One with a `kv_source` attends to what that layer has cached, and caches nothing.
            q: [B, S, N, H], rotated.
            k, v: [B, S, K, H], k rotated.
            scale, window, softcap, sinks: see `NF.flash_attention`.

        Returns:
            [B, S, N, H].

        Raises:
            Unsupported: an attention function that would ignore a bound on the scores, or sinks.
        """
        name = self.config._attn_implementation
        refuse_ignored(name, softcap=softcap is not None, sinks=sinks is not None)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.cache is not None:
            source = getattr(layer, "kv_source", None)
            if source is None:
                k, v = self.cache.update(k, v, layer.layer_idx)
                self._kept[layer.layer_name] = (k, v)
            else:
                k, v = self._kept[source]
        options: dict[str, Any] = {"sliding_window": window, **self.options}
        options |= {key: value for key, value in (("softcap", softcap), ("s_aux", sinks)) if value is not None}
        out, weights = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention)(
            layer,
            q,
            k,
            v,
            self.masks["full_attention" if window is None else "sliding_attention"],
            dropout=self.dropout if layer.training else 0.0,
            scaling=scale,
            **options,
        )
        if self.weights is not None and weights is not None:
            self.weights.append(weights)
        return out


def masks(
    config: Any,
    kinds: Iterable[str],
    like: Tensor,
    *,
    attention_mask: Any,
    cache: Any,
    position_ids: Tensor,
) -> dict[str, Any]:
    """Make the mask of each kind of layer, for padding on either side and for packed sequences.

    Args:
        config: the Hugging Face config.
        kinds: of the model's layers.
        like: [B, S, ...], of which the shape, dtype and device count.
        attention_mask: [B, cached + S], 0 where there is padding; or what is a mask already: [B, 1, S, keys], a block
            mask, or a dictionary of these by kind, as `generate` prepares it.
        cache: Hugging Face's cache, or None.
        position_ids: [B or 1, S]; where they do not go on by one another sequence of the pack starts.
    """
    if isinstance(attention_mask, dict):
        return attention_mask
    about = {
        "config": config,
        "inputs_embeds": like,
        "attention_mask": attention_mask,
        "past_key_values": cache,
        "position_ids": position_ids,
    }
    return {kind: _MASKS[kind](**about) for kind in dict.fromkeys(kinds)}


def refuse_ignored(name: str | None, *, softcap: bool, sinks: bool) -> None:
    """Refuse an attention function that takes a model's bound on the scores, or its sinks, and ignores them.

    Raises:
        Unsupported: `name` is such a function.
    """
    if name == "sdpa" and (softcap or sinks):
        what = "a bound on attention scores" if softcap else "attention sinks"
        raise Unsupported(
            f"sdpa attention ignores {what}, which this model has",
            where="attn_implementation",
            do="use eager" + ("" if sinks else " or flex_attention"),
        )


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attend by plain products, in the interface of Hugging Face's attention functions.

    Args:
        module: the attention module.
        query: [B, N, S, H].
        key, value: [B, K, keys, H].
        attention_mask: added to the scores, [B or 1, 1, S, keys].
        scaling: factor on the scores.
        dropout: share of the weights that is dropped in training.
        softcap: bound of the scores, None for none.
        s_aux: [N] sinks, None for none.
        kwargs: not looked at; what other attention functions take.

    Returns:
        [B, S, N, H], and the weights [B, N, S, keys].

    Numerics: products in the tensors' dtype, softmax in fp32, the weights rounded to the queries' dtype.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None:
        scores = scores + attention_mask
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)), dim=-1)
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    if s_aux is not None:
        weights = weights[..., :-1]
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights
