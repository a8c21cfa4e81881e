"""Hugging Face's side of a tap: every site, the same values, and what is handed onward arrives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pilotage.accuracy.arms import hf
from pilotage.core.errors import ConfigError, Unsupported
from pilotage.probe.hf import HFTaps, TensorCaptureModel
from pilotage.probe.replacement import TensorReplacer

IDS = [5, 9, 200, 31, 77, 12, 4, 260, 41]
NAMES = ("llama3", "gemma3", "qwen3_moe", "gpt_oss", "deepseek_v3")


def load(tiny: Callable[..., Path], name: str) -> object:
    return hf.load(tiny(name), torch.float32, attention="eager" if name == "gemma3" else "sdpa")


@pytest.mark.parametrize("name", NAMES)
def test_recording_changes_nothing_and_names_follow_the_layer(name: str, tiny: Callable[..., Path]) -> None:
    model = load(tiny, name)
    taps = HFTaps(model)
    plain = model(input_ids=torch.tensor([IDS])).logits
    seen: dict[str, Tensor] = {}

    def note(site: str, rows: Tensor) -> None:
        assert site not in seen
        seen[site] = rows.clone()

    with torch.inference_mode(), taps.attached(note):
        tapped = model(input_ids=torch.tensor([IDS])).logits
    assert torch.equal(plain, tapped)
    assert all(rows.shape[0] == len(IDS) for rows in seen.values())
    assert torch.equal(seen["logits"], plain[0])
    # The residual stream adds up site by site.
    layer = "model.layers.1"
    normed = f"{layer}.post_attention_layernorm" if name == "gemma3" else f"{layer}.self_attn"
    fed = f"{layer}.post_feedforward_layernorm" if name == "gemma3" else f"{layer}.mlp"
    assert torch.equal(seen[f"{layer}.mid"], seen["model.layers.0"] + seen[normed])
    assert torch.equal(seen[layer], seen[f"{layer}.mid"] + seen[fed])
    attention = f"{layer}.self_attn"
    heads = model.config.num_attention_heads
    values = 14 if name == "deepseek_v3" else 20
    assert seen[f"{attention}.q_rope"].shape == (len(IDS), heads, 20)
    assert seen[f"{attention}.heads"].shape == (len(IDS), heads, values)
    if name == "deepseek_v3":
        assert f"{attention}.k_rope" not in seen  # what is cached is no key
    else:
        assert seen[f"{attention}.k_rope"].shape == seen[f"{attention}.v"].shape == (len(IDS), 2, 20)
    if name == "gemma3":
        assert torch.equal(seen[f"{attention}.q_norm"], model.model.layers[1].self_attn.q_norm(seen[f"{attention}.q"]))
    if name in ("qwen3_moe", "gpt_oss", "deepseek_v3"):
        gate = model.model.layers[1].mlp
        gate = gate.router if name == "gpt_oss" else gate.gate
        expected = torch.nn.functional.linear(
            seen[f"{layer}.post_attention_layernorm"], gate.weight, getattr(gate, "bias", None)
        )
        assert torch.equal(seen[f"{layer}.mlp.router"], expected)
        assert set(taps.router_names()) == {site for site in seen if site.endswith(".router")}
        assert taps.router_names()[f"{layer}.mlp.router"] in (f"{layer}.mlp.gate", f"{layer}.mlp.router")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_handed_onward_decides_everything_after_it(name: str, tiny: Callable[..., Path]) -> None:
    model = load(tiny, name)
    taps = HFTaps(model)
    other: dict[str, Tensor] = {}

    def note(site: str, rows: Tensor) -> None:
        other[site] = rows.clone()

    with torch.inference_mode(), taps.attached(note):
        expected = model(input_ids=torch.tensor([IDS[::-1]])).logits
    for site in ("model.embed_tokens", "model.layers.1", "model.norm"):
        with (
            torch.inference_mode(),
            taps.attached(lambda at, rows, site=site: other[at] if at == site else None),
        ):
            found = model(input_ids=torch.tensor([IDS])).logits
        # Whatever came before, from here on it is the other stream.
        assert torch.equal(found, expected), site
    live: dict[str, Tensor] = {}

    def everywhere(site: str, rows: Tensor) -> Tensor:
        live[site] = rows.clone()
        return other[site]

    with torch.inference_mode(), taps.attached(everywhere):
        model(input_ids=torch.tensor([IDS]))
    wrong = [site for site in other if site != "model.embed_tokens" and not torch.equal(live[site], other[site])]
    assert not wrong  # each site saw the other stream's inputs


def test_the_attention_functions_are_put_back(tiny: Callable[..., Path]) -> None:
    from transformers.modeling_utils import AttentionInterface

    before = dict(AttentionInterface._global_mapping)
    taps = HFTaps(load(tiny, "llama3"))
    with pytest.raises(RuntimeError, match="stop"), taps.attached(lambda site, rows: None):
        raise RuntimeError("stop")
    assert AttentionInterface._global_mapping == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in taps.model.modules())


def test_a_batch_is_refused(tiny: Callable[..., Path]) -> None:
    taps = HFTaps(load(tiny, "llama3"))
    with taps.attached(lambda site, rows: None), pytest.raises(Unsupported, match="one stream"):
        taps.model(input_ids=torch.tensor([IDS, IDS]))


def test_capture_model_yields_what_replacement_takes(tiny: Callable[..., Path]) -> None:
    model = load(tiny, "qwen3_moe")
    capture = TensorCaptureModel(model, ["model.layers.[1-2].mlp.router", "model.layers.3.self_attn.q_rope"])
    captures = capture.run([IDS, IDS[:4]], max_new_tokens=3)
    assert capture.prompt_token_ids == [IDS, IDS[:4]]
    sites = {"model.layers.1.mlp.router", "model.layers.2.mlp.router", "model.layers.3.self_attn.q_rope"}
    assert [set(steps) for steps in captures] == [sites, sites]
    steps = captures[0]["model.layers.1.mlp.router"]
    assert [tuple(step.shape) for step in steps] == [(1, len(IDS), 8), (1, 1, 8), (1, 1, 8), (1, 1, 8)]
    # Through the cache or in one forward: the same rows.
    whole = TensorCaptureModel(model, ["model.layers.1.mlp.router"])
    step = model(input_ids=torch.tensor([IDS]), use_cache=True)
    tokens = list(IDS)
    for _ in range(3):
        tokens.append(int(step.logits[0, -1].argmax()))
        step = model(input_ids=torch.tensor([tokens]))
    whole(input_ids=torch.tensor([tokens]), use_cache=False)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole.captures[0]["model.layers.1.mlp.router"][0])
    replacer = TensorReplacer(captures, prompt_token_ids=capture.prompt_token_ids)
    replacer.register_request("r", IDS)
    context = replacer.build_context(["r"], [len(IDS) + 1], False, torch.device("cpu"))
    assert torch.equal(context["model.layers.1.mlp.router"][0], steps[2][0, -1])


def test_capture_model_takes_any_torch_model_and_knows_its_sites() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
    capture = TensorCaptureModel(model, ["0", "1.input"])
    x = torch.randn(1, 5, 3)
    output = capture(x)
    assert torch.equal(output, model(x))
    (steps,) = capture.captures
    assert torch.equal(steps["0"][0], model[0](x)) and torch.equal(steps["1.input"][0], model[0](x))
    with pytest.raises(ConfigError, match="matches no site"):
        TensorCaptureModel(model, ["2"])(x)


def test_what_makes_the_layers_own_inputs_has_sites(tiny: Callable[..., Path]) -> None:
    """Gemma 4: else a fault there would be blamed on the layer that takes them."""
    model = hf.load(tiny("gemma4"), torch.float32)
    taps = HFTaps(model)
    seen: dict[str, Tensor] = {}
    with torch.inference_mode(), taps.attached(lambda site, rows: seen.__setitem__(site, rows.clone())):
        plain = model(input_ids=torch.tensor([IDS])).logits
    rows = len(IDS)
    assert seen["model.embed_tokens_per_layer"].shape == (rows, 8 * 14)
    assert seen["model.per_layer_projection_norm"].shape == (rows, 8, 14)
    handed = {name: seen[name] * 1.5 for name in ("model.embed_tokens_per_layer", "model.per_layer_projection_norm")}
    with torch.inference_mode(), taps.attached(lambda site, rows: handed.get(site)):
        moved = model(input_ids=torch.tensor([IDS])).logits
    # They read the embedded rows before the first layer does, and read those that are handed onward.
    doubled = {"model.embed_tokens": seen["model.embed_tokens"] * 2}
    found: dict[str, Tensor] = {}

    def twice(site: str, rows: Tensor) -> Tensor | None:
        found[site] = rows.clone()
        return doubled.get(site)

    with torch.inference_mode(), taps.attached(twice):
        model(input_ids=torch.tensor([IDS]))
    assert torch.equal(found["model.per_layer_model_projection"], seen["model.per_layer_model_projection"] * 2)
    # A common factor is normalised away, one of the two alone is not.
    assert float((moved - plain).norm() / plain.norm()) < 1e-4
    del handed["model.embed_tokens_per_layer"]
    with torch.inference_mode(), taps.attached(lambda site, rows: handed.get(site)):
        moved = model(input_ids=torch.tensor([IDS])).logits
    assert float((moved - plain).norm() / plain.norm()) > 1e-2
