"""Scores of sites on synthetic errors: what is a fault, what is noise, what is not measured."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pilotage.accuracy import gates
from pilotage.accuracy.localise import blame, score
from pilotage.accuracy.localise.blame import Facts, Finding
from pilotage.core.nouns import Status

ROWS, WIDTH = 120, 48
PHASES = ["prefill"] * 80 + ["decode"] * 40


def law(seed: int, size: float = 2e-3) -> Tensor:
    return size * torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


EXPECTED = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CONTROLS = [score.measure(EXPECTED + law(seed), EXPECTED) for seed in (1, 2, 3)]


def scored(actual: Tensor, dtype: torch.dtype = torch.bfloat16) -> score.Score:
    return score.score(score.measure(actual, EXPECTED), CONTROLS, PHASES, dtype, score.floors(dtype))


@pytest.mark.parametrize("seed", range(10, 60))
def test_the_controls_own_law_is_no_fault(seed: int) -> None:
    found = scored(EXPECTED + law(seed))
    assert found.status is Status.PASS and found.value < 0.8


def test_a_large_error_in_all_rows() -> None:
    found = scored(EXPECTED + law(9, 6e-3))
    assert found.status is Status.FAIL
    assert found.ratio == pytest.approx(3, rel=0.05)


def test_one_row_that_the_average_hides() -> None:
    actual = EXPECTED + law(9)
    actual[17] += 8e-3 * torch.sign(EXPECTED[17])
    found = scored(actual)
    assert found.statistics["rms"] < score.BOUNDS["rms"]
    assert found.status is Status.FAIL and found.worst == 17


def test_one_element_that_a_row_hides() -> None:
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(20, 4096, generator=generator, dtype=torch.float64)
    one, two, actual = (
        expected + 2e-3 * torch.randn(20, 4096, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    actual[17, 3] += 0.1
    controls = [score.measure(found, expected) for found in (one, two)]
    phases = ["prefill"] * 20
    dtype = torch.bfloat16
    found = score.score(score.measure(actual, expected), controls, phases, dtype, score.floors(dtype))
    assert found.statistics["row"] < score.BOUNDS["row"]
    assert found.statistic == "element" and found.status is Status.FAIL


def test_one_phase_that_the_pool_hides() -> None:
    actual = EXPECTED + law(9)
    actual[80:] = EXPECTED[80:] + law(9, 3.2e-3)[80:]
    found = scored(actual)
    assert found.statistics["rms"] < score.BOUNDS["rms"]
    assert found.statistic == "rms_decode" and found.status is Status.FAIL


def test_a_scale_that_rounding_hides() -> None:
    """A tenth of a percent, under an error of that size."""
    actual = EXPECTED * 1.001 + law(9)
    found = scored(actual)
    assert found.statistics["rms"] < score.BOUNDS["rms"] * 1.1
    assert found.statistics["gain"] > score.BOUNDS["gain"]
    assert found.status is Status.FAIL


def test_rounding_once_more_is_seen_where_all_controls_round_alike() -> None:
    """Whoever rounds as often, at other places, is as near to the truth; who rounds once more is not."""
    one = score.measure(EXPECTED + law(1), EXPECTED)

    def alike(actual: Tensor, others: list[score.SiteErrors]) -> score.Score:
        dtype = torch.bfloat16
        return score.score(score.measure(actual, EXPECTED), others, PHASES, dtype, score.floors(dtype))

    other_places, once_more = EXPECTED + law(9), EXPECTED + law(9) + 0.9 * law(10)
    assert alike(other_places, [one, one]).status is Status.PASS
    found = alike(once_more, [one, one])
    assert found.status is Status.FAIL and found.statistic.startswith("rms")
    assert 1.25 < found.statistics["rms"] < score.BOUNDS["rms"] and found.bounds["rms"] < 1.25
    # With controls that differ, what one draw may add is not known that well.
    assert scored(once_more).status is Status.PASS
    few = score.score(score.measure(once_more[:2], EXPECTED[:2]), [one.taken(torch.arange(ROWS) < 2)] * 2, PHASES[:2],
                      torch.bfloat16, score.floors(torch.bfloat16))  # fmt: skip
    assert few.bounds["rms"] > found.bounds["rms"]


def test_who_leaves_out_a_rounding_that_is_biased_is_not_at_fault() -> None:
    """Two roundings that together go one way are one in a fused kernel, and that goes none."""
    dtype, floor = torch.bfloat16, score.floors(torch.bfloat16)
    home = [score.measure(EXPECTED * 1.0017 + law(1), EXPECTED)] * 2
    fused = score.score(score.measure(EXPECTED + 0.8 * law(9), EXPECTED), home, PHASES, dtype, floor)
    assert fused.status is Status.PASS and fused.statistics["gain"] == 0
    # As far off the other way is another scale, and so is what a look-up, which nothing fuses, makes nearer.
    other = score.score(score.measure(EXPECTED * 0.9983 + 0.8 * law(9), EXPECTED), home, PHASES, dtype, floor)
    assert other.status is Status.FAIL and other.statistic == "gain"
    looked_up = score.measure(EXPECTED + 0.8 * law(9), EXPECTED)
    assert score.score(looked_up, home, PHASES, dtype, floor, rounds_once=True).statistic == "gain"


def test_of_a_look_up_every_bit_counts() -> None:
    exact = [score.measure(EXPECTED, EXPECTED)]
    floor = score.floors(torch.bfloat16)
    for unlike, status in ((0.0, Status.PASS), (2 * gates.MAX_UNLIKE, Status.FAIL)):
        found = score.score(
            score.measure(EXPECTED, EXPECTED), exact, PHASES, torch.bfloat16, floor, rounds_once=True, unlike=unlike
        )
        assert found.status is status
    assert found.statistic == "unlike" and found.to_json()["bounds"]["unlike"] == 1


def test_below_the_floor_nothing_is_wrong_where_the_controls_are_exact() -> None:
    exact = [score.measure(EXPECTED, EXPECTED)]
    floor = score.floors(torch.float32)
    noise = EXPECTED * (1 + 2.0**-23 * torch.sign(law(1)))
    found = score.score(score.measure(noise, EXPECTED), exact, PHASES, torch.float32, floor)
    assert found.status is Status.PASS and 0 < found.ratio < 1
    found = score.score(score.measure(EXPECTED * (1 + 1e-5), EXPECTED), exact, PHASES, torch.float32, floor)
    assert found.status is Status.FAIL


def test_what_is_not_finite_is_a_fault_of_the_target_and_no_measurement_of_the_reference() -> None:
    actual = EXPECTED.clone()
    actual[3, 3] = math.nan
    assert scored(actual).status is Status.FAIL
    assert scored(actual).to_json()["score"] == score.LARGEST
    broken = EXPECTED.clone()
    broken[3, 3] = math.nan
    found = score.score(score.measure(EXPECTED, broken), CONTROLS, PHASES, torch.float32, score.floors(torch.float32))
    assert found.status is Status.NOT_MEASURED


def finding(key: str, value: float, arm: str = "float32") -> Finding:
    one = score.Score(
        value=value, statistic="rms", status=Status.FAIL, ratio=value, relative=0.1, statistics={"rms": value},
        bounds={"rms": 1.0}, worst=0, by_row=torch.zeros(1),
    )  # fmt: skip
    return Finding(
        key=key, arm=arm, score=one, worst={"request": 0, "position": 1, "phase": "decode"}, first=1, wrong={}
    )


SITES = [
    "model.layers.0.input_layernorm",
    "model.layers.0.self_attn.q",
    "model.layers.0.self_attn.q_norm",
    "model.layers.0.self_attn.q_rope",
    "model.layers.0.self_attn.heads",
    "model.layers.0.self_attn.o_proj",
    "model.layers.0",
    "model.layers.1.input_layernorm",
    "model.layers.1",
    "model.norm",
    "lm_head",
]


@pytest.mark.parametrize(
    ("key", "module", "site"),
    [
        ("model.embed_tokens", "model.embed_tokens", "output"),
        ("model.layers.0.self_attn.q", "model.layers.0.self_attn.q_proj", "q"),
        ("model.layers.0.self_attn.k_rope", "model.layers.0.self_attn", "k_rope"),
        ("model.layers.0.self_attn.heads", "model.layers.0.self_attn", "heads"),
        ("model.layers.0.self_attn.kv", "model.layers.0.self_attn", "kv"),
        ("model.layers.0.self_attn", "model.layers.0.self_attn.o_proj", "output"),
        ("model.layers.0.mid", "model.layers.0", "mid"),
        ("model.layers.0.mlp.router", "model.layers.0.mlp.gate", "router"),
        ("model.layers.0.mlp.experts", "model.layers.0.mlp.experts", "experts"),
        ("logits", "lm_head", "output"),
    ],
)
def test_sites_are_blamed_on_modules(key: str, module: str, site: str) -> None:
    facts = Facts(reference_sites=SITES, routers={"model.layers.0.mlp.router": "model.layers.0.mlp.gate"})
    assert blame.blamed(key, facts)[:2] == (module, site)


def test_what_the_target_lacks_is_blamed_before_what_that_spoils() -> None:
    there = frozenset({"model.layers.0.self_attn", "model.layers.0", "model.norm", "model.layers.0.input_layernorm"})
    facts = Facts(reference_sites=SITES, target_modules=there)
    assert blame.blamed("model.layers.0.self_attn.q_rope", facts)[0] == "model.layers.0.self_attn.q_norm"
    assert blame.blamed("model.norm", facts)[0] == "model.layers.1"


def test_ranking_keeps_kinds_together_and_the_worst_first() -> None:
    findings = [
        finding("model.layers.2.self_attn.heads", 5.0),
        finding("model.layers.1.self_attn.q_rope", 90.0),
        finding("model.layers.0.self_attn.q_rope", 80.0),
        finding("model.layers.0.self_attn.k_rope", 100.0),
        finding("model.layers.0.self_attn.k_rope", 7.0, "bfloat16"),
    ]
    ranked = blame.rank(findings, Facts(reference_sites=SITES))
    assert [culprit.key for culprit in ranked] == [
        "model.layers.0.self_attn.k_rope",
        "model.layers.0.self_attn.q_rope",
        "model.layers.1.self_attn.q_rope",
        "model.layers.2.self_attn.heads",
    ]
    assert ranked[0].evidence["arms"] == {"float32": 100.0, "bfloat16": 7.0}
    assert ranked[1].layers == [0, 1]


def test_a_wrong_cache_comes_before_the_attention_that_reads_it() -> None:
    findings = [finding("model.layers.1.self_attn.heads", 90.0), finding("model.layers.1.self_attn.kv", 20.0)]
    assert [culprit.site for culprit in blame.rank(findings, Facts(reference_sites=SITES))] == ["kv", "heads"]


def test_what_is_proven_and_not_measured_is_a_culprit_too() -> None:
    facts = Facts(
        reference_sites=SITES,
        parameters=["model.layers.1.mlp.down_proj.weight"],
        fields={"sliding_window": {"target": 9000, "reference": 9001}},
        constants={"model.norm": "eps is 1e-05, the reference's 1e-06"},
    )
    modules = {culprit.module for culprit in blame.rank([], facts)}
    assert modules == {"model.layers.1.mlp.down_proj", "model.layers.0.self_attn", "model.norm"}
