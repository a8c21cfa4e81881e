"""Which sites a model has: found by running it on shapes alone.

Nothing is computed and no weight is read, so this works on a model without weights, on a served one between two steps,
and on any rank of several.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pilotage import parallel
from pilotage.core import sites
from pilotage.core.tap import TapPlan, active, asking, tap
from pilotage.functional.receipts import unrecorded

# Not places of their own: the whole model and its backbone, whose values are those of parts of theirs.
_WHOLE = ("", "model")
# Told apart by their number: token rows, and rows that logits are computed for.
_TOKENS, _SAMPLED = 7, 3
_BLOCK = 16


@dataclass(frozen=True, kw_only=True)
class SiteInfo:
    """What one row of a site looks like.

    Attributes:
        name: see `core.sites`.
        shape: of a row on this rank; None where the model only asks for the site's replacement.
        dtype: of a row; None with `shape`.
        sampled: whether it has a row for each computed row of logits, not for each token.
        full_shape: of a row over all ranks; None where that is not known, and the rows are this rank's.
        shard_dim: dimension of a row that is divided over the ranks; None if every rank has the whole row.
        num_shards: distinct shares; rank r holds share r // (ranks / num_shards).
        bare: whether the model asks for its replacement without a live value, so that a row without a reference is
            zero.
    """

    name: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    sampled: bool = False
    full_shape: tuple[int, ...] | None = None
    shard_dim: int | None = None
    num_shards: int = 1
    bare: bool = False

    def share(self, rows: Tensor, rank: int, world_size: int) -> Tensor:
        """Cut a rank's share out of whole rows [rows, ...]."""
        if self.shard_dim is None:
            return rows
        return rows.chunk(self.num_shards, dim=self.shard_dim + 1)[rank * self.num_shards // world_size]

    def join(self, shares: list[Tensor]) -> Tensor:
        """Put the ranks' shares [rows, ...] together to whole rows; `shares` has one a rank."""
        if self.shard_dim is None:
            return shares[0]
        return torch.cat(shares[:: len(shares) // self.num_shards], dim=self.shard_dim + 1)


def sites_of(model: nn.Module) -> list[str]:
    """Return the names of all sites of a model, in the order in which they are computed.

    Inputs and outputs of every module that is really called, and the inner taps. Projections that are computed as one
    product are no calls of modules; their values are the taps `q`, `k` and `v`.
    """
    return list(describe(model))


def describe(model: nn.Module) -> dict[str, SiteInfo]:
    """Return all sites of a model by name, in the order in which they are computed on this rank."""
    found = _run(model)
    group = parallel.get_tp_group()
    whole = _whole_model(model) if group.world_size > 1 else None
    described = {}
    full = _run(whole) if whole is not None else {}
    for name, info in found.items():
        full_shape, dim, shards = info.shape, None, 1
        if group.world_size > 1 and info.shape is not None:
            other = full.get(name)
            full_shape = other.shape if other is not None else None
            if full_shape is not None and full_shape != info.shape:
                dim = next(i for i, (a, b) in enumerate(zip(info.shape, full_shape, strict=True)) if a != b)
                shards = full_shape[dim] // info.shape[dim]
        described[name] = SiteInfo(
            name=name,
            shape=info.shape,
            dtype=info.dtype,
            sampled=info.sampled,
            bare=info.bare,
            full_shape=full_shape,
            shard_dim=dim,
            num_shards=shards,
        )
    return described


def _whole_model(model: nn.Module) -> nn.Module | None:
    """Build the model as a single rank would, without weights; None for a model that is built some other way."""
    group = parallel.get_tp_group()
    kind: Any = type(model)
    try:
        parallel.set_tp_group(None)
        with torch.device("meta"):
            built: nn.Module = kind(model.config, model.backend)
            return built
    except (AttributeError, TypeError):
        return None
    finally:
        parallel.set_tp_group(group.process_group)


@contextlib.contextmanager
def hooked(model: nn.Module, names: Mapping[str, nn.Module], places: set[str] | None = None) -> Iterator[None]:
    """Tap the inputs and outputs of modules inside the block.

    Args:
        model: unused but for its lifetime.
        names: Hugging Face name -> module.
        places: sites to tap; None for all.
    """
    handles = []
    try:
        for name, module in names.items():
            if places is None or f"{name}.input" in places:
                handles.append(module.register_forward_pre_hook(_input_hook(f"{name}.input")))
            # A module that is called like an inner tap (`mlp.router`, `mlp.experts`) is tapped by its block: a second
            # tap of the same place would record what the first has handed onward.
            if (places is None or name in places) and sites.parse(name).site == "output":
                handles.append(module.register_forward_hook(_output_hook(name)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that can be places, by their Hugging Face names."""
    return {name: module for name, module in model.named_modules() if name not in _WHOLE}


def _input_hook(site: str) -> Callable[..., Any]:
    def hook(_module: nn.Module, args: tuple[Any, ...]) -> Any:
        if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            return None
        return (tap(site, args[0]), *args[1:])

    return hook


def _output_hook(site: str) -> Callable[..., Any]:
    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return tap(site, output)
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
            return (tap(site, output[0]), *output[1:])
        return None

    return hook


def _run(model: nn.Module) -> dict[str, SiteInfo]:
    """Run the model once as a prefill and once as a decode, and note what is tapped."""
    found: dict[str, SiteInfo] = {}
    asked: dict[str, bool] = {}

    def listen(site: str, x: Tensor) -> Tensor:
        rows = x.shape[0] if x.ndim else 0
        if rows in (_TOKENS, _SAMPLED):
            info = SiteInfo(name=site, shape=tuple(x.shape[1:]), dtype=x.dtype, sampled=rows == _SAMPLED)
            found.setdefault(site, info)
        return x

    def note(name: str, with_live: bool) -> None:
        asked[name] = asked.get(name, False) or not with_live
        found.setdefault(name, SiteInfo(name=name))

    device = next(model.parameters()).device
    with (
        unrecorded(),
        torch.no_grad(),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.device(device),
        _bound(model),
        hooked(model, modules_of(model)),
        active(TapPlan(listener=listen)),
        asking(note),
    ):
        for decode in (False, True):
            model(**_arguments(model, decode))
    return {
        name: info if not asked.get(name) else SiteInfo(**{**info.__dict__, "bare": True})
        for name, info in found.items()
    }


def _arguments(model: Any, decode: bool) -> dict[str, Any]:
    """Arguments of the contract's forward for one step of shapes: one request a row."""
    tokens = _TOKENS
    rows = tokens if decode else _SAMPLED
    zeros = partial(torch.zeros, dtype=torch.int32)
    positions = zeros(tokens)
    shared = {
        "block_table_tensor": zeros(rows, 2),
        "slot_mapping": torch.zeros(tokens, dtype=torch.int64),
        "max_query_len": 1 if decode else tokens,
        "block_size": _BLOCK,
        "max_blocks_per_seq": 2,
        "decode_token_threshold": 1,
        "cached_seq_len": zeros(rows),
        "kv_segment_size": 0,
        "query_start_loc": zeros(rows + 1),
        "seq_lens": zeros(rows),
        "token_to_req": zeros(tokens),
    }
    metadata: dict[str, Any] = {"decode_token_threshold": 1, "positions": positions}
    metadata.update(dict.fromkeys([layer.name for layer in model.get_kv_spec().layers], shared))
    given: dict[str, Any] = {
        "input_ids": torch.zeros(tokens, dtype=torch.int64),
        "positions": positions,
        "attn_metadata": metadata,
        # In a decode every row is sampled; fewer here, so that rows of either kind can be told apart.
        "sampling_positions": torch.zeros(_SAMPLED, dtype=torch.int64),
    }
    if "rank" in inspect.signature(model.forward).parameters:
        given["rank"] = torch.zeros((), dtype=torch.int32)
    return given


@contextlib.contextmanager
def _bound(model: Any) -> Iterator[None]:
    """Give the model pages without content, and whatever it had before back at the end."""
    before = {module: module.__dict__["kv_cache"] for module in model.modules() if "kv_cache" in module.__dict__}
    pages = {layer.name: layer.pages(2, _BLOCK) for layer in model.get_kv_spec().layers}
    model.bind_kv_cache(pages)
    try:
        yield
    finally:
        for module in model.modules():
            if module in before:
                module.kv_cache = before[module]
            else:
                module.__dict__.pop("kv_cache", None)
