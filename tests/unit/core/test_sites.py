"""Names of places, and the patterns that pick them."""

from __future__ import annotations

import pytest

from pilotage.core import sites
from pilotage.core.errors import ConfigError

KNOWN = [
    "model.embed_tokens",
    *(
        f"model.layers.{index}{part}"
        for index in (0, 1, 2, 10)
        for part in ("", ".input", ".self_attn", ".self_attn.q_rope", ".mlp")
    ),
    "lm_head",
]


@pytest.mark.parametrize(
    ("name", "module", "site"),
    [
        ("model.layers.0.mlp", "model.layers.0.mlp", "output"),
        ("model.layers.0.mlp.output", "model.layers.0.mlp", "output"),
        ("model.layers.0.mlp.input", "model.layers.0.mlp", "input"),
        ("model.layers.0.self_attn.q_rope", "model.layers.0.self_attn", "q_rope"),
        ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj", "output"),
        ("lm_head", "lm_head", "output"),
        ("input", "input", "output"),
    ],
)
def test_names_are_read_and_written(name: str, module: str, site: str) -> None:
    found = sites.parse(name)
    assert found == (module, site)
    assert sites.parse(str(found)) == found


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("model.layers.*.mlp", [f"model.layers.{i}.mlp" for i in (0, 1, 2, 10)]),
        ("model.layers.[0-1].self_attn", ["model.layers.0.self_attn", "model.layers.1.self_attn"]),
        ("model.layers.[0,10].input", ["model.layers.0.input", "model.layers.10.input"]),
        ("model.layers.1.output", ["model.layers.1"]),
        ("model.layers.*", [f"model.layers.{i}" for i in (0, 1, 2, 10)]),  # one part
        ("**.q_rope", [f"model.layers.{i}.self_attn.q_rope" for i in (0, 1, 2, 10)]),
        ("lm_head", ["lm_head"]),
    ],
)
def test_patterns_pick(pattern: str, expected: list[str]) -> None:
    assert sites.select([pattern], KNOWN, where="test") == expected


def test_a_dot_is_a_dot_and_a_number_is_whole() -> None:
    assert sites.select(["model.layers.[1-2].mlp"], KNOWN, where="t") == ["model.layers.1.mlp", "model.layers.2.mlp"]
    with pytest.raises(ConfigError):
        sites.select(["modelxlayers.1.mlp"], KNOWN, where="t")


def test_order_is_the_models_and_nothing_twice() -> None:
    found = sites.select(["lm_head", "model.layers.0.mlp", "model.*.0.mlp"], KNOWN, where="t")
    assert found == ["model.layers.0.mlp", "lm_head"]


def test_a_pattern_that_matches_nothing_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mpl.*no site.*nearest is 'model\.layers\.\d+\.mlp'"):
        sites.select(["model.layers.0.mpl"], KNOWN, where="tensor_capture")


@pytest.mark.parametrize("pattern", ["a.[3-1]", "a.[x]", "a.[]", "a.[0-"])
def test_a_broken_range_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match="no range of numbers"):
        sites.matcher(pattern)
