"""Which implementations a model's layers are built from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

from torch import Tensor, nn

import pilotage.functional as NF
import pilotage.nn as pnn
from pilotage.core.errors import ConfigError, Unsupported

Shard = Literal["column", "row"]


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """The choice of layer classes, passed down through a model's constructor.

    Attributes:
        attn: the attention of training: "sdpa", "flex", "eager"; None for Hugging Face's own choice. Serving has
            its own operators.
        linear: "parallel" for layers that hold one rank's share and communicate (serving); "torch" for plain
            `nn.Linear` and `nn.Embedding`, which a plan shards from outside; "auto" for the first when serving and
            the second when training.
        rms_norm: "torch", the one there is.
    """

    attn: str | None = None
    linear: str = "auto"
    rms_norm: str = "torch"

    def __post_init__(self) -> None:
        if self.attn is not None:
            _known("attn", self.attn, tuple(_ATTENTION))
        _known("linear", self.linear, _LINEAR)
        _known("rms_norm", self.rms_norm, ("torch",))

    def for_training(self) -> Self:
        """These choices, with "auto" settled.

        Raises:
            Unsupported: "parallel" layers, whose shares a training plan cannot see.
        """
        if self.linear == "parallel":
            raise Unsupported(
                "the layers of serving communicate by themselves, and a training plan cannot shard them",
                where="BackendConfig.linear",
                do="use torch",
            )
        return dataclasses.replace(self, linear="torch") if self.linear == "auto" else self

    @property
    def attn_implementation(self) -> str | None:
        """Hugging Face's name of `attn`."""
        return None if self.attn is None else _ATTENTION[self.attn]


_LINEAR = ("auto", "parallel", "torch")
_ATTENTION = {"sdpa": "sdpa", "flex": "flex_attention", "eager": "eager"}


class ScaledEmbedding(nn.Embedding):
    """`nn.Embedding` whose rows are multiplied by a factor, rounded to their dtype; None for no factor."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, scale: float | None) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.scale = scale

    def forward(self, input_ids: Tensor) -> Tensor:
        """Look up input_ids [...] -> [..., D]; the row of `padding_idx` gets no gradient from here."""
        return NF.embedding(input_ids, self.weight, scale=self.scale, padding_idx=self.padding_idx)


def _known(field: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{value!r} is unknown", where=f"BackendConfig.{field}", do=f"use {' or '.join(known)}")


def initialize_linear_module(
    kind: str,
    in_features: int,
    out_features: int,
    bias: bool = False,
    *,
    shard: Shard | None = None,
    num_shards: int | None = None,
    component: str = "attention",
) -> nn.Module:
    """Build a linear layer.

    Args:
        kind: `BackendConfig.linear`.
        in_features, out_features: of the whole layer, whatever is sharded.
        bias: whether there is one.
        shard: "column" divides the outputs over the ranks, "row" the inputs, None nothing.
        num_shards: distinct shares of a "column" layer where these are fewer than ranks (key/value heads).
        component: the part of the model whose ranks divide it, "attention" or "mlp"; see `parallel.layout`.

    Returns:
        A module whose `weight` is [out, in] (this rank's share of it) and whose `bias` may be None.

    Raises:
        ConfigError: an unknown kind.
        Unsupported: the layer does not divide over the ranks.
    """
    _known("linear", kind, _LINEAR)
    if kind == "torch":
        return nn.Linear(in_features, out_features, bias=bias)
    if shard == "row":
        return pnn.RowParallelLinear(in_features, out_features, bias, component=component)
    if shard is None:
        return pnn.ReplicatedLinear(in_features, out_features, bias)
    return pnn.ColumnParallelLinear(in_features, out_features, bias, num_shards=num_shards, component=component)


def initialize_rms_norm_module(
    kind: str, size: int, *, eps: float, unit_offset: bool = False, round_once: bool = False
) -> nn.Module:
    """Build an RMS norm over `size` features; `unit_offset` for weights stored minus one.

    `round_once`: see `NF.rms_norm`.

    Raises:
        ConfigError: an unknown kind.
    """
    _known("rms_norm", kind, ("torch",))
    return pnn.RMSNorm(size, eps=eps, unit_offset=unit_offset, round_once=round_once)


def initialize_embedding_module(
    kind: str, num_embeddings: int, embedding_dim: int, *, scale: float | None = None
) -> nn.Module:
    """Build a token embedding; `scale` multiplies its rows.

    Raises:
        ConfigError: an unknown kind.
    """
    _known("linear", kind, _LINEAR)
    if kind == "torch":
        return ScaledEmbedding(num_embeddings, embedding_dim, scale=scale)
    return pnn.VocabDimShardedEmbedding(num_embeddings, embedding_dim, scale=scale)


def initialize_lm_head_module(kind: str, in_features: int, vocab_size: int, bias: bool = False) -> nn.Module:
    """Build the head: hidden rows to logits over the whole vocabulary on every rank.

    Raises:
        ConfigError: an unknown kind.
    """
    _known("linear", kind, _LINEAR)
    build: Callable[..., nn.Module] = nn.Linear if kind == "torch" else pnn.LMHead
    return build(in_features, vocab_size, bias=bias)
