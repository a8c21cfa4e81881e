"""What a planted fault is, and the ways to plant one.

A fault is a change of the served model's code or of what it loaded, made in this process and undone afterwards. The
checkpoint stays the original: a config that was read wrongly, not one that says something else, so nothing but the
model's own behaviour gives the fault away.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Plant = Callable[["Patch"], None]


class Patch:
    """Changes to code that are undone together, last first, when the block ends."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a class or module, which must have it."""
        before = owner.__dict__[name]
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, before))

    def item(self, mapping: dict[Any, Any], key: Any, value: Any) -> None:
        """Set an entry of a dictionary, which must have it."""
        before = mapping[key]
        mapping[key] = value
        self._undo.append(lambda: mapping.__setitem__(key, before))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._undo:
            self._undo.pop()()


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A planted fault.

    Attributes:
        name: what is wrong.
        heading: the component.
        model: tiny model that it is planted in.
        plant: makes it.
        where: patterns of the names that are right for the first culprit: a module, or a site of it.
        only: the condition without which it does not show: "chunk", "decode", "batch", "long", "padding",
            "tensor parallel", "speculation", "training" or "loading"; empty for none.
        fp32: whether fp32 arithmetic can see it; a difference of rounding alone is seen in the serving dtype if at all.
        ranks: of the target.
        subject: "model"; "tokenizer" where the faulty part is what makes the tokens; "drafts" where it is the engine's
            speculation, which `pilotage invariance` looks at; "training" where gradients, updates or what is saved
            show it, which `train_checks` look at.
    """

    name: str
    heading: str
    model: str
    plant: Plant
    where: tuple[str, ...]
    only: str = ""
    fp32: bool = True
    ranks: int = 1
    subject: str = "model"

    @property
    def id(self) -> str:
        """A name for files and messages."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.model} {self.name}".lower()).strip("-")

    def names(self, found: str) -> bool:
        """Whether a culprit's name is one of the right ones."""
        return any(fnmatch.fnmatchcase(found, pattern) for pattern in self.where)


def reads(**changes: Any) -> Plant:
    """Make the model read its config wrongly.

    Args:
        changes: fields of the model's own config; a callable is given the right config and returns the wrong value.
    """

    def plant(patch: Patch) -> None:
        from pilotage.models.common.config import DecoderConfig

        real = DecoderConfig.__dict__["from_spec"].__func__

        def from_spec(cls: Any, /, spec: Any, **own: Any) -> Any:
            config = real(cls, spec, **own)
            wrong = {name: value(config) if callable(value) else value for name, value in changes.items()}
            return dataclasses.replace(config, **wrong)

        patch.set(DecoderConfig, "from_spec", classmethod(from_spec))

    return plant


def loads(edit: Callable[[Any], None]) -> Plant:
    """Make the loader load wrong values: `edit(the loaded model)` changes them in place."""

    def plant(patch: Patch) -> None:
        from pilotage.models.common.causal_lm import CausalLM

        real = CausalLM.__dict__["load_weights"]

        def load_weights(self: Any, *args: Any, **how: Any) -> Any:
            ledger = real(self, *args, **how)
            with torch.no_grad():
                edit(self)
            return ledger

        patch.set(CausalLM, "load_weights", load_weights)

    return plant


def operator(name: str, wrong: Callable[..., Any]) -> Plant:
    """Replace an operator everywhere: `wrong(the right operator, *args, **kwargs)`."""

    def plant(patch: Patch) -> None:
        import pilotage.functional as NF

        real = getattr(NF, name)
        patch.set(NF, name, lambda *args, **how: wrong(real, *args, **how))

    return plant


def method(owner: Callable[[], Any], name: str, wrong: Callable[..., Any]) -> Plant:
    """Replace a method: `wrong(the right method, self, *args, **kwargs)`; `owner` imports its class."""

    def plant(patch: Patch) -> None:
        found = owner()
        real = found.__dict__.get(name) or getattr(found, name)
        if name in found.__dict__:
            patch.set(found, name, lambda self, *args, **how: wrong(real, self, *args, **how))
        else:
            patch.set(_definer(found, name), name, lambda self, *args, **how: wrong(real, self, *args, **how))

    return plant


def _definer(cls: Any, name: str) -> Any:
    return next(base for base in cls.__mro__ if name in base.__dict__)


def attends(change: Callable[[Any, dict[str, Any], dict[str, Any]], None], *, phase: str | None = None) -> Plant:
    """Change what attention is given.

    Args:
        change: `change(layer, metadata of the layer, options)` edits copies of both in place; options are q, k, v,
            scale, window, softcap, sinks and positions.
        phase: only in steps of this kind: "prefill" (nothing cached), "chunk" or "decode"; None for all.
    """

    def plant(patch: Patch) -> None:
        from pilotage.models.common.context import PagedContext

        real = PagedContext.__dict__["attend"]

        def attend(self: Any, layer: Any, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
            name = getattr(layer, "kv_source", None) or layer.layer_name
            meta = dict(self[name])
            if phase is not None and phase != kind_of(self, name):
                return real(self, layer, q, k, v, **how)
            options = {"q": q, "k": k, "v": v, "positions": self["positions"], **how}
            change(layer, meta, options)
            context = PagedContext(self)
            context["positions"] = options.pop("positions")
            context[name] = meta
            return real(context, layer, options.pop("q"), options.pop("k"), options.pop("v"), **options)

        patch.set(PagedContext, "attend", attend)

    return plant


def sees(where: Callable[[Tensor, Any], Tensor], *, phase: str | None = None) -> Plant:
    """Let queries see as if they stood elsewhere: `where(their positions, metadata of the layer)`.

    Computed by the operators' definitions: faster implementations take the rows of a request to be its last ones.
    """

    def attend(real: Any, self: Any, layer: Any, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        import pilotage.functional as NF

        name = getattr(layer, "kv_source", None) or layer.layer_name
        if phase is not None and phase != kind_of(self, name):
            return real(self, layer, q, k, v, **how)
        context = type(self)(self)
        context["positions"] = where(self["positions"], self[name])
        with NF.forced(dict.fromkeys(("flash_attention", "segmented_attention", "attention_decode"), "torch")):
            return real(context, layer, q, k, v, **how)

    return around_attention(attend)


def kind_of(context: Any, layer_name: str) -> str:
    """Return the kind of a step: "prefill", where none of its requests has anything cached, "chunk" or "decode".

    The engine's graphs take both kinds of prompts, so that what is cached says which this is. Where tensors have shapes
    and no values, as when the sites of a model are listed, nothing is cached.
    """
    if context.decodes(layer_name):
        return "decode"
    cached = context[layer_name].get("cached_seq_len")
    if cached is None or isinstance(cached, FakeTensor):
        return "prefill"
    return "chunk" if bool(cached.any()) else "prefill"


def around_attention(wrong: Callable[..., Tensor]) -> Plant:
    """Replace attention: `wrong(the right one, context, layer, q, k, v, **options)`."""

    def context() -> Any:
        from pilotage.models.common.context import PagedContext

        return PagedContext

    return method(context, "attend", wrong)


def fills(change: Callable[[Any, Any], None]) -> Plant:
    """Change the inputs of every step of the engine: `change(the filled inputs, the forward)`."""

    def owner() -> Any:
        from pilotage.serving.batch import StepInputs

        return StepInputs

    def fill(real: Any, self: Any, forward: Any, **how: Any) -> None:
        real(self, forward, **how)
        change(self, forward)

    return method(owner, "fill", fill)
