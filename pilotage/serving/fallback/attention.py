"""The attention function that transformers is given, and the mask function that goes with it.

While a model is learnt they note what each layer asks for; afterwards attention goes to the pages, whose business masks
are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pilotage.core.errors import Unsupported
from pilotage.models.common.context import PagedContext

NAME = "pilotage"
_LAYERS = "_pilotage_layers"
_WRITE = "write a model package"
# Tensors that models hand to attention beside its own arguments and that plain causal attention may ignore.
_IDLE = ("position_ids", "cache_position", "cache_params", "attention_mask", "position_embeddings", "padding_mask")
# Far enough to see any window that a model states, twice, so that chunks do not pass for windows.
_FAR = (2_000_003, 1_234_577)


@dataclass(kw_only=True, eq=False)
class Layer:
    """One call of one attention module of Hugging Face's in a forward, as the paged context sees it.

    Attributes:
        layer_name: the module's name in the model; with the number of the call where it is called several times.
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
    """Carries what a step needs past Hugging Face's signatures.

    Attributes:
        context: metadata of the step that runs; None outside of one.
        positions: of its tokens, [T].
        calls: how often each attention module was called in it, by id.
    """

    context: PagedContext | None = None
    positions: Tensor | None = None
    calls: Counter[int] = field(default_factory=Counter)

    @contextmanager
    def running(self, context: PagedContext | None, positions: Tensor) -> Iterator[None]:
        """Hold a step's metadata for what runs inside the block."""
        self.context, self.positions = context, positions
        self.calls.clear()
        try:
            yield
        finally:
            self.context = self.positions = None


@dataclass(kw_only=True)
class Call:
    """What one call of the attention interface asked for."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    own_tokens: bool
    mask: Tensor | None
    stated_window: int | None
    extras: tuple[str, ...]


@dataclass
class Notes:
    """The calls of a learning forward, and where its masks came from."""

    calls: list[Call] = field(default_factory=list)
    masks: dict[int, tuple[Tensor, Callable[..., Tensor]]] = field(default_factory=dict)


_notes: Notes | None = None


@contextmanager
def learning() -> Iterator[Notes]:
    """Note the calls of the forwards inside the block, and compute nothing."""
    global _notes
    register()
    _notes = Notes()
    try:
        yield _notes
    finally:
        _notes = None


def register() -> None:
    """Hand both functions to transformers; doing so twice changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def use(model: nn.Module, implementation: str) -> None:
    """Make every module of a model take this attention function."""
    register()
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    for config in configs.values():
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = implementation


def mark(module: nn.Module, layer: Layer) -> None:
    """Tell the attention function which layer a module is, in its next call."""
    layers: tuple[Layer, ...] = getattr(module, _LAYERS, ())
    object.__setattr__(module, _LAYERS, (*layers, layer))


def _mask(*, mask_function: Callable[..., Tensor] | None = None, **arguments: Any) -> Tensor | None:
    if _notes is None:
        return None
    from transformers.masking_utils import causal_mask_function, eager_mask

    arguments.pop("allow_is_causal_skip", None)
    arguments.pop("allow_is_bidirectional_skip", None)
    function: Any = mask_function or causal_mask_function
    mask: Tensor = eager_mask(mask_function=function, **arguments)
    _notes.masks[mask.data_ptr()] = (mask, function)
    return mask


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """Note the call while a model is learnt, or attend on pages; with transformers' shapes, [1, heads, T, H]."""
    if _notes is not None:
        _notes.calls.append(
            Call(
                module=module,
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_size=query.shape[-1],
                value_size=value.shape[-1],
                own_tokens=key.shape[2] == query.shape[2],
                mask=attention_mask,
                stated_window=sliding_window,
                extras=tuple(k for k, v in extras.items() if isinstance(v, Tensor) and k not in _IDLE),
            )
        )
        # What comes out only has to have the right shape: nothing of this forward is compared.
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, H]
    scale = float(scaling) if scaling is not None else q.shape[-1] ** -0.5
    return _on_pages(module, q, k, v, scale=scale, softcap=softcap, sinks=s_aux)[None], None


def _on_pages(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    layers: tuple[Layer, ...] = getattr(module, _LAYERS, ())
    step = layers[0].step if layers else Step()
    if step.context is None:
        raise Unsupported("attention outside of a step", where=type(module).__name__)
    call = step.calls[id(module)]
    step.calls[id(module)] += 1
    if call >= len(layers):
        raise Unsupported(f"it attends more than {len(layers)} times in a forward", where=layers[0].layer_name)
    layer, wide, narrow = layers[call], q.shape[-1], v.shape[-1]
    if wide < layer.head_size:
        q, k = (nn.functional.pad(x, (0, layer.head_size - wide)) for x in (q, k))
    if narrow < layer.head_size:
        v = nn.functional.pad(v, (0, layer.head_size - narrow))
    out = step.context.attend(layer, q.contiguous(), k.contiguous(), v.contiguous(), window=layer.window, **how)
    return out[:, :, :narrow].contiguous()


def window_of(call: Call, masks: Mapping[int, tuple[Tensor, Callable[..., Tensor]]], config: Any) -> int | None:
    """Say what a mask lets a query see: all keys up to it (None), or a window of them.

    The mask's own function is asked at positions far apart, so a window longer than the probe is seen as well. A mask
    that the model made by itself is judged by its values.

    Raises:
        Unsupported: it is neither.
    """
    if not call.own_tokens:
        raise Unsupported("a layer of it attends to something else than the tokens of its prompt", do=_WRITE)
    mask = call.mask
    if mask is None:
        return call.stated_window
    noted = masks.get(mask.data_ptr())
    if noted is not None and noted[0].shape == mask.shape:
        return _window_of_function(noted[1])
    if mask.is_floating_point():
        if bool(((mask != 0) & (mask > -1e4)).any()):
            raise Unsupported("its mask adds a bias to the scores of attention", do=_WRITE)
        visible = mask > -1e4
    else:
        visible = mask.bool()
    size = visible.shape[-2]
    if visible.shape[-1] != size:
        raise Unsupported("its mask is of another length than its keys", do=_WRITE)
    at = torch.arange(size)
    causal = at[None, :] <= at[:, None]
    if bool((visible == causal).all()):
        if call.stated_window is None and getattr(config, "sliding_window", None):
            raise Unsupported(
                "it makes its mask by itself and has a sliding window, whose length cannot be read from it",
                do=_WRITE,
            )
        return call.stated_window
    width = int(visible.reshape(-1, size, size)[0, -1].sum())
    if bool((visible == causal & (at[None, :] > at[:, None] - width)).all()):
        return width
    raise Unsupported("its mask is neither causal nor a window of positions", do=_WRITE)


def _window_of_function(function: Callable[..., Tensor]) -> int | None:
    found = set()
    for query in _FAR:
        keys = torch.arange(query + 2)
        try:
            visible = torch.as_tensor(function(0, 0, torch.tensor(query), keys)).expand(query + 2)
        except (IndexError, RuntimeError) as error:
            raise Unsupported("its mask depends on the content of the prompt", do=_WRITE) from error
        if bool(visible[-1]) or not bool(visible[-2]):
            raise Unsupported("a query of it sees keys behind it, or not itself", do=_WRITE)
        width = int(visible.sum())
        if not bool(visible[query + 1 - width : query + 1].all()):
            raise Unsupported("its mask is neither causal nor a window of positions", do=_WRITE)
        found.add(None if width == query + 1 else width)
    if len(found) > 1:
        raise Unsupported("its mask divides the prompt into chunks", do=_WRITE)
    return found.pop()
