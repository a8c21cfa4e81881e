"""The gradient that a tied embedding and head share: the sum of both, in every way that one of them can be missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pilotage.models import registry
from pilotage.models.common import tied

ROWS, LENGTH = 2, 70


def model(dtype: torch.dtype = torch.float32, **changed: Any) -> Any:
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=97,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=12,
        sliding_window=32,
        architectures=["Gemma3ForCausalLM"],
        **{"pad_token_id": 3, "tie_word_embeddings": True, **changed},
    )
    torch.manual_seed(0)
    built = registry.training_class(config.architectures).from_config(config, dtype=dtype).train()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return built


def ids(seed: int = 0, high: int = 9) -> Tensor:
    """Few different tokens, so that each occurs often; the padding token is one of them."""
    return torch.randint(0, high, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def gradient(built: Any, monkeypatch: pytest.MonkeyPatch | None = None, **given: Any) -> Tensor:
    """The gradient of the tied weight; with `monkeypatch` as plain autograd adds it up."""
    built.zero_grad()
    if monkeypatch is not None:
        monkeypatch.setattr(tied, "for_lookup", lambda weight: (weight, False))
        monkeypatch.setattr("pilotage.models.common.backend.for_lookup", lambda weight: (weight, False))
    built(**given).loss.backward()
    if monkeypatch is not None:
        monkeypatch.undo()
    weight = built.lm_head.weight
    assert not weight.grad.is_sparse
    return weight.grad.clone()


def test_is_the_sum_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    built, given = model(), {"input_ids": ids(), "labels": ids(1)}
    torch.testing.assert_close(gradient(built, **given), gradient(built, monkeypatch, **given), rtol=2e-6, atol=1e-7)


def test_the_padding_token_learns_as_an_output_only(monkeypatch: pytest.MonkeyPatch) -> None:
    built, given = model(), {"input_ids": torch.full((ROWS, LENGTH), 3), "labels": ids(1)}
    alone = gradient(built, **given)
    assert torch.equal(alone, gradient(built, monkeypatch, **given))
    assert alone[3].abs().max() > 0
    other = gradient(built, input_ids=torch.full((ROWS, LENGTH), 4), labels=ids(1))
    assert other[4].norm() > 2 * alone[4].norm()


def test_rounding_is_that_of_one_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16: one token a hundred times; its row must be no further from fp64 than plain autograd's."""
    built, given = model(torch.bfloat16), {"input_ids": ids(high=2), "labels": ids(1)}
    ours, plain = gradient(built, **given), gradient(built, monkeypatch, **given)
    kept: list[Tensor] = []
    parts = model(torch.bfloat16)
    parts.lm_head.weight = torch.nn.Parameter(parts.lm_head.weight.detach().clone())  # both gradients by themselves

    def keep(_module: Any, _given: Any, rows: Tensor) -> None:
        rows.register_hook(kept.append)

    parts.model.embed_tokens.register_forward_hook(keep)
    parts(**given).loss.backward()
    scaled = kept[0].double() * float(torch.tensor(24**0.5, dtype=torch.bfloat16))
    exact = parts.lm_head.weight.grad.double()
    exact.index_add_(0, given["input_ids"].flatten(), scaled.to(torch.bfloat16).double().flatten(0, 1))
    rows = slice(0, 2)
    assert (ours - exact)[rows].norm() < 0.5 * (plain - exact)[rows].norm()


