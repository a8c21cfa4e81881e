"""What the stages' JSON means; missing parts never pass."""

from __future__ import annotations

from typing import Any

import pytest

from pilotage.core.nouns import Status
from pilotage.voyage.judge import judge

PASS = {"claim": "c", "metric": "rms_ratio", "estimate": 1.0, "bound": 1.3, "status": "pass"}
FAIL = {**PASS, "estimate": 2.0, "status": "fail"}


@pytest.mark.parametrize("stage", ["diff", "implement", "register", "weights", "smoke", "validate", "bench"])
def test_an_empty_result_never_passes(stage: str) -> None:
    status, _, reason = judge(stage, {}, 0)
    assert status is Status.NOT_MEASURED and reason


@pytest.mark.parametrize(
    ("stage", "result", "status", "reason"),
    [
        ("diff", {"checklist": [{"verdict": "differs"}]}, "pass", ""),
        ("implement", {"architecture": "A", "supported": True}, "pass", ""),
        ("implement", {"architecture": "A", "supported": False, "files": ["f"]}, "not_measured", "A has no model"),
        ("register", {"checks": [{"claim": "c", "found": "nothing", "ok": False}]}, "fail", "c: nothing"),
        ("weights", {"status": "pass", "tensors": [{}], "verdicts": [FAIL]}, "fail", "“c” does not hold"),
        ("weights", {"status": "pass", "tensors": []}, "not_measured", "no tensor"),
        ("smoke", {"verdicts": [PASS, {**PASS, "status": "not_measured"}]}, "not_measured", "could not be judged"),
        ("smoke", {"verdicts": [PASS, FAIL]}, "fail", "rms_ratio 2, bound 1.30"),
        ("validate", {"status": "pass", "arms": [{"arm": "a", "status": "fail", "verdicts": [FAIL]}]}, "fail", "“c”"),
        ("validate", {"status": "pass", "arms": [{"arm": "a"}]}, "not_measured", "no verdict"),
        ("bench", {"arms": {"pilotage": {}}, "ratios": []}, "not_measured", "nothing to compare with"),
        ("bench", {"arms": {"hf": {}}, "ratios": [{"ratio": 1.0}]}, "not_measured", "no measurement of pilotage"),
        ("bench", {"arms": {"pilotage": {}}, "ratios": [{"load": "x", "ratio": 0.2}]}, "pass", ""),
    ],
)  # fmt: skip
def test_results(stage: str, result: dict[str, Any], status: str, reason: str) -> None:
    found, summary, why = judge(stage, result, {"pass": 0, "fail": 1, "not_measured": 2}[status])
    assert (found.value, bool(summary)) == (status, True)
    assert reason in why and bool(why) == (status != "pass")


def test_the_worse_of_exit_code_and_result_counts() -> None:
    good = {"checklist": [{"verdict": "same"}]}
    assert judge("diff", good, 1)[0] is Status.FAIL
    assert judge("diff", good, 2)[0] is Status.NOT_MEASURED
    assert "exit code 2" in judge("diff", good, 2)[2]
