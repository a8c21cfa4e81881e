"""Levels 1 and 2 through the real engine: forced and free logits, the KV cache in its pages, servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import prompts_of

from pilotage.accuracy import kv, kv_controls
from pilotage.accuracy.arms import hf
from pilotage.accuracy.arms.base import Stream
from pilotage.accuracy.arms.engine import EngineGenerate, read_kv
from pilotage.accuracy.logits import logit_validation, multi_prompt_logit_validation
from pilotage.core.nouns import Status
from pilotage.serving import launch

pytestmark = pytest.mark.engine

STEPS = 10
CONFIG = {"num_batched_tokens_buckets": [16, 64], "num_seqs_buckets": [1, 4]}
ENGINE: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 160,
    "max_num_seqs": 4,
    "additional_config": CONFIG,
    "block_size": 16,
}


LENGTHS = (5, 33, 90, 41, 64, 17)


def cached(llm: Any, tmp_path: Path, streams: list[Stream]) -> list[list[Any]]:
    """Run streams, forced, more of them than fit at once; returns what their pages held."""
    from vllm import SamplingParams

    llm.collective_rpc("kv_read_start", args=(str(tmp_path),))
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=len(stream.tokens) - stream.prompt,
            ignore_eos=True,
            extra_args={"pilotage_force": list(stream.tokens[stream.prompt :])},
        )
        for stream in streams
    ]
    prompts = [{"prompt_token_ids": list(stream.tokens[: stream.prompt])} for stream in streams]
    llm.generate(prompts, params, use_tqdm=False)
    return read_kv(llm.collective_rpc("kv_read_stop"), len(streams))


def forced_streams(model: Any, lengths: tuple[int, ...] = LENGTHS) -> list[Stream]:
    prompts = prompts_of(lengths, seed=11)
    # Of several lengths, so that they end at different steps and others get their pages.
    sequences = [hf.greedy(model, [prompt], 4 + 3 * i)[0] for i, prompt in enumerate(prompts)]
    return [
        Stream(tokens=tokens, prompt=len(prompt), positions=(0,))
        for tokens, prompt in zip(sequences, prompts, strict=True)
    ]


def check_cache(found: list[list[Any]], model: Any, streams: list[Stream], *, window: int | None) -> None:
    for stream, layers in zip(streams, found, strict=True):
        for ours, truth in zip(layers, hf.keys_values(model, stream), strict=True):
            assert ours.layer == truth.layer
            computed = len(stream.tokens) - 1
            assert ours.first in (0, max(0, computed - (window or 0) + 1))
            assert ours.first + len(ours.keys) == computed
            torch.testing.assert_close(ours.keys, truth.keys[ours.first :], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(ours.values, truth.values[ours.first :], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_hold_their_heads(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny("gemma3")
    model = hf.load(path, torch.float32)
    streams = forced_streams(model, (5, 33, 70))
    with launch.engine(path, dtype="float32", tensor_parallel_size=2, **ENGINE) as llm:
        found = cached(llm, tmp_path, streams)
    check_cache(found, model, streams, window=16)


@pytest.fixture(scope="module")
def fp32(tiny: Callable[..., Path]) -> Iterator[tuple[Path, Any, Any]]:
    path = tiny("gemma3")
    with launch.engine(path, dtype="float32", **ENGINE) as llm:
        yield path, llm, hf.load(path, torch.float32)


def test_forced_in_one_pass_and_retried_give_the_same_numbers(fp32: tuple[Path, Any, Any]) -> None:
    _, llm, model = fp32
    ids = torch.tensor(prompts_of((23, 23, 23), seed=7))
    # Tokens that nobody would say, so that the loop is led back at every step.
    tokens = torch.randint(5, 300, (STEPS, 3), generator=torch.Generator().manual_seed(1))
    expected = hf.forced(model, ids, tokens)
    found = {
        how: logit_validation(
            ids, EngineGenerate(llm, STEPS), expected, expected_tokens=tokens, dtype=torch.float32, how=how
        )
        for how in ("one_pass", "retry")
    }
    assert found["one_pass"].calls == 1 and not found["one_pass"].divergences
    assert found["retry"].calls == STEPS and len(found["retry"].divergences) >= STEPS - 1
    one, other = (found[how].logits[0] for how in ("one_pass", "retry"))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-4)
    for how in ("one_pass", "retry"):
        assert [v.status for v in found[how].verdicts[:4]] == [Status.PASS] * 4


def test_several_prompts_of_several_lengths(fp32: tuple[Path, Any, Any]) -> None:
    _, llm, model = fp32
    groups = [prompts_of((40,), seed=8), prompts_of((3, 71), seed=9)]
    expected = [hf.generate(model, ids, STEPS)[0] for ids in groups]
    baseline = []
    model.set_attn_implementation("eager")
    for ids, logits in zip(groups, expected, strict=True):
        baseline.append(hf.forced(model, ids, logits.argmax(-1)))
    model.set_attn_implementation("sdpa")
    result = multi_prompt_logit_validation(
        groups, EngineGenerate(llm, STEPS), expected, baseline_logits=baseline, dtype=torch.float32
    )
    assert result, [v.to_json() for v in result.verdicts]
    assert len(result.rows) == 3 * STEPS


@pytest.mark.parametrize("again", ["cold", "prefix hits"])
def test_pages_of_every_request_hold_what_hugging_face_has(
    again: str, fp32: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    _, llm, model = fp32
    streams = forced_streams(model)
    found = cached(llm, tmp_path, streams)
    assert any(layer.first > 0 for layer in found[2]), "the window must have passed some pages of a long request"
    assert {layer.first for layer in found[0]} == {0}
    check_cache(found, model, streams, window=16)


@pytest.fixture(scope="module")
def kv_sides(fp32: tuple[Path, Any, Any]) -> tuple[list[Stream], Any, kv.KVSide]:
    path, _, truth = fp32
    streams = forced_streams(truth)
    expected = [hf.keys_values(truth, stream) for stream in streams]
    model = hf.load(path, torch.bfloat16)
    baseline = [hf.keys_values(model, stream) for stream in streams]
    controls, _ = kv_controls.measure(model, streams, expected, baseline)
    return streams, expected, kv.KVSide(baseline=baseline, controls=controls, about={})


def _scaled(real: Callable[..., None]) -> Callable[..., None]:
    """A prefill caches values that are 3% too large, though it attends to the right ones itself."""

    def write(k_cache: Any, v_cache: Any, k: Any, v: Any, **how: Any) -> None:
        real(k_cache, v_cache, k, v * 1.03 if v.shape[0] > 4 else v, **how)

    return write


def _one_slot(real: Callable[..., None]) -> Callable[..., None]:
    """The last two tokens of a full prefill bucket change places in the cache."""

    def write(k_cache: Any, v_cache: Any, k: Any, v: Any, *, slot_mapping: Any) -> None:
        if slot_mapping.numel() == 64 and bool((slot_mapping >= 0).all()):
            slot_mapping = slot_mapping[[*range(62), 63, 62]]
        real(k_cache, v_cache, k, v, slot_mapping=slot_mapping)

    return write


@pytest.mark.parametrize(
    ("fault", "failing"),
    [
        (None, set()),
        pytest.param(_scaled, {"kv_rms_ratio"}, marks=pytest.mark.slow),
        (_one_slot, {"kv_worst_row"}),
    ],
    ids=["clean", "scaled values", "one slot"],
)
def test_the_cache_of_the_serving_dtype(
    fault: Callable[..., Any] | None,
    failing: set[str],
    kv_sides: tuple[list[Stream], Any, kv.KVSide],
    fp32: tuple[Path, Any, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import pilotage.functional as NF

    streams, expected, side = kv_sides
    if fault is not None:
        monkeypatch.setattr(NF, "write_kv", fault(NF.write_kv))
    with launch.engine(fp32[0], dtype="bfloat16", **ENGINE) as llm:
        result = kv.judge(cached(llm, tmp_path, streams), expected, side, arm="bfloat16")
    found = {v.metric for v in result.verdicts if v.status is Status.FAIL}
    assert failing <= found, [v.to_json() for v in result.verdicts]
    if fault is None:
        assert [v.status for v in result.verdicts] == [Status.PASS] * 2, [v.to_json() for v in result.verdicts]
