"""The mathematical operators that instructions take (`op=nl.add`), which are also functions of the language.

Engines compute in float32; what comes in here has been widened already. `alu` operators run on the vector engine,
`activation` functions on the scalar engine; the reference lists both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pilotage.kernels.nki.dtypes import Array
from pilotage.kernels.nki.faults import fault

_F = np.float32
SQRT_2, SQRT_2_OVER_PI = _F(math.sqrt(2)), _F(math.sqrt(2 / math.pi))


class Op:
    """An operator. Calling it applies it to tiles, as the functions of `nki.language` do.

    Attributes:
        name: as in `nl.<name>`.
        arity: 1 or 2 operands.
        function: numpy in, numpy out.
        bitvec: works on bit patterns of integers.
        alu, activation: which engines know it.
        reduction: the numpy reducer, for those that can reduce.
        identity: what a reduction starts from.
    """

    def __init__(
        self,
        name: str,
        arity: int,
        function: Callable[..., Any],
        *,
        bitvec: bool = False,
        alu: bool = False,
        activation: bool = False,
        reduction: Callable[..., Any] | None = None,
        identity: float | int | None = None,
    ) -> None:
        self.name, self.arity, self.function = name, arity, function
        self.bitvec, self.alu, self.activation = bitvec, alu, activation
        self.reduction, self.identity = reduction, identity
        self.__name__ = name

    def __repr__(self) -> str:
        return f"nl.{self.name}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from pilotage.kernels.nki.functions import apply

        return apply(self, *args, **kwargs)


def _sigmoid(x: Array) -> Array:
    return torch.sigmoid(torch.from_numpy(np.ascontiguousarray(x))).numpy()


def _erf(x: Array) -> Array:
    return torch.erf(torch.from_numpy(np.ascontiguousarray(x))).numpy()


def _normal_density(x: Array) -> Array:
    return np.exp(-x * x / _F(2)) / _F(math.sqrt(2 * math.pi))


def _tanh_argument(x: Array) -> Array:
    return SQRT_2_OVER_PI * (x + _F(0.044715) * x * x * x)


def _silu_dx(x: Array) -> Array:
    s = _sigmoid(x)
    return s * (_F(1) + x * (_F(1) - s))


def _apprx_sigmoid_dx(x: Array) -> Array:
    s = _sigmoid(_F(1.702) * x)
    return s * (_F(1) + _F(1.702) * x * (_F(1) - s))


def _softplus(x: Array) -> Array:
    return np.logaddexp(_F(0), x)


def _sin_on_engine(x: Array) -> Array:
    return np.where(np.abs(x) <= _F(np.pi) + _F(1e-6), np.sin(x), _F(np.nan))


def _truth(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: function(*args).astype(np.float32)


def _fold(pair: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Make a reducer over an axis of a two-argument function that numpy has none for."""

    def reducer(values: Array, axis: int | tuple[int, ...], **kwargs: Any) -> Array:
        axes = (axis,) if isinstance(axis, int) else tuple(axis)
        moved = np.moveaxis(values, axes, range(len(axes))).reshape(
            -1, *[n for i, n in enumerate(values.shape) if i not in axes]
        )
        out = moved[0]
        for one in moved[1:]:
            out = pair(out, one)
        return out

    return reducer


def _truth_over(reducer: Callable[..., Any]) -> Callable[..., Any]:
    return lambda values, axis, **kwargs: reducer(values, axis=axis).astype(np.float32)


def _subtract_all(values: Array, axis: Any, **kwargs: Any) -> Array:
    return _fold(np.subtract)(values, axis)


