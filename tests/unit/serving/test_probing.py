"""What the platform does to requests of a replaced run before they reach the scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pilotage.core.config import TargetConfig
from pilotage.serving.platform import PilotagePlatform, _salt

REPLACED = TargetConfig.from_dict({"tensor_replacement": {"tensors_path": "a.safetensors"}})


def validated(extra: dict[str, Any] | None = None, **request: Any) -> dict[str, Any]:
    inputs = {"prompt_token_ids": [1, 2], **request}
    PilotagePlatform.validate_request(inputs, SimpleNamespace(extra_args=extra))
    return inputs


def test_pages_of_a_replaced_run_serve_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PilotagePlatform, "_salt", _salt(REPLACED))
    salted = validated()["cache_salt"]
    assert salted and salted == validated()["cache_salt"], "requests of one plan share their pages"
    assert validated({"pilotage_prompt": 0})["cache_salt"] != validated({"pilotage_prompt": 1})["cache_salt"]
    assert validated(cache_salt="mine")["cache_salt"] not in (salted, "mine")
    other = TargetConfig.from_dict({"tensor_replacement": {"tensors_path": "b.safetensors"}})
    assert _salt(other) != _salt(REPLACED)
    monkeypatch.setattr(PilotagePlatform, "_salt", _salt(TargetConfig()))
    assert "cache_salt" not in validated()


def test_a_plan_without_a_reference_salts_nothing() -> None:
    assert _salt(TargetConfig.from_dict({"tensor_replacement": {"sites": ["model.norm"]}})) is None


@pytest.mark.parametrize("prompt", [-1, "0", 1.0, True])
def test_the_index_of_a_prompt_is_a_number(prompt: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="pilotage_prompt"):
        validated({"pilotage_prompt": prompt})
    validated({"pilotage_prompt": 0})
