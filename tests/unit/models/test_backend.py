"""BackendConfig: what it refuses, and what it makes of another toolkit's."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch
from torch import nn

from pilotage.core.errors import ConfigError, Unsupported
from pilotage.models.common import BackendConfig, initialize_linear_module, initialize_rms_norm_module

NEEDS_ENGINE: list[dict[str, Any]] = [{"attn": "te"}, {"linear": "te"}, {"rms_norm": "te"}, {"rope_fusion": True}]


@pytest.mark.parametrize("given", NEEDS_ENGINE)
def test_what_needs_transformer_engine_is_refused_without_it(given: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match="Transformer Engine, which is not installed") as error:
        BackendConfig(**given)
    assert error.value.where == f"BackendConfig.{next(iter(given))}"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Stands for Transformer Engine, which needs a GPU: records how its classes are called."""
    calls: list[tuple[str, dict[str, Any]]] = []
    package, module = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")
    package.__spec__ = ModuleSpec("transformer_engine", None)

    def recording(name: str) -> Any:
        def build(*args: int, **options: Any) -> nn.Module:
            calls.append((name, {"sizes": args, **options}))
            return nn.Linear(args[0], args[-1])

        return build

    module.Linear, module.RMSNorm = recording("Linear"), recording("RMSNorm")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)
    return calls


def test_transformer_engines_layers_get_the_models_sizes(engine: list[tuple[str, dict[str, Any]]]) -> None:
    backend = BackendConfig(linear="te", rms_norm="te")
    initialize_linear_module(backend.linear, 6, 10, True, shard="column")
    initialize_rms_norm_module(backend.rms_norm, 6, eps=1e-5, unit_offset=True)
    assert engine == [
        ("Linear", {"sizes": (6, 10), "bias": True, "params_dtype": torch.float32}),
        ("RMSNorm", {"sizes": (6,), "eps": 1e-5, "zero_centered_gamma": True, "params_dtype": torch.float32}),
    ]


@pytest.mark.parametrize("given", [{"attn": "te"}, {"rope_fusion": True}])
def test_what_nothing_here_computes_is_refused_with_it_too(given: dict[str, Any], engine: Any) -> None:
    with pytest.raises(Unsupported):
        BackendConfig(**given)


@pytest.mark.parametrize("given", [{"attn": "flash"}, {"linear": "tee"}, {"rms_norm": "triton"}])
def test_unknown_values_name_the_known_ones(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as error:
        BackendConfig(**given)
    assert "torch" in str(error.value.do) or "sdpa" in str(error.value.do)


def test_training_takes_plain_layers() -> None:
    assert BackendConfig().for_training().linear == "torch"
    with pytest.raises(Unsupported, match="plan cannot shard"):
        BackendConfig(linear="parallel").for_training()
    with pytest.raises(Unsupported, match="pack"):
        BackendConfig(linear="parallel", combined=True)
    with pytest.raises(Unsupported, match="serving packs"):
        BackendConfig(combined=True).combines  # noqa: B018
    assert BackendConfig(combined=True).for_training().combines


def test_another_toolkits_config_is_read() -> None:
    @dataclass
    class Other:
        attn: str = "sdpa"
        linear: str = "torch"
        rms_norm: str = "torch_fp32"
        rope_fusion: bool = False
        experts: str = "torch"

    assert BackendConfig.of(Other()) == BackendConfig(attn="sdpa", linear="torch")
    assert BackendConfig.of(None) == BackendConfig()
    with pytest.raises(Unsupported, match="Transformer Engine"):
        BackendConfig.of(Other(attn="te"))
