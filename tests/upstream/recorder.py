"""A pytest plugin for upstream's tests: leaves out what the allow list excludes, and writes every outcome as it comes.

It reads two environment variables: UPSTREAM_EXCLUDE, a JSON list of patterns of node ids, and UPSTREAM_RESULTS, a file
of JSON lines. The file is appended to after each test, so a run that is cut off keeps what it had.
"""

from __future__ import annotations

import fnmatch
import json
import os
from pathlib import Path

import pytest

_RANK = {"passed": 0, "skipped": 1, "failed": 2}
_outcomes: dict[str, str] = {}


def is_excluded(node: str, patterns: list[str]) -> bool:
    """Return whether a pattern names this test: its name, its name without parameters, or a glob of either.

    Brackets in a pattern are plain characters: they belong to the names of parametrised tests.
    """
    name = node.split("::", 1)[1]
    plain = name.split("[", 1)[0]
    return any(
        fnmatch.fnmatchcase(candidate, pattern.replace("[", "[[]"))
        for pattern in patterns
        for candidate in (name, plain)
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    patterns = json.loads(os.environ.get("UPSTREAM_EXCLUDE", "[]"))
    left_out = [item for item in items if is_excluded(item.nodeid, patterns)]
    unused = [pattern for pattern in patterns if not any(is_excluded(item.nodeid, [pattern]) for item in items)]
    if unused:
        raise pytest.UsageError(f"exclusions that name no test: {', '.join(unused)}")
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
        for item in left_out:
            _write(item.nodeid, "excluded", "")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    before = _outcomes.get(report.nodeid, "passed")
    outcome = max(before, report.outcome, key=_RANK.__getitem__)
    _outcomes[report.nodeid] = outcome
    if report.when == "teardown" or (report.when == "setup" and report.outcome == "failed"):
        _write(report.nodeid, outcome, "")
    elif report.failed:
        _write(report.nodeid, "why", str(report.longrepr)[-600:])


def _write(node: str, outcome: str, why: str) -> None:
    with Path(os.environ["UPSTREAM_RESULTS"]).open("a") as file:
        file.write(json.dumps({"test": node, "outcome": outcome, "why": why}) + "\n")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Do what a worker does when it starts: tests that call vLLM's samplers themselves run on this target's kernels."""
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides()
