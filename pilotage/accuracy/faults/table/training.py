"""Faults of training: of the backward pass, of its sums over ranks, and of what is saved and read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pilotage.accuracy.faults.fault import Fault, Patch, method

_HEADING = "Training side"
# Fewer layers than the tiny models have; biases, so that one can be forgotten.
OVERRIDES: dict[str, dict[str, Any]] = {
    "gemma3": {"num_hidden_layers": 3},
    "llama3": {"num_hidden_layers": 3, "attention_bias": True},
}


def _engine() -> Any:
    from pilotage.training.engine import Engine

    return Engine


def _no_head_norms(patch: Patch) -> None:
    from pilotage.training import plans

    patch.set(plans, "HEAD_NORMS", ())


def _cut_first_norm(real: Callable[..., None], model: Any, mesh: Any, **how: Any) -> None:
    """A norm whose output no longer leads back to its input, as a compiled one of a public trainer did under TP."""
    real(model, mesh, **how)
    norm = model.get_submodule("model.layers.0.input_layernorm")
    norm.register_forward_pre_hook(lambda _, args: tuple(x.detach() for x in args))


def _plan(wrong: Callable[..., None]) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        from pilotage.training import plans

        real = plans.apply_tensor_parallel
        patch.set(plans, "apply_tensor_parallel", lambda *args, **how: wrong(real, *args, **how))

    return plant


def _reduce_again(real: Callable[..., None], engine: Any) -> None:
    """Sum gradients of undivided parameters over the ranks, which every rank has whole already."""
    from torch.distributed.tensor import DTensor

    real(engine)
    if engine.mesh.tp > 1:
        for parameter in engine.parameters().values():
            if not isinstance(parameter.grad, DTensor):
                dist.all_reduce(parameter.grad, group=engine.mesh.axis("tp").get_group())


def _clip_own_stage(real: Callable[..., float], engine: Any, max_norm: float | None) -> float:
    """Take the norm over the parameters that this process holds."""
    if engine.mesh.pp == 1:
        return real(engine, max_norm)
    return float(torch.nn.utils.clip_grad_norm_(engine.parameters().values(), max_norm or float("inf")))


def _mean_of_means(real: Callable[..., Any], engine: Any, batch: Any) -> Any:
    """Average each micro-batch over its own tokens, and then the averages."""
    from pilotage.training.engine import token_losses

    if engine.mesh.dp == 1:
        return real(engine, batch)
    logits = engine.stage(batch.input_ids, batch.position_ids)
    return token_losses(logits, batch.labels) / batch.num_targets() / (engine.mesh.dp * 2)


def _half_precision_between(real: Callable[..., Any], stage: Any, *args: Any, **how: Any) -> Any:
    """Send activations on as the dtype that the pipeline was set up for, not as the model's."""
    out = real(stage, *args, **how)
    return out if stage.last else out.bfloat16().float()


def _stage() -> Any:
    from pilotage.training.pipeline import Stage

    return Stage


def _untie(patch: Patch) -> None:
    from pilotage.models.common.hf_checkpointing_mixin import HFCheckpointingMixin

    real = HFCheckpointingMixin.__dict__["from_pretrained"].__func__

    def from_pretrained(cls: Any, *args: Any, **how: Any) -> Any:
        model = real(cls, *args, **how)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        return model

    patch.set(HFCheckpointingMixin, "from_pretrained", classmethod(from_pretrained))


def _rope_buffer(patch: Patch) -> None:
    """Keep the frequencies in a buffer that is in no checkpoint; the meta device gives it no values."""
    import dataclasses

    from pilotage.models.common.blocks import DecoderBackbone

    build, run = DecoderBackbone.__init__, DecoderBackbone.forward

    def init(self: Any, *args: Any, **how: Any) -> None:
        build(self, *args, **how)
        for kind, frequencies in self.rope.items():
            self.register_buffer(f"inv_freq_{kind}", torch.tensor(frequencies.inv_freq), persistent=False)

    def forward(self: Any, x: Any, positions: Any, ctx: Any) -> Any:
        right = self.rope
        self.rope = {
            kind: dataclasses.replace(one, inv_freq=tuple(getattr(self, f"inv_freq_{kind}").tolist()))
            for kind, one in right.items()
        }
        try:
            return run(self, x, positions, ctx)
        finally:
            self.rope = right

    patch.set(DecoderBackbone, "__init__", init)
    patch.set(DecoderBackbone, "forward", forward)


def _forget_bias(real: Callable[..., Any], adapter: Any, state_dict: Any, *args: Any, **how: Any) -> Any:
    written = real(adapter, state_dict, *args, **how)
    return {name: value for name, value in written.items() if not name.endswith("k_proj.bias")}


def _adapter() -> Any:
    from pilotage.weights.adapter import StateDictAdapter

    return StateDictAdapter


def _fresh_optimizer(patch: Patch) -> None:
    """Read the weights and begin with an optimizer that has seen nothing."""
    from pilotage.training import checkpoint

    real = checkpoint.load

    def load(path: Any, engine: Any, optimizer: Any, **how: Any) -> Any:
        state = real(path, engine, optimizer, **how)
        checkpoint._make_moments(engine, optimizer)
        return state

    patch.set(checkpoint, "load", load)


def _fault(name: str, plant: Callable[[Patch], None], *where: str, model: str = "gemma3") -> Fault:
    return Fault(
        name=name, heading=_HEADING, model=model, plant=plant, where=where, only="training", ranks=2, subject="training"
    )


FAULTS: tuple[Fault, ...] = (
    _fault("plan without the query and key norms", _no_head_norms, "*.q_norm.weight", "*.k_norm.weight"),
    _fault("gradient path of the first norm dropped", _plan(_cut_first_norm), "model.embed_tokens.weight"),
    _fault("gradient of norms reduced twice", method(_engine, "_finish_gradients", _reduce_again), "*norm.weight"),
    _fault("clipping over one stage's parameters", method(_engine, "clip", _clip_own_stage), "gradient norm"),
    _fault("mean of micro-batch means", method(_engine, "_loss", _mean_of_means), "loss"),
    _fault("stage boundary in bf16", method(_stage, "forward", _half_precision_between), "output of stage 0"),
    _fault("head untied after loading", _untie, "lm_head.weight"),
    _fault("RoPE buffer lost after the meta device", _rope_buffer, "model.inv_freq_*"),
    _fault("adapter forgets a bias", method(_adapter, "to_hf", _forget_bias), "*.k_proj.bias", model="llama3"),
    _fault("optimizer state lost on resume", _fresh_optimizer, "optimizer state: *"),
)
