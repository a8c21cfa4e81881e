"""Localisation names the module of every planted fault first, and nothing on clean models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from planted import FAULTS, Fault

from pilotage.accuracy.localise import localise
from pilotage.core.nouns import Status

# Fault -> the kinds of site of which the first culprit must be one, and the modules that may be blamed first.
ROPE = ("q_rope", "k_rope")
EXPECTED = {
    "rope theta 1e4, gemma3": (ROPE, "model.layers.2.self_attn"),
    "rope theta 1e4, llama3": (ROPE, "model.layers.0.self_attn"),
    "rope theta 1e4, qwen3": (ROPE, "model.layers.0.self_attn"),
    "window one longer": (("heads",), "model.layers.0.self_attn"),
    "window one shorter": (("heads",), "model.layers.0.self_attn"),
    "layer pattern inverted": ((*ROPE, "heads"), "model.layers.0.self_attn"),
    "q/k norm without +1": (("output",), "model.layers.0.self_attn.[qk]_norm"),
    "query scale ignored": (("heads",), "model.layers.0.self_attn"),
    "embedding scale dropped": (("output",), "model.embed_tokens"),
    "o_proj heads permuted": (("output",), "model.layers.0.self_attn.o_proj"),
    "qkv bias dropped": (("q", "k", "v"), "model.layers.0.self_attn.[qkv]_proj"),
    "norm epsilon 1e-5 in the config": (("output",), ".*norm"),
    "norm epsilon 1e-5 in the code": (("output",), ".*norm"),
    "K and V swapped in one layer": (("k", "v"), "model.layers.2.self_attn.[kv]_proj"),
    "K and V swapped in one layer, qwen3": (("k", "v"), "model.layers.2.self_attn.[kv]_proj"),
}


# In the fast tests: what a config says, what a module computes, a weight that is missing, and one that is misplaced.
FAST = {
    "window one longer",
    "embedding scale dropped",
    "norm epsilon 1e-5 in the code",
    "K and V swapped in one layer, qwen3",
}
CASES = [pytest.param(fault, id=fault.name, marks=[] if fault.name in FAST else pytest.mark.slow) for fault in FAULTS]


@pytest.mark.parametrize("fault", CASES)
def test_the_module_at_fault_is_named_first(
    fault: Fault, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import re

    original = tiny(fault.model)
    checkpoint = fault.plant(original, tmp_path / "planted")
    if fault.patch is not None:
        fault.patch(monkeypatch)
    found = localise(str(checkpoint), reference=str(original))
    assert found.status is Status.FAIL
    sites, module = EXPECTED[fault.name]
    first = found.culprits[0]
    assert first.site in sites
    assert re.fullmatch(module, first.module), first.module
    assert {culprit.site for culprit in found.culprits} <= {*sites, *(ROPE if sites == ("heads",) else ())}
    # Restoring what is blamed makes the logits those of a clean model, in every arm that sees the fault.
    for arm in found.arms:
        assert arm.causal is None or arm.causal["all_restore"], arm.causal
    assert found.arms[0].causal is not None
    if fault.config:
        assert found.config is not None and found.config["status"] == "fail"
        assert first.evidence["config"]


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_nothing_is_named_on_a_clean_model(name: str, tiny: Callable[..., Path]) -> None:
    found = localise(str(tiny(name, seed=1)))
    assert found.status is Status.PASS, [(culprit.key, culprit.score) for culprit in found.culprits]
    assert found.to_json()["culprits"] == []
    for arm in found.arms:
        assert len(arm.sites) > 50
        assert max(site["score"] for site in arm.sites) < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 21))
@pytest.mark.parametrize("name", ["llama3", "gemma3", "qwen2", "qwen3"])
def test_nothing_is_named_on_many_clean_models(name: str, seed: int, tiny: Callable[..., Path]) -> None:
    found = localise(str(tiny(name, seed=seed)))
    assert found.status is Status.PASS, [(culprit.key, culprit.score) for culprit in found.culprits]


def test_two_faults_are_both_named(tiny: Callable[..., Path], tmp_path: Path) -> None:
    from planted import _norms_minus_one

    original = tiny("gemma3")
    both = Fault(
        name="both", model="gemma3", config={"sliding_window": 19}, weights=_norms_minus_one, modules=()
    ).plant(original, tmp_path / "planted")
    found = localise(str(both), reference=str(original), arms=("float32",))
    kinds = {culprit.kind.removeprefix("model.layers.*.") for culprit in found.culprits}
    assert kinds == {"self_attn.q_norm", "self_attn.k_norm", "self_attn.heads"}
    (arm,) = found.arms
    assert arm.causal is not None
    assert arm.causal["all_restore"] and not arm.causal["first_restores"]


def test_a_wrong_cache_is_named_as_such(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of the cache goes to the wrong slot: its row, and the rows that attend to it, are wrong."""
    import pilotage.functional as NF
    from pilotage.models.common import context

    real = NF.write_kv

    def late(k_cache, v_cache, k, v, *, slot_mapping):  # type: ignore[no-untyped-def]
        wrong = slot_mapping.clone()
        wrong[5] = wrong[4]
        return real(k_cache, v_cache, k, v, slot_mapping=wrong)

    monkeypatch.setattr(context.NF, "write_kv", late)
    found = localise(str(tiny("llama3")), arms=("float32",))
    first = found.culprits[0]
    assert first.site == "kv" and first.module.endswith(".self_attn")
    assert {culprit.site for culprit in found.culprits} == {"kv", "heads"}
    assert not found.culprits[-1].evidence["wrong_rows_by_phase"]["prefill"]  # a fresh prefill reads no pages
