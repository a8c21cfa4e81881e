"""Single modules as arms: Hugging Face's with the arguments its own model gives it, and ours on a paged cache."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy.arms.routing import Routing
from pilotage.core.errors import Unsupported
from pilotage.probe import hf


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a module was called with inside its model.

    Attributes:
        x: its first tensor argument.
        args: the other positional arguments.
        kwargs: keyword arguments, without `x` where that came by keyword.
        key: name under which `x` came, or None for the first positional one.
    """

    x: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: str | None


@dataclass(frozen=True, kw_only=True)
class Job:
    """One question to a module of ours.

    Attributes:
        name: relative to the decoder.
        kind: "embedding", "norm", "mlp", "linear", "router", "attention", "decoder layer" or "rope". The answer of a
            router is its logits [S, E].
        label: of the result.
        x: its input, [1, S, D]; tokens [1, S] of an embedding; positions [S] of RoPE, whose answer is cos and sin.
        layer_type: kind of attention, for those of `CONTEXT` and for RoPE.
        beside: what the module gets beside its input: `per_layer_input` [1, S, P], and `keys` and `values` [1, K, S, H]
            of the earlier layer that it attends to.
    """

    name: str
    kind: str
    label: str
    x: Tensor
    layer_type: str
    beside: Mapping[str, Tensor] = field(default_factory=dict)


# Kinds that need a cache and positions.
CONTEXT = ("attention", "decoder layer")
# Hugging Face's names of what some layers get beside the residual stream.
_PER_LAYER, _SHARED = "per_layer_input", "shared_kv_states"


