"""The Hugging Face side of a tap: the same sites, by the same names, in transformers' own models.

Module outputs are reached through hooks. What no module returns is reached where transformers passes it on: queries,
keys and heads at the attention function, router logits at the router's product, the residual stream between attention
and MLP at the next module that takes it. Nothing of the model's code is changed, and nothing stays behind.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pilotage.core.errors import PilotageError, Unsupported
from pilotage.core.sites import select

# Called with a site and its rows [S, ...]; gives the rows to hand onward, or None for the live ones.
Visit = Callable[[str, Tensor], Tensor | None]

_IMPLEMENTATIONS = ("sdpa", "eager")
_ROUTERS = ("gate", "router")
_QKV = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}
_NO_SITE = ("act_fn", "activation_fn", "rotary_emb", *_QKV)


class HFTaps:
    """The sites of one causal language model of transformers.

    Works for one stream at a time (batch size 1). Sites are those of `core.sites`; module names are given as the model
    would have them with the decoder at `model`, wherever a wrapper keeps it.

    Args:
        model: loaded, with "sdpa" or "eager" attention.

    Attributes:
        attentions: attention module -> its name.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.decoder = model.get_decoder()
        self.layers: list[tuple[str, nn.Module]] = [
            (f"model.layers.{index}", layer) for index, layer in enumerate(self.decoder.layers)
        ]
        self.attentions: dict[nn.Module, str] = {}
        self._latent: set[nn.Module] = set()
        self._routers: dict[nn.Module, str] = {}
        self._plain: dict[nn.Module, str] = {}
        for name, layer in self.layers:
            self._classify(name, layer)
        for name, module in self.decoder.named_children():
            # Beside the layers: the last norm, and what makes the layers' own inputs.
            if name not in ("layers", "embed_tokens", "rotary_emb") and not isinstance(module, nn.ModuleList):
                self._plain[module] = f"model.{name}"
        self._rows = 0
        self._embedded = False  # whether this forward has visited what was embedded

    def _classify(self, layer_name: str, layer: nn.Module) -> None:
        inside: tuple[str, ...] = ()
        for relative, module in layer.named_modules():
            name = f"{layer_name}.{relative}" if relative else layer_name
            if inside and name.startswith(inside):
                continue
            parent, _, own = name.rpartition(".")
            block = layer.get_submodule(relative.rpartition(".")[0]) if relative else None
            if is_router(own, block):
                # Whatever a block calls its gate, the site is the block's.
                self._routers[module] = f"{parent}.router"
                inside += (f"{name}.",)
                continue
            if own == "experts":
                inside += (f"{name}.",)
            latent = hasattr(module, "kv_b_proj")
            if hasattr(module, "o_proj") and (latent or hasattr(module, "q_proj") or hasattr(module, "qkv_proj")):
                self.attentions[module] = name
                if latent:
                    self._latent.add(module)
            if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Dropout) or own in _NO_SITE:
                continue
            self._plain[module] = name

    @contextlib.contextmanager
    def attached(self, visit: Visit) -> Iterator[None]:
        """Call `visit` at every site of every forward inside the block."""
        with contextlib.ExitStack() as stack:
            for hook in self._hooks(visit):
                stack.callback(hook.remove)
            stack.enter_context(self._attention_functions(visit))
            yield

    def names(self, tokens: Sequence[int]) -> list[str]:
        """List the sites in the order in which a forward over `tokens` meets them."""
        found: dict[str, None] = {}

        def note(site: str, rows: Tensor) -> None:
            found.setdefault(site)

        with torch.no_grad(), self.attached(note):
            self.model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
        return list(found)

    def router_names(self) -> dict[str, str]:
        """Give, for each router site, the name of the module that computes it."""
        modules = {module: relative for relative, module in self.decoder.named_modules()}
        return {site: f"model.{modules[router]}" for router, site in self._routers.items()}

    def _hooks(self, visit: Visit) -> list[Any]:
        hooks = [self.model.register_forward_pre_hook(self._count, with_kwargs=True)]
        hooks.append(self.model.register_forward_hook(self._logits(visit)))
        head = self.model.get_output_embeddings()
        if head is not None:
            hooks.append(head.register_forward_hook(self._head(visit)))
        states: list[dict[str, Any]] = []
        for index, (name, layer) in enumerate(self.layers):
            state: dict[str, Any] = {"known": [], "attended": False, "mid": False}
            states.append(state)
            hooks.append(layer.register_forward_pre_hook(self._enter(visit, index == 0, state), with_kwargs=True))
            for child in layer.children():
                if child not in self.attentions:
                    hooks.append(child.register_forward_pre_hook(self._mid(visit, name, state), with_kwargs=True))
        for attention, name in self.attentions.items():
            for projection, site in _QKV.items():
                module = getattr(attention, projection, None)
                if isinstance(module, nn.Module) and attention not in self._latent:
                    size = int(getattr(attention, "head_dim", 0))
                    hooks.append(module.register_forward_hook(self._projected(visit, f"{name}.{site}", size)))
        for router, name in self._routers.items():
            stack: list[_Product] = []
            hooks.append(router.register_forward_pre_hook(self._enter_router(visit, name, stack)))
            hooks.append(router.register_forward_hook(_leave_router(stack), always_call=True))
        for module, name in self._plain.items():
            if name.startswith("model.") and name.count(".") == 1:
                hooks.append(module.register_forward_pre_hook(self._before_the_layers(visit)))
            hooks.append(module.register_forward_hook(self._output(visit, name)))
        # After those that replace what a child returns: the tensor handed onward is the one to know.
        for (_, layer), state in zip(self.layers, states, strict=True):
            for child in layer.children():
                hooks.append(child.register_forward_hook(self._remember(child, state)))
        return hooks

    def _count(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None or ids.shape[0] != 1:
            raise Unsupported("taps follow one stream of token ids at a time", where="input_ids", do="batch size 1")
        self._rows, self._embedded = int(ids.shape[1]), False

    def _head(self, visit: Visit) -> Callable[..., Any]:
        """The head sees the rows whose logits are wanted, which may be fewer than the stream's."""

        def hook(_: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            handed = visit("lm_head", output[0])
            return None if handed is None else handed.reshape(output.shape)

        return hook

    def _logits(self, visit: Visit) -> Callable[..., Any]:
        """What the model returns: the head's output, capped or scaled where the model does that."""

        def hook(_: nn.Module, args: Any, output: Any) -> None:
            visit("logits", output.logits[0])

        return hook

    def _enter(self, visit: Visit, first: bool, state: dict[str, Any]) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs["hidden_states"]
            state.update(known=[x], attended=False, mid=False)
            if first and not self._embedded:
                # Scaled or not, normalised or not: what enters the first layer is what was embedded.
                _in_place(x, visit("model.embed_tokens", x[0]))

        return hook

    def _before_the_layers(self, visit: Visit) -> Callable[..., Any]:
        """What takes the embedded rows before the first layer does must have those that are handed onward."""

        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0] if args else None
            if self._embedded or module is getattr(self.decoder, "norm", None) or not isinstance(x, Tensor):
                return
            width = self.model.get_input_embeddings().weight.shape[1]
            if x.is_floating_point() and x.shape == (1, self._rows, width):
                self._embedded = True
                _in_place(x, visit("model.embed_tokens", x[0]))

        return hook

    def _mid(self, visit: Visit, layer: str, state: dict[str, Any]) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs.get("hidden_states")
            if not state["attended"] or state["mid"] or not isinstance(x, Tensor):
                return
            if any(x is other for other in state["known"]):
                return
            state["mid"] = True
            # In place: the layer keeps the same tensor for its second residual sum.
            _in_place(x, visit(f"{layer}.mid", x.reshape(-1, x.shape[-1])))

        return hook

    def _remember(self, child: nn.Module, state: dict[str, Any]) -> Callable[..., Any]:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            state["known"].append(output[0] if isinstance(output, tuple) else output)
            state["attended"] = state["attended"] or child in self.attentions

        return hook

    def _projected(self, visit: Visit, site: str, size: int) -> Callable[..., Any]:
        def hook(_: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            heads = output[0].unflatten(-1, (-1, size)) if size else output[0]
            handed = visit(site, heads)
            return None if handed is None else handed.reshape(output.shape)

        return hook

    def _output(self, visit: Visit, name: str) -> Callable[..., Any]:
        def hook(_: nn.Module, args: Any, output: Any) -> Any:
            first = output[0] if isinstance(output, tuple) else output
            if not isinstance(first, Tensor) or not first.is_floating_point():
                return None
            axis = self._axis(first)
            if axis is None:
                return None
            handed = visit(name, _to_rows(first, axis))
            if handed is None:
                return None
            replaced = _from_rows(handed, first, axis)
            return (replaced, *output[1:]) if isinstance(output, tuple) else replaced

        return hook

    def _axis(self, x: Tensor) -> int | None:
        """Say which dimension runs over tokens; None for a tensor that has none."""
        if x.ndim == 2:
            return 0 if x.shape[0] == self._rows else None
        axes = [axis for axis in range(1, x.ndim - 1) if x.shape[axis] == self._rows]
        # As many heads as tokens: tokens lie further apart, transposed or not.
        return max(axes, key=x.stride) if axes else None

    def _enter_router(self, visit: Visit, site: str, stack: list[_Product]) -> Callable[..., Any]:
        def hook(_: nn.Module, args: Any) -> None:
            mode = _Product(visit, site)
            stack.append(mode)
            mode.__enter__()

        return hook

    @contextlib.contextmanager
    def _attention_functions(self, visit: Visit) -> Iterator[None]:
        from transformers.modeling_utils import AttentionInterface

        mapping = AttentionInterface._global_mapping
        before = dict(mapping)
        names = {*_IMPLEMENTATIONS, self.model.config._attn_implementation}
        mapping.update({name: self._attention(visit, before.get(name)) for name in names})
        try:
            yield
        finally:
            mapping.clear()
            mapping.update(before)

    def _attention(self, visit: Visit, function: Any) -> Callable[..., Any]:
        def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            # Eager attention is each model's own function and in no register.
            run = function or sys.modules[type(module).__module__].eager_attention_forward
            name = self.attentions.get(module)
            if name is None:
                return run(module, query, key, value, *args, **kwargs)
            query = self._heads(visit, f"{name}.q_rope", query)
            if module not in self._latent:  # whose cached row is no key, and its keys are never cached
                key = self._heads(visit, f"{name}.k_rope", key)
            output, weights = run(module, query, key, value, *args, **kwargs)
            handed = visit(f"{name}.heads", output[0])
            return (output if handed is None else handed[None].contiguous()), weights

        return attend

    def _heads(self, visit: Visit, site: str, x: Tensor) -> Tensor:
        """Visit the new tokens of x [1, heads, tokens, H]; cached ones come first."""
        new = x[0, :, -self._rows :].transpose(0, 1)
        handed = visit(site, new)
        if handed is None:
            return x
        if x.shape[2] != self._rows:
            raise Unsupported("cached keys cannot be handed onward", where=site, do="run without a cache")
        return handed.transpose(0, 1)[None]


def is_router(name: str, block: Any) -> bool:
    """Whether the child of this name scores the experts of a block."""
    return name in _ROUTERS and hasattr(block, "experts")


@contextlib.contextmanager
def first_product() -> Iterator[list[Tensor]]:
    """Collect the first product [rows, out] computed inside: of a router its logits, whatever else it returns."""
    found: list[Tensor] = []
    with _Product(lambda _, rows: found.append(rows), ""):
        yield found


class _Product(TorchFunctionMode):
    """Visits the result of the first `linear` inside it: a router's logits, before its top k."""

    def __init__(self, visit: Visit, site: str) -> None:
        super().__init__()
        self.visit, self.site, self.done = visit, site, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not F.linear or self.done:
            return result
        self.done = True
        handed = self.visit(self.site, result.reshape(-1, result.shape[-1]))
        return result if handed is None else handed.reshape(result.shape)


def _leave_router(stack: list[_Product]) -> Callable[..., Any]:
    def hook(*_: Any) -> None:
        if stack:
            stack.pop().__exit__(None, None, None)

    return hook


def _in_place(x: Tensor, rows: Tensor | None) -> None:
    if rows is not None:
        x.copy_(rows.reshape(x.shape))


def _to_rows(x: Tensor, axis: int) -> Tensor:
    return x if x.ndim == 2 else x.movedim(axis, 1)[0]


def _from_rows(rows: Tensor, like: Tensor, axis: int) -> Tensor:
    return rows.reshape(like.shape) if like.ndim == 2 else rows[None].movedim(1, axis)


class TensorCaptureModel(nn.Module):
    """Any torch model, with what its modules return recorded at every forward.

    Of a causal language model of transformers every site can be recorded, inner ones too (`model.layers.0.mlp.router`);
    of any other module its submodules' outputs (by name) and inputs (`name.input`). The result is what
    `TensorReplacer` takes: for each prompt {site: [step 0: [1, prompt length, ...], step 1: [1, new rows, ...], ...]}.

    Args:
        model: the model; its behaviour is unchanged.
        patterns: site names or patterns, see `core.sites.matcher`.

    Attributes:
        captures: what was recorded so far, one entry for each prompt.
        prompt_token_ids: the prompts, in the order of `captures`.

    Example:
        >>> capture = TensorCaptureModel(hf_model, ["model.layers.*.mlp.router"])  # doctest: +SKIP
        >>> captures = capture.run([[2, 14, 5]], max_new_tokens=4)  # doctest: +SKIP
        >>> replacer = TensorReplacer(captures, prompt_token_ids=capture.prompt_token_ids)  # doctest: +SKIP
    """

    def __init__(self, model: nn.Module, patterns: Sequence[str]) -> None:
        super().__init__()
        self.model, self.patterns = model, list(patterns)
        self.captures: list[dict[str, list[Tensor]]] = []
        self.prompt_token_ids: list[list[int]] = []
        self._wanted: set[str] | None = None

    def new_prompt(self, token_ids: Sequence[int] = ()) -> None:
        """Begin the entry of another prompt; the forwards that follow are its steps."""
        self.captures.append({})
        self.prompt_token_ids.append(list(token_ids))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model and record one step of the current prompt.

        Raises:
            ConfigError: a pattern that matches no site of this model.
            PilotageError: a site that this forward did not reach.
        """
        if not self.captures:
            self.new_prompt()
        steps = self.captures[-1]
        seen: dict[str, Tensor] = {}
        offered: dict[str, None] = {}

        def note(site: str, rows: Tensor) -> None:
            offered.setdefault(site)
            if self._wanted is None or site in self._wanted:
                seen[site] = rows.detach().clone()

        with torch.no_grad(), self._attached(note):
            output = self.model(*args, **kwargs)
        if self._wanted is None:
            self._wanted = set(select(self.patterns, offered, where="TensorCaptureModel"))
        for site in self._wanted:
            if site not in seen:
                raise PilotageError("this forward did not reach it", where=site, do="leave it out of the patterns")
            steps.setdefault(site, []).append(seen[site][None])
        return output

    @torch.no_grad()
    def run(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int = 0) -> list[dict[str, list[Tensor]]]:
        """Record prompts, each followed by tokens that the model itself prefers, through its KV cache.

        Args:
            prompts: token ids.
            max_new_tokens: decode steps after each.

        Returns:
            One entry for each prompt.
        """
        first = len(self.captures)
        for prompt in prompts:
            self.new_prompt(prompt)
            step = self(input_ids=torch.tensor([list(prompt)]), use_cache=True)
            for _ in range(max_new_tokens):
                token = step.logits[:, -1:].argmax(-1)
                step = self(input_ids=token, use_cache=True, past_key_values=step.past_key_values)
        return self.captures[first:]

    def _attached(self, visit: Visit) -> contextlib.AbstractContextManager[None]:
        if hasattr(self.model, "get_decoder") and hasattr(self.model, "lm_head"):
            return HFTaps(self.model).attached(visit)
        return _modules_attached(self.model, visit)


@contextlib.contextmanager
def _modules_attached(model: nn.Module, visit: Visit) -> Iterator[None]:
    """Visit what the submodules of any model take and return; a leading batch of one is left out."""

    def rows(x: Any) -> Tensor | None:
        first = x[0] if isinstance(x, tuple) and x else x
        if isinstance(first, Mapping) or not isinstance(first, Tensor) or first.ndim == 0:
            return None
        return first[0] if first.ndim > 2 and first.shape[0] == 1 else first

    def entering(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any) -> None:
            found = rows(args)
            if found is not None:
                visit(f"{name}.input", found)

        return hook

    def leaving(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            found = rows(output)
            if found is not None:
                visit(name, found)

        return hook

    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            if name and not re.search(r"\.(act_fn|rotary_emb)$", name):
                stack.callback(module.register_forward_pre_hook(entering(name)).remove)
                stack.callback(module.register_forward_hook(leaving(name)).remove)
        yield
