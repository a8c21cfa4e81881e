"""The screened head: the logits it keeps are those of the whole product, and the largest is always among them."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

import pilotage.functional as NF
from pilotage.functional.screen import LEADING, PANEL
from pilotage.kernels import cpu

NATIVE = cpu.unavailable()
pytestmark = pytest.mark.skipif(NATIVE is not None, reason=f"no compiled kernels: {NATIVE}")
ON, OFF = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)


def head(vocab: int, width: int, seed: int = 0, outliers: bool = True) -> Tensor:
    """A weight with a common direction and, as real ones have, rows of unlike length."""
    draws = torch.Generator().manual_seed(seed)
    rows = torch.randn(vocab, width, generator=draws) * 0.03
    if outliers:
        rows *= torch.rand(vocab, 1, generator=draws) * 2 + 0.2
        rows += torch.randn(width, generator=draws) * 0.02
    return rows.to(torch.bfloat16)


def inputs(rows: int, width: int, seed: int = 1) -> Tensor:
    """Hidden rows with two channels that stand out, as those of Gemma do."""
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=draws)
    x[:, 5] *= 30
    x[:, width // 2] *= -12
    return x.to(torch.bfloat16)


def screened(x: Tensor, weight: Tensor, screen: NF.Screen, only: Tensor = ON) -> Tensor:
    with NF.screened(screen), NF.likely_only(only), NF.forced({"lm_head": "native"}):
        return NF.lm_head(x, weight)


def whole(x: Tensor, weight: Tensor) -> Tensor:
    with NF.forced({"lm_head": "native"}):
        return NF.lm_head(x, weight)


def assert_same_largest(x: Tensor, weight: Tensor, screen: NF.Screen) -> Tensor:
    """The kept logits are the product's own, bit for bit, and hold its first largest one; returns what is kept."""
    got, expected = screened(x, weight, screen), whole(x, weight)
    kept = got != float("-inf")
    assert torch.equal(got[kept], expected[kept])
    assert torch.equal(got.argmax(-1), expected.argmax(-1))
    return kept


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 32])
@pytest.mark.parametrize(("vocab", "width"), [(5000, 100), (64, 64), (1025, 640)])
def test_largest_is_found(vocab: int, width: int, rows: int) -> None:
    weight = head(vocab, width)
    assert_same_largest(inputs(rows, width), weight, NF.Screen(weight))


def test_little_is_kept() -> None:
    weight = head(20000, 256)
    x = weight[[3, 77, 19999]] * 20 + inputs(3, 256) * 0.1  # each row points to a token
    kept = assert_same_largest(x.to(torch.bfloat16), weight, NF.Screen(weight))
    assert int(kept.sum(1).max()) < 200


def test_more_rows_than_are_multiplied_as_they_lie() -> None:
    """Above 96 rows the whole product sums in another order; the kept logits are those of fewer rows."""
    weight, x = head(3000, 128), inputs(150, 128)
    got = screened(x, weight, NF.Screen(weight))
    expected = torch.cat([whole(some, weight) for some in x.split(75)])
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


def test_first_of_equal_tokens_wins() -> None:
    weight = head(9000, 128)
    weight[[40, 4000, 8999]] = (inputs(1, 128)[0] * 0.01).to(torch.bfloat16)
    x = inputs(2, 128)
    kept = assert_same_largest(x, weight, NF.Screen(weight))
    assert screened(x, weight, NF.Screen(weight)).argmax(-1)[0] == 40
    assert kept[0, [40, 4000, 8999]].all()


def test_products_that_round_to_the_same_number() -> None:
    """Two tokens a little apart in fp32 and equal in bf16: the first is taken, though the second is larger."""
    weight = head(4000, 128, outliers=False)
    x = inputs(1, 128)
    best = (x[0].float() / x[0].float().norm() * 2).to(torch.bfloat16)
    weight[3000] = best
    weight[100] = best
    weight[100, 7] = weight[100, 7] - (x[0, 7].sign() * weight[100, 7].abs() * 2**-6).to(torch.bfloat16)
    exact = x.double() @ weight.double().T
    assert exact[0, 3000] > exact[0, 100]
    logits = whole(x, weight)
    assert logits[0, 3000] == logits[0, 100] == logits.max()
    assert screened(x, weight, NF.Screen(weight)).argmax(-1).item() == 100


