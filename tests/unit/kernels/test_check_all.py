"""`kernels check` of every operator with every implementation that runs here; a sample of them quickly, all slowly."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import pilotage.functional  # noqa: F401  registers
from pilotage.core.nouns import Status
from pilotage.functional import registry
from pilotage.kernels import cases
from pilotage.kernels.check import check

OFFERED = {  # operators that have more than a definition
    name: [one.name for one in registry.implementations(name) if one.name != registry.DEFINITION]
    for name in registry.operators()
    if len(registry.implementations(name)) > 1
}


@pytest.mark.slow
@pytest.mark.parametrize("operator", OFFERED)
def test_every_implementation_that_runs_here_passes(operator: str) -> None:
    """As a user runs it: a process of its own, in which both interpreters are switched on."""
    done = subprocess.run(
        [sys.executable, "-m", "pilotage", "kernels", "check", operator, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    told = {one["implementation"]: one for one in json.loads(done.stdout)["implementations"]}
    assert list(told) == OFFERED[operator]
    for one in told.values():
        assert one["status"] == "pass" or one["missing"], one
    assert sum(one["cases"] for one in told.values()) > 10


def test_a_sample_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router chooses by comparing: what is not a number must neither be lost nor reach other tokens."""
    monkeypatch.setenv("NKI_SIMULATOR", "1")
    (router,) = check("expert_affinities", implementation="nki", dtypes=(torch.float32,), dims={"T": 3})
    assert router.status is Status.PASS, router.failures
    assert router.of("non-finite") is Status.PASS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("options", [{}, {"window": 7}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("operator", ["flash_attention", "segmented_attention", "attention_decode"])
def test_a_query_that_is_no_number_gives_none_in_its_row_alone(
    operator: str, options: dict[str, float], dtype: torch.dtype
) -> None:
    """In the compiled operators, which would be the ones to serve a model that has gone wrong."""
    native = next(one for one in registry.implementations(operator) if one.name == "native")
    case = cases.build(operator, {"T": 40 if operator == "flash_attention" else 6}, dtype, options=options)
    case.arguments["q"][1, 2, 0] = torch.nan
    if (refusal := native.judge(case.call)) is not None:
        pytest.skip(refusal.words)
    args, kwargs = case.split(case.arguments)
    out = native.function(*args, **kwargs)[: case.rows].isnan()
    assert out[1, 2].all()
    out[1, 2] = False
    assert not out.any()
