"""Clean controls of an arm: computed once for all targets, and one of them rounds as a fused kernel does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from pilotage.accuracy.arms.tapped import PagedTapped, Request
from pilotage.accuracy.localise import Condition, localise
from pilotage.accuracy.localise.side import Known
from pilotage.accuracy.localise.variants import Variant, _Fused, variants
from pilotage.core.errors import BadInput

REQUESTS = [Request(tokens=tuple(range(5, 24)), parts=(12,), kept=(0, 11, 17))]


def test_an_activation_and_its_product_are_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(40, 30, generator=generator).bfloat16() for _ in range(2))
    exact = (F.silu(gate.float()) * up.float()).bfloat16()
    twice = F.silu(gate) * up
    assert not torch.equal(exact, twice)
    with _Fused():
        assert torch.equal(F.silu(gate) * up, exact)
        assert torch.equal(up * F.silu(gate), exact)
        # What else takes the activation gets it rounded, as it is.
        assert torch.equal(F.silu(gate) + up, F.silu(gate) + up)
        kept = F.gelu(gate, approximate="tanh")
        assert kept.dtype is torch.bfloat16
    assert any(variant.fused for variant in variants(torch.bfloat16))
    assert not any(variant.fused for variant in variants(torch.float32))


def test_the_fused_control_moves_the_mlp_alone(tiny: Callable[..., Path]) -> None:
    known = Known(path=tiny("llama3"))
    _, control = known.models("bfloat16")
    before = control.observe(REQUESTS, ["model.layers.0.mlp", "model.layers.0.self_attn"])
    with Variant(name="fused", fused=True).applied(control.model):
        after = control.observe(REQUESTS, ["model.layers.0.mlp", "model.layers.0.self_attn"])
    assert torch.equal(before["model.layers.0.self_attn"][0], after["model.layers.0.self_attn"][0])
    assert not torch.equal(before["model.layers.0.mlp"][0], after["model.layers.0.mlp"][0])


def test_hugging_faces_side_is_measured_once_for_several_targets(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny("qwen2")
    known = Known(path=path)
    made: list[int] = []

    def target(checkpoint: Path, dtype: torch.dtype, longest: int) -> PagedTapped:
        made.append(longest)
        return PagedTapped(checkpoint, dtype, longest)

    first = localise(str(path), arms=["float32"], target=target, known=known, condition=Condition())
    assert first.summary() == "none" and len(known._sides) == 1
    side = next(iter(known._sides.values()))
    monkeypatch.setattr("pilotage.accuracy.localise.side.Side.__init__", None)
    again = localise(str(path), arms=["float32"], target=target, known=known)
    assert next(iter(known._sides.values())) is side and len(made) == 2
    assert [site["score"] for site in again.arms[0].sites] == [site["score"] for site in first.arms[0].sites]
    with pytest.raises(BadInput, match="what is known is of"):
        localise(str(tiny("llama3")), arms=["float32"], known=known)
