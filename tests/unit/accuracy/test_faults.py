"""The table of planted faults, the peers' rules, and what is made of results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pilotage.accuracy.faults import page, peers, run
from pilotage.accuracy.faults.cases import KERNELS, MODELS, clean_cases, sample
from pilotage.accuracy.faults.fault import Fault, Patch, kind_of, method, operator
from pilotage.accuracy.faults.report import Report
from pilotage.accuracy.faults.run import kept_report
from pilotage.accuracy.faults.table import FAULTS
from pilotage.core.errors import BadInput
from pilotage.core.nouns import Status

# The component headings of the catalogue.
HEADINGS = {
    "Tokenizer / BOS", "Embedding scale / logit and residual multipliers", "RoPE", "qk-norm",
    "Attention scale / softcap / sinks", "Sliding window and masks", "GQA / tensor-parallel layout / fused weights",
    "Bias / norm / activation", "MoE", "lm_head / vocab", "Loading, adapters, config", "KV cache, buckets, graphs",
    "Numerics", "Speculation", "Training side",
}  # fmt: skip


class _Context(dict[str, Any]):
    def decodes(self, name: str) -> bool:
        return False


def test_a_step_is_told_by_what_is_cached_and_without_values_by_nothing() -> None:
    """The sites of a model are listed with tensors that have none; a planted fault is asked there as well."""
    kinds = {None: "prefill", 0: "prefill", 5: "chunk"}
    for cached, kind in kinds.items():
        meta = {} if cached is None else {"cached_seq_len": torch.tensor([cached, 0])}
        assert kind_of(_Context(layer=meta), "layer") == kind
    with FakeTensorMode():
        assert kind_of(_Context(layer={"cached_seq_len": torch.ones(2)}), "layer") == "prefill"


def test_the_table_covers_every_component_model_and_condition() -> None:
    assert len(FAULTS) >= 60
    assert {fault.heading for fault in FAULTS} == HEADINGS
    assert {fault.model for fault in FAULTS} == set(MODELS)
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)
    assert {fault.only for fault in FAULTS} >= {
        "batch",
        "chunk",
        "decode",
        "long",
        "padding",
        "tensor parallel",
        "loading",
        "speculation",
    }
    assert sum(fault.subject == "drafts" for fault in FAULTS) >= 4
    assert sum(fault.subject == "training" for fault in FAULTS) >= 9
    assert all(fault.where for fault in FAULTS)


def test_the_sample_is_spread_over_components_and_models() -> None:
    faults, clean = sample()
    assert len(faults) == 12 and len({fault.id for fault in faults}) == 12
    assert len({fault.heading for fault in faults}) == 12 and len({fault.model for fault in faults}) >= 6
    assert all(fault.ranks == 1 and fault.subject != "drafts" for fault in faults)
    assert len(clean) == 10 and len({case.model for case in clean}) == 10


def test_clean_cases_vary_seed_model_and_kernels() -> None:
    cases = clean_cases(200)
    assert len({case.id for case in cases}) == 200
    assert {case.kernels for case in cases} == set(KERNELS) and len({case.seed for case in cases}) == 5
    assert {case.model for case in cases} == set(MODELS)
    assert sum(case.localised for case in cases) == 50


class Thing:
    def double(self, x: int) -> int:
        return 2 * x


class Child(Thing):
    pass


def test_patches_are_undone_even_when_something_fails() -> None:
    import pilotage.functional as NF

    real, entries = NF.softcap, {"a": 1}
    with pytest.raises(RuntimeError), Patch() as patch:
        operator("softcap", lambda right, x, **how: right(x, **how) + 1)(patch)
        method(lambda: Child, "double", lambda right, self, x: right(self, x) + 1)(patch)
        patch.item(entries, "a", 2)
        assert float(NF.softcap(torch.zeros(1), cap=3.0)) == 1.0
        assert Child().double(4) == 9 and entries == {"a": 2}
        raise RuntimeError
    assert NF.softcap is real and Child().double(4) == 8 and entries == {"a": 1}


def rules(target: torch.Tensor, expected: torch.Tensor, baseline: torch.Tensor) -> dict[str, bool]:
    return peers.judge(target, expected, baseline)


def test_peers_rules_accept_the_reference_and_each_misses_what_it_is_blind_to() -> None:
    generator = torch.Generator().manual_seed(0)
    expected = 3 * torch.randn(40, 320, generator=generator)
    noise = 0.002 * torch.randn(40, 320, generator=generator)
    assert all(rules(expected + noise / 2, expected, expected + noise).values())
    scaled = rules(expected * 1.5, expected, expected + noise)
    assert scaled["PCC 0.99"] and scaled["cosine 0.98"] and scaled["top-5 closeness"]  # blind to scale
    assert not scaled["NMSE 1e-2"] and not scaled["allclose 1e-2"] and not scaled["max KL 0.015"]
    one_row = expected.clone()
    one_row[7] = -one_row[7]
    found = rules(one_row, expected, expected + noise)
    assert not found["top-5 closeness"] and not found["max KL 0.015"] and not found["static top-k map"]
    broken = expected.clone()
    broken[0, 0] = float("nan")
    assert not any(rules(broken, expected, expected + noise).values())
    louder = rules(expected + 5 * noise, expected, expected + noise)
    assert not louder["BC 0.99 or sigma 1"] and louder["PCC 0.99"]


def result(name: str, **values: Any) -> dict[str, Any]:
    return {
        "id": name, "name": name, "heading": "RoPE", "model": "llama3", "only": "", "fp32": True, "ranks": 1,
        "where": ["*.q_rope"], "detected": True, "detected_by": ["float32"], "arms": {}, "modules": [], "seconds": 1.0,
        "culprits": [{"key": "model.layers.0.self_attn.q_rope", "module": "model.layers.0.self_attn"}],
        "named_first": True, "named": True, "peers": dict.fromkeys(peers.RULES, True), **values,
    }  # fmt: skip


def quiet(name: str, **values: Any) -> dict[str, Any]:
    return {
        "id": name, "model": "llama3", "seed": 0, "kernels": "as served", "localised": True, "alarms": [],
        "peers": dict.fromkeys(peers.RULES, True), "seconds": 1.0, **values,
    }  # fmt: skip


def test_a_report_passes_only_when_all_three_targets_hold() -> None:
    good = [result(f"f{i}") for i in range(40)]
    assert Report(faults=good, clean=[quiet("c")]).status is Status.PASS
    unseen = result("u", fp32=False, detected=False, culprits=[], named_first=False, named=False)
    assert Report(faults=[*good, unseen]).status is Status.PASS  # rounding alone, which fp32 cannot see
    assert Report(faults=[*good, {**unseen, "fp32": True}]).status is Status.FAIL
    assert Report(faults=good, clean=[quiet("c", alarms=["float32: rms_ratio"])]).status is Status.FAIL
    misnamed = [result(f"m{i}", named_first=False) for i in range(3)]
    assert Report(faults=[*good, *misnamed[:2]]).status is Status.PASS
    assert Report(faults=[*good, *misnamed]).status is Status.FAIL
    assert Report().status is Status.NOT_MEASURED


def test_the_page_says_what_was_missed() -> None:
    faults = [
        result("found"),
        result("missed", detected=False, detected_by=[], culprits=[], named_first=False, named=False),
        result("misnamed", named_first=False, peers=dict.fromkeys(peers.RULES, False)),
    ]
    louder = {"float32": {"rms": 0.25, "row": 0.9}}
    clean = [
        quiet("c", largest={"float32": {"rms": 0.5, "row": 0.25}}),
        quiet("d", peers=dict.fromkeys(peers.RULES, False), largest=louder),
        quiet("e", localised=False, peers=dict.fromkeys(peers.RULES, True), largest={}),
    ]
    text = page.markdown(Report(faults=faults, clean=clean))
    assert "| float32 | 2 | rms 0.50, row 0.90 |" in text
    assert "| found, of those that fp32 can see | 2 of 3 |" in text
    assert f"| in the table and not planted here | {len(FAULTS)} |" in text
    assert "with an alarm\n" not in text
    loud = page.markdown(Report(faults=faults, clean=[*clean, quiet("f", alarms=["module: layers.3 (bfloat16)"])]))
    assert "| f | module: layers.3 (bfloat16) |" in loud
    whole = page.markdown(Report(faults=[result(fault.id) for fault in FAULTS]))
    assert "not planted here" not in whole
    assert "| named first, of those found | 1 of 2 (50.0%) |" in text
    assert "| llama3 | missed | `*.q_rope` | nothing found it |" in text
    assert "the right one is among the others" in text
    assert "| cosine 0.98 | Cosine similarity of all logits at least 0.98 | 2 | 1 |" in text
    assert "| pilotage | the gates above | 1 | 0 |" in text
    assert "Context parallelism: " in text
    assert "real engine" not in text.split("# Planted faults")[1].split("## Result")[1]
    engine = [
        result("there"),
        result("rounding", detected_by=["bfloat16"]),
        result("gone", detected=False, detected_by=[]),
    ]
    text = page.markdown(Report(faults=faults, clean=clean, engine=engine))
    assert "| found through the real engine | 2 of 3 planted there |" in text
    assert "| RoPE | 3 | 1 | 1 | llama3: gone |" in text


def test_results_are_kept_and_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def fault(self: run.Runner, found: Fault) -> dict[str, Any]:
        ran.append(found.id)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return result(found.id)

    monkeypatch.setattr(run.Runner, "fault", fault)
    few = FAULTS[3:6]
    with pytest.raises(KeyboardInterrupt):
        run.measure(tmp_path, faults=few)
    assert len(kept_report(tmp_path).faults) == 1
    report = run.measure(tmp_path, faults=few)
    assert len(report.faults) == 3 and len(ran) == 4
    assert [found["id"] for found in report.faults] == [fault.id for fault in few]
    first = tmp_path / "faults" / f"{few[0].id}.json"
    first.write_text(json.dumps({**json.loads(first.read_text()), "recipe": -1}))
    run.measure(tmp_path, faults=few)
    assert ran[4:] == [few[0].id]
    with pytest.raises(BadInput, match="'nothing like it' means no case"):
        run.measure(tmp_path, faults=few, only="nothing like it")
    with pytest.raises(BadInput, match="run `pilotage faults` first"):
        kept_report(tmp_path / "other")
