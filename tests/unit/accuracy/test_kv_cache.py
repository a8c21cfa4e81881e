"""The KV comparison on errors of known law, and on caches of tiny models with planted faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pilotage.accuracy import error_laws, kv, kv_controls
from pilotage.accuracy.arms import hf
from pilotage.accuracy.arms.base import LayerKV, Stream
from pilotage.core.errors import BadInput
from pilotage.core.nouns import Status, worst

NOISE = 0.02


def tensors(tokens: int, heads: int, width: int, ratio: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    expected, a, b = (torch.randn(tokens, heads, width, generator=generator) for _ in range(3))
    return expected + NOISE * ratio * a, expected, expected + NOISE * b


def status(verdicts: Sequence[object]) -> Status:
    return worst([verdict.status for verdict in verdicts])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("n", "low", "high"), [(64, 0.45, 0.7), (256, 0.85, 0.92), (1024, 0.96, 0.985), (4096, 0.99, 1)]
)
def test_the_coefficient_of_two_draws_of_one_law_depends_on_their_size(n: int, low: float, high: float) -> None:
    generator = torch.Generator().manual_seed(0)
    found = [error_laws.bhattacharyya(torch.randn(n, generator=generator), torch.randn(n, generator=generator))]
    assert low < found[0] < high


def test_coefficients_of_plain_cases() -> None:
    x = torch.tensor([0.0, 1.0, 2.0, -3.0])
    assert error_laws.bhattacharyya(x, -x) == pytest.approx(1.0)
    assert error_laws.bhattacharyya(torch.zeros(4), torch.zeros(4)) == 1.0
    assert error_laws.bhattacharyya(torch.full((4,), 0.001), torch.full((4,), 1.0)) == 0.0
    assert error_laws.bhattacharyya(torch.tensor([1.0, float("inf")]), x) == 0.0
    # Two bins: p = (3/4, 1/4), q = (1/4, 3/4).
    p, q = torch.tensor([0.1, 0.2, 0.3, 1.0]), torch.tensor([0.1, 0.8, 0.9, 0.7])
    assert error_laws.bhattacharyya(p, q, bins=2) == pytest.approx(2 * (3 / 16) ** 0.5)


@pytest.mark.parametrize("n", [1, 2, 4, 16])
def test_a_perfect_target_on_a_small_tensor_never_fails(n: int) -> None:
    """n tokens of 2 heads of 16: the guide's criterion rejects every one of these."""
    said = [kv.kv_three_way(*tensors(n, 2, 16, 1.0, seed)) for seed in range(100)]
    assert sum(status(verdicts) is Status.FAIL for verdicts in said) == 0
    coefficients = [verdicts[0].evidence["bhattacharyya_says"] for verdicts in said]
    assert coefficients.count("fail") == 100
    # And it says that the two disagree.
    assert all(verdicts[0].evidence["disagree"] for verdicts in said)


def test_a_perfect_target_passes_where_there_is_enough() -> None:
    said = [status(kv.kv_three_way(*tensors(256, 2, 32, 1.0, seed))) for seed in range(40)]
    assert said.count(Status.PASS) >= 39 and Status.FAIL not in said


@pytest.mark.parametrize("arm", ["target", "baseline", "both"])
def test_an_error_of_1_3_behind_an_outlier_does_not_pass(arm: str) -> None:
    """150,000 elements, one of them 300 standard deviations off: the coefficient is above 0.99."""
    target, expected, baseline = tensors(600, 2, 125, 1.3, 0)
    if arm in ("target", "both"):
        target[5, 1, 7] = expected[5, 1, 7] + 300 * NOISE
    if arm in ("baseline", "both"):
        baseline[5, 1, 7] = expected[5, 1, 7] + 300 * NOISE
    verdicts = kv.kv_three_way(target, expected, baseline)
    evidence = verdicts[0].evidence
    assert evidence["bhattacharyya"] > 0.99 and evidence["bhattacharyya_says"] == "pass"
    assert status(verdicts) is Status.FAIL
    assert evidence["disagree"]
    trimmed = next(v for v in verdicts if v.metric == "trimmed_rms_ratio")
    assert trimmed.status is Status.FAIL
    assert trimmed.estimate == pytest.approx(1.3, rel=0.05)


def test_one_wrong_slot_fails_and_is_named() -> None:
    target, expected, baseline = tensors(300, 4, 32, 1.0, 3)
    target[123, 2] = expected[124, 2]
    found = next(v for v in kv.kv_three_way(target, expected, baseline) if v.metric == "worst_row")
    assert found.status is Status.FAIL
    assert found.evidence == {"token": 123, "head": 2}


def test_what_is_not_finite_fails() -> None:
    target, expected, baseline = tensors(30, 2, 32, 1.0, 3)
    target[4, 1, 0] = float("nan")
    assert status(kv.kv_three_way(target, expected, baseline)) is Status.FAIL


def test_shapes_are_checked() -> None:
    target, expected, baseline = tensors(30, 2, 32, 1.0, 3)
    with pytest.raises(BadInput):
        kv.kv_errors(target[:29], expected, baseline)


STREAMS = [
    Stream(tokens=tuple(range(5, 70)), prompt=50, positions=(0,)),
    Stream(tokens=tuple(range(90, 120)), prompt=20, positions=(0,)),
    Stream(tokens=tuple(range(200, 207)), prompt=2, positions=(0,)),
]


