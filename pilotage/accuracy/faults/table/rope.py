"""Rotary positions: base, scaling, layout, precision, and the positions themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import pilotage.functional as NF
from pilotage.accuracy.faults.fault import Fault, Plant, kind_of, method, operator, reads

_rope = partial(Fault, heading="RoPE", where=("*.self_attn.q_rope", "*.self_attn.k_rope"))


def _frequencies(**values: Any) -> Plant:
    """Give every kind of layer these frequencies."""

    def rope(config: Any) -> Any:
        found = NF.rope_frequencies(head_size=config.head_size, **values)
        return dict.fromkeys(config.rope, found)

    return reads(rope=rope)


def _changed(change: Callable[[NF.RopeFrequencies], NF.RopeFrequencies]) -> Plant:
    return reads(rope=lambda config: {kind: change(found) for kind, found in config.rope.items()})


def _rounded(found: NF.RopeFrequencies) -> NF.RopeFrequencies:
    values = torch.tensor(found.inv_freq, device="cpu").bfloat16().float()
    return dataclasses.replace(found, inv_freq=tuple(values.tolist()))


def _swapped(config: Any) -> Any:
    full, sliding = config.rope["full_attention"], config.rope["sliding_attention"]
    return {"full_attention": sliding, "sliding_attention": full}


def _interleaved(real: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def rotate(x: Tensor) -> Tensor:
        half = cos.shape[-1] // 2
        c, s = cos[..., None, :half], sin[..., None, :half]
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((even * c - odd * s, odd * c + even * s), -1).flatten(-2)

    return rotate(q), rotate(k)


def _bf16_angles(real: Any, positions: Tensor, frequencies: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = positions[..., None].bfloat16() * torch.tensor(frequencies.inv_freq).bfloat16()
    angles = torch.cat((angles, angles), -1)
    return tuple((f(angles.float()) * frequencies.amplitude).to(dtype) for f in (torch.cos, torch.sin))


def _positions(change: Callable[[Tensor, Any], Tensor], phase: str) -> Plant:
    def backbone() -> Any:
        from pilotage.models.common.blocks import DecoderBackbone

        return DecoderBackbone

    def forward(real: Any, self: Any, x: Tensor, positions: Tensor, ctx: Any) -> Tensor:
        if kind_of(ctx, "layers.0.self_attn") == phase:
            positions = change(positions, ctx["layers.0.self_attn"])
        return real(self, x, positions, ctx)

    return method(backbone, "forward", forward)


def _backwards(real: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return real(q, k, cos, -sin)


def _twice_as_fast(found: NF.RopeFrequencies) -> NF.RopeFrequencies:
    """Angles of channel i where those of i / 2 belong: the exponents' step is that of pairs, not of channels."""
    return dataclasses.replace(found, inv_freq=tuple(value**2 for value in found.inv_freq))


def _last_channel_still(found: NF.RopeFrequencies) -> NF.RopeFrequencies:
    return dataclasses.replace(found, inv_freq=(*found.inv_freq[:-1], 0.0))


