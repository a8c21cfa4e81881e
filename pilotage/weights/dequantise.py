"""Rules that make plain parameters of quantised checkpoint tensors while loading.

They are the exception among the rules: they compute, and there is no way back, because other bytes stand for the same
values. Saving such a model under its checkpoint's names is refused; the ledger counts the tensors as not restored.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from pilotage.core.errors import Unsupported, WeightError
from pilotage.weights.rules import Drop, Stack

# E2M1: sign, two bits of exponent, one of mantissa (OCP Microscaling Formats specification 1.0).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS = 127  # E8M0: a power of two


@dataclass(frozen=True)
class Mxfp4:
    """Experts in MXFP4, two values a byte, a power of two for each 32, as gpt-oss is published.

    Args:
        hf: the checkpoint's name without its ending; `_blocks` [E, out, in / 32, 16] and `_scales` [E, out, in / 32]
            are read, both uint8.
        native: the parameter, [E, in, out].

    Numerics: exact in bf16 and fp32 for scales from 2**-125.
    """

    hf: str
    native: str
    dequantises: ClassVar[bool] = True

    @property
    def hf_patterns(self) -> tuple[str, ...]:
        return f"{self.hf}_blocks", f"{self.hf}_scales"

    @property
    def native_patterns(self) -> tuple[str, ...]:
        return (self.native,)

    def to_native(self, parts: Sequence[Tensor]) -> list[Tensor]:
        blocks, scales = parts
        if blocks.ndim != 4 or blocks.shape[:-1] != scales.shape or blocks.shape[-1] != 16:
            raise WeightError(
                f"blocks {list(blocks.shape)} and scales {list(scales.shape)}; expected [E, out, groups, 16] and "
                "[E, out, groups]",
                where=self.hf,
            )
        if blocks.is_meta:
            experts, out, groups, _ = blocks.shape
            return [blocks.new_empty(experts, groups * 32, out, dtype=torch.bfloat16)]
        # One expert at a time: the indices take eight bytes a value for a moment.
        return [torch.stack([self._expert(*one) for one in zip(blocks, scales, strict=True)])]

    def to_hf(self, parts: Sequence[Tensor]) -> list[Tensor]:
        raise _one_way(self.native, "MXFP4")

    @staticmethod
    def _expert(blocks: Tensor, scales: Tensor) -> Tensor:
        """blocks [out, groups, 16], scales [out, groups] -> [in, out]."""
        table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.bfloat16)
        # The low half of a byte comes first.
        values = table[torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).long()].flatten(-2)
        exponents = (scales.to(torch.int32) - _SCALE_BIAS)[..., None]
        return torch.ldexp(values, exponents).to(torch.bfloat16).flatten(-2).t().contiguous()


@dataclass(frozen=True)
class ScaledFp8:
    """A matrix in 8-bit floats with scales beside it.

    Args:
        hf: the checkpoint's name of the matrix [out, in].
        scale: the name of its scales: of the whole matrix ([] or [1]), of each row ([out] or [out, 1]), or of blocks.
        native: the parameter.
        block: rows and columns of a block; None where scales are of the whole or of rows.

    Numerics: the product in fp32; rounded to the parameter's dtype once.
    """

    hf: str
    scale: str
    native: str
    block: tuple[int, int] | None = None
    dequantises: ClassVar[bool] = True

    @property
    def hf_patterns(self) -> tuple[str, ...]:
        return self.hf, self.scale

    @property
    def native_patterns(self) -> tuple[str, ...]:
        return (self.native,)

    def to_native(self, parts: Sequence[Tensor]) -> list[Tensor]:
        weight, scale = parts
        if weight.ndim != 2:
            raise WeightError(f"{list(weight.shape)} is no matrix", where=self.hf)
        rows, columns = weight.shape
        if self.block is not None:
            grid = (-(-rows // self.block[0]), -(-columns // self.block[1]))
            if tuple(scale.shape) != grid:
                raise WeightError(
                    f"scales {list(scale.shape)}, blocks of {list(self.block)} make {list(grid)}", where=self.scale
                )
            scale = scale.repeat_interleave(self.block[0], 0)[:rows]
            scale = scale.repeat_interleave(self.block[1], 1)[:, :columns]
        elif scale.numel() == 1:
            scale = scale.reshape(1, 1)
        elif tuple(scale.shape) in ((rows,), (rows, 1)):
            scale = scale.reshape(rows, 1)
        else:
            raise WeightError(f"scales {list(scale.shape)} of a matrix {list(weight.shape)}", where=self.scale)
        if not weight.is_meta and weight.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise WeightError(f"has scales and is {weight.dtype}, not an 8-bit float", where=self.hf)
        return [weight.float() * scale.float()]

    def to_hf(self, parts: Sequence[Tensor]) -> list[Tensor]:
        raise _one_way(self.native, "FP8")


@dataclass(frozen=True)
class ScaledFp8Stack(Stack):
    """Experts one by one in 8-bit floats, each matrix with scales beside it, are one parameter.

    Args:
        scale: what follows a matrix's name, less ".weight", in that of its scales.
        block: see `ScaledFp8`.

    Numerics: see `ScaledFp8`.
    """

    scale: str = "weight_scale_inv"
    block: tuple[int, int] | None = None
    dequantises: ClassVar[bool] = True

    @functools.cached_property
    def hf_patterns(self) -> tuple[str, ...]:
        pairs = [(name, f"{name.removesuffix('.weight')}.{self.scale}") for name in self.hf]
        return tuple(name.replace("{e}", str(e)) for e in range(self.count) for pair in pairs for name in pair)

    @property
    def tensors_per_expert(self) -> int:
        return 2 * len(self.hf)

    def to_native(self, parts: Sequence[Tensor]) -> list[Tensor]:
        names = self.hf_patterns
        values = []
        for at in range(0, len(parts), 2):
            rule = ScaledFp8(names[at], names[at + 1], self.native, self.block)
            try:
                values += rule.to_native(parts[at : at + 2])
            except WeightError as error:  # one of hundreds: the message must name it
                raise WeightError(f"{error.where}: {error.what}", where=self.native) from error
        return Stack(self.hf, self.native, self.count, self.sizes, self.dim).to_native(values)

    def to_hf(self, parts: Sequence[Tensor]) -> list[Tensor]:
        raise _one_way(self.native, "FP8")


# The linear layers of a dense decoder; embedding, head and norms are never quantised in these checkpoints.
_LINEARS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


@dataclass(frozen=True, kw_only=True)
class Fp8Scheme:
    """How a dense decoder's checkpoint holds its linear layers in 8-bit floats.

    Attributes:
        scale: what a scale is called beside its `weight`.
        block: see `ScaledFp8`.
    """

    scale: str
    block: tuple[int, int] | None

    @classmethod
    def from_config(cls, quantization: Mapping[str, Any]) -> Self:
        """Read a `quantization_config`.

        Raises:
            Unsupported: a method or a layout other than 8-bit float weights with their scales.
        """
        where, method = "config.json, quantization_config", quantization.get("quant_method")
        if method == "compressed-tensors":
            return cls._from_groups(quantization, where)
        if method != "fp8":
            raise Unsupported(f"{method!r} is not implemented", where=where, do="served are fp8 and compressed-tensors")
        kept = [
            name for name in quantization.get("modules_to_not_convert") or () if "layers" in name or "_proj" in name
        ]
        kept += [name for name in quantization.get("ignored_layers") or () if "layers" in name or "_proj" in name]
        if kept:
            raise Unsupported(f"{kept[0]} is left unquantised, the layers beside it are not", where=where)
        block = quantization.get("weight_block_size")
        if block is None:
            return cls(scale="weight_scale", block=None)
        if not (isinstance(block, Sequence) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
            raise Unsupported(
                f"blocks of {block!r} are no blocks", where=f"{where}, weight_block_size", do="two positive numbers"
            )
        return cls(scale="weight_scale_inv", block=(int(block[0]), int(block[1])))

    @classmethod
    def _from_groups(cls, quantization: Mapping[str, Any], where: str) -> Self:
        groups = list((quantization.get("config_groups") or {}).values())
        if quantization.get("format") != "float-quantized" or len(groups) != 1:
            raise Unsupported(
                f"format {quantization.get('format')!r} in {len(groups)} groups is not implemented",
                where=where,
                do="served is float-quantized in one group",
            )
        weights = groups[0].get("weights") or {}
        if (weights.get("num_bits"), weights.get("type")) != (8, "float") or groups[0].get("targets") != ["Linear"]:
            raise Unsupported("weights other than 8-bit floats of all Linear layers", where=where)
        kept = [name for name in quantization.get("ignore") or () if name != "lm_head"]
        if kept:
            raise Unsupported(f"{kept[0]} is left unquantised", where=where)
        if weights.get("strategy") not in ("tensor", "channel"):
            raise Unsupported(f"scales by {weights.get('strategy')!r}", where=where, do="served are tensor and channel")
        return cls(scale="weight_scale", block=None)

    def rules(self, linears: Sequence[str] = _LINEARS) -> list[ScaledFp8 | Drop]:
        """The rules that a weight map needs before its general ones, for linear layers named below a decoder layer."""
        found: list[ScaledFp8 | Drop] = []
        for linear in linears:
            name = f"model.layers.{{i}}.{linear}"
            found.append(ScaledFp8(f"{name}.weight", f"{name}.{self.scale}", f"{name}.weight", self.block))
            found.append(Drop(f"{name}.input_scale", "activations keep the serving dtype", first=True))
        return found

    def stack(self, hf: tuple[str, ...], native: str, count: int, sizes: tuple[int, ...]) -> ScaledFp8Stack:
        """The rule of experts that are stored one by one; see `rules.Stack`."""
        return ScaledFp8Stack(hf, native, count, sizes, scale=self.scale, block=self.block)


def _one_way(native: str, kind: str) -> WeightError:
    return WeightError(
        f"it was made from {kind} on loading, and is not written back as that",
        where=native,
        do="save it under a config without quantization_config",
    )