@pytest.fixture(scope="module", params=["gemma3", "gpt_oss"])
def sides(request: pytest.FixtureRequest, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple:
    path = tiny(request.param)
    truth = hf.load(path, torch.float32)
    expected = [hf.keys_values(truth, stream) for stream in STREAMS]
    model = hf.load(path, torch.bfloat16)
    baseline = [hf.keys_values(model, stream) for stream in STREAMS]
    controls, missing = kv_controls.measure(model, STREAMS, expected, baseline)
    assert len(controls) == kv_controls.ENOUGH and not missing
    return model, expected, kv.KVSide(baseline=baseline, controls=controls, about={})


def test_hugging_faces_cache_is_the_same_in_chunks(sides: tuple, tiny: Callable[..., Path]) -> None:
    model = hf.load(tiny("gemma3"), torch.float32)
    for stream in STREAMS:
        whole, chunked = (hf.keys_values(model, stream, chunk=chunk) for chunk in (None, 11))
        for a, b in zip(whole, chunked, strict=True):
            assert a.keys.shape == (len(stream.tokens) - 1, 2, 20)
            torch.testing.assert_close(a.keys, b.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(a.values, b.values, rtol=1e-4, atol=1e-4)


def test_another_clean_computation_passes(sides: tuple) -> None:
    model, expected, side = sides
    target = [hf.keys_values(model, stream, chunk=9) for stream in STREAMS]
    # As an engine with a window holds it: the first layer's early positions are gone.
    target = [
        [
            dataclasses.replace(layer, first=5, keys=layer.keys[5:], values=layer.values[5:]) if not i else layer,
            *rest,
        ]
        for i, (layer, *rest) in enumerate(target)
    ]
    result = kv.judge(target, expected, side, arm="bfloat16")
    assert [v.status for v in result.verdicts] == [Status.PASS, Status.PASS]
    assert result.layers[0].errors.n == 64 - 5 + 29 + 6
    evidence = result.verdicts[0].evidence
    assert evidence["bhattacharyya_says"] in ("pass", "fail") and "disagree" in evidence
    found = result.to_json()["layers"]
    assert len(found) == 2 * len(expected[0])
    assert len(found[0]["heads"]) == expected[0][0].keys.shape[1]
    first = found[0]["by_position"][0]
    assert (first["stream"], first["positions"][0]) == (0, 5)
    assert len(first["positions"]) == len(first["ratio"]) <= kv.BINS


def changed(cache: list[list[LayerKV]], stream: int, layer: int, **fields: Tensor) -> list[list[LayerKV]]:
    copy = [list(layers) for layers in cache]
    copy[stream][layer] = dataclasses.replace(copy[stream][layer], **fields)
    return copy


def test_faults_of_the_cache_are_found_and_named(sides: tuple) -> None:
    model, expected, side = sides
    clean = [hf.keys_values(model, stream, chunk=9) for stream in STREAMS]
    one = clean[1][2]
    swapped = one.values.clone()
    swapped[[7, 8]] = swapped[[8, 7]]
    wrong_slot = kv.judge(changed(clean, 1, 2, values=swapped), expected, side, arm="bfloat16")
    row = wrong_slot.verdicts[1]
    assert row.status is Status.FAIL
    assert (row.evidence["layer"], row.evidence["kind"], row.evidence["stream"]) == ("layers.2.self_attn", "v", 1)
    assert row.evidence["position"] in (7, 8)
    scaled = [
        [
            dataclasses.replace(layer, keys=layer.keys * 1.02) if layer.layer == "layers.1.self_attn" else layer
            for layer in x
        ]
        for x in clean
    ]
    pooled = kv.judge(scaled, expected, side, arm="bfloat16").verdicts[0]
    assert pooled.status is Status.FAIL
    assert (pooled.evidence["layer"], pooled.evidence["kind"]) == ("layers.1.self_attn", "k")
    zeroed = kv.judge(changed(clean, 0, 0, keys=torch.zeros_like(clean[0][0].keys)), expected, side, arm="bfloat16")
    assert Status.FAIL in [v.status for v in zeroed.verdicts]


def test_heads_of_ranks_that_hold_the_same_one_are_paired(sides: tuple) -> None:
    model, expected, side = sides
    clean = [hf.keys_values(model, stream) for stream in STREAMS]
    double = [
        [
            dataclasses.replace(
                layer, keys=layer.keys.repeat_interleave(2, 1), values=layer.values.repeat_interleave(2, 1)
            )
            for layer in x
        ]
        for x in clean
    ]
    assert [v.status for v in kv.judge(double, expected, side, arm="bfloat16").verdicts] == [Status.PASS] * 2
    double[0][0].keys[3, 1] += 1
    with pytest.raises(BadInput, match="same head"):
        kv.judge(double, expected, side, arm="bfloat16")


def test_a_rounded_cache_is_not_measured_against_one_that_is_not() -> None:
    assert kv.rounded_cache({"kv_cache": {"dtype": "bfloat16"}}) is None
    assert kv.rounded_cache({}) is None
    stored = kv.rounded_cache({"kv_cache": {"dtype": "float8_e4m3fn"}})
    assert stored is not None
    verdict = kv.not_comparable(stored, arm="bfloat16")
    assert verdict.status is Status.NOT_MEASURED and "float8_e4m3fn" in verdict.bound_source + str(verdict.evidence)
