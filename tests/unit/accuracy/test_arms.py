"""Hugging Face arms, exact symmetries, prompts and controls, on tiny models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pilotage.accuracy import comparison, controls, gates, metrics, prompts, same_config
from pilotage.accuracy import validate as validation
from pilotage.accuracy.arms import hf, symmetry
from pilotage.accuracy.arms.base import Stream
from pilotage.arch.spec import ArchSpec
from pilotage.core.errors import BadInput, Unsupported
from pilotage.core.nouns import Observation, Status

STREAMS = [
    Stream(tokens=tuple(range(5, 50)), prompt=40, positions=(0, 17, 38, 39, 40, 43)),
    Stream(tokens=tuple(range(60, 70)), prompt=7, positions=tuple(range(9))),
]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return metrics.relative_l2(a, b)


@pytest.mark.parametrize("mode", ["cached", "chunked"])
def test_modes_of_hugging_face_agree_row_by_row(mode: hf.Mode, tiny: Callable[..., Path]) -> None:
    model = hf.load(tiny("gemma3"), torch.float32)
    whole = hf.HFArm(model, "whole").observe(STREAMS)
    other = hf.HFArm(model, mode, mode=mode).observe(STREAMS)
    assert other.positions == [[0, 17, 38, 39, 40, 43], list(range(9))]
    for a, b in zip(other.logits, whole.logits, strict=True):
        assert relative(a, b) < 1e-5
        # Shifted by one row they would not be near.
        assert relative(a[1:], b[:-1]) > 0.1


def test_greedy_follows_the_most_likely_tokens(tiny: Callable[..., Path]) -> None:
    model = hf.load(tiny("llama3"), torch.float32)
    (tokens,) = hf.greedy(model, [[5, 6, 7]], 6)
    assert tokens[:3] == (5, 6, 7) and len(tokens) == 9
    logits = model(input_ids=torch.tensor([tokens[:-1]])).logits[0]
    assert tuple(logits[2:].argmax(-1).tolist()) == tokens[3:]


def test_a_checkpoint_without_a_tensor_is_refused_not_filled_with_noise(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    original = tiny("qwen3")
    (tmp_path / "config.json").write_text((original / "config.json").read_text())
    tensors = load_file(original / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadInput, match=r"layers\.1\.mlp\.up_proj"):
        hf.load(tmp_path, torch.float32)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_where_sdpa_does_not_fit_eager_is_the_reference_and_another_order_of_it_the_baseline(
    name: str, tiny: Callable[..., Path]
) -> None:
    model = hf.load(tiny(name), torch.float32)
    assert model.config._attn_implementation == "eager"
    reference = torch.cat(hf.HFArm(model, "reference").observe(STREAMS).logits)
    hf.set_attention(model, "eager")
    assert model.config._attn_implementation == hf.GROUPED
    other = torch.cat(hf.HFArm(model, "other").observe(STREAMS).logits)
    cached = torch.cat(hf.HFArm(model, "cached", mode="chunked").observe(STREAMS).logits)
    assert 0 < relative(other, reference) < 5e-6
    assert relative(cached, reference) < 5e-6
    hf.set_attention(model, "sdpa")
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    "name", ["llama3", "gemma3", "qwen2", "qwen3", "gpt_oss", "qwen3_moe", "mixtral", "deepseek_v3", "gemma4"]
)
@pytest.mark.parametrize("change", [symmetry.permute_hidden, symmetry.permute_inner])
def test_permutations_move_rounding_and_nothing_else(
    name: str, change: Callable[[object, int], None], tiny: Callable[..., Path]
) -> None:
    model = hf.load(tiny(name), torch.float64)
    before = torch.cat(hf.HFArm(model, "a").observe(STREAMS).logits)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    change(model, 3)
    moved = [key for key, value in model.state_dict().items() if not torch.equal(value, weights[key])]
    after = torch.cat(hf.HFArm(model, "b").observe(STREAMS).logits)
    assert len(moved) > 10
    # Hugging Face computes norms in fp32 whatever the model's dtype, so fp64 stops there.
    assert relative(after, before) < 1e-5


def test_permuting_refuses_a_parameter_that_it_does_not_know(tiny: Callable[..., Path]) -> None:
    model = hf.load(tiny("llama3"), torch.float32)
    model.model.layers[1].mystery = torch.nn.Parameter(torch.zeros(60))
    before = model.model.embed_tokens.weight.clone()
    with pytest.raises(Unsupported, match="mystery"):
        symmetry.permute_hidden(model, 1)
    assert torch.equal(model.model.embed_tokens.weight, before)


def test_controls_are_measured_in_units_of_the_baseline_and_leave_the_model_alone(tiny: Callable[..., Path]) -> None:
    path = tiny("gemma3")
    model = hf.load(path, torch.bfloat16)
    expected = torch.cat(hf.HFArm(hf.load(path, torch.float32), "e").observe(STREAMS).logits)
    baseline = metrics.row_errors(torch.cat(hf.HFArm(model, "b").observe(STREAMS).logits), expected)
    phases = [s.phase(p) for s in STREAMS for p in s.positions]
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    fast = tuple(control for control in controls.CONTROLS if not control.compiled)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controls, "CONTROLS", fast)
        found, missing = controls.measure(model, STREAMS, expected, baseline, phases, skip=(controls.EAGER,))
    assert not missing
    assert [c.name for c in found] == [c.name for c in fast if c.name != controls.EAGER][: controls.ENOUGH]
    assert len(found) == controls.ENOUGH >= gates.MIN_CONTROLS
    assert all(0.5 < c.estimate < 2 for c in found)
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


def test_a_control_that_an_architecture_cannot_have_is_replaced(tiny: Callable[..., Path]) -> None:
    """Without permutations and a compiler there are still enough, and the reasons are told."""
    path = tiny("llama3")
    model = hf.load(path, torch.bfloat16)
    for layer in model.model.layers:
        layer.input_layernorm.mystery = torch.nn.Parameter(torch.zeros(1))
    expected = torch.cat(hf.HFArm(hf.load(path, torch.float32), "e").observe(STREAMS).logits)
    baseline = metrics.row_errors(torch.cat(hf.HFArm(model, "b").observe(STREAMS).logits), expected)
    phases = [s.phase(p) for s in STREAMS for p in s.positions]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no compiler")))
        found, missing = controls.measure(model, STREAMS, expected, baseline, phases)
    assert "mystery" in missing["permuted hidden channels"] and "no compiler" in missing["compiled"]
    assert not {c.name for c in found} & set(missing)
    assert len(found) == 7


def test_controls_have_one_compiled_and_one_permuted() -> None:
    names = {control.name for control in controls.CONTROLS}
    assert {"compiled", "permuted hidden channels"} <= names and len(names) == len(controls.CONTROLS)


def test_measured_controls_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTAGE_HOME", str(tmp_path))
    one = gates.ControlErrors(name="c", estimate=1.0, high={"all": 1.1}, worst_row=2.0, linf=1.0, gain=1.0)
    calls: list[int] = []

    def compute() -> tuple[list[gates.ControlErrors], dict[str, str]]:
        calls.append(1)
        return [one], {"d": "why"}

    assert controls.cached(["key"], compute) == ([one], {"d": "why"}, False)
    assert controls.cached(["key"], compute) == ([one], {"d": "why"}, True)
    assert controls.cached(["other key"], compute)[2] is False
    (first, _) = sorted((tmp_path / "controls").glob("*.json"))
    first.write_text('{"controls": [{"nonsense": 1}], "missing": {}}')
    assert {controls.cached([key], compute)[2] for key in ("key", "other key")} == {True, False}
    assert len(calls) == 3


def test_a_digest_changes_with_any_byte(tiny: Callable[..., Path], tmp_path: Path) -> None:
    original = tiny("llama3")
    first = controls.digest(original)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((original / name).read_bytes())
    assert controls.digest(tmp_path) == first
    data = bytearray((tmp_path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(data)
    assert controls.digest(tmp_path) != first


@pytest.mark.parametrize(("window", "limit"), [(16, 1024), (512, 32768), (None, 4096), (4096, 128), (None, 24)])
def test_prompts_reach_past_the_window_inside_the_context(window: int | None, limit: int) -> None:
    chosen = prompts.lengths(sliding_window=window, max_position=limit)
    assert max(chosen.prompts) + chosen.new_tokens <= limit and min(chosen.prompts) >= 1
    if window is not None and window < limit - chosen.new_tokens:
        assert max(chosen.prompts) > window + 4
    if window == 16:
        assert max(chosen.prompts) > 3 * window
    if limit > 1000:
        assert len(set(chosen.prompts)) == 4


def test_prompt_ids_start_with_bos_and_stay_in_the_vocabulary() -> None:
    ids = prompts.token_ids(lambda text: [ord(c) for c in text], (9, 3000), vocab_size=128, bos=2)
    assert [len(prompt) for prompt in ids] == [9, 3000]
    assert all(prompt[0] == 2 and max(prompt) < 128 for prompt in ids)
    assert prompts.token_ids(None, (4, 6), vocab_size=50, bos=None) == prompts.token_ids(
        None, (4, 6), vocab_size=50, bos=None
    )


def test_a_large_vocabulary_is_compared_at_chosen_positions() -> None:
    tokens = [list(range(620)), list(range(30))]
    few = prompts.streams(tokens, [600, 10], vocab_size=262_144)
    assert sum(len(stream.positions) for stream in few) < 80
    assert set(range(600, 619)) <= set(few[0].positions) and {0, 599} <= set(few[0].positions)
    every = prompts.streams(tokens, [600, 10], vocab_size=320)
    assert every[0].positions == tuple(range(619))


def spec(**changes: object) -> ArchSpec:
    from pilotage.arch import tiny as tiny_models

    return ArchSpec.from_hf(tiny_models.config_dict("gemma3", changes or None))


def test_config_verdict() -> None:
    assert same_config.config_verdict(spec(), spec()).status is Status.PASS
    assert same_config.config_verdict(spec(max_position_embeddings=77), spec()).status is Status.PASS
    verdict = same_config.config_verdict(spec(rms_norm_eps=1e-5), spec())
    assert verdict.status is Status.FAIL
    assert verdict.evidence["differing"] == {"norm_eps": {"target": 1e-5, "reference": 1e-6}}
    json.dumps(verdict.to_json())
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert set(same_config.config_verdict(spec(rope_parameters=rope), spec()).evidence["differing"]) == {"rope"}


def test_comparison_is_json_whatever_the_target_says(tiny: Callable[..., Path]) -> None:
    """A target of NaN fails, and the report stays valid JSON."""
    model = hf.load(tiny("llama3"), torch.float32)
    truth = comparison.reference(tiny("llama3"), model, [[5, 6, 7, 8]], 4)
    baseline = truth.logits * (1 + 1e-6)
    result = comparison.compare(truth, torch.full_like(baseline, float("nan")), baseline, [], arm="float32")
    assert result.status is Status.FAIL
    whole = validation.Validation(
        model="m", reference="m", arms=[result], modules=[], verdicts=[], streams=truth.streams, command=""
    )
    found = json.loads(json.dumps(whole.to_json(), allow_nan=False))
    assert found["status"] == "fail" and found["arms"][0]["by_position"][0]["target"]["l2"] is None


def test_another_vocabulary_is_bad_input(tiny: Callable[..., Path]) -> None:
    model = hf.load(tiny("llama3"), torch.float32)
    truth = comparison.reference(tiny("llama3"), model, [[5, 6, 7, 8]], 4)
    with pytest.raises(BadInput, match="vocabulary"):
        comparison.compare(truth, truth.logits[:, :-1], truth.logits, [], arm="float32")


@pytest.mark.usefixtures("own_home")
def test_a_checkpoint_converted_to_fewer_bits_is_held_against_its_rounded_original(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fp32 arm asks for the same function of the weights that are there, not for the bits that were given up."""
    monkeypatch.setattr(controls, "CONTROLS", tuple(c for c in controls.CONTROLS if not c.compiled))
    original, converted = tiny("llama3"), tmp_path / "converted"
    converted.mkdir()
    config = json.loads((original / "config.json").read_text()) | {"dtype": "bfloat16"}
    (converted / "config.json").write_text(json.dumps(config))
    tensors = {name: value.bfloat16() for name, value in load_file(original / "model.safetensors").items()}
    save_file(tensors, converted / "model.safetensors", metadata={"format": "pt"})

    def observe(arm: str, streams: list[Stream]) -> Observation:
        model = hf.load(converted, getattr(torch, arm), attention="eager")
        return hf.HFArm(model, "target", mode="cached").observe(streams)

    result = validation.validate(str(converted), reference=str(original), modules=False, observe=observe)
    assert result.status is Status.PASS
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name] * 1.5}, converted / "model.safetensors", metadata={"format": "pt"})
    result = validation.validate(str(converted), reference=str(original), modules=False, observe=observe)
    assert [arm.status for arm in result.arms] == [Status.FAIL, Status.FAIL]


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTAGE_HOME", str(tmp_path / "home"))
