"""Tiny checkpoints: the same bytes everywhere, loadable by transformers, and with every planted fault in sight."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pilotage.arch import tiny
from pilotage.core.errors import BadInput

# Other bytes under the same name would silently change every number measured on these models: raise RECIPE with them.
SHA256 = {
    "deepseek_v3": "5960c7f0c870c451",
    "gemma2": "02f0f519fe8d0abc",
    "gemma3": "d3c81178ccb94a50",
    "gemma4": "b0a095099b17f951",
    "gpt_oss": "34e7d48670750528",
    "llama3": "bc9386e201a702ab",
    "mistral": "bc9386e201a702ab",  # the weights of llama3; what differs is their use
    "mixtral": "4affb68600338865",
    "qwen2": "b29ad99694747a7b",
    "qwen3": "b14ece1aa5276bf9",
    "qwen3_moe": "23435c3b3c802db3",
}
# Hugging Face's sdpa attention knows neither a bound on the scores nor sinks.
EAGER_ONLY = ("gemma2", "gpt_oss")


@pytest.mark.parametrize("name", tiny.NAMES)
def test_bytes_are_pinned(tiny: Callable[..., Path], name: str) -> None:
    digest = hashlib.sha256((tiny(name) / "model.safetensors").read_bytes()).hexdigest()
    assert digest[:16] == SHA256[name]


def test_another_process_builds_the_same_files(tiny: Callable[..., Path], tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from pilotage.arch import tiny; "
    code += "print(tiny.build('gemma3', seed=3, cache=Path(sys.argv[1])))"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    ours = tiny("gemma3", seed=3)
    theirs = Path(done.stdout.strip())
    names = sorted(file.name for file in ours.iterdir())
    assert names == sorted(file.name for file in theirs.iterdir())
    assert all((ours / name).read_bytes() == (theirs / name).read_bytes() for name in names)


def load(path: Path, dtype: torch.dtype = torch.float32, attention: str | None = None) -> Any:
    if attention is None and path.name.startswith(EAGER_ONLY):
        attention = "eager"
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=attention, experts_implementation="eager"
    ).eval()


@pytest.mark.parametrize("name", tiny.NAMES)
def test_transformers_finds_every_tensor_in_its_shape(tiny: Callable[..., Path], name: str) -> None:
    path = tiny(name)
    _, info = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    config = load(path).config
    # Heads may differ by layer.
    layers = getattr(config, "per_layer_config", None) or [config]
    layers = [layers[index] for index in range(config.num_hidden_layers)] if len(layers) > 1 else layers
    assert all(layer.head_dim * layer.num_attention_heads != config.hidden_size for layer in layers)
    assert config.hidden_size & (config.hidden_size - 1)


def test_overrides_keep_the_weights_and_unknown_ones_are_refused(tiny: Callable[..., Path]) -> None:
    plain, other = tiny("gemma3"), tiny("gemma3", sliding_window=17)
    assert plain != other
    assert (plain / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert json.loads((other / "config.json").read_text())["sliding_window"] == 17
    with pytest.raises(BadInput, match="no field 'sliding_windo'; the nearest is 'sliding_window'"):
        tiny("gemma3", sliding_windo=17)
    with pytest.raises(BadInput, match="no tiny model is called 'gema3'; the nearest is 'gemma3'"):
        tiny("gema3")


@pytest.mark.parametrize(("model", "expected"), [("tiny:gemma3", ("gemma3", 0)), ("tiny:qwen2@12", ("qwen2", 12))])
def test_names_with_seeds_are_read(model: str, expected: tuple[str, int]) -> None:
    assert tiny.parse(model) == expected


@pytest.mark.parametrize("model", ["tiny:gemma3@", "tiny:gemma3@x", "tiny:gemma3@-1", "tiny:gemma3@1@2"])
def test_a_bad_seed_is_refused(model: str) -> None:
    with pytest.raises(BadInput, match="not a tiny model and seed"):
        tiny.parse(model)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_every_text_survives_the_tokenizer_and_bos_comes_once(tiny: Callable[..., Path], name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny(name))
    for text in ("Hello, the cat", "é ☃ 日本\n\t  3333+777 it's", ""):
        ids = tokenizer.encode(text)
        assert ids[0] == 2 and ids.count(2) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(tokenizer) == 320 and all(tokenizer.convert_ids_to_tokens(id_) is not None for id_ in range(320))
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], return_dict=False)
    assert chat[0] == 2 and chat.count(2) == 1


def prompt(seed: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([torch.tensor([[2]]), torch.randint(4, 320, (1, length - 1), generator=generator)], 1)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_greedy_text_is_varied_and_mostly_without_ties(tiny: Callable[..., Path], name: str) -> None:
    distinct, gaps = [], []
    for seed in range(3):
        out = load(tiny(name, seed=seed)).generate(
            prompt(seed, 30), max_new_tokens=32, min_new_tokens=32, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        logits = torch.cat(out.logits)
        assert logits.isfinite().all() and 1.0 < logits.std() < 5.0
        top = logits.topk(2).values
        gaps.append(top[:, 0] - top[:, 1])
        distinct.append(len(set(out.sequences[0, 30:].tolist())))
    assert min(distinct) >= 8, distinct
    assert (torch.cat(gaps) > 1e-3).float().mean() > 0.95


def gemma_rope(**thetas: float) -> dict[str, Any]:
    rope = tiny.config_dict("gemma3")["rope_parameters"]
    return {"rope_parameters": {k: {**v, "rope_theta": thetas.get(k, v["rope_theta"])} for k, v in rope.items()}}


def swap_kv(model: Any, layer: int) -> None:
    attention = model.model.layers[layer].self_attn
    k, v = attention.k_proj.weight.data.clone(), attention.v_proj.weight.data.clone()
    attention.k_proj.weight.data, attention.v_proj.weight.data = v, k


def permute_heads(model: Any, layer: int) -> None:
    weight = model.model.layers[layer].self_attn.o_proj.weight
    weight.data = weight.data.view(60, 6, 20)[:, [1, 0, 2, 3, 4, 5]].reshape(60, 120).contiguous()


def drop_bias(model: Any) -> None:
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(layer.self_attn, name).bias.data.zero_()


def drop_offset(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.data -= 1
        layer.self_attn.k_norm.weight.data -= 1


def drop_embedding_scale(model: Any) -> None:
    model.model.embed_tokens.embed_scale = torch.tensor(1.0)


plain_rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
llama_rope = tiny.config_dict("llama3")["rope_parameters"]
FAULTS: dict[str, tuple[str, dict[str, Any], Callable[[Any], None] | None]] = {
    "theta 1e4, full layers": ("gemma3", gemma_rope(full_attention=1e4), None),
    "theta 1e4, sliding layers": ("gemma3", gemma_rope(sliding_attention=1e4), None),
    "window 17": ("gemma3", {"sliding_window": 17}, None),
    "window 15": ("gemma3", {"sliding_window": 15}, None),
    "pattern inverted": ("gemma3", {"layer_types": (["full_attention"] * 2 + ["sliding_attention"]) * 2}, None),
    "scale ignored": ("gemma3", {"query_pre_attn_scalar": 20}, None),
    "norms without +1": ("gemma3", {}, drop_offset),
    "embedding scale dropped": ("gemma3", {}, drop_embedding_scale),
    "heads permuted, gemma3": ("gemma3", {}, lambda model: permute_heads(model, 5)),
    "k and v swapped, gemma3": ("gemma3", {}, lambda model: swap_kv(model, 5)),
    "theta 1e4, llama3": ("llama3", {"rope_parameters": {**llama_rope, "rope_theta": 1e4}}, None),
    "rope scaling ignored": ("llama3", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, None),
    "k and v swapped, llama3": ("llama3", {}, lambda model: swap_kv(model, 3)),
    "theta 1e4, qwen2": ("qwen2", plain_rope, None),
    "bias dropped": ("qwen2", {}, drop_bias),
    "theta 1e4, qwen3": ("qwen3", plain_rope, None),
    "heads permuted, qwen3": ("qwen3", {}, lambda model: permute_heads(model, 0)),
}  # fmt: skip


def rms(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).pow(2).mean().sqrt())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_far_above_the_noise_of_bf16(tiny: Callable[..., Path], fault: str) -> None:
    name, overrides, edit = FAULTS[fault]
    ids = prompt(0, 96)
    with torch.no_grad():
        clean = load(tiny(name))(ids).logits
        noise = load(tiny(name), torch.bfloat16)(ids).logits.float()
        model = load(tiny(name, **overrides))
        if edit is not None:
            edit(model)
        faulty = model(ids).logits
    assert rms(faulty, clean) > 4 * rms(noise, clean)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_a_norm_epsilon_shows_in_fp32(tiny: Callable[..., Path], name: str) -> None:
    ids = prompt(0, 96)
    other = 1e-6 if json.loads((tiny(name) / "config.json").read_text())["rms_norm_eps"] == 1e-5 else 1e-5
    with torch.no_grad():
        clean = load(tiny(name))(ids).logits
        noise = rms(load(tiny(name), attention="eager")(ids).logits, clean)
        faulty = load(tiny(name, rms_norm_eps=other))(ids).logits
    # Where there is no other attention, eight roundings stand for the noise.
    assert rms(faulty, clean) > 20 * max(noise, 8 * torch.finfo(torch.float32).eps)
