"""Fixtures that every test may use.

Tiny checkpoints are perturbed on purpose: a freshly initialised tiny model hides most porting faults (biases are 0,
norms 1, weights small), and symmetric shapes hide the rest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Two cores: a test that wants more threads asks for them itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def environment_kept() -> Iterator[None]:
    """What a test, or a command that it runs in this process, sets in the environment ends with it.

    `pilotage kernels check` switches interpreters on that way: engines of later tests would run on them.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Build (once per session) a tiny perturbed checkpoint: `tiny("gemma3", seed=3, sliding_window=12)`."""
    from pilotage.arch import tiny as tiny_models

    cache = tmp_path_factory.mktemp("tiny")

    def build(name: str, seed: int = 0, **overrides: object) -> Path:
        return tiny_models.build(name, seed=seed, overrides=overrides or None, cache=cache)

    return build
