"""Shard plans: which parameter is divided how, by the names that every decoder here shares.

A plan is complete or it is refused. A module that a plan forgets is not an error for torch: its loss is exact and its
gradient is one rank's, so every parameter under a divided layer must be named by a rule.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from pilotage.core.errors import Unsupported
from pilotage.nn import Experts, Router
from pilotage.training.experts import DealExperts
from pilotage.training.mesh import Mesh

COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW = ("o_proj", "down_proj")
HEAD_NORMS = ("q_norm", "k_norm")
GATHERS = ("self_attn", "mlp")
ROWS = Shard(1)  # of hidden states [B, S, D]


class GatherRows(ParallelStyle):
    """Make the hidden states that a block is given whole once, for all projections that read them."""

    def __init__(self, layout: Shard | Replicate) -> None:
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def whole(x: Tensor) -> Tensor:
            return DTensor.from_local(x, device_mesh, [self.layout], run_check=False).redistribute(
                placements=[Replicate()]
            )

        module.register_forward_pre_hook(lambda _, args, how: _with_hidden(whole, args, how), with_kwargs=True)
        return module


class WholeRows(ParallelStyle):
    """Give a block all rows as plain tensors, and each rank its own rows of what the block returns."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def whole(x: Tensor) -> Tensor:
            shares = DTensor.from_local(x, device_mesh, [ROWS], run_check=False)
            return shares.redistribute(placements=[Replicate()]).to_local()

        def own(_: nn.Module, args: Any, out: Tensor) -> Tensor:
            rows = DTensor.from_local(out, device_mesh, [Replicate()], run_check=False)
            return rows.redistribute(placements=[ROWS]).to_local()

        module.register_forward_pre_hook(lambda _, args, how: _with_hidden(whole, args, how), with_kwargs=True)
        module.register_forward_hook(own)
        return module


class SplitRows(ParallelStyle):
    """Give each rank its share of the rows that a layer is given."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def own(x: Tensor) -> Tensor:
            if x.shape[1] % device_mesh.size():
                raise Unsupported(
                    f"{x.shape[1]} tokens do not divide over tp={device_mesh.size()}",
                    where="parallel.sequence_parallel",
                    do="choose a sequence length that is a multiple of it",
                )
            whole = DTensor.from_local(x, device_mesh, [Replicate()], run_check=False)
            return whole.redistribute(placements=[ROWS]).to_local()

        module.register_forward_pre_hook(lambda _, args, how: _with_hidden(own, args, how), with_kwargs=True)
        return module


class JoinRows(ParallelStyle):
    """Give every rank all rows that a layer returns, for the next pipeline stage."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def join(_: nn.Module, args: Any, out: Any) -> Any:
            shares = DTensor.from_local(out, device_mesh, [ROWS], run_check=False)
            return shares.redistribute(placements=[Replicate()]).to_local()

        module.register_forward_hook(join)
        return module


