"""Latent attention: the projection from latents to keys and values, applied to queries and to attention's result.

A head's key is `W_k latent` and its value `W_v latent`. Since q.(W_k latent) = (W_k^T q).latent, and a weighted sum of
`W_v latent` is W_v times the weighted sum, attention needs the latents alone (DeepSeek-V2, arXiv:2405.04434, 2.1.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pilotage.functional.registry import operator


@operator
def latent_queries(q: Tensor, kv_b_weight: Tensor) -> Tensor:
    """Turn queries on keys into queries on latents.

    Args:
        q: [..., N, H], the channels without rotation.
        kv_b_weight: [N * (H + V), L]; of each head its keys' H rows, then its values'.

    Returns:
        [..., N, L].

    Numerics: products in the tensors' dtype.
    """
    heads, size = q.shape[-2:]
    weight_NHL = kv_b_weight.unflatten(0, (heads, -1))[:, :size]
    q_NTH = q.flatten(0, -3).transpose(0, 1)
    return torch.bmm(q_NTH, weight_NHL).transpose(0, 1).reshape(*q.shape[:-1], -1)


@operator
def latent_values(latents: Tensor, kv_b_weight: Tensor, *, skip: int) -> Tensor:
    """Turn weighted sums of latents into weighted sums of values.

    Args:
        latents: [..., N, L].
        kv_b_weight: [N * (skip + V), L]; of each head its keys' rows, then its values'.
        skip: rows of a head's keys.

    Returns:
        [..., N, V].

    Numerics: products in the tensors' dtype.
    """
    heads = latents.shape[-2]
    weight_NVL = kv_b_weight.unflatten(0, (heads, -1))[:, skip:]
    latents_NTL = latents.flatten(0, -3).transpose(0, 1)
    return torch.bmm(latents_NTL, weight_NVL.transpose(1, 2)).transpose(0, 1).reshape(*latents.shape[:-1], -1)
