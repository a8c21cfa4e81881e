"""The two attention functions that transformers is given, and the masks that go with them.

`pilotage_learn` computes plain dense attention and notes what each layer asked for; `pilotage_paged` goes to the pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pilotage.core.errors import Unsupported
from pilotage.models.common.context import PagedContext

LEARN, PAGED = "pilotage_learn", "pilotage_paged"
_LAYER = "_pilotage_layer"
# Far enough to see any window that a model states, twice, so that chunks do not pass for windows.
_FAR = (2_000_003, 1_234_577)


@dataclass(kw_only=True, eq=False)
class Layer:
    """One attention module of Hugging Face's, as the paged context sees it.

    Attributes:
        layer_name: its name in the model.
        num_kv_heads, head_size: of its pages; values narrower than keys are padded.
        window: keys that a query sees, itself included; None for all.
        step: holds the context of the step that runs, the same for all layers.
        kv_cache: pages, once bound.
    """

    layer_name: str
    num_kv_heads: int
    head_size: int
    window: int | None
    step: Step
    kv_cache: tuple[Tensor, Tensor] = field(default_factory=lambda: (torch.empty(0), torch.empty(0)))


@dataclass(eq=False)
class Step:
    """Carries the metadata of a step past Hugging Face's signatures."""

    context: PagedContext | None = None


@dataclass(kw_only=True)
class Call:
    """What one call of the attention interface asked for."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    mask: Tensor | None
    stated_window: int | None


@dataclass
class Notes:
    """The calls of a learning forward, and where its masks came from."""

    calls: list[Call] = field(default_factory=list)
    masks: dict[int, tuple[Tensor, Callable[..., Tensor]]] = field(default_factory=dict)


_notes: Notes | None = None


class learning:
    """Note the calls of the forwards inside the block."""

    def __enter__(self) -> Notes:
        global _notes
        register()
        _notes = Notes()
        return _notes

    def __exit__(self, *_: object) -> None:
        global _notes
        _notes = None


def register() -> None:
    """Hand both functions to transformers; doing so twice changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(LEARN, _learn)
    AttentionInterface.register(PAGED, _paged)
    AttentionMaskInterface.register(LEARN, _noted_mask)
    AttentionMaskInterface.register(PAGED, _no_mask)


def use(model: nn.Module, implementation: str) -> None:
    """Make every module of a model take this attention function."""
    register()
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    for config in configs.values():
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = implementation


def mark(module: nn.Module, layer: Layer) -> None:
    """Tell `pilotage_paged` which layer a module is."""
    object.__setattr__(module, _LAYER, layer)


def _noted_mask(*, mask_function: Callable[..., Tensor] | None = None, **arguments: Any) -> Tensor | None:
    from transformers.masking_utils import causal_mask_function, eager_mask

    arguments.pop("allow_is_causal_skip", None)
    arguments.pop("allow_is_bidirectional_skip", None)
    function = mask_function or causal_mask_function
    mask = eager_mask(mask_function=function, **arguments)
    if _notes is not None:
        _notes.masks[mask.data_ptr()] = (mask, function)
    return mask


def _no_mask(**_: Any) -> None:
    return None


def _learn(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if _notes is not None:
        _notes.calls.append(
            Call(
                module=module,
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_size=query.shape[-1],
                value_size=value.shape[-1],
                mask=attention_mask,
                stated_window=sliding_window,
            )
        )
    # What comes out only has to have the right shape: nothing of this forward is compared.
    groups = query.shape[1] // key.shape[1]
    out = value.repeat_interleave(groups, 1)[:, :, : query.shape[2]]
    return out.transpose(1, 2).contiguous(), None


def _paged(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    layer: Layer | None = getattr(module, _LAYER, None)
    context = layer.step.context if layer is not None else None
    if layer is None or context is None:
        raise Unsupported("attention outside of a step", where=type(module).__name__)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, H]
    wide, narrow = q.shape[-1], v.shape[-1]
    if wide < layer.head_size:
        q, k = (nn.functional.pad(x, (0, layer.head_size - wide)) for x in (q, k))
    if narrow < layer.head_size:
        v = nn.functional.pad(v, (0, layer.head_size - narrow))
    out = context.attend(
        layer,
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        scale=float(scaling) if scaling is not None else wide**-0.5,
        window=layer.window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None, :, :, :narrow].contiguous(), None


def window_of(call: Call, masks: Mapping[int, tuple[Tensor, Callable[..., Tensor]]], config: Any) -> int | None:
    """Say what a mask lets a query see: all keys up to it (None), or a window of them.

    The mask's own function is asked at positions far apart, so a window longer than the probe is seen as well. A mask
    that the model made by itself is judged by its values.

    Raises:
        Unsupported: it is neither.
    """
    mask = call.mask
    if mask is None:
        return call.stated_window
    noted = masks.get(mask.data_ptr())
    if noted is not None and noted[0].shape == mask.shape:
        return _window_of_function(noted[1])
    if mask.is_floating_point():
        if bool(((mask != 0) & (mask > -1e4)).any()):
            raise Unsupported("its mask adds a bias to the scores of attention", do="write a model package")
        visible = mask > -1e4
    else:
        visible = mask.bool()
    size = visible.shape[-2]
    if visible.shape[-1] != size:
        raise Unsupported("its mask is of another length than its keys", do="write a model package")
    at = torch.arange(size)
    causal = at[None, :] <= at[:, None]
    if bool((visible == causal).all()):
        if call.stated_window is None and getattr(config, "sliding_window", None):
            raise Unsupported(
                "it makes its mask by itself and has a sliding window, whose length cannot be read from it",
                do="write a model package",
            )
        return call.stated_window
    width = int(visible.reshape(-1, size, size)[0, -1].sum())
    if bool((visible == causal & (at[None, :] > at[:, None] - width)).all()):
        return width
    raise Unsupported("its mask is neither causal nor a window of positions", do="write a model package")


def _window_of_function(function: Callable[..., Tensor]) -> int | None:
    found = set()
    for query in _FAR:
        keys = torch.arange(query + 2)
        try:
            visible = torch.as_tensor(function(0, 0, torch.tensor(query), keys)).expand(query + 2)
        except (IndexError, RuntimeError) as error:
            raise Unsupported("its mask depends on the content of the prompt", do="write a model package") from error
        if bool(visible[-1]) or not bool(visible[-2]):
            raise Unsupported("a query of it sees keys behind it, or not itself", do="write a model package")
        width = int(visible.sum())
        if not bool(visible[query + 1 - width : query + 1].all()):
            raise Unsupported("its mask is neither causal nor a window of positions", do="write a model package")
        found.add(None if width == query + 1 else width)
    if len(found) > 1:
        raise Unsupported("its mask divides the prompt into chunks", do="write a model package")
    return found.pop()
