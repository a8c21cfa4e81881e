"""Clean controls: other correct computations of the same model, whose errors say what noise looks like for it.

The bound that a target is held against comes from these, not from a constant: how far rounding is amplified is a
property of the weights and the prompts.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy import metrics
from pilotage.accuracy.arms import symmetry
from pilotage.accuracy.arms.base import Stream
from pilotage.accuracy.arms.hf import HFArm, Mode, set_attention
from pilotage.accuracy.gates import ControlErrors
from pilotage.core import store
from pilotage.core.errors import Unsupported
from pilotage.core.progress import track

# Part of the cache key of measured controls: change it with anything that changes what a control computes.
RECIPE = 6


@dataclass(frozen=True, kw_only=True)
class Control:
    """How a control differs from the baseline.

    Attributes:
        name: what the verdict lists.
        attention: transformers' attention implementation.
        change: applied to a copy of the model, or None.
        mode: see `HFArm`.
        compiled: decoder layers of the most frequent kind go through `torch.compile`.
    """

    name: str
    attention: str
    change: Callable[[Any], None] | None = None
    mode: Mode = "whole"
    compiled: bool = False


def _hidden(seed: int) -> Callable[[Any], None]:
    return lambda model: symmetry.permute_hidden(model, seed)


def _inner(seed: int) -> Callable[[Any], None]:
    return lambda model: symmetry.permute_inner(model, seed)


def _both(seed: int) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        symmetry.permute_hidden(model, seed)
        symmetry.permute_inner(model, seed)

    return change


EAGER = "eager attention"
# In the order in which they are run; the last ones are spares for architectures that cannot have all of the others.
CONTROLS: tuple[Control, ...] = (
    Control(name=EAGER, attention="eager"),
    Control(name="permuted hidden channels", attention="sdpa", change=_hidden(1)),
    Control(name="permuted heads and MLP channels", attention="sdpa", change=_inner(2)),
    Control(name="all permuted", attention="sdpa", change=_both(3)),
    Control(name="all permuted, eager attention", attention="eager", change=_both(4)),
    Control(name="chunks through the KV cache", attention="sdpa", mode="chunked"),
    Control(name="chunks through the KV cache, all permuted", attention="sdpa", mode="chunked", change=_both(8)),
    Control(name="compiled", attention="sdpa", compiled=True),
    Control(name="compiled, all permuted", attention="sdpa", change=_both(6), compiled=True),
    Control(name="permuted heads and MLP channels, eager attention", attention="eager", change=_inner(7)),
    Control(name="chunks through the KV cache, eager attention", attention="eager", mode="chunked"),
    Control(name="token by token through the KV cache", attention="sdpa", mode="cached"),
    Control(name="token by token through the KV cache, eager attention", attention="eager", mode="cached"),
    Control(name="compiled, eager attention", attention="eager", compiled=True),
    Control(name="compiled, chunks through the KV cache", attention="sdpa", mode="chunked", compiled=True),
    Control(
        name="compiled, chunks through the KV cache, eager attention", attention="eager", mode="chunked", compiled=True
    ),
    Control(name="compiled, token by token through the KV cache", attention="sdpa", mode="cached", compiled=True),
)
ENOUGH = 9


def _variant(model: Any, control: Control) -> HFArm:
    """Make a control of a loaded model, which is copied where the control changes it.

    Raises:
        Unsupported: this architecture cannot have it.
    """
    variant = copy.deepcopy(model) if control.change is not None or control.compiled else model
    if control.change is not None:
        control.change(variant)
    set_attention(variant, control.attention)
    if control.compiled:
        for layer in _commonest(_layers(variant)):
            layer.forward = torch.compile(layer.forward, dynamic=True)
    return HFArm(variant, control.name, mode=control.mode)


def _layers(model: Any) -> Any:
    """Return the decoder's layers; where it has no `layers`, as GPT-2's `h`, the longest list of modules in it.

    Raises:
        Unsupported: there is none.
    """
    layers = getattr(model.get_decoder(), "layers", None)
    if layers is None:
        lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
        layers = max(lists, key=len, default=None)
    if not layers:
        raise Unsupported("its decoder has no list of layers to compile", where=type(model).__name__)
    return layers


def _commonest(layers: Any) -> list[Any]:
    """Return the layers of the most frequent kind: they share one graph, and each further kind costs seconds more."""
    kinds = [
        getattr(layer, "attention_type", getattr(getattr(layer, "self_attn", None), "is_sliding", None))
        for layer in layers
    ]
    kind = max(kinds, key=kinds.count)
    return [layer for layer, found in zip(layers, kinds, strict=True) if found == kind]


def measure(
    model: Any,
    streams: Sequence[Stream],
    expected: Tensor,
    baseline: metrics.RowErrors,
    phases: Sequence[str],
    *,
    skip: Sequence[str] = (),
) -> tuple[list[ControlErrors], dict[str, str]]:
    """Run controls until there are `ENOUGH`, and put their errors in units of the baseline's.

    Args:
        model: a Hugging Face causal language model in the arm's dtype, with the baseline's weights.
        streams: what to run.
        expected: [rows, V] reference logits of all streams, joined.
        baseline: errors of the baseline in those rows.
        phases: phase of each row.
        skip: names of controls that are the baseline itself.

    Returns:
        The measured controls, and for each that could not be had the reason.
    """
    measured: list[ControlErrors] = []
    missing: dict[str, str] = {}
    wanted = [control for control in CONTROLS if control.name not in skip]
    before = model.config._attn_implementation
    dtype = str(model.dtype).removeprefix("torch.")
    for control in track(wanted, f"clean controls, {dtype}"):
        if len(measured) == ENOUGH:
            break
        try:
            logits = torch.cat(_variant(model, control).observe(streams).logits)
        except Exception as error:
            # A compiler may be missing or fail; only a control made without one must work if it can be made at all.
            if not (control.compiled or isinstance(error, Unsupported)):
                raise
            missing[control.name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            continue
        finally:
            model.set_attn_implementation(before)
        errors = metrics.row_errors(logits, expected)
        measured.append(ControlErrors.of(control.name, metrics.model_errors(errors, baseline, phases)))
    return measured, missing


def digest(checkpoint: Path) -> str:
    """Return a hash over a checkpoint's configuration and weights."""
    total = hashlib.sha256()
    for path in sorted([checkpoint / "config.json", *checkpoint.glob("*.safetensors")]):
        with open(path, "rb") as file:
            total.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def cached(
    key: Sequence[Any], compute: Callable[[], tuple[list[ControlErrors], dict[str, str]]]
) -> tuple[list[ControlErrors], dict[str, str], bool]:
    """Return controls measured earlier under the same key, or measure and keep them.

    Args:
        key: JSON values that name everything the result depends on.
        compute: measures them.

    Returns:
        Controls, reasons of missing ones, and whether they came from the cache.
    """
    import transformers

    versions = [torch.__version__, transformers.__version__, torch.get_num_threads(), RECIPE]
    path = store.keyed("controls", [*key, versions])

    def read(value: Any) -> tuple[list[ControlErrors], dict[str, str]]:
        return [ControlErrors(**item) for item in value["controls"]], value["missing"]

    if (kept := store.kept(path, read)) is not None:
        return *kept, True
    controls, missing = compute()
    store.write_json(path, {"controls": [dataclasses.asdict(item) for item in controls], "missing": missing})
    return controls, missing, False
