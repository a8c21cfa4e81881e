"""Norm, rotary, embedding and projections against transformers' own functions, bit for bit where the order is ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm, Gemma3TextScaledWordEmbedding
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

import pilotage.functional as NF
from pilotage.core.errors import Unsupported

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unit_offset", [False, True])
def test_rms_norm_has_hf_cast_order(dtype: torch.dtype, unit_offset: bool) -> None:
    reference = (Gemma3RMSNorm if unit_offset else LlamaRMSNorm)(60, eps=1e-5).to(dtype)
    torch.nn.init.normal_(reference.weight)
    x = torch.randn(7, 60).to(dtype) * 3
    with NF.forced({"rms_norm": "torch"}):
        got = NF.rms_norm(x, reference.weight, eps=1e-5, unit_offset=unit_offset)
    assert torch.equal(got, reference(x))


ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 8.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 64},
    "yarn, every parameter": {
        **{"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 20.0, "beta_slow": 2.0},
        **{"mscale": 1.3, "mscale_all_dim": 0.7, "truncate": False},
    },
    "yarn, stated attention factor": {
        **{"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.5},
    },
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ROPES)
def test_rope_equals_hf(kind: str, dtype: torch.dtype) -> None:
    values, kind = ROPES[kind], kind.split(",")[0]
    config = LlamaConfig(
        hidden_size=120,
        num_attention_heads=6,
        head_dim=20,
        rope_parameters={"rope_type": kind, "rope_theta": 1234.5, **values},
    )
    named = dict(values)
    if "original_max_position_embeddings" in named:
        named["original_max_position"] = named.pop("original_max_position_embeddings")
    frequencies = NF.rope_frequencies(theta=1234.5, head_size=20, kind=kind, **named)
    positions = torch.tensor([0, 1, 7, 500, 3000], dtype=torch.int32)
    cos, sin = NF.rope_table(positions, frequencies, dtype)
    hf_cos, hf_sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=dtype), positions[None])
    assert torch.equal(cos, hf_cos[0])
    assert torch.equal(sin, hf_sin[0])
    q, k = torch.randn(5, 6, 20).to(dtype), torch.randn(5, 2, 20).to(dtype)
    got = NF.rotary(q, k, cos, sin)
    expected = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_partial_rotary_leaves_the_rest_alone() -> None:
    frequencies = NF.rope_frequencies(theta=100.0, head_size=20, partial_rotary_factor=0.5)
    cos, sin = NF.rope_table(torch.arange(4), frequencies, torch.float32)
    q = torch.randn(4, 3, 20)
    turned, _ = NF.rotary(q, q, cos, sin)
    assert torch.equal(turned[..., 10:], q[..., 10:])
    assert not torch.equal(turned[1:, :, :10], q[1:, :, :10])


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"kind": "longrope", "factor": 4.0}, "rope_type"),
        ({"kind": "yarn", "factor": 4.0}, "original_max_position"),
        ({"kind": "llama3", "factor": 4.0}, "low_freq_factor"),
        ({"partial_rotary_factor": 0.15}, "partial_rotary_factor"),
    ],
)
def test_what_rope_cannot_do_is_refused_by_key(values: dict[str, Any], key: str) -> None:
    with pytest.raises(Unsupported, match=key):
        NF.rope_frequencies(theta=1e4, head_size=20, **values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_embedding_scale_is_rounded_like_hf(dtype: torch.dtype) -> None:
    reference = Gemma3TextScaledWordEmbedding(32, 8, 0, embed_scale=640**0.5).to(dtype)
    ids = torch.randint(0, 32, (9,))
    assert torch.equal(NF.embedding(ids, reference.weight, scale=640**0.5), reference(ids))


def test_mlp_is_its_parts() -> None:
    x, gate, up, down = torch.randn(5, 12), torch.randn(20, 12), torch.randn(20, 12), torch.randn(12, 20)
    with NF.forced({"mlp": "torch"}):
        got = NF.mlp(x, torch.cat((gate, up)), down, activation="gelu_pytorch_tanh")
    hidden = torch.nn.functional.gelu(x @ gate.T, approximate="tanh") * (x @ up.T)
    torch.testing.assert_close(got, hidden @ down.T)
    with pytest.raises(Unsupported, match=r"hidden_act.*swish_of_old.*silu"):
        NF.mlp(x, torch.cat((gate, up)), down, activation="swish_of_old")


def test_softcap_bounds() -> None:
    capped = NF.softcap(torch.tensor([-1e3, 0.0, 1.0]), cap=30.0)
    torch.testing.assert_close(capped, torch.tensor([-30.0, 0.0, 30 * torch.tanh(torch.tensor(1 / 30)).item()]))
