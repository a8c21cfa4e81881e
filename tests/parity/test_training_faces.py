"""Training faces against transformers, tiny and perturbed: logits, loss and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faces import NAMES, batch, gradients, hf_face, our_face, packed

Tiny = Callable[..., Path]
# Of a gradient, relative to its largest value: the same operators, except that heads are normalised before they are
# transposed and not after, which leaves sums in another order.
BOUND = 2e-6


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest, tiny: Tiny) -> tuple[Any, Any]:
    path = tiny(request.param)
    return hf_face(path), our_face(path)


def compare(pair: tuple[Any, Any], given: dict[str, Any], bound: float = BOUND) -> None:
    expected, wanted = gradients(pair[0], given)
    got, found = gradients(pair[1], given)
    torch.testing.assert_close(got.logits, expected.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-6, atol=0)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        error = (found[name] - gradient).abs().max() / gradient.abs().max()
        assert error <= bound, f"{name}: {error}"


@pytest.mark.parametrize("given", ["padded", "packed"])
def test_logits_loss_and_gradients_equal_hf(pair: tuple[Any, Any], given: str) -> None:
    compare(pair, batch(pair[0].config.pad_token_id) if given == "padded" else packed())


def test_checkpointing_changes_nothing(pair: tuple[Any, Any]) -> None:
    _, ours = pair
    given = batch(ours.config.pad_token_id)
    before, wanted = gradients(ours, given)
    ours.gradient_checkpointing_enable()
    try:
        after, found = gradients(ours, given)
    finally:
        ours.gradient_checkpointing_disable()
    assert after.past_key_values is None
    assert torch.equal(after.logits, before.logits)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
