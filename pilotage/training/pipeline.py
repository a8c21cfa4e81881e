"""A stage of a pipeline: the part of a model that one process runs, under the names of the whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pilotage.core.errors import ConfigError
from pilotage.training.plans import check_parts


class PassThrough(nn.Module):
    """Stands where a layer of another stage would be."""

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        # Some decoders ask a layer of which kind it is before they call it.
        for name in ("attention_type", "layer_type"):
            if hasattr(like, name):
                setattr(self, name, getattr(like, name))

    def forward(self, hidden_states: Tensor, *args: Any, **how: Any) -> Tensor:
        """Return the hidden states as they came."""
        return hidden_states


class Stage(nn.Module):
    """What a process calls: tokens or hidden states in, hidden states or logits out.

    Args:
        model: the causal language model; what other stages hold is taken out of it.
        first: it embeds.
        last: it has the final norm and the head.
    """

    def __init__(self, model: nn.Module, *, first: bool = True, last: bool = True) -> None:
        super().__init__()
        self.inner = model
        self.first, self.last = first, last

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        """Run the stage.

        Args:
            x: tokens [B, S] on the first stage, else hidden states [B, S, D].
            position_ids: [B, S]; they start again with each document, which also says what sees what.

        Returns:
            logits [B, S, V] of the last stage, else hidden states.
        """
        model: Any = self.inner
        given = {"input_ids" if self.first else "inputs_embeds": x, "position_ids": position_ids, "use_cache": False}
        if self.last:
            return model(**given).logits
        # Without the head, and without what the model does to logits.
        return (model.decode if hasattr(model, "decode") else model.model)(**given).last_hidden_state


def layers_of_stage(num_layers: int, stage: int, num_stages: int) -> range:
    """Deal layers out in order; earlier stages get one more where they do not divide.

    Raises:
        ConfigError: fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ConfigError(f"{num_layers} layers do not fill pp={num_stages} stages", where="parallel.pp")
    each, more = divmod(num_layers, num_stages)
    start = stage * each + min(stage, more)
    return range(start, start + each + (stage < more))


def cut_stage(model: Any, stage: int, num_stages: int) -> Stage:
    """Keep the part of `model` that a stage holds, in place, and wrap it.

    Raises:
        Unsupported: the model has parts that belong to no stage.
        ConfigError: fewer layers than stages.

    Where the head is tied to the embedding and both are on different stages, each keeps a copy; see
    `engine.Engine.tie_gradients`.
    """
    check_parts(model, "parallel.pp")
    first, last = stage == 0, stage == num_stages - 1
    inner = model.model
    held = layers_of_stage(len(inner.layers), stage, num_stages)
    for index, layer in enumerate(inner.layers):
        if index not in held:
            inner.layers[index] = PassThrough(layer)
    if not first:
        inner.embed_tokens = nn.Identity()
    if not last:
        inner.norm, model.lm_head = nn.Identity(), nn.Identity()
    return Stage(model, first=first, last=last)
