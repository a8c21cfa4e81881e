"""Assertions for tests of ported modules: `assert_close_three_way` and `assert_close`.

A port is right when it errs no more than a trusted implementation at the same precision, both measured against a
reference at a higher one. See `pilotage.accuracy.simulate` for how often these assertions are wrong.
"""

from __future__ import annotations

from torch import Tensor, finfo

from pilotage.accuracy import gates
from pilotage.core.nouns import Status, Verdict, worst


class NotMeasured(AssertionError):
    """The data cannot tell whether the claim holds. Never a pass: a test that sees it fails."""


def _describe(verdict: Verdict) -> str:
    parts = [f"{verdict.status.value}: {verdict.claim}", f"{verdict.metric}="]
    parts[-1] += "n/a" if verdict.estimate is None else f"{verdict.estimate:.4g}"
    if verdict.interval:
        parts.append(f"in [{verdict.interval[0]:.4g}, {verdict.interval[1]:.4g}]")
    if verdict.bound is not None:
        parts.append(f"bound {verdict.bound:.4g}")
    parts.append(f"n={verdict.n} ({verdict.bound_source})")
    return ", ".join(parts)


def _settle(verdicts: list[Verdict]) -> list[Verdict]:
    status = worst([verdict.status for verdict in verdicts])
    if status is Status.PASS:
        return verdicts
    text = "\n".join(_describe(verdict) for verdict in verdicts)
    raise (AssertionError if status is Status.FAIL else NotMeasured)(text)


def assert_close_three_way(
    target: Tensor, expected: Tensor, baseline: Tensor, rtol: float | None = None, name: str = "tensor"
) -> list[Verdict]:
    """Assert that the target errs no more than the baseline, both against the expected tensor.

    Judged by the ratio of root mean square errors with an interval (clustered by row where there are at least 16), the
    same without the largest 1% of errors, the worst element and the worst row. Any of them can fail alone.

    Args:
        target: the output under test, any shape and float dtype.
        expected: the reference at a higher precision (Hugging Face in fp32), same shape.
        baseline: a trusted implementation at the target's precision (Hugging Face in bf16), same shape.
        rtol: relative L2 error of the whole tensor under which nothing fails, for where the baseline is exact; None
            for 4 eps of the expected tensor's dtype.
        name: what is compared, for the message.

    Returns:
        The verdicts, all passed.

    Raises:
        AssertionError: the target errs more.
        NotMeasured: an interval lies across its bound, or there is nothing to measure. A subclass of AssertionError.
    """
    if rtol is None:
        rtol = 4 * finfo(expected.dtype).eps
    return _settle(gates.three_way(target, expected, baseline, rtol=rtol, name=name))


def assert_close(
    actual: Tensor, expected: Tensor, rtol: float = 0.01, atol: float = 1e-5, name: str = "tensor"
) -> Verdict:
    """Assert (max|actual - expected| - atol) / max|expected| <= rtol, for where there is no baseline.

    Args:
        actual: the output under test, any shape and float dtype.
        expected: the reference, same shape.
        rtol: largest error as a share of the largest expected magnitude.
        atol: absolute error that is always allowed.
        name: what is compared, for the message.

    Returns:
        The verdict, passed.

    Raises:
        AssertionError: some element is further off, or is not finite where the reference is.
        NotMeasured: there are no elements.
    """
    return _settle([gates.two_way(actual, expected, rtol=rtol, atol=atol, name=name)])[0]
