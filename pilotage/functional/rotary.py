"""Rotary position embedding: frequencies, the cos/sin table of a step, and its application."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pilotage.core.errors import Unsupported
from pilotage.functional.registry import operator


@dataclass(frozen=True, kw_only=True)
class RopeFrequencies:
    """The angles per position, as constants of the model and not as buffers, which meta devices and casts lose.

    Attributes:
        inv_freq: one angle per position for each rotated pair of channels; exact fp32 values.
        amplitude: factor on cos and sin (the attention factor of YaRN; 1.0 for the other kinds).
    """

    inv_freq: tuple[float, ...]
    amplitude: float = 1.0


def rope_frequencies(
    *,
    theta: float,
    head_size: int,
    kind: str = "default",
    factor: float | None = None,
    low_freq_factor: float | None = None,
    high_freq_factor: float | None = None,
    original_max_position: int | None = None,
    partial_rotary_factor: float = 1.0,
    attention_factor: float | None = None,
    beta_fast: float | None = None,
    beta_slow: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    truncate: bool = True,
) -> RopeFrequencies:
    """Compute the frequencies of one RoPE variant.

    Args:
        theta: the base.
        head_size: H.
        kind: "default", "linear" (positions divided by `factor`), "llama3" (long wavelengths divided by `factor`,
            short ones kept, a ramp between: Llama 3.1), "yarn" (the same with a ramp over channels, and larger cos
            and sin: arXiv:2309.00071) or "proportional" (frequencies laid out over the whole head, of which the fast
            ones turn: Gemma 4).
        factor: scaling of all but "default".
        low_freq_factor, high_freq_factor, original_max_position: the ramp of "llama3".
        partial_rotary_factor: the share of the head that is rotated; the first channels, or with "proportional" the
            first of each half.
        attention_factor: what "yarn" multiplies cos and sin by; None for its own formula.
        beta_fast, beta_slow, original_max_position: the ramp of "yarn"; None for 32 and 1.
        mscale, mscale_all_dim: further terms of the formula of `attention_factor`.
        truncate: round the ramp's ends to whole channels.

    Raises:
        Unsupported: another kind, or a value that the kind needs is missing.

    Numerics: fp32 throughout, in the order of operations of transformers' modeling_rope_utils.py.
    """
    if kind == "proportional":
        turning = int(partial_rotary_factor * head_size // 2)
        exponents = torch.arange(0, 2 * turning, 2, dtype=torch.int64, device="cpu").to(torch.float32) / head_size
        still = torch.zeros(head_size // 2 - turning, device="cpu")
        inv_freq = torch.cat((1.0 / (theta**exponents), still)) / (factor or 1.0)
        return RopeFrequencies(inv_freq=tuple(inv_freq.tolist()))
    rotated = int(head_size * partial_rotary_factor)
    if rotated % 2 or rotated <= 0:
        raise Unsupported(
            f"{rotated} of {head_size} channels would be rotated; RoPE needs pairs", where="partial_rotary_factor"
        )
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64, device="cpu").to(torch.float32) / rotated
    inv_freq = 1.0 / (theta**exponents)
    if kind == "linear":
        inv_freq = inv_freq / _needed("factor", factor, kind)
    elif kind == "llama3":
        inv_freq = _llama3_frequencies(
            inv_freq,
            factor=_needed("factor", factor, kind),
            low=_needed("low_freq_factor", low_freq_factor, kind),
            high=_needed("high_freq_factor", high_freq_factor, kind),
            original=_needed("original_max_position_embeddings", original_max_position, kind),
        )
    elif kind == "yarn":
        factor = _needed("factor", factor, kind)
        original = _needed("original_max_position_embeddings", original_max_position, kind)
        share = _yarn_share(theta, rotated, beta_fast or 32, beta_slow or 1, original, truncate)
        inv_freq = 1.0 / (factor * theta**exponents) * (1 - share) + inv_freq * share
        if attention_factor is None:
            both = mscale and mscale_all_dim
            attention_factor = _yarn_scale(factor, mscale if both and mscale else 1.0)
            attention_factor /= _yarn_scale(factor, mscale_all_dim) if both and mscale_all_dim else 1.0
        return RopeFrequencies(inv_freq=tuple(inv_freq.tolist()), amplitude=attention_factor)
    elif kind != "default":
        raise Unsupported(
            f"RoPE of type {kind!r} is not implemented",
            where="rope_parameters.rope_type",
            do="the types served are default, linear, llama3, yarn and proportional",
        )
    return RopeFrequencies(inv_freq=tuple(inv_freq.tolist()))


def _needed(name: str, value: float | None, kind: str) -> float:
    if value is None:
        raise Unsupported(
            f"RoPE of type {kind!r} needs it", where=f"rope_parameters.{name}", do="state it in the config"
        )
    return value


def _llama3_frequencies(inv_freq: Tensor, *, factor: float, low: float, high: float, original: float) -> Tensor:
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / factor, inv_freq)
    ramp = (original / wavelength - low) / (high - low)
    blended = (1 - ramp) * scaled / factor + ramp * scaled
    between = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(between, blended, scaled)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_share(theta: float, rotated: int, fast: float, slow: float, original: float, truncate: bool) -> Tensor:
    """Return how much of each channel's own frequency is kept: 1 for fast channels, 0 for slow ones, a ramp between."""

    def channel(rotations: float) -> float:
        return rotated * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(fast), channel(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    if low == high:
        high += 0.001  # as in transformers
    ramp = (torch.arange(rotated // 2, dtype=torch.float32, device="cpu") - low) / (high - low)
    return 1 - ramp.clamp(0, 1)


def rope_table(positions: Tensor, frequencies: RopeFrequencies, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute cos and sin of every position, shared by all layers of one RoPE variant.

    Args:
        positions: [...] integers.
        frequencies: of the variant; R = 2 * len(inv_freq) channels are rotated.
        dtype: the model's dtype.

    Returns:
        cos and sin, each [..., R] in `dtype`.

    Numerics: angles, cos and sin in fp32, rounded to `dtype` once; half-precision angles alias past position 256.
    """
    inv_freq = torch.tensor(frequencies.inv_freq, dtype=torch.float32, device=positions.device)
    angles = positions[..., None].float() * inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * frequencies.amplitude).to(dtype), (angles.sin() * frequencies.amplitude).to(dtype)


@operator
def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their position; the two halves of a head form the pairs (the NeoX layout).

    Args:
        q: [..., N, H].
        k: [..., K, H].
        cos, sin: [..., R] from `rope_table`; channels from R on pass unrotated.

    Returns:
        q and k rotated, same shapes and dtype.

    Numerics: products and sum in the tensors' own dtype, as in transformers.
    """
    return _rotate(q, cos[..., None, :], sin[..., None, :]), _rotate(k, cos[..., None, :], sin[..., None, :])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated = cos.shape[-1]
    turned, passed = x[..., :rotated], x[..., rotated:]
    first, second = turned[..., : rotated // 2], turned[..., rotated // 2 :]
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return turned if rotated == x.shape[-1] else torch.cat((turned, passed), dim=-1)