def _with_hidden(change: Any, args: tuple[Any, ...], how: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Change the hidden states of a call: the first argument, or the one that transformers names so."""
    if args:
        return (change(args[0]), *args[1:]), how
    return args, {**how, "hidden_states": change(how["hidden_states"])}


def holds(module: nn.Module) -> bool:
    """Whether this process has parameters of a module."""
    return next(module.parameters(), None) is not None


def decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the decoder layers that this process has, by name."""
    found: Any = model.get_submodule("model.layers")
    return {f"model.layers.{name}": layer for name, layer in found.named_children() if holds(layer)}


def check_parts(model: nn.Module, where: str) -> None:
    """Refuse a model of more than an embedding, layers, a norm and a head, or whose layers read one another's keys.

    Raises:
        Unsupported: it is, by the first parameter or layer that is neither.
    """
    known = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")
    odd = [name for name, _ in model.named_parameters() if not name.startswith(known)]
    layers: Any = model.get_submodule("model.layers")
    odd += [f"model.layers.{i}" for i, layer in enumerate(layers) if getattr(_attention(layer), "kv_source", None)]
    if odd:
        raise Unsupported(
            f"{odd[0]} is no part that can be divided this way", where=where, do="train this model with dp alone"
        )


def _attention(layer: Any) -> Any:
    return getattr(layer, "self_attn", None)


def tensor_parallel_plan(
    model: nn.Module, tp: int, *, sequence_parallel: bool = False, ep: int = 1
) -> dict[str, ParallelStyle]:
    """Build the plan of a causal language model, or of the stage of one.

    Args:
        model: has `model.embed_tokens`, `model.layers`, `model.norm` and `lm_head`, as far as it holds them.
        tp: ranks.
        sequence_parallel: divide the rows between layers as well.
        ep: `tp` where the ranks hold whole experts, else 1.

    Returns:
        Module name -> what is done with it.

    Raises:
        Unsupported: a parameter of a layer that no rule names, or heads that do not divide over the ranks.
    """
    check_parts(model, "parallel.tp")
    between = ROWS if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {}
    layers = decoder_layers(model)
    _check_heads(model, tp)
    for name, layer in layers.items():
        for path, module in layer.named_modules():
            if path and any(True for _ in module.parameters(recurse=False)):
                plan[f"{name}.{path}"] = _style(f"{name}.{path}", model, module, between, ep)
        for block in GATHERS:
            module: Any = getattr(layer, block, None)
            if isinstance(getattr(module, "experts", None), Experts):
                if sequence_parallel:
                    plan[f"{name}.{block}"] = WholeRows()
            elif isinstance(module, nn.Module):
                plan[f"{name}.{block}"] = GatherRows(between)
    names = dict(model.named_modules())
    if holds(names["model.embed_tokens"]):
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    if holds(names["lm_head"]):
        plan["lm_head"] = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
    if sequence_parallel:
        held = list(layers)
        plan[held[0]] = SplitRows()
        if holds(names["model.norm"]):
            plan["model.norm"] = SequenceParallel(use_local_output=True)
        else:
            # One layer may be both the first and the last of a stage.
            plan[f"{held[-1]}@out"] = JoinRows()
    return {key: style for key, style in plan.items() if style is not None}


def _style(path: str, model: nn.Module, module: nn.Module, between: Shard | Replicate, ep: int) -> Any:
    leaf = path.rpartition(".")[2]
    if isinstance(module, Router):
        return None  # whole on every rank, and so are the rows it sees and their gradients
    if isinstance(module, Experts):
        if ep == 1:
            raise Unsupported("experts are dealt out, not divided", where=path, do="set parallel.ep to the same as tp")
        return DealExperts()
    if leaf in COLUMN:
        return ColwiseParallel(input_layouts=Replicate())
    if leaf in ROW:
        return RowwiseParallel(output_layouts=between)
    if leaf in HEAD_NORMS:
        weight: Any = module.weight
        if weight.numel() != _head_size(model):
            raise Unsupported(
                f"normalises {weight.numel()} channels, not one head's {_head_size(model)}",
                where=path,
                do="train it without tensor parallelism",
            )
        # Each rank has some heads: its gradient is a part of the sum.
        return SequenceParallel(sequence_dim=2, use_local_output=True)
    if leaf.endswith("norm"):
        return SequenceParallel(use_local_output=True) if isinstance(between, Shard) else None
    raise Unsupported(
        "no rule of the plan says how it is divided", where=path, do="train this model with dp or pp, not with tp"
    )


def _text(model: Any) -> Any:
    return model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config


def _head_size(model: Any) -> int:
    config = _text(model)
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _check_heads(model: Any, tp: int) -> None:
    config = _text(model)
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(config, name, None)
        if size is not None and size % tp:
            good = [n for n in range(1, size + 1) if size % n == 0 and n <= 16]
            raise Unsupported(f"{name}={size} does not divide over tp={tp}", where="parallel.tp", do=f"use {good}")


def apply_tensor_parallel(model: nn.Module, mesh: Mesh, *, sequence_parallel: bool = False, ep: int = 1) -> None:
    """Divide a model, or a stage of one, over the ranks of "tp" in place; a tied head stays tied.

    Raises:
        Unsupported: see `tensor_parallel_plan`; or `ep` for a model without experts.
    """
    if ep > 1 and not any(isinstance(module, Experts) for module in model.modules()):
        raise Unsupported("no layer of this model has experts", where="parallel.ep", do="set it to 1")
    plan = tensor_parallel_plan(model, mesh.tp, sequence_parallel=sequence_parallel, ep=ep)
    tied = is_tied(model)
    axis = mesh.axis("tp")
    for name, style in plan.items():
        parallelize_module(model.get_submodule(name.removesuffix("@out")), axis, style)
    if tied:
        # Dividing gave each module a parameter of its own.
        model.get_submodule("lm_head").weight = model.get_submodule("model.embed_tokens").weight


def is_tied(model: nn.Module) -> bool:
    """Whether embedding and head are one parameter here."""
    weights = [getattr(dict(model.named_modules()).get(name), "weight", None) for name in TIED]
    return weights[0] is not None and weights[0] is weights[1]


TIED = ("model.embed_tokens", "lm_head")


def apply_fully_sharded(
    root: nn.Module, model: nn.Module, mesh: Mesh, *, compute_dtype: torch.dtype | None = None
) -> None:
    """Shard all parameters over "dp": each layer is gathered when it runs; embedding, norm and head together.

    Gradients are summed, not averaged: the loss is already divided by the tokens of all ranks.

    Args:
        root: the module that is called.
        model: the causal language model inside it.
        mesh: the processes.
        compute_dtype: dtype of gathered parameters and activations; gradients are reduced in fp32. None: the
            parameters' own.
    """
    # A stage returns a view of gathered logits, and nothing here writes into it.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32 if compute_dtype else None)
    axis = mesh.axis("dp")
    for layer in decoder_layers(model).values():
        fully_shard(layer, mesh=axis, mp_policy=policy)
    fully_shard(root, mesh=axis, mp_policy=policy)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
