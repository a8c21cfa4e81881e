"""Hugging Face's own modules behind the runner's contract."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pilotage.core.errors import ConfigError, Unsupported
from pilotage.models.common.context import PagedContext
from pilotage.models.common.kv import KVSpec, LayerSpec
from pilotage.serving.fallback import attention, positions
from pilotage.serving.fallback.positions import Counting

_PROBE_TOKENS = 7
WRITE = "write a model package (`pilotage new`)"
# Kinds of layers that remember more than keys and values.
_RECURRENT = ("mamba", "linear", "conv", "recurrent", "rwkv", "ssm", "lightning")
_STATEFUL = re.compile(r"Mamba|ShortConv|DeltaNet|DeltaAttention|Recurrent|Rwkv|xLSTM|LSTM")


class FallbackForCausalLM(nn.Module):
    """A causal language model of transformers, served for flat tokens on paged attention.

    Attributes:
        hf: Hugging Face's model, unchanged but for its attention function, or what has its face.
        name: its architecture.
        fallback: true; says to whoever holds the model that it is no model package.
    """

    fallback = True

    def __init__(self, hf: Any = None, *, vllm_config: Any = None, prefix: str = "") -> None:
        """Learn from one forward what the layers ask of the cache.

        Args:
            hf: the model, loaded.
            vllm_config, prefix: for the signature that vLLM's registry asks for; our worker does not use them.

        Raises:
            Unsupported: the model cannot be served this way; says why.
        """
        super().__init__()
        if hf is None:
            raise Unsupported("the fallback is built by the worker", where="FallbackForCausalLM")
        self.hf = hf
        self.name: str = getattr(hf, "architecture", type(hf).__name__)
        self.step = attention.Step()
        self.config = hf.config
        self._takes = _arguments(hf)
        self._fixed: dict[str, Any] = {"use_cache": False} if "use_cache" in self._takes else {}
        self._base: list[nn.Module] = []  # the backbone; in a list so that it is no second submodule
        self.counting = Counting()
        self.clues: tuple[str, ...] = ()
        self.proof: Any = None  # a `check.Proof`, once it has been proven
        self.layers = self._learn()

    def _learn(self) -> list[attention.Layer]:
        name = self.name
        require_decoder(self.hf.config, name)
        if not self._takes & {"position_ids", "kwargs"}:
            raise Unsupported("its forward takes no positions, but counts by itself", where=name, do=WRITE)
        attention.use(self.hf, attention.NAME)
        ids = torch.arange(3, 3 + _PROBE_TOKENS)
        used: set[nn.Module] = set()
        try:
            with attention.learning(), torch.no_grad(), _noting_modules(used):
                run = partial(self.hf, input_ids=ids[None], return_dict=True, **self._fixed)
                self.counting = positions.learn(self.hf, run, "position_ids" in self._takes)
            with attention.learning() as notes:
                self._hidden_and_logits(ids, torch.arange(_PROBE_TOKENS), None)
        except Unsupported:
            raise
        except Exception as error:
            _require_no_state(self.hf, used, name)
            raise Unsupported(
                f"its forward cannot be run on token ids and positions alone ({in_a_line(error)})", where=name, do=WRITE
            ) from error
        _require_no_state(self.hf, used, name)
        if not notes.calls:
            raise Unsupported("its attention is code of its own, not transformers' interface", where=name, do=WRITE)
        for module in self.counting.told:
            positions.tell(module, self.step)
        self.clues = _clues(self.hf, notes)
        return self._layers(notes, name)

    def _layers(self, notes: attention.Notes, name: str) -> list[attention.Layer]:
        names = {id(module): key for key, module in self.hf.named_modules()}
        layers: list[attention.Layer] = []
        seen: Counter[str] = Counter()
        for call in notes.calls:
            layer = names.get(id(call.module))
            if layer is None:
                raise Unsupported("attention is called by something that is no module of it", where=name, do=WRITE)
            try:
                window = attention.window_of(call, notes.masks, self.hf.config)
            except Unsupported as error:
                raise Unsupported(error.what, where=f"{name}, {layer}", do=WRITE) from error
            found = attention.Layer(
                layer_name=f"{layer}.call{seen[layer]}" if seen[layer] else layer,
                num_kv_heads=call.num_kv_heads,
                head_size=max(call.head_size, call.value_size),
                window=window,
                step=self.step,
            )
            seen[layer] += 1
            layers.append(found)
            attention.mark(call.module, found)
        return layers

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attn_metadata: Mapping[str, Any],
        sampling_positions: Tensor,
        rank: int | Tensor | None = None,
        return_hidden: bool = False,
        **other: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute logits of the sampled rows for a step of flat tokens; see `models.common.causal_lm.CausalLM`.

        Raises:
            Unsupported: an argument of the contract that this model has no part for.
        """
        stated = [key for key, value in other.items() if value is not None]
        if stated:
            raise Unsupported(f"{', '.join(stated)} is not available", where="fallback", do=WRITE)
        context = attn_metadata
        if not isinstance(context, PagedContext):
            context = PagedContext(context, positions=positions)
        with self.step.running(context, positions):
            hidden, logits = self._hidden_and_logits(input_ids, positions, sampling_positions)
        calls = self.step.calls.total()
        if calls != len(self.layers):  # then a layer has cached nothing of these tokens
            raise Unsupported(
                f"it attended {calls} times in a step, and {len(self.layers)} times when it was learnt",
                where=self.name,
                do=WRITE,
            )
        return (logits, hidden) if return_hidden else logits

    def _hidden_and_logits(self, ids: Tensor, positions: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        places = positions[None].long() + self.counting.offset
        arguments: dict[str, Any] = {"input_ids": ids[None].long(), "position_ids": places}
        some = keep is not None and "logits_to_keep" in self._takes
        if some:
            arguments["logits_to_keep"] = keep
        seen: list[tuple[nn.Module, Tensor]] = []
        handles = [
            module.register_forward_hook(lambda module, _, out: seen.append((module, out[0])))
            for module in self._base or _backbones(self.hf)
        ]
        try:
            with torch.no_grad():
                logits = self.hf(**arguments, **self._fixed, return_dict=True).logits[0]
        finally:
            for handle in handles:
                handle.remove()
        if keep is not None and not some:
            logits = logits[keep]
        module, hidden = seen[-1]  # where one holds the other, the outer one ends last
        self._base = [module]
        return hidden[0], logits

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embed input_ids [T] -> [T, D]."""
        embedded: Tensor = self.hf.get_input_embeddings()(input_ids)
        return embedded

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Run what the model does after its backbone on hidden rows [rows, D]: head, scales and bounds."""
        with self._backbone_gives(hidden), torch.no_grad():
            ids = torch.zeros(1, hidden.shape[0], dtype=torch.long)
            logits: Tensor = self.hf(input_ids=ids, return_dict=True).logits[0]
            return logits

    @contextmanager
    def _backbone_gives(self, hidden: Tensor) -> Iterator[None]:
        (base,) = self._base
        before = base.__dict__.get("forward")

        from transformers.modeling_outputs import BaseModelOutput

        class Output(BaseModelOutput):
            def __getattr__(self, name: str) -> None:
                """Whatever else a model hands on (router logits, cross attentions): there is none."""

        def forward(*_: Any, **__: Any) -> Any:
            given: Any = hidden[None]
            return Output(last_hidden_state=given)

        base.forward = forward
        try:
            yield
        finally:
            if before is None:
                del base.forward
            else:
                base.forward = before

    def get_kv_spec(self) -> KVSpec:
        """Say what each layer caches, in the dtype of the weights."""
        dtype = self.hf.get_input_embeddings().weight.dtype
        return KVSpec(
            layers=[
                LayerSpec(layer.layer_name, layer.num_kv_heads, layer.head_size, dtype, layer.window)
                for layer in self.layers
            ]
        )

    def bind_kv_cache(self, kv_caches: Mapping[str, Sequence[Tensor]]) -> None:
        """Give every layer its pages: {layer name: [k_cache, v_cache]}, each [P, K, C, H].

        Raises:
            ConfigError: a layer without pages, or pages without a layer.
        """
        layers = {layer.layer_name: layer for layer in self.layers}
        if layers.keys() != kv_caches.keys():
            odd = sorted(layers.keys() ^ kv_caches.keys())
            raise ConfigError(f"layers and pages do not match: {', '.join(odd)}", where="bind_kv_cache")
        for name, (k_cache, v_cache) in kv_caches.items():
            layers[name].kv_cache = (k_cache, v_cache)


def in_a_line(error: Exception) -> str:
    """Say an error of other people's code within a sentence."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160] if text else ''}"


def _backbones(hf: Any) -> list[nn.Module]:
    """What may be the part of a model between token ids and the hidden states that its head reads."""
    found = [getattr(hf, name, None) for name in (hf.base_model_prefix, "model", "transformer")]
    found.append(hf.get_decoder() if hasattr(hf, "get_decoder") else None)
    embedding = hf.get_input_embeddings()
    return [
        one
        for one in {id(one): one for one in found if isinstance(one, nn.Module) and one is not hf}.values()
        if any(module is embedding for module in one.modules())  # some call a projection of their head a decoder
    ]


def _arguments(hf: Any) -> set[str]:
    return set(inspect.signature(type(hf).forward).parameters)


def require_decoder(config: Any, name: str) -> None:
    """Refuse by its config what is no decoder of text, or keeps more than keys and values.

    Raises:
        Unsupported: says which.
    """
    config = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise Unsupported("it is an encoder with a decoder", where=name, do=WRITE)
    stated = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    odd = sorted({str(kind) for kind in stated if any(word in str(kind) for word in _RECURRENT)})
    if odd:
        raise Unsupported(f"its layers of kind {', '.join(odd)} keep a recurrent state", where=name, do=WRITE)
    if getattr(config, "audio_channels", None) and getattr(config, "num_codebooks", None):
        raise Unsupported("it generates codes of several books at a time, no text", where=name, do=WRITE)
    if getattr(config, "is_causal", True) is False:
        raise Unsupported("its attention is bidirectional", where=name, do=WRITE)
    if stated and (getattr(config, "num_kv_shared_layers", None) or 0) >= len(stated):
        raise Unsupported("all its layers read the keys of another model, whose draft it is", where=name, do=WRITE)


@contextmanager
def _noting_modules(used: set[nn.Module]) -> Iterator[None]:
    """Collect the modules whose forward runs inside the block."""
    handle = nn.modules.module.register_module_forward_pre_hook(lambda module, _: used.add(module))
    try:
        yield
    finally:
        handle.remove()


def _require_no_state(hf: nn.Module, used: set[nn.Module], name: str) -> None:
    """Refuse used modules that carry something from token to token beside keys and values."""
    convolutions = [one for module in used for one in (module, *module.children()) if isinstance(one, nn.Conv1d)]
    if any(one.kernel_size[0] > 1 for one in convolutions):
        raise Unsupported("its convolutions over the prompt keep a state between tokens", where=name, do=WRITE)
    for module in (one for one in hf.modules() if one in used):  # in the order of the model: the outermost is named
        kind = type(module).__name__
        if module is not hf and ("A_log" in dict(module.named_parameters(recurse=False)) or _STATEFUL.search(kind)):
            raise Unsupported(f"its {kind} keeps a recurrent state", where=name, do=WRITE)


def _clues(hf: nn.Module, notes: attention.Notes) -> tuple[str, ...]:
    """What a model hands to attention that the pages have no part for; the reason, should its proof fail."""
    extras = sorted({extra for call in notes.calls for extra in call.extras})
    found = [f"it hands {', '.join(extras)} to attention"] if extras else []
    if any("Indexer" in type(module).__name__ for module in hf.modules()):
        found.append("an indexer of it picks by content which keys a query sees")
    return tuple(found)


def require_length(config: Any, max_model_len: int, name: str) -> None:
    """Refuse lengths at which rotary frequencies depend on the longest request of a batch.

    Raises:
        Unsupported: a rotary embedding of kind dynamic or longrope, asked for more than its original length.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    for one in kinds:
        kind = one.get("rope_type")
        if kind not in ("dynamic", "longrope"):
            continue
        if one.get("alpha") and str(config.model_type).startswith("hunyuan"):  # it calls its fixed stretch dynamic
            continue
        limit = one.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        limit = limit or config.max_position_embeddings
        if max_model_len > limit:
            raise Unsupported(
                f"its rotary frequencies ({kind}) depend on the longest request of a batch beyond {limit} tokens, and "
                f"max_model_len is {max_model_len}",
                where=name,
                do=f"serve it with max_model_len={limit} or less",
            )