@pytest.mark.parametrize("steps", [2, 3])
def test_adds_up_over_micro_batches(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    built = model()
    parts = [gradient(built, monkeypatch, input_ids=ids(n), labels=ids(n + 9)) for n in range(steps)]
    built.zero_grad()
    for n in range(steps):
        built(input_ids=ids(n), labels=ids(n + 9)).loss.backward()
    torch.testing.assert_close(built.lm_head.weight.grad, sum(parts), rtol=2e-6, atol=2e-7)


def test_embedded_rows_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding is not asked: the head's gradient alone, and none of an earlier forward."""
    built = model()
    built(input_ids=ids(), labels=ids(1))
    rows = torch.randn(ROWS, LENGTH, 24)
    given = {"inputs_embeds": rows, "labels": ids(1)}
    assert torch.equal(gradient(built, **given), gradient(built, monkeypatch, **given))


def test_one_of_the_two_is_cut_off() -> None:
    built = model()
    rows: list[Tensor] = []
    hook = built.model.embed_tokens.register_forward_hook(lambda _m, _i, out: rows.append(out))
    built(input_ids=ids())
    rows[0].sum().backward()  # the head has no part in it
    hook.remove()
    weight = built.lm_head.weight
    assert not weight.grad.is_sparse
    expected = torch.zeros_like(weight)
    scale = float(torch.tensor(24**0.5))
    for token in ids().flatten().tolist():
        expected[token] += scale * (token != 3)
    torch.testing.assert_close(weight.grad, expected)
    built.zero_grad()
    hook = built.model.norm.register_forward_hook(lambda _m, _i, out: out.detach())
    built(input_ids=ids(), labels=ids(1)).loss.backward()  # the embedding has none
    hook.remove()
    assert 0 < weight.grad.norm() < float("inf")


def test_the_head_by_itself_is_a_linear_layer() -> None:
    built = model()
    built(input_ids=ids(), labels=ids(1)).loss.backward()
    built.zero_grad()
    hidden = torch.randn(3, 24)
    built.lm_head(hidden).sum().backward()
    torch.testing.assert_close(built.lm_head.weight.grad, hidden.sum(0).expand(97, 24))


def test_the_same_graph_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    built, given = model(), {"input_ids": ids(), "labels": ids(1)}
    once = gradient(built, monkeypatch, **given)
    built.zero_grad()
    loss = built(**given).loss
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(built.lm_head.weight.grad, 2 * once, rtol=2e-6, atol=2e-7)


def test_gradients_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A penalty on the gradient, as plain autograd has it."""
    built = model(attn_implementation="eager")

    def penalised() -> Tensor:
        built.zero_grad()
        loss = built(input_ids=ids(), labels=ids(1)).loss
        (grad,) = torch.autograd.grad(loss, [built.lm_head.weight], create_graph=True)
        grad.square().sum().backward()
        return built.lm_head.weight.grad.clone()

    found = penalised()
    monkeypatch.setattr("pilotage.models.common.backend.for_lookup", lambda weight: (weight, False))
    torch.testing.assert_close(found, penalised(), rtol=1e-4, atol=1e-5)


def test_checkpointed_layers_and_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    built, given = model(), {"input_ids": ids(), "labels": ids(1)}
    plain = gradient(built, monkeypatch, **given)
    built.gradient_checkpointing_enable()
    torch.testing.assert_close(gradient(built, **given), plain, rtol=2e-6, atol=1e-7)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = gradient(built, **given)
    assert mixed.dtype == torch.float32
    assert (mixed - plain).norm() < 0.03 * plain.norm()


def test_an_untied_head_and_a_frozen_one() -> None:
    built = model(tie_word_embeddings=False)
    built(input_ids=ids(), labels=ids(1)).loss.backward()
    assert not built.model.embed_tokens.weight.grad.is_sparse
    frozen = model()
    frozen.lm_head.weight.requires_grad_(False)
    frozen(input_ids=ids(), labels=ids(1)).loss.backward()
    assert frozen.lm_head.weight.grad is None


def test_no_gradient_of_the_vocabulary_is_made_beside_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is for: of tensors as large as the weight only the head's own gradient is filled."""
    from torch.profiler import ProfilerActivity, profile

    built, given = model(), {"input_ids": ids(), "labels": ids(1)}

    def filled(patch: pytest.MonkeyPatch | None) -> int:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            gradient(built, patch, **given)
        large = [[97, 24], [24, 97]]
        names = ("aten::fill_", "aten::add", "aten::zero_")
        return sum(e.name in names and bool(e.input_shapes) and e.input_shapes[0] in large for e in seen.events())

    assert filled(None) == 0
    assert filled(monkeypatch) >= 2
