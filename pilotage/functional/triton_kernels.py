"""The Triton kernels of `kernels.triton`, offered on CUDA devices and, in fp32, in Triton's interpreter.

Each is one opaque operator in a graph; its gradient is the definition's. Written and checked in the interpreter: none
of them has run on a GPU yet.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from pilotage.functional import descriptions  # noqa: F401  the operators exist and are described
from pilotage.functional.domain import Domain, Emulator, Limit
from pilotage.functional.registry import DEFINITION, implementations, register
from pilotage.kernels import triton, wrap_kernel

_NOTES = "not run on a GPU"
_EMULATOR = Emulator(
    name="Triton's interpreter", how="TRITON_INTERPRET=1", active=triton.interpreting, dtypes=(torch.float32,)
)
_HEAD = Limit(at_most=256, why="a head has to fit the registers of a program")
_ROW = Limit(at_most=16384, why="a row has to fit the registers of a program")
_NO_SCALES: dict[str, tuple[Any, ...]] = {"k_scale": (None,), "v_scale": (None,)}


def _domain(*one_dtype: str, **more: Any) -> Domain:
    return Domain(
        targets=("cuda",),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        one_dtype=one_dtype,
        gradient=True,
        emulator=_EMULATOR,
        machine=triton.missing,
        **more,
    )


def _launcher(module: str, name: str, *dropped: str) -> Callable[..., Any]:
    """Return a function that imports the kernel when it is first called; triton takes a while to import."""

    def launch(*args: Any, **kwargs: Any) -> Any:
        kept = {key: value for key, value in kwargs.items() if key not in dropped}
        return getattr(importlib.import_module(f"pilotage.kernels.triton.{module}"), name)(*args, **kept)

    return launch


def _offer(operator: str, launch: Callable[..., Any], domain: Domain) -> None:
    definition = next(one for one in implementations(operator) if one.name == DEFINITION)
    wrapped = wrap_kernel(launch, definition.function, name=f"triton_{operator}")
    register(operator, "triton", wrapped, domain=domain, priority=30, language="Triton", notes=_NOTES)


_offer("rms_norm", _launcher("norm", "rms_norm"), _domain("x", "weight", limits={"D": _ROW}))
_offer("rotary", _launcher("norm", "rotary"), _domain("q", "k", "cos", "sin", limits={"H": _HEAD}))
_offer(
    "flash_attention",
    _launcher("attention", "flash_attention"),
    _domain("q", "k", "v", limits={"H": _HEAD}, error=1.5, hides_non_finite=True),
)
_PAGED = _domain(
    "q",
    "k_cache",
    "v_cache",
    limits={"H": _HEAD, "C": Limit(at_most=256), "N//K": Limit(at_most=64)},
    options=_NO_SCALES,
    error=1.5,
    hides_non_finite=True,
)
_UNUSED = ("seq_lens", "kv_segment_size", "k_scale", "v_scale")
_offer("attention_decode", _launcher("attention", "paged_attention", *_UNUSED), _PAGED)
_offer("segmented_attention", _launcher("attention", "paged_attention", *_UNUSED), _PAGED)
_offer(
    "mlp",
    _launcher("mlp", "mlp"),
    _domain(
        "x",
        "gate_up_weight",
        "down_weight",
        options={"activation": ("silu", "gelu", "gelu_pytorch_tanh", "relu")},
        error=1.2,
    ),
)
