"""`kernels check` catches each kind of mistake in a kernel, and says which; right kernels pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pilotage.functional as NF
from pilotage.core.errors import ConfigError
from pilotage.core.nouns import Status
from pilotage.functional import Domain, Limit, registry
from pilotage.kernels import check as checking
from pilotage.kernels.check import Checked, check, status_of

FP32 = (torch.float32,)
Register = Callable[..., Checked]


@pytest.fixture
def checked() -> Iterator[Register]:
    """Register an implementation of an operator, check it, and forget it."""
    registered: list[tuple[str, str]] = []

    def run(operator: str, function: Callable[..., Any], domain: Any = None, dtypes: Any = FP32) -> Checked:
        NF.register(operator, "tested", function, domain=domain or Domain(gradient=False), priority=99)
        registered.append((operator, "tested"))
        (found,) = check(operator, implementation="tested", dtypes=dtypes)
        return found

    yield run
    for operator, name in registered:
        registry._OPERATORS[operator].pop(name, None)
    registry._decide.cache_clear()


def failed(found: Checked) -> set[str]:
    return {one.check for one in found.failures if one.status is Status.FAIL}


def norm(x: Tensor, weight: Tensor, *, eps: float, unit_offset: bool = False, round_once: bool = False) -> Tensor:
    """A right one, with the numbers of another order of sums."""
    scale = weight.double() + 1 if unit_offset else weight.double()
    rows = x.double()
    return (rows / (rows.square().mean(-1, keepdim=True) + eps).sqrt() * scale).to(x.dtype)


def test_a_right_kernel_passes_every_check(checked: Register) -> None:
    found = checked("rms_norm", norm, Domain(gradient=True), (torch.float32, torch.bfloat16))
    assert found.status is Status.PASS, found.failures
    assert set(found.to_json()["checks"]) == set(checking.CHECKS)
    assert found.ran > 20 and set(found.ratio) == {"fp32", "bf16"}


def without(what: str) -> Callable[..., Any]:
    def wrong(x: Tensor, weight: Tensor, *, eps: float, unit_offset: bool = False, round_once: bool = False) -> Any:
        options = {"eps": eps, "unit_offset": unit_offset, "round_once": round_once}
        right = norm(x, weight, **options)  # type: ignore[arg-type]
        match what:
            case "axis":
                return norm(x, weight, **options) if x.shape[0] == 1 else x / x.square().mean(0).sqrt() * weight
            case "eps":
                return norm(x, weight, **(options | {"eps": 1e-2}))  # type: ignore[arg-type]
            case "offset":
                return norm(x, weight, **(options | {"unit_offset": False}))  # type: ignore[arg-type]
            case "last row":
                out = torch.empty_like(right)
                out[: max(1, len(out) - 1)] = right[: max(1, len(out) - 1)]
                return out
            case "last row, numpy":
                array = np.empty_like(right.numpy())
                array[:-1] = right.numpy()[:-1]
                return torch.from_numpy(array)
            case "argument":
                x.mul_(1.5)
                return right
            case "repeat":
                return right * (1 + 1e-8 * torch.rand(())) + 1e-7 * torch.randn_like(right)
            case "tail":  # the columns past the last whole tile of 32
                out = right.clone()
                out[..., x.shape[-1] // 32 * 32 :] = 0
                return out
            case "strides":
                flat = torch.as_strided(x, x.shape, (x.shape[-1], 1))
                return norm(flat, weight, **options)  # type: ignore[arg-type]
            case "nan":
                return torch.nan_to_num(right, nan=0.0)
            case "leak":
                return right + 0 * x.sum()
            case "shape":
                return right[:1]
            case "raises":
                raise IndexError("tile 3 of 2")
        raise AssertionError(what)

    return wrong


@pytest.mark.parametrize(
    ("what", "check_name", "words"),
    [
        ("axis", "values", "rms_ratio"),
        ("eps", "values", "rms_ratio"),
        ("offset", "values", "rms_ratio"),
        ("last row", "written", "not written"),
        ("last row, numpy", "written", "not written"),
        ("argument", "arguments", "x changed"),
        ("repeat", "repeats", "two runs differ"),
        ("tail", "values", "rms_ratio"),
        ("strides", "written", "not written"),
        ("nan", "non-finite", "finite that should not be"),
        ("leak", "non-finite", "not finite that should be"),
        ("shape", "values", "results are"),
        ("raises", "values", "IndexError: tile 3 of 2"),
    ],
)
def test_each_mistake_is_caught_and_named(what: str, check_name: str, words: str, checked: Register) -> None:
    found = checked("rms_norm", without(what))
    assert found.status is Status.FAIL
    assert check_name in failed(found)
    if what == "strides":
        assert all(one.case.startswith("rows apart") for one in found.failures if one.check == "written")
    else:
        assert any(words in one.detail for one in found.failures if one.check == check_name), found.failures
    if what in ("offset", "tail", "nan", "leak", "repeat", "argument"):
        assert failed(found) <= {check_name, "values"}, "and nothing else is blamed"


def test_an_edge_that_the_domain_overstates_is_walked_over(checked: Register) -> None:
    def up_to_96(
        x: Tensor, weight: Tensor, *, eps: float, unit_offset: bool = False, round_once: bool = False
    ) -> Tensor:
        right = norm(x, weight, eps=eps, unit_offset=unit_offset)
        return right if x.shape[-1] <= 96 else right * 1.01

    right = checked("rms_norm", up_to_96, Domain(limits={"D": Limit(at_most=96)}))
    assert right.status is Status.PASS and "D is 97, not <= 96" in right.refused
    del registry._OPERATORS["rms_norm"]["tested"]
    wrong = checked("rms_norm", up_to_96, Domain(limits={"D": Limit(at_most=97)}))
    assert {one.case for one in wrong.failures} >= {"D=97, fp32"}
    assert all("D=97" in one.case or "all cases" in one.case for one in wrong.failures)


def test_a_gradient_that_is_promised_is_measured(checked: Register) -> None:
    class Detached(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
            ctx.save_for_backward(x, weight)
            return norm(x, weight, eps=eps, unit_offset=unit_offset)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            _, weight = ctx.saved_tensors
            return grad * weight, grad.sum(0), None, None

    def wrong(x: Tensor, weight: Tensor, *, eps: float, unit_offset: bool = False, round_once: bool = False) -> Tensor:
        return Detached.apply(x, weight, eps, unit_offset)

    found = checked("rms_norm", wrong, Domain(gradient=True))
    assert failed(found) == {"gradient"}


def test_a_mask_that_is_missing_and_a_cache_that_is_overwritten(checked: Register) -> None:
    definition = registry._OPERATORS["flash_attention"]["torch"].function

    def every_key(*args: Any, **kwargs: Any) -> Tensor:
        far = {**kwargs, "positions": torch.full_like(kwargs["positions"], 1000)}
        return definition(*args, **far)

    assert "values" in failed(checked("flash_attention", every_key))
    registry._OPERATORS["flash_attention"].pop("tested")

    def no_window(*args: Any, **kwargs: Any) -> Tensor:
        return definition(*args, **{**kwargs, "window": None})

    found = checked("flash_attention", no_window)
    assert {one.case for one in found.failures} == {"window=7, fp32", "all cases, fp32"}

    def padding_too(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, *, slot_mapping: Tensor) -> None:
        page, offset = slot_mapping // k_cache.shape[2], slot_mapping % k_cache.shape[2]
        k_cache[page, :, offset], v_cache[page, :, offset] = k, v

    found = checked("write_kv", padding_too)
    assert "values" in failed(found)


def test_what_may_err_more_has_to_say_so(checked: Register) -> None:
    def coarse(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        right = registry._OPERATORS["flash_attention"]["torch"].function(q.float(), k, v, **options)
        at = torch.arange(right.numel()).view(right.shape)
        return (right * (1 + 0.01 * torch.sin(at * 1.7))).to(q.dtype)

    bf16 = (torch.bfloat16,)
    assert checked("flash_attention", coarse, Domain(hides_non_finite=True), bf16).status is Status.FAIL
    del registry._OPERATORS["flash_attention"]["tested"]
    found = checked("flash_attention", coarse, Domain(hides_non_finite=True, error=10.0), bf16)
    assert {one.case for one in found.failures} == {"T=1, bf16"}, "with one key the definition is exact"


def test_what_cannot_run_here_is_said_and_does_not_count() -> None:
    results = check("attention_decode", dtypes=FP32, implementation="fused")
    if not torch.cuda.is_available():
        assert results[0].missing == "no cuda device"
        assert status_of(results) is Status.NOT_MEASURED
    assert status_of(check("softcap")) is Status.NOT_MEASURED
    with pytest.raises(ConfigError, match=r"no implementation 'nativ'.*native"):
        check("linear", implementation="nativ")


@pytest.mark.parametrize("operator", ["mlp", "write_kv", "flash_attention"])
def test_our_own_pass(operator: str) -> None:
    results = check(operator)
    assert status_of(results) is Status.PASS, [one.failures for one in results]


def test_fused_gelu_is_not_silu(checked: Register) -> None:
    def gelu_always(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
        return F.gelu(gate, approximate="tanh") * up

    found = checked("gated_activation", gelu_always)
    assert any("activation=silu" in one.case for one in found.failures)
    assert not any("activation=gelu_pytorch_tanh" in one.case for one in found.failures if one.check == "values")
