"""The data types of NKI and how values become them.

A type is a string, as the language documents it, that also knows its size and how the interpreter holds it. With
NKI_PRECISE_FP=0 the low-precision floats are held in float32: that separates a kernel's logic from its rounding.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from pilotage.kernels.nki.faults import fault
from pilotage.kernels.nki.hardware import precise

Array = np.ndarray[Any, Any]


class DType(str):
    """A data type: its name, `itemsize` in bytes on the device, and the numpy type that holds it here."""

    itemsize: int
    exact: np.dtype[Any]
    kind: str  # "float", "low" (float of 16 bits or fewer), "int", "packed"

    def __new__(cls, name: str, exact: Any, kind: str) -> DType:
        self = super().__new__(cls, name)
        self.exact = np.dtype(exact)
        self.itemsize = self.exact.itemsize
        self.kind = kind
        return self

    @property
    def held(self) -> np.dtype[Any]:
        """The numpy type of a fresh tensor."""
        return np.dtype(np.float32) if self.kind == "low" and not precise() else self.exact

    @property
    def is_float(self) -> bool:
        return self.kind in ("float", "low")

    @property
    def is_integer(self) -> bool:
        return self.kind == "int"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return str.__eq__(self, other)
        found = _lookup(other)
        return found is not None and str.__eq__(self, found)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __repr__(self) -> str:
        return f"nl.{self!s}"


bool_ = DType("bool", np.uint8, "int")
int8 = DType("int8", np.int8, "int")
int16 = DType("int16", np.int16, "int")
int32 = DType("int32", np.int32, "int")
uint8 = DType("uint8", np.uint8, "int")
uint16 = DType("uint16", np.uint16, "int")
uint32 = DType("uint32", np.uint32, "int")
float32 = DType("float32", np.float32, "float")
tfloat32 = DType("tfloat32", np.float32, "float")
float16 = DType("float16", np.float16, "low")
bfloat16 = DType("bfloat16", ml_dtypes.bfloat16, "low")
float8_e4m3 = DType("float8_e4m3", ml_dtypes.float8_e4m3, "low")
float8_e4m3fn = DType("float8_e4m3fn", ml_dtypes.float8_e4m3fn, "low")
float8_e5m2 = DType("float8_e5m2", ml_dtypes.float8_e5m2, "low")
float8_e8m0fnu = DType("float8_e8m0fnu", ml_dtypes.float8_e8m0fnu, "low")
float8_e4m3fn_x4 = DType("float8_e4m3fn_x4", np.uint32, "packed")
float8_e5m2_x4 = DType("float8_e5m2_x4", np.uint32, "packed")
float4_e2m1fn_x4 = DType("float4_e2m1fn_x4", np.uint16, "packed")

ALL = {
    str(one): one
    for one in (
        bool_, int8, int16, int32, uint8, uint16, uint32, float32, tfloat32, float16, bfloat16, float8_e4m3,
        float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float8_e4m3fn_x4, float8_e5m2_x4, float4_e2m1fn_x4,
    )
}  # fmt: skip
_BY_NUMPY = {one.exact: one for one in ALL.values() if one.kind != "packed" and one not in (bool_, tfloat32)}
_BY_NUMPY[np.dtype(np.bool_)] = bool_


def _lookup(asked: Any) -> DType | None:
    if isinstance(asked, DType):
        return asked
    if isinstance(asked, str):
        return ALL.get(asked.removeprefix("torch.").replace("bool_", "bool"))
    if type(asked).__module__ == "torch":
        return ALL.get(str(asked).removeprefix("torch."))
    try:
        return _BY_NUMPY.get(np.dtype(asked))
    except TypeError:
        return None


def resolve(asked: Any) -> DType:
    """Find the data type that a name, a numpy type or a torch type means."""
    found = _lookup(asked)
    if found is None:
        fault(f"{asked!r} is not a data type of NKI", do=f"use one of {', '.join(ALL)}")
    return found


_INT_RANGE = {one.exact: (np.iinfo(one.exact).min, np.iinfo(one.exact).max) for one in ALL.values() if one.is_integer}


def convert(values: Array, dtype: DType) -> Array:
    """Bring values into the type that holds `dtype`: floats round to nearest even, integers round and saturate."""
    held = dtype.held
    if dtype is tfloat32:
        return round_to_tf32(values)
    if values.dtype == held:
        return values
    if held in _INT_RANGE and values.dtype.kind not in "iub":
        low, high = _INT_RANGE[held]
        wide = np.rint(values.astype(np.float64))
        return np.clip(np.nan_to_num(wide, nan=0.0), low, high).astype(held)
    if held in _INT_RANGE and values.dtype.kind in "iu":
        low, high = _INT_RANGE[held]
        return np.clip(values.astype(np.int64), low, high).astype(held)
    with np.errstate(over="ignore", invalid="ignore"):
        if held.kind != "f" or held.itemsize < 4:  # every narrow float is reached through float32, as on the engines
            return values.astype(np.float32).astype(held)
        return values.astype(held)


def widen(values: Array) -> Array:
    """Read values as float32, the type that every engine computes in."""
    return values if values.dtype == np.float32 else values.astype(np.float32)


def round_to_tf32(values: Array) -> Array:
    """Keep 10 bits of mantissa, round to nearest even; infinities and NaN pass."""
    wide = np.ascontiguousarray(values, dtype=np.float32)
    bits = wide.view(np.uint32)
    rounded = (bits + np.uint32(0x0FFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(wide), rounded.view(np.float32), wide)
