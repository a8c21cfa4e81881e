"""One optimiser step over whatever mesh there is: loss, gradients and norm are those of one process.

The loss is a mean over all tokens that have a target, in all micro-batches on all ranks: it is divided by their number
before anything is summed, so that neither accumulation nor sharding changes what it means.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from pilotage.core.errors import PilotageError, Unsupported
from pilotage.training import plans
from pilotage.training.mesh import Mesh, Parallel
from pilotage.training.pipeline import Stage, cut_stage

IGNORED = -100  # a label that is no target
PIECE = 1 << 17  # elements whose squares are summed in fp32


@dataclass(frozen=True)
class Batch:
    """A micro-batch of one data-parallel rank.

    Attributes:
        input_ids: [B, S].
        labels: [B, S], the token that follows each; `IGNORED` where there is none to learn.
        position_ids: [B, S]; they start again with each document.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor

    def num_targets(self) -> int:
        """Count the tokens that have a target."""
        return int((self.labels != IGNORED).sum())

    def to(self, device: str) -> Batch:
        """Move it to a device."""
        return Batch(self.input_ids.to(device), self.labels.to(device), self.position_ids.to(device))


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum the cross entropies: logits [B, S, V] of any float dtype, labels [B, S] -> scalar, in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=IGNORED)


class Engine:
    """A model on a mesh.

    Args:
        model: a causal language model on this process's device, with the same weights on every process; it is divided
            in place. Its parts are called `model.embed_tokens`, `model.layers`, `model.norm` and `lm_head`.
        mesh: the processes.
        parallel: how they divide the model.
        device: "cpu" or "cuda".
        autocast: dtype that products are computed in, with parameters and their updates in their own; None for theirs.

    Attributes:
        model: the part of the model that this process holds.
        targets: tokens that the last step or evaluation was a mean over.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        parallel: Parallel,
        *,
        device: str = "cpu",
        autocast: torch.dtype | None = None,
    ) -> None:
        self.mesh, self.device, self.autocast = mesh, device, autocast
        self.tied = plans.is_tied(model)
        self.names = [name for name, _ in model.named_parameters()]
        frozen = any(not parameter.requires_grad for parameter in model.parameters())
        if frozen and (mesh.tp > 1 or mesh.pp > 1):
            raise Unsupported(
                "adapters are trained with data parallelism only", where="parallel", do="set tp and pp to 1, use dp"
            )
        self.stage: Stage = cut_stage(model, mesh.pp_rank, mesh.pp) if mesh.pp > 1 else Stage(model)
        self.model = model
        if mesh.tp > 1:
            plans.apply_tensor_parallel(model, mesh, sequence_parallel=parallel.sequence_parallel, ep=parallel.ep)
        if mesh.dp > 1:
            plans.apply_fully_sharded(self.stage, model, mesh)
        self._tie_group = self._make_tie_group()
        self._schedules: dict[int, Any] = {}
        self.targets = 1

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return this process's trainable parameters by name; a tied head is the embedding."""
        return {name: value for name, value in self.model.named_parameters() if value.requires_grad}

    def forward_backward(self, batches: Sequence[Batch]) -> float:
        """Add up the gradients of the micro-batches of one step.

        Args:
            batches: this data-parallel rank's; all ranks have as many, of one shape.

        Returns:
            The mean loss over all tokens of all ranks, the same on every process.

        Raises:
            PilotageError: no token has a target.
        """
        self._count(batches)
        if self.mesh.pp > 1:
            loss = self._pipeline(batches, train=True)
        else:
            loss = torch.zeros((), device=self.device)
            for index, batch in enumerate(batches):
                self._sync(index == len(batches) - 1)
                part = self._loss(batch)
                part.backward()
                loss += part.detach()
        self._finish_gradients()
        return self._all_ranks(loss)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """Return the mean loss over all tokens of all ranks without touching gradients, and their number."""
        count = self._count(batches)
        self.stage.eval()
        try:
            if self.mesh.pp > 1:
                loss = self._pipeline(batches, train=False)
            else:
                loss = sum((self._loss(batch) for batch in batches), torch.zeros((), device=self.device))
        finally:
            self.stage.train()
        return self._all_ranks(loss), count

    def clip(self, max_norm: float | None) -> float:
        """Scale all gradients so that their common norm is at most `max_norm`; returns the norm before.

        The norm is one number over every parameter of the model, however each is divided and whoever holds it.
        """
        grads = {name: p.grad for name, p in self.parameters().items() if p.grad is not None}
        own = [local(grad) for grad in grads.values()]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for (name, grad), square in zip(grads.items(), squares(own), strict=True):
            total += square / self._copies(name, grad)
        if self.mesh.devices is not None:
            dist.all_reduce(total)
        norm = float(total.sqrt())
        if max_norm is not None and norm > max_norm:
            torch._foreach_mul_(own, torch.tensor(max_norm / norm, device=self.device))  # bf16 by a number takes longer
        return norm

    def gathered(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Collect whole tensors from all processes, on each of them; for tests and comparisons, not for large models.

        Args:
            values: by name, of this process, e.g. gradients.
        """
        whole = {name: full(value).detach().cpu().clone() for name, value in values.items()}
        if self.mesh.pp == 1:
            return whole
        parts: list[Any] = [None] * self.mesh.pp
        dist.all_gather_object(parts, whole, group=self.mesh.axis("pp").get_group())
        joined: dict[str, Tensor] = {}
        for part in parts:
            joined |= part
        if self.tied:
            joined.pop("lm_head.weight", None)
        return joined

    def gradients(self) -> dict[str, Tensor]:
        """Collect every gradient whole; see `gathered`."""
        found = self.parameters().items()
        return self.gathered({name: p.grad for name, p in found if p.grad is not None})

    def _loss(self, batch: Batch) -> Tensor:
        batch = batch.to(self.device)
        with self._precision():
            logits = self.stage(batch.input_ids, batch.position_ids)
        return token_losses(logits, batch.labels) / self.targets

    def _precision(self) -> Any:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device, self.autocast)

    def _count(self, batches: Sequence[Batch]) -> int:
        count = torch.tensor(sum(batch.num_targets() for batch in batches), device=self.device)
        if self.mesh.dp > 1:
            dist.all_reduce(count, group=self.mesh.axis("dp").get_group())
        self.targets = int(count)
        if not self.targets:
            raise PilotageError("no token of this batch has a target", where="labels")
        return self.targets

    def _sync(self, last: bool) -> None:
        """Exchange gradients once, after the last micro-batch."""
        if isinstance(self.stage, FSDPModule):
            self.stage.set_requires_gradient_sync(last)
            self.stage.set_is_last_backward(last)

    def _pipeline(self, batches: Sequence[Batch], *, train: bool) -> Tensor:
        schedule = self._schedule(len(batches))
        ids, labels, positions = (
            torch.cat([getattr(batch, name) for batch in batches]).to(self.device)
            for name in ("input_ids", "labels", "position_ids")
        )
        losses: list[Tensor] = []
        given = (ids,) if self.mesh.first_stage else ()
        target = {"target": labels, "losses": losses} if self.mesh.last_stage else {}
        with self._precision():
            if train:
                schedule.step(*given, position_ids=positions, return_outputs=False, **target)
            else:
                schedule.eval(*given, position_ids=positions, **target)
        return sum((loss.detach() for loss in losses), torch.zeros((), device=self.device))

    def _schedule(self, count: int) -> Any:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        if count not in self._schedules:
            if count < self.mesh.pp:
                raise Unsupported(
                    f"{count} micro-batches do not fill pp={self.mesh.pp} stages",
                    where="batch",
                    do="make micro-batches smaller, or the batch larger",
                )
            stage = PipelineStage(
                self.stage,
                self.mesh.pp_rank,
                self.mesh.pp,
                torch.device(self.device),
                group=self.mesh.axis("pp").get_group(),
            )
            self._schedules[count] = Schedule1F1B(
                stage,
                count,
                loss_fn=lambda logits, labels: token_losses(logits, labels) / self.targets,
                scale_grads=False,
            )
        return self._schedules[count]

    def _finish_gradients(self) -> None:
        for parameter in self.parameters().values():
            grad = parameter.grad
            # Where rows or heads are divided a rank's gradient is a part of the sum: complete it, once.
            if isinstance(grad, DTensor) and grad.placements != parameter.placements:
                parameter.grad = grad.redistribute(placements=parameter.placements)
        if self._tie_group is not None:
            weight: Any = self._tied_weight()
            dist.all_reduce(local(weight.grad), group=self._tie_group)

    def _tied_weight(self) -> nn.Parameter:
        name = "model.embed_tokens" if self.mesh.first_stage else "lm_head"
        weight: Any = self.model.get_submodule(name).weight
        return weight

    def _make_tie_group(self) -> Any:
        """A tied head on another stage than its embedding: both copies get the sum of both gradients."""
        if not self.tied or self.mesh.pp == 1 or self.mesh.devices is None:
            return None
        ranks = self.mesh.devices.mesh
        mine = None
        for first, last in zip(ranks[0].flatten().tolist(), ranks[-1].flatten().tolist(), strict=True):
            group = dist.new_group([first, last])
            if dist.get_rank() in (first, last):
                mine = group
        return mine

    def _copies(self, name: str, grad: Tensor) -> int:
        """Count the processes that hold the same part of a gradient."""
        copies = self.mesh.dp * self.mesh.tp
        if isinstance(grad, DTensor):
            for size, placement in zip(grad.device_mesh.shape, grad.placements, strict=True):
                if not placement.is_replicate():  # FSDP over TP has a kind of shard of its own
                    copies //= size
        if self._tie_group is not None and self.model.get_parameter(name) is self._tied_weight():
            copies *= 2
        return copies

    def _all_ranks(self, loss: Tensor) -> float:
        if self.mesh.devices is None:
            return float(loss)
        # Every rank of tp has computed the same loss; only the last stage has one.
        total = loss.double() / self.mesh.tp
        dist.all_reduce(total)
        return float(total)


def squares(values: Sequence[Tensor]) -> list[Tensor]:
    """Return the squared length of each tensor, fp64.

    Numerics: pieces are summed in fp32, which over a whole embedding would lose three digits. Norms of half-precision
    pieces, which are larger, are rounded to their dtype, as torch's own clipping rounds them: converting costs more
    than summing.
    """
    pieces = [value.reshape(-1).split(PIECE if value.element_size() >= 4 else 4 * PIECE) for value in values]
    if not pieces:
        return []
    norms = torch._foreach_norm([piece for parts in pieces for piece in parts], 2)
    each = torch.stack(norms).double().square().split([len(parts) for parts in pieces])
    return [part.sum() for part in each]


def local(value: Tensor) -> Tensor:
    """Return this process's part of a tensor, sharing its memory."""
    return value.to_local() if isinstance(value, DTensor) else value


def full(value: Tensor) -> Tensor:
    """Return the whole of a tensor; all processes that share it must ask."""
    return value.full_tensor() if isinstance(value, DTensor) else value


@contextlib.contextmanager
def deterministic(seed: int) -> Iterator[None]:
    """Seed torch, and give the generator back as it was."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)
