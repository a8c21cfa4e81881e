"""Which implementations a model's layers are built from."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

import pilotage.functional as NF
import pilotage.nn as pnn
from pilotage.core.errors import ConfigError, Unsupported
from pilotage.models.common.tied import Head, for_lookup

Shard = Literal["column", "row"]


_LINEAR = ("auto", "parallel", "torch", "te")
_NORM = ("torch", "te")
_ATTENTION = {"sdpa": "sdpa", "flex": "flex_attention", "eager": "eager"}


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """The choice of layer classes, passed down through a model's constructor.

    Attributes:
        attn: the attention of training: "sdpa", "flex", "eager"; None for Hugging Face's own choice. "te" is refused.
            Serving has its own operators.
        linear: "parallel" for layers that hold one rank's share and communicate (serving); "torch" for plain
            `nn.Linear` and `nn.Embedding`, which a plan shards from outside; "te" for Transformer Engine's linear
            layers; "auto" for "parallel" when serving and "torch" when training.
        rms_norm: "torch", or "te" for Transformer Engine's.
        rope_fusion: rotate by a fused kernel; there is none, so True is refused.
        combined: training models have one `qkv_proj` and one `gate_up_proj`, whose rows are those of q, k and v, or of
            gate and up, one after the other, heads in order. Checkpoints keep Hugging Face's names.

    Raises:
        ConfigError: an unknown value.
        Unsupported: what needs Transformer Engine, where it is not installed.
    """

    attn: str | None = None
    linear: str = "auto"
    rms_norm: str = "torch"
    rope_fusion: bool = False
    combined: bool = False

    def __post_init__(self) -> None:
        if self.attn is not None:
            _known("attn", self.attn, (*_ATTENTION, "te"))
        _known("linear", self.linear, _LINEAR)
        _known("rms_norm", self.rms_norm, _NORM)
        for field, value in (("attn", self.attn), ("linear", self.linear), ("rms_norm", self.rms_norm)):
            if value == "te":
                _transformer_engine(field)
        if self.rope_fusion:
            _transformer_engine("rope_fusion")
            raise Unsupported(
                "no fused kernel rotates here, with Transformer Engine or without",
                where="BackendConfig.rope_fusion",
                do="leave it False",
            )
        if self.attn == "te":
            raise Unsupported(
                "attention goes through Hugging Face's functions, and none of them is Transformer Engine's",
                where="BackendConfig.attn",
                do=f"use {', '.join(_ATTENTION)}",
            )
        if self.combined and self.linear == "parallel":
            raise Unsupported(
                "the layers of serving pack separate projections by themselves", where="BackendConfig.combined"
            )

    @classmethod
    def of(cls, other: Any) -> Self:
        """Take the fields that another toolkit's backend config shares with this one; None gives the defaults.

        Its norm "torch_fp32" is ours, which always computes in fp32.

        Raises:
            ConfigError, Unsupported: as the constructor.
        """
        if other is None or isinstance(other, cls):
            return other or cls()
        given = {name: getattr(other, name) for name in ("attn", "linear", "rms_norm", "rope_fusion")}
        if given["rms_norm"] == "torch_fp32":
            given["rms_norm"] = "torch"
        return cls(**given)

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

    @property
    def combines(self) -> bool:
        """Whether projections that share their input are one layer.

        Raises:
            Unsupported: asked for by a model that is built to serve.
        """
        if self.combined and self.linear == "auto":
            raise Unsupported(
                "serving packs separate projections by itself", where="BackendConfig.combined", do="leave it False"
            )
        return self.combined


def _transformer_engine(field: str) -> Any:
    if importlib.util.find_spec("transformer_engine") is None:
        raise Unsupported(
            "it needs Transformer Engine, which is not installed",
            where=f"BackendConfig.{field}",
            do="install transformer-engine[pytorch] for your CUDA, or leave the default",
        )
    return importlib.import_module("transformer_engine.pytorch")


class ScaledEmbedding(nn.Embedding):
    """`nn.Embedding` whose rows are multiplied by a factor, rounded to their dtype; None for no factor."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, scale: float | None) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.scale = scale

    def forward(self, input_ids: Tensor) -> Tensor:
        """Look up input_ids [...] -> [..., D]; the row of `padding_idx` gets no gradient from here."""
        weight, sparse = for_lookup(self.weight)
        return NF.embedding(input_ids, weight, scale=self.scale, padding_idx=self.padding_idx, sparse_gradient=sparse)


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
    if kind == "te":
        engine = _transformer_engine("linear")
        return engine.Linear(in_features, out_features, bias=bias, params_dtype=torch.get_default_dtype())
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
        Unsupported: "te" where Transformer Engine is not installed.
    """
    _known("rms_norm", kind, _NORM)
    if kind == "te":
        engine = _transformer_engine("rms_norm")
        return engine.RMSNorm(size, eps=eps, zero_centered_gamma=unit_offset, params_dtype=torch.get_default_dtype())
    return pnn.RMSNorm(size, eps=eps, unit_offset=unit_offset, round_once=round_once)


def initialize_embedding_module(
    kind: str, num_embeddings: int, embedding_dim: int, *, scale: float | None = None
) -> nn.Module:
    """Build a token embedding; `scale` multiplies its rows.

    Raises:
        ConfigError: an unknown kind.
    """
    _known("linear", kind, _LINEAR)
    if kind in ("torch", "te"):
        return ScaledEmbedding(num_embeddings, embedding_dim, scale=scale)
    return pnn.VocabDimShardedEmbedding(num_embeddings, embedding_dim, scale=scale)


def initialize_lm_head_module(kind: str, in_features: int, vocab_size: int, bias: bool = False) -> nn.Module:
    """Build the head: hidden rows to logits over the whole vocabulary on every rank.

    Raises:
        ConfigError: an unknown kind.
    """
    _known("linear", kind, _LINEAR)
    build: Callable[..., nn.Module] = Head if kind in ("torch", "te") else pnn.LMHead
    return build(in_features, vocab_size, bias=bias)