def test_nothing_stands_out() -> None:
    """Where all tokens are alike everything is computed."""
    weight = head(1, 128).expand(3000, 128).contiguous()
    x = inputs(3, 128)
    assert torch.equal(screened(x, weight, NF.Screen(weight)), whole(x, weight))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_a_number_stays(value: float) -> None:
    weight, x = head(3000, 128), inputs(3, 128)
    x[1, 9] = value
    got, expected = screened(x, weight, NF.Screen(weight)), whole(x, weight)
    assert torch.equal(got[1].isnan(), expected[1].isnan())
    assert torch.equal(got[1].nan_to_num(), expected[1].nan_to_num())
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


def test_zero_and_tiny_rows() -> None:
    weight, x = head(3000, 128), inputs(4, 128)
    weight[5] = 0
    x[0] = 0
    x[1] *= 1e-30
    x[2] *= 1e-38  # below what fp32 holds in full
    assert_same_largest(x, weight, NF.Screen(weight))


def test_everything_is_computed_unless_said() -> None:
    weight, x = head(3000, 128), inputs(3, 128)
    screen = NF.Screen(weight)
    assert torch.equal(screened(x, weight, screen, OFF), whole(x, weight))
    with NF.screened(screen):
        assert torch.equal(NF.lm_head(x, weight), whole(x, weight))


def test_padding_is_left_out() -> None:
    weight, x = head(3000, 128), inputs(4, 128)
    with NF.padded(4, torch.tensor([0, 1, 2], dtype=torch.int32)):
        got, expected = screened(x, weight, NF.Screen(weight)), whole(x, weight)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))
    assert torch.equal(got[2:], expected[2:])


def test_another_weights_screen_is_refused() -> None:
    weight = head(3000, 128)
    with pytest.raises(RuntimeError, match="not this weight's"):
        screened(inputs(1, 128), weight, NF.Screen(head(2000, 128)))


@hypothesis.settings(deadline=None, max_examples=40, derandomize=True)
@hypothesis.given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(1, 700),
    width=st.integers(16, 90).map(lambda quarter: 4 * quarter),
    rows=st.integers(1, 9),
    spread=st.floats(0, 3),
)
def test_any_weight(seed: int, vocab: int, width: int, rows: int, spread: float) -> None:
    draws = torch.Generator().manual_seed(seed)
    scale = (torch.randn(vocab, width, generator=draws) * spread).exp()
    weight = (torch.randn(vocab, width, generator=draws) * scale).to(torch.bfloat16)
    x = (torch.randn(rows, width, generator=draws) * (torch.randn(width, generator=draws) * spread).exp()).to(
        torch.bfloat16
    )
    assert_same_largest(x, weight, NF.Screen(weight))


def test_bounds_hold() -> None:
    """What the copy loses of a row is within what it says, for every row: the bounds that all else rests on."""
    weight = head(1000, 128)
    screen = NF.Screen(weight)
    basis = screen.basis.transpose(0, 1).reshape(128, -1)[:, :128].double()
    assert torch.allclose(basis.T @ basis, torch.eye(128, dtype=torch.float64), atol=1e-5)
    rows = weight.double() @ basis
    panels = screen.codes.shape[0]
    codes = screen.codes.transpose(1, 2).reshape(panels * PANEL, -1)[:1000].double() - 128
    leading = screen.leading.transpose(1, 2).reshape(panels * PANEL, LEADING)[:1000].double()
    step, length = screen.scale.view(-1)[:1000].double(), screen.length.view(-1)[:1000].double()
    lost = (rows[:, LEADING:] - codes * step[:, None]).norm(dim=1)
    assert (lost <= step * screen.bounds[0]).all()
    assert ((codes * step[:, None]).norm(dim=1) <= length).all()
    assert (leading.norm(dim=1) <= screen.bounds[1]).all()
    assert ((rows[:, :LEADING] - leading).norm(dim=1) <= screen.bounds[2]).all()
    assert (rows.norm(dim=1) <= screen.bounds[3]).all()
