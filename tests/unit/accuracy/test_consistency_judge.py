"""What counts as the same, from numbers alone."""

from __future__ import annotations

import pytest
import torch

from pilotage.accuracy.consistency import Said, judge, statistics
from pilotage.core.nouns import Status, worst


def sequences(error: float, shift: float = 0.0, *, where: slice = slice(None)) -> tuple[list[Said], list, list, list]:
    """Make sequences on which server, trainer and baseline err independently by `error`, and the trainer by `shift`."""
    generator = torch.Generator().manual_seed(3)
    said, trained, reference, baseline = [], [], [], []
    for _ in range(4):
        true = -torch.rand(60, generator=generator).mul(6)
        noise = [error * torch.randn(60, generator=generator) for _ in range(3)]
        moved = true + noise[1]
        moved[where] += shift
        said.append(Said(tokens=tuple(range(61)), prompt=40, logprobs=true + noise[0]))
        trained.append(moved)
        reference.append(true)
        baseline.append(true + noise[2])
    return said, trained, reference, baseline


def status(arm: str, *given: object, exact: bool = False) -> Status:
    found = judge(*given, arm=arm, exact=exact, cost={})  # type: ignore[arg-type]
    return worst([verdict.status for verdict in found.verdicts])


def test_noise_of_the_dtype_passes_and_a_systematic_shift_fails() -> None:
    assert status("bfloat16", *sequences(0.02)) is Status.PASS
    assert status("bfloat16", *sequences(0.02, 0.05)) is Status.FAIL


def test_one_wrong_decode_token_fails() -> None:
    assert status("bfloat16", *sequences(0.02, 1.0, where=slice(50, 51))) is Status.FAIL


@pytest.mark.parametrize(("shift", "expected"), [(5e-6, Status.PASS), (1e-4, Status.FAIL)])
def test_fp32_is_held_to_its_own_bound(shift: float, expected: Status) -> None:
    assert status("float32", *sequences(1e-7, shift)) is expected


def test_a_model_whose_fp32_is_less_exact_is_held_to_that() -> None:
    """Hugging Face's own fp32 is up to 2e-5 from fp64 on some real models, by any measure of size."""
    assert status("float32", *sequences(6e-6)) is Status.PASS
    assert status("float32", *sequences(6e-6, 6e-5)) is Status.FAIL


def test_exact_forgives_nothing() -> None:
    said, _, reference, baseline = sequences(0.02)
    same = [one.logprobs.clone() for one in said]
    assert status("bfloat16", said, same, reference, baseline, exact=True) is Status.PASS
    same[2][45] = torch.nextafter(same[2][45], torch.tensor(0.0))
    assert status("bfloat16", said, same, reference, baseline, exact=True) is Status.FAIL


def test_a_value_that_is_not_a_number_fails() -> None:
    given = sequences(1e-7)
    given[1][0][50] = float("nan")
    assert status("float32", *given) is Status.FAIL
    assert status("bfloat16", *given) is Status.FAIL


def test_phases_are_divided_where_the_server_decodes() -> None:
    said, trained, reference, baseline = sequences(0.0)
    trained[0][39] += 1.0  # the first sampled token: computed from the prompt's last row
    found = judge(said, trained, reference, baseline, arm="float32", exact=False, cost={})
    assert found.phases["prefill"]["max_abs"] == pytest.approx(1.0)
    assert found.phases["decode"]["max_abs"] == 0.0
    assert found.worst[0]["position"] == 40
    assert found.phases["prefill"]["n"] == 160 and found.phases["decode"]["n"] == 80


def test_statistics_are_those_of_the_ratio() -> None:
    found = statistics(torch.tensor([0.0, 0.1, -0.2, 0.0], dtype=torch.float64))
    assert found["equal"] == 2
    assert found["max_ratio"] == pytest.approx(1.2214, abs=1e-4)
    assert found["mean_ratio"] == pytest.approx((2 + 1.10517 + 1.22140) / 4, abs=1e-4)
    assert found["kl"] == pytest.approx(((1.105170918 - 1.1) + (0.818730753 - 0.8)) / 4, abs=1e-8)