def _angles_in_half(real: Any, positions: Tensor, frequencies: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Angles in the serving dtype."""
    if dtype is torch.float32:
        return real(positions, frequencies, dtype)
    return _bf16_angles(real, positions, frequencies, dtype)


def _wrapped(real: Any, positions: Tensor, frequencies: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A table that ends: positions past it begin again."""
    return real(positions % 48, frequencies, dtype)


def _from_the_chunk(positions: Tensor, meta: Any) -> Tensor:
    return positions - meta["cached_seq_len"][meta["token_to_req"].long()]


def _base_in_decode() -> Plant:
    def backbone() -> Any:
        from pilotage.models.common.blocks import DecoderBackbone

        return DecoderBackbone

    def forward(real: Any, self: Any, x: Tensor, positions: Tensor, ctx: Any) -> Tensor:
        if kind_of(ctx, "layers.0.self_attn") != "decode":
            return real(self, x, positions, ctx)
        before = self.rope
        self.rope = dict.fromkeys(before, before["sliding_attention"])
        try:
            return real(self, x, positions, ctx)
        finally:
            self.rope = before

    return method(backbone, "forward", forward)


_LLAMA3 = {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN: dict[str, Any] = {"kind": "yarn", "theta": 150000.0, "factor": 8.0, "original_max_position": 128}

FAULTS = (
    _rope(
        name="theta 1e4 in place of 5e5",
        model="llama3",
        plant=_frequencies(theta=1e4, original_max_position=128, **_LLAMA3),
    ),
    _rope(name="theta 1e4 in place of 1e6, with experts", model="qwen3_moe", plant=_frequencies(theta=1e4)),
    _rope(name="scaling parsed and not applied", model="llama3", plant=_frequencies(theta=5e5)),
    _rope(
        name="scaling linear in place of llama3",
        model="llama3",
        plant=_frequencies(theta=5e5, kind="linear", factor=8.0),
    ),
    _rope(
        name="low and high factor exchanged",
        model="llama3",
        plant=_frequencies(
            theta=5e5, original_max_position=128, kind="llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=1.0
        ),
    ),
    _rope(name="one base for both kinds of layer", model="gemma3", plant=_frequencies(theta=1e6)),
    _rope(name="bases of the kinds of layer exchanged", model="gemma3", plant=reads(rope=_swapped)),
    _rope(name="half of the head rotated", model="qwen2", plant=_frequencies(theta=1e6, partial_rotary_factor=0.5)),
    _rope(name="interleaved pairs in place of halves", model="mistral", plant=operator("rotary", _interleaved)),
    _rope(
        name="applied twice",
        model="qwen3",
        plant=operator("rotary", lambda real, q, k, cos, sin: real(*real(q, k, cos, sin), cos, sin)),
    ),
    _rope(
        name="keys not rotated",
        model="gemma2",
        where=("*.self_attn.k_rope",),
        plant=operator("rotary", lambda real, q, k, cos, sin: (real(q, k, cos, sin)[0], k)),
    ),
    _rope(
        name="frequencies lost: all zero",
        model="mixtral",
        plant=_changed(lambda found: dataclasses.replace(found, inv_freq=(0.0,) * len(found.inv_freq))),
    ),
    _rope(name="frequencies rounded to bf16", model="qwen3", only="long", plant=_changed(_rounded)),
    _rope(name="angles in bf16", model="mixtral", only="long", plant=operator("rope_table", _bf16_angles)),
    _rope(
        name="YaRN without its factor on cos and sin",
        model="gpt_oss",
        plant=_changed(lambda found: dataclasses.replace(found, amplitude=1.0)),
    ),
    _rope(name="YaRN not applied", model="gpt_oss", plant=_frequencies(theta=150000.0)),
    _rope(name="YaRN's ramp rounded to whole channels", model="gpt_oss", plant=_frequencies(truncate=True, **_YARN)),
    _rope(
        name="decode one position ahead",
        model="qwen2",
        only="decode",
        plant=_positions(lambda p, meta: p + 1, "decode"),
    ),
    _rope(
        name="decode always at position 0",
        model="llama3",
        only="decode",
        plant=_positions(lambda p, meta: p * 0, "decode"),
    ),
    _rope(
        name="angles in the serving dtype",
        model="qwen3",
        only="long",
        fp32=False,
        plant=operator("rope_table", _angles_in_half),
    ),
    _rope(name="rotated backwards", model="llama3", plant=operator("rotary", _backwards)),
    _rope(name="base 0.5% off", model="qwen2", plant=_frequencies(theta=1.005e6)),
    _rope(name="exponents of pairs in place of channels", model="mixtral", plant=_changed(_twice_as_fast)),
    _rope(name="slowest pair not rotated", model="qwen3", plant=_changed(_last_channel_still)),
    _rope(name="table shorter than the prompt", model="gemma2", only="long", plant=operator("rope_table", _wrapped)),
    _rope(
        name="YaRN's fast end at 16 rotations",
        model="gpt_oss",
        plant=_frequencies(beta_fast=16.0, truncate=False, **_YARN),
    ),
    _rope(
        name="base of the sliding layers in decode",
        model="gemma3",
        only="decode",
        plant=_base_in_decode(),
    ),
    _rope(
        name="positions start again in a chunk",
        model="mistral",
        only="chunk",
        plant=_positions(_from_the_chunk, "chunk"),
    ),
)