class HFModules:
    """The modules of one Hugging Face model, callable with another input than they had.

    Args:
        model: the loaded causal language model.
        tokens: one token stream.
        names: modules, relative to the decoder ("layers.0.mlp").
    """

    def __init__(self, model: Any, tokens: Sequence[int], names: Sequence[str]) -> None:
        self.decoder = model.get_decoder()
        self.dtype: torch.dtype = model.dtype
        self.calls: dict[str, Call] = {}
        self.tokens = torch.tensor([list(tokens)])
        hooks = [
            self.decoder.get_submodule(name).register_forward_pre_hook(self._recorder(name), with_kwargs=True)
            for name in names
        ]
        try:
            with torch.inference_mode():
                model(input_ids=self.tokens, use_cache=False, logits_to_keep=1)
        finally:
            for hook in hooks:
                hook.remove()

    def _recorder(self, name: str) -> Any:
        def record(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if kwargs.get(_SHARED) is not None:
                kwargs = {**kwargs, _SHARED: dict(kwargs[_SHARED])}  # later layers write into theirs
            if args:
                self.calls[name] = Call(x=args[0], args=args[1:], kwargs=dict(kwargs), key=None)
            else:
                key = next(key for key, value in kwargs.items() if isinstance(value, Tensor))
                rest = {other: value for other, value in kwargs.items() if other != key}
                self.calls[name] = Call(x=kwargs[key], args=(), kwargs=rest, key=key)

        return record

    def beside(self, name: str) -> dict[str, Tensor]:
        """Return what a module got beside its input; see `Job.beside`."""
        call, module = self.calls[name], self.decoder.get_submodule(name)
        if _PER_LAYER not in (accepted := inspect.signature(module.forward).parameters) and _SHARED not in accepted:
            return {}
        given = self._arguments(call, module, call.x)
        found = {_PER_LAYER: given[_PER_LAYER]} if isinstance(given.get(_PER_LAYER), Tensor) else {}
        attention = getattr(module, "self_attn", module)
        if getattr(attention, "is_kv_shared_layer", False):
            found["keys"], found["values"] = given[_SHARED][attention.layer_type]
        return found

    @staticmethod
    def _arguments(call: Call, module: Any, x: Tensor) -> dict[str, Any]:
        """Name everything that a module is called with."""
        by_name = {call.key: x} if call.key is not None else {}
        first = () if call.key is not None else (x,)
        bound = inspect.signature(module.forward).bind(*first, *call.args, **by_name, **call.kwargs).arguments
        return {**bound.pop("kwargs", {}), **bound}

    @torch.inference_mode()
    def run(self, name: str, x: Tensor, beside: Mapping[str, Tensor] | None = None) -> Tensor:
        """Call a module with `x` in place of its own input, `beside` likewise, and all else as its model gave it."""
        call = self.calls[name]
        module = self.decoder.get_submodule(name)
        if x.is_floating_point():
            x = x.to(self.dtype)
        if beside:
            given = self._arguments(call, module, x)
            beside = {key: value.to(self.dtype) for key, value in beside.items()}
            if _PER_LAYER in beside:
                given[_PER_LAYER] = beside[_PER_LAYER]
            if "keys" in beside:
                kind = getattr(module, "self_attn", module).layer_type
                given[_SHARED] = {**given[_SHARED], kind: (beside["keys"], beside["values"])}
            found = module(**given)
        else:
            found = module(x, *call.args, **call.kwargs) if call.key is None else module(**{call.key: x}, **call.kwargs)
        return found[0] if isinstance(found, tuple) else found

    @torch.inference_mode()
    def exactly(self, name: str, x: Tensor) -> Tensor:
        """Call a module that looks at its input alone in fp32, with weights and input as they are in this dtype."""
        module = copy.deepcopy(self.decoder.get_submodule(name)).float()
        found = module(x.to(self.dtype).float())
        return found[0] if isinstance(found, tuple) else found

    def logits(self, name: str, x: Tensor, *, exactly: bool = False) -> Tensor:
        """Return what a router makes of `x`, [S, E] before any choice; `exactly` as the method of that name."""
        with hf.first_product() as found:
            self.exactly(name, x) if exactly else self.run(name, x)
        return found[0]

    def routed(self, name: str, x: Tensor, beside: Mapping[str, Tensor] | None = None) -> tuple[Tensor, Routing] | None:
        """Run a module that may hold experts, and see what its router is asked.

        Returns:
            The module's output and its routing; None where there is no router. With several routers inside, the last
            one's.
        """
        found: list[Routing] = []

        def see(router: Any, args: tuple[Any, ...], output: Any) -> None:
            found.append(Routing.seen(router, args[0], output))

        routers = [
            module
            for module in self.decoder.get_submodule(name).modules()
            if hasattr(module, "top_k") and isinstance(getattr(module, "weight", None), Tensor)
        ]
        if not routers:
            return None
        hooks = [router.register_forward_hook(see) for router in routers]
        try:
            out = self.run(name, x, beside)
        finally:
            for hook in hooks:
                hook.remove()
        return out, found[-1]

    @torch.inference_mode()
    def rope(self, positions: Tensor, layer_type: str) -> tuple[Tensor, Tensor]:
        """Return cos and sin [S, R] of one kind of layer at positions [S]."""
        rotary = self.decoder.rotary_emb
        x = torch.zeros(1, dtype=self.dtype)
        by_type = "layer_type" in inspect.signature(rotary.forward).parameters
        cos, sin = rotary(x, positions[None], layer_type) if by_type else rotary(x, positions[None])
        return cos[0], sin[0]


class OurModules:
    """The modules of one of our models, on a paged cache of their own.

    Attention is fed in three parts, so that each of its paths is run: a prefill with nothing cached, a chunk that reads
    the cache, and single decode tokens.

    Args:
        checkpoint: directory.
        dtype: of weights and computation.
        length: tokens of the stream.
    """

    DECODED = 4

    def __init__(self, checkpoint: Path, dtype: torch.dtype, length: int) -> None:
        from pilotage.arch import source
        from pilotage.models import registry
        from pilotage.models.common.paging import PagedSession

        config = source.load_config(str(checkpoint))
        entry = registry.find(config.architectures or [])
        if entry is None:
            raise Unsupported(
                f"no model package serves {', '.join(config.architectures or ['an unnamed architecture'])}",
                where=str(checkpoint / "config.json"),
                do="scaffold one with `pilotage new`",
            )
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                self.model = entry.load().from_configs(config, None)
            self.model.load_weights(checkpoint, "cpu")
        finally:
            torch.set_default_dtype(before)
        self.model.eval().requires_grad_(False)
        self.dtype, self.length = dtype, length
        self.session = PagedSession(model=self.model, num_requests=1, max_tokens=length, block_size=16)

    def module(self, name: str) -> Any:
        """Return a module by its name relative to the decoder; None if there is none of that name."""
        try:
            return self.model.model.get_submodule(name)
        except AttributeError:
            return None

    def steps(self) -> list[tuple[int, int, Any]]:
        """Return (first row, end, context) of each step that the stream is fed in."""
        from pilotage.models.common.paging import build_metadata

        decode = max(1, self.length - self.DECODED)
        half = max(1, decode // 2)
        parts = [(0, half, {"fresh": True}), (half, decode, {})]
        parts += [(row, row + 1, {"decode": True}) for row in range(decode, self.length)]
        return [
            (
                start,
                end,
                build_metadata(
                    self.session.layer_names,
                    num_computed=[start],
                    num_new=[end - start],
                    block_table=self.session.block_table,
                    block_size=self.session.block_size,
                    num_tokens=end - start,
                    **how,
                ),
            )
            for start, end, how in parts
            if start < end
        ]

    def rope(self, positions: Tensor, layer_type: str) -> tuple[Tensor, Tensor]:
        """Return cos and sin [S, R] of one kind of layer at positions [S]."""
        import pilotage.functional as NF

        tables = self.model.model.rope
        # Hugging Face's config names no kinds where all layers are of one, and the one may be a sliding window.
        found = next(iter(tables.values())) if len(tables) == 1 else tables[layer_type]
        cos, sin = NF.rope_table(positions, found, self.dtype)
        return cos, sin

    @torch.inference_mode()
    def with_context(self, job: Job) -> Tensor:
        """Call an attention module or a decoder layer on rows [1, S, D], step by step."""
        module, rows = self.module(job.name), job.x[0].to(self.dtype)
        out = []
        for start, end, context in self.steps():
            rope = self.rope(context["positions"], job.layer_type)
            more = self._beside(module, job, slice(start, end), context)
            out.append(module(rows[start:end], rope, context, **more))
        return torch.cat(out)[None]

    def _beside(self, module: Any, job: Job, rows: slice, context: Any) -> dict[str, Any]:
        """Return what a module takes beside rows, positions and context; an earlier layer's keys go to its pages."""
        import pilotage.functional as NF
        from pilotage.parallel import get_tp_group

        accepted = inspect.signature(module.forward).parameters
        more: dict[str, Any] = {}
        if _PER_LAYER in accepted and _PER_LAYER in job.beside:
            more[_PER_LAYER] = job.beside[_PER_LAYER][0, rows].to(self.dtype)
        if "earlier" not in accepted:
            return more
        more["earlier"] = {}
        attention = getattr(module, "self_attn", module)
        if attention.kv_source is not None:
            k, v = (job.beside[name][0, :, rows].transpose(0, 1).to(self.dtype) for name in ("keys", "values"))
            shards, group = k.shape[1] // attention.num_kv_heads, get_tp_group()
            share = group.rank * shards // group.world_size
            k, v = (x.chunk(shards, dim=1)[share].contiguous() for x in (k, v))
            k_pages, v_pages = attention.kv_cache
            NF.write_kv(k_pages, v_pages, k, v, slot_mapping=context[attention.kv_source]["slot_mapping"])
            more["earlier"][job.layer_type] = (k, v)
        return more

    @torch.inference_mode()
    def run(self, name: str, x: Tensor) -> Tensor:
        """Call a module that looks at its input alone; a row-parallel projection gets its rank's part of it."""
        module = self.module(name)
        weight = getattr(module, "weight", None)
        if x.is_floating_point() and isinstance(weight, Tensor) and weight.ndim == 2:
            from pilotage.parallel import get_tp_group

            width, rank = weight.shape[1], get_tp_group().rank
            if x.shape[-1] == width * get_tp_group().world_size:
                x = x[..., rank * width : (rank + 1) * width]
        return module(x.to(self.dtype) if x.is_floating_point() else x)

    def answer(self, job: Job) -> Tensor | None:
        """Return a module's output for a job; None where we have no such module."""
        if job.kind == "rope":
            return torch.stack(self.rope(job.x, job.layer_type))
        if self.module(job.name) is None:
            return None
        if job.name == "embed_tokens":
            return self.embed(job.x)
        if job.kind == "router":
            return self.logits(job.name, job.x)
        return self.with_context(job) if job.kind in CONTEXT else self.run(job.name, job.x)

    def logits(self, name: str, x: Tensor) -> Tensor | None:
        """Return the logits [S, E] of a router, whatever it makes of them; None for one that is not built on ours."""
        from pilotage.nn import Router

        found: list[Tensor] = []
        inner = next((module for module in self.module(name).modules() if isinstance(module, Router)), None)
        if inner is None:
            return None
        hook = inner.register_forward_hook(lambda _module, _given, out: found.append(out))
        try:
            self.run(name, x)
        finally:
            hook.remove()
        return found[0].flatten(0, -2)

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens [1, S], scaled as the model scales them."""
        return self.model.embed_input_ids(tokens[0])[None]