_BINARY = [
    Op("add", 2, np.add, alu=True, reduction=np.sum, identity=0.0),
    Op("subtract", 2, np.subtract, alu=True, reduction=_subtract_all, identity=0.0),
    Op("multiply", 2, np.multiply, alu=True, reduction=np.prod, identity=1.0),
    Op("maximum", 2, np.maximum, alu=True, reduction=np.max, identity=-np.inf),
    Op("minimum", 2, np.minimum, alu=True, reduction=np.min, identity=np.inf),
    Op("abs_max", 2, lambda x, y: np.maximum(np.abs(x), np.abs(y)), alu=True,
       reduction=lambda v, axis, **k: np.max(np.abs(v), axis=axis), identity=0.0),
    Op("abs_min", 2, lambda x, y: np.minimum(np.abs(x), np.abs(y)), alu=True,
       reduction=lambda v, axis, **k: np.min(np.abs(v), axis=axis), identity=np.inf),
    Op("divide", 2, np.divide),
    Op("power", 2, np.power, alu=True),
    Op("mod", 2, np.mod),
    Op("fmod", 2, np.fmod),
    Op("equal", 2, _truth(np.equal), alu=True),
    Op("not_equal", 2, _truth(np.not_equal), alu=True),
    Op("greater", 2, _truth(np.greater), alu=True),
    Op("greater_equal", 2, _truth(np.greater_equal), alu=True),
    Op("less", 2, _truth(np.less), alu=True),
    Op("less_equal", 2, _truth(np.less_equal), alu=True),
    Op("logical_and", 2, _truth(np.logical_and), alu=True, reduction=_truth_over(np.all), identity=1.0),
    Op("logical_or", 2, _truth(np.logical_or), alu=True, reduction=_truth_over(np.any), identity=0.0),
    Op("logical_xor", 2, _truth(np.logical_xor), alu=True, reduction=_fold(_truth(np.logical_xor)), identity=0.0),
    Op("bitwise_and", 2, np.bitwise_and, alu=True, bitvec=True, reduction=np.bitwise_and.reduce, identity=-1),
    Op("bitwise_or", 2, np.bitwise_or, alu=True, bitvec=True, reduction=np.bitwise_or.reduce, identity=0),
    Op("bitwise_xor", 2, np.bitwise_xor, alu=True, bitvec=True, reduction=np.bitwise_xor.reduce, identity=0),
    Op("left_shift", 2, np.left_shift, alu=True, bitvec=True),
    Op("right_shift", 2, np.right_shift, alu=True, bitvec=True),
]  # fmt: skip
_UNARY = [
    Op("invert", 1, np.invert, alu=True, bitvec=True),
    Op("abs", 1, np.abs, alu=True, activation=True),
    Op("square", 1, np.square, alu=True, activation=True),
    Op("relu", 1, lambda x: np.maximum(x, _F(0)), alu=True, activation=True),
    Op("rsqrt", 1, lambda x: _F(1) / np.sqrt(x), alu=True, activation=True),
    Op("reciprocal", 1, lambda x: _F(1) / x, alu=True, activation=True),
    Op("bypass", 1, lambda x: x, alu=True, activation=True),
    Op("copy", 1, lambda x: x, activation=True),
    Op("exp", 1, np.exp, activation=True),
    Op("log", 1, np.log, activation=True),
    Op("sqrt", 1, np.sqrt, activation=True),
    Op("tanh", 1, np.tanh, activation=True),
    Op("sigmoid", 1, _sigmoid, activation=True),
    Op("gelu", 1, lambda x: _F(0.5) * x * (_F(1) + _erf(x / SQRT_2)), activation=True),
    Op("gelu_dx", 1, lambda x: _F(0.5) * (_F(1) + _erf(x / SQRT_2)) + x * _normal_density(x), activation=True),
    Op("gelu_apprx_tanh", 1, lambda x: _F(0.5) * x * (_F(1) + np.tanh(_tanh_argument(x))), activation=True),
    Op("gelu_apprx_sigmoid", 1, lambda x: x * _sigmoid(_F(1.702) * x), activation=True),
    Op("gelu_apprx_sigmoid_dx", 1, _apprx_sigmoid_dx, activation=True),
    Op("silu", 1, lambda x: x * _sigmoid(x), activation=True),
    Op("silu_dx", 1, _silu_dx, activation=True),
    Op("softplus", 1, _softplus, activation=True),
    Op("mish", 1, lambda x: x * np.tanh(_softplus(x)), activation=True),
    Op("erf", 1, _erf, activation=True),
    Op("erf_dx", 1, lambda x: _F(2 / math.sqrt(math.pi)) * np.exp(-x * x), activation=True),
    Op("sin", 1, np.sin, activation=True),
    Op("cos", 1, np.cos),
    Op("tan", 1, np.tan),
    Op("arctan", 1, np.arctan, activation=True),
    Op("sign", 1, np.sign, activation=True),
    Op("ceil", 1, np.ceil),
    Op("floor", 1, np.floor),
    Op("trunc", 1, np.trunc),
    Op("negative", 1, np.negative),
    Op("logical_not", 1, _truth(np.logical_not)),
]
OPERATORS = {one.name: one for one in (*_BINARY, *_UNARY)}
# The polynomial of the scalar engine's sine is not public and wrong beyond pi, so what it gives there is poison here.
ON_SCALAR_ENGINE = {"sin": _sin_on_engine}
_SYNONYMS = {
    "max": "maximum",
    "min": "minimum",
    "sum": "add",
    "prod": "multiply",
    "true_divide": "divide",
    "absolute": "abs",
    "amax": "maximum",
    "amin": "minimum",
}


def operator(asked: Any, *, what: str = "op") -> Op:
    """Find the operator that an argument means; reducers (`nl.max`) and numpy functions name theirs, as in NKI 0.1."""
    if isinstance(asked, Op):
        return asked
    name = getattr(asked, "__name__", None)
    found = OPERATORS.get(_SYNONYMS.get(name, name)) if isinstance(name, str) else None
    if found is None:
        fault(f"{what}={asked!r} is not an operator of nki.language")
    return found


def alu(asked: Any, *, what: str = "op", legacy: bool = False) -> Op:
    """Find an operator that the vector engine has."""
    found = operator(asked, what=what)
    if not found.alu and not legacy:
        known = ", ".join(name for name, one in OPERATORS.items() if one.alu)
        fault(f"{what}={found!r} is not an operator of the vector engine", do=f"it has {known}")
    return found


def activation(asked: Any) -> Callable[[Array], Array]:
    """Find a function that the scalar engine has."""
    found = operator(asked)
    if not found.activation:
        known = ", ".join(name for name, one in OPERATORS.items() if one.activation)
        fault(f"op={found!r} is not a function of the scalar engine", do=f"it has {known}")
    return ON_SCALAR_ENGINE.get(found.name, found.function)


def quiet() -> np.errstate:
    """Let infinities and NaN through without a warning, as the engines do."""
    return np.errstate(all="ignore")
