"""What an engine is given where the user states nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def scheduler(path: Path, **stated: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(model=str(path), dtype="float32", max_model_len=128, **stated)
    return arguments.create_engine_config().scheduler_config


@pytest.mark.parametrize(
    ("stated", "asynchronous"),
    [
        ({}, False),
        ({"distributed_executor_backend": "uni"}, False),
        ({"async_scheduling": True}, True),
        ({"async_scheduling": False}, False),
        ({"distributed_executor_backend": "mp"}, True),  # its worker computes while the scheduler goes on
        ({"tensor_parallel_size": 2}, True),
        ({"tensor_parallel_size": 2, "async_scheduling": False}, False),
    ],
    ids=str,
)
def test_steps_are_scheduled_ahead_only_where_the_model_runs_in_another_process(
    stated: dict[str, Any], asynchronous: bool, tiny: Callable[..., Path]
) -> None:
    assert scheduler(tiny("gemma3"), **stated).async_scheduling is asynchronous


def test_stated_sizes_stay(tiny: Callable[..., Path]) -> None:
    found = scheduler(tiny("gemma3"), max_num_seqs=3)
    assert found.max_num_seqs <= 3
