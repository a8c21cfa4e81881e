"""The modules of a model without a package: Hugging Face's own, on the pages that the day-zero fallback serves from."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy.arms.base import LayerKV
from pilotage.accuracy.arms.module import CONTEXT, HFModules, Job, OurModules
from pilotage.core.errors import Unsupported
from pilotage.core.nouns import Status, Verdict


def has_package(checkpoint: Path) -> bool:
    """Whether a model package serves a checkpoint; without one it is the fallback."""
    from pilotage.arch import source
    from pilotage.models import registry

    return registry.find(source.load_config(str(checkpoint)).architectures or []) is not None


def note(checkpoint: Path, *, modules: bool) -> Verdict | None:
    """Say what a comparison is worth where the fallback serves; None where a package does."""
    if has_package(checkpoint):
        return None
    claim = "No model package: what was compared is the day-zero fallback, Hugging Face's own modules on our pages."
    if modules:
        claim += (
            " Level 3 held them against themselves under Hugging Face's attention: it judges attention and pages, and "
            "no module of our own."
        )
    return Verdict(
        claim=claim,
        metric="served by the fallback",
        estimate=None,
        bound=None,
        bound_source="there is nothing to hold it against",
        n=1,
        status=Status.PASS,
    )


def require_named_modules(model: Any) -> None:
    """Refuse to compare single modules where a model calls them otherwise than the comparison does.

    Args:
        model: Hugging Face's.

    Raises:
        Unsupported: names what its decoder does not have.
    """
    decoder = model.get_decoder()
    layers: Any = getattr(decoder, "layers", None)
    lacking = [name for name in ("layers", "norm") if not isinstance(getattr(decoder, name, None), torch.nn.Module)]
    for index, layer in enumerate(layers if "layers" not in lacking else ()):
        parts = ("self_attn", "mlp")
        lacking += [
            f"layers.{index}.{part}" for part in parts if not isinstance(getattr(layer, part, None), torch.nn.Module)
        ]
    if lacking:
        raise Unsupported(
            f"its decoder has no {', '.join(lacking[:3])}; level 3 knows modules by these names",
            where=type(decoder).__name__,
            do="leave level 3 out",
        )


def paired(found: Sequence[Sequence[LayerKV]], expected: Sequence[Sequence[LayerKV]]) -> list[list[LayerKV]]:
    """Give the layers of the fallback's cache the names of the reference's, in the order of the model.

    Args:
        found: what the engine has cached of each stream; heads may be padded at their end.
        expected: of the reference.

    Raises:
        Unsupported: the reference caches something else than what its attention is handed.
    """
    out = []
    for ours, theirs in zip(found, expected, strict=True):
        ordered = sorted(ours, key=lambda layer: [int(n) for n in re.findall(r"\d+", layer.layer)])
        if len(ordered) != len(theirs):
            raise Unsupported(f"its layers attend {len(ordered)} times, and Hugging Face caches {len(theirs)}")
        out.append([_as_cached(mine, other) for mine, other in zip(ordered, theirs, strict=True)])
    return out


def _as_cached(mine: LayerKV, other: LayerKV) -> LayerKV:
    cut = {kind: getattr(mine, kind)[..., : getattr(other, kind).shape[-1]] for kind in ("keys", "values")}
    shapes = [(cut[kind].shape[1:], getattr(other, kind).shape[1:]) for kind in cut]
    if any(ours[1] != theirs[1] or ours[0] % theirs[0] for ours, theirs in shapes):
        raise Unsupported(
            f"{mine.layer} hands attention keys and values of {[list(ours) for ours, _ in shapes]}, and Hugging Face "
            f"caches {[list(theirs) for _, theirs in shapes]} (heads, size)"
        )
    return dataclasses.replace(mine, layer=other.layer, **cut)


class FallbackModules:
    """Answers jobs as `OurModules` does; attention goes to pages, in the same three ways.

    Args:
        checkpoint: directory.
        dtype: of weights and computation.
        length: tokens of the stream.
    """

    def __init__(self, checkpoint: Path, dtype: torch.dtype, length: int) -> None:
        from pilotage.models.common.paging import PagedSession
        from pilotage.serving.fallback.load import load

        self.model = load(checkpoint, dtype=dtype, max_model_len=length)
        self.dtype, self.length = dtype, length
        self.session = PagedSession(model=self.model, num_requests=1, max_tokens=length, block_size=16)
        self._recorded: dict[str, HFModules] = {}

    steps: Any = OurModules.steps
    DECODED = OurModules.DECODED

    def _recorder(self, name: str) -> HFModules:
        """A module and what its model calls it with at positions from 0; tokens do not matter for that."""
        from pilotage.serving.fallback import attention

        if name not in self._recorded:
            attention.use(self.model.hf, "eager")
            try:
                self._recorded[name] = HFModules(self.model.hf, [3] * self.length, [name])
            finally:
                attention.use(self.model.hf, attention.NAME)
        return self._recorded[name]

    @torch.inference_mode()
    def answer(self, job: Job) -> Tensor | None:
        """Return a module's output for a job."""
        if job.kind == "rope":
            return torch.stack(HFModules.rope(_Bare(self.model.hf, self.dtype), job.x, job.layer_type))  # type: ignore[arg-type]
        arm = self._recorder(job.name)
        if job.kind == "router":
            return arm.logits(job.name, job.x)
        if job.kind not in CONTEXT:
            x = job.x.to(self.dtype) if job.x.is_floating_point() else job.x
            found = arm.decoder.get_submodule(job.name)(x)
            return found[0] if isinstance(found, tuple) else found
        module, call = arm.decoder.get_submodule(job.name), arm.calls[job.name]
        given = HFModules._arguments(call, module, job.x.to(self.dtype))
        given |= {key: value.to(self.dtype) for key, value in job.beside.items() if key in given}
        out = []
        for start, end, context in self.steps():
            with self.model.step.running(context, context["positions"]):
                found = module(**{key: _rows(value, start, end, self.length) for key, value in given.items()})
            out.append(found[0] if isinstance(found, tuple) else found)
        return torch.cat(out, dim=1)


class _Bare:
    """As much of `HFModules` as its RoPE needs."""

    def __init__(self, hf: Any, dtype: torch.dtype) -> None:
        self.decoder, self.dtype = hf.get_decoder(), dtype


def _rows(value: Any, start: int, end: int, length: int) -> Any:
    """Cut what has one row a token, [1, length, ...], to some of the tokens; masks, which pages do not need, go."""
    if isinstance(value, tuple):
        return tuple(_rows(one, start, end, length) for one in value)
    if not isinstance(value, Tensor):
        return value
    if value.ndim == 4 and value.shape[-1] == value.shape[-2] == length:
        return None
    return value[:, start:end] if value.ndim > 1 and value.shape[1] == length else value
