"""Faults of ported models, planted one at a time: by an edited config, an edited checkpoint, or a patched operator.

A fault is a checkpoint that is validated against the original (`--reference`), plus, where no checkpoint can express
it, a patch that the test applies to the served model's code.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pilotage.arch import tiny as tiny_models

HEADS, HEAD = 6, 20
Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A planted fault.

    Attributes:
        name: what is wrong.
        model: tiny model it is planted in.
        config: fields of config.json that it changes.
        weights: edits the tensors in place.
        patch: changes the served model's code.
        arms: arms whose logits must show it.
        modules: (kind, dtype) of module checks that must fail.
    """

    name: str
    model: str
    config: Mapping[str, Any] | None = None
    weights: Callable[[Tensors], None] | None = None
    patch: Callable[[pytest.MonkeyPatch], None] | None = None
    arms: tuple[str, ...] = ("bfloat16", "float32")
    modules: tuple[tuple[str, str], ...]

    def plant(self, original: Path, directory: Path) -> Path:
        """Write the faulty checkpoint into `directory`."""
        shutil.copytree(original, directory)
        if self.config:
            path = directory / "config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), **self.config}))
        if self.weights:
            tensors = load_file(directory / "model.safetensors")
            self.weights(tensors)
            save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory


def _config(model: str) -> dict[str, Any]:
    return tiny_models.config_dict(model)


def _theta(model: str, kind: str | None = None) -> dict[str, Any]:
    rope = _config(model)["rope_parameters"]
    (rope[kind] if kind else rope)["rope_theta"] = 1e4
    return {"rope_parameters": rope}


def _inverted() -> dict[str, Any]:
    other = {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}
    return {"layer_types": [other[kind] for kind in _config("gemma3")["layer_types"]]}


def _norms_minus_one(tensors: Tensors) -> None:
    """What multiplying by the stored weight, not by one plus it, computes."""
    for name in tensors:
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            tensors[name] -= 1


def _permute_o_heads(tensors: Tensors) -> None:
    for name, weight in tensors.items():
        if name.endswith("o_proj.weight"):
            heads = weight.view(weight.shape[0], HEADS, HEAD)
            tensors[name] = heads[:, [1, 0, 2, 3, 4, 5]].reshape(weight.shape).contiguous()


def _drop_bias(tensors: Tensors) -> None:
    for name in tensors:
        if name.endswith("_proj.bias"):
            tensors[name].zero_()


def _swap_k_and_v(tensors: Tensors) -> None:
    k, v = (f"model.layers.2.self_attn.{name}_proj.weight" for name in "kv")
    tensors[k], tensors[v] = tensors[v], tensors[k]


def _no_embedding_scale(patch: pytest.MonkeyPatch) -> None:
    """Serve embedded rows as they are stored."""
    from pilotage.nn import VocabDimShardedEmbedding

    real = VocabDimShardedEmbedding.__init__

    def unscaled(self: Any, num_embeddings: int, embedding_dim: int, *, scale: float | None = None) -> None:
        real(self, num_embeddings, embedding_dim, scale=None)

    patch.setattr(VocabDimShardedEmbedding, "__init__", unscaled)


def _epsilon(patch: pytest.MonkeyPatch) -> None:
    """Hard-code 1e-5 in the norm."""
    from pilotage.nn import RMSNorm

    real = RMSNorm.__init__

    def fixed(self: Any, size: int, *, eps: float, **options: Any) -> None:
        real(self, size, eps=1e-5, **options)

    patch.setattr(RMSNorm, "__init__", fixed)


ATTENTION = (("attention", "bfloat16"), ("attention", "float32"))
ROPE = (("rope", "bfloat16"), ("rope", "float32"), *ATTENTION)
ONE_LAYER = (("decoder layer", "float32"), *ATTENTION)

FAULTS = (
    Fault(name="rope theta 1e4, gemma3", model="gemma3", config=_theta("gemma3", "full_attention"), modules=ROPE),
    Fault(name="rope theta 1e4, llama3", model="llama3", config=_theta("llama3"), modules=ROPE),
    Fault(name="rope theta 1e4, qwen3", model="qwen3", config=_theta("qwen3"), modules=ROPE),
    Fault(name="window one longer", model="gemma3", config={"sliding_window": 17}, modules=ATTENTION),
    Fault(name="window one shorter", model="gemma3", config={"sliding_window": 15}, modules=ATTENTION),
    Fault(name="layer pattern inverted", model="gemma3", config=_inverted(), modules=ATTENTION),
    Fault(
        name="q/k norm without +1",
        model="gemma3",
        weights=_norms_minus_one,
        modules=(("norm", "bfloat16"), ("norm", "float32"), *ATTENTION),
    ),
    Fault(name="query scale ignored", model="gemma3", config={"query_pre_attn_scalar": HEAD}, modules=ATTENTION),
    Fault(
        name="embedding scale dropped",
        model="gemma3",
        patch=_no_embedding_scale,
        modules=(("embedding", "bfloat16"), ("embedding", "float32")),
    ),
    Fault(name="o_proj heads permuted", model="llama3", weights=_permute_o_heads, modules=ATTENTION),
    Fault(name="qkv bias dropped", model="qwen2", weights=_drop_bias, modules=ATTENTION),
    Fault(
        name="norm epsilon 1e-5 in the config",
        model="gemma3",
        config={"rms_norm_eps": 1e-5},
        arms=("float32",),
        modules=(("norm", "float32"), ("norm", "bfloat16")),
    ),
    Fault(
        name="norm epsilon 1e-5 in the code",
        model="qwen3",
        patch=_epsilon,
        arms=("float32",),
        modules=(("norm", "float32"), ("norm", "bfloat16")),
    ),
    Fault(name="K and V swapped in one layer", model="gemma3", weights=_swap_k_and_v, modules=ONE_LAYER),
    Fault(name="K and V swapped in one layer, qwen3", model="qwen3", weights=_swap_k_and_v, modules=()),
)


class PagedArm:
    """Our model without the engine: packed prefill, a chunk that reads the cache, then decode steps of all streams."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint

    def __call__(self, arm: str, streams: Any) -> Any:
        from pilotage.accuracy.arms.module import OurModules
        from pilotage.core.nouns import Observation
        from pilotage.models.common.paging import PagedSession

        longest = max(len(stream.tokens) for stream in streams)
        model = OurModules(self.checkpoint, getattr(torch, arm), longest).model
        session = PagedSession(model=model, num_requests=len(streams), max_tokens=longest, block_size=16)
        rows: list[list[Tensor]] = [[] for _ in streams]

        def step(new: dict[int, list[int]], **how: Any) -> None:
            for index, logits in session.step(new, **how).items():
                rows[index].append(logits.float())

        halves = [max(1, stream.prompt // 2) for stream in streams]
        step({i: list(stream.tokens[: halves[i]]) for i, stream in enumerate(streams)}, fresh=True)
        step({i: list(stream.tokens[halves[i] : stream.prompt]) for i, stream in enumerate(streams)})
        for offset in range(len(streams[0].tokens) - streams[0].prompt - 1):
            step({i: [stream.tokens[stream.prompt + offset]] for i, stream in enumerate(streams)}, decode=True)
        return Observation(
            arm="target",
            dtype=arm,
            logits=[torch.cat(found)[list(stream.positions)] for stream, found in zip(streams, rows, strict=True)],
            positions=[list(stream.positions) for stream in streams],
        )
