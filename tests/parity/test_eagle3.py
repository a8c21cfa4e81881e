"""The EAGLE3 head against a dense computation written out here, and what a checkpoint may not say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import eagle3_heads as heads
import pytest
import torch
from torch import Tensor

from pilotage.core.errors import Unsupported, WeightError
from pilotage.models.eagle3 import Eagle3Config, weights

Tiny = Callable[..., Path]
CPU = torch.device("cpu")


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def turned(x: Tensor, theta: float = 10000.0) -> Tensor:
    """Rotary positions 0, 1, ...: x [T, heads, H]."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x)).double()[:, None] * theta ** -(torch.arange(half).double() / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def dense(t: dict[str, Tensor], embedded: Tensor, aux: Tensor, *, before: bool) -> tuple[Tensor, Tensor]:
    """The paper's head in double: returns what it hands on [T, D], and that normalised."""
    t = {name.removeprefix("midlayer."): value.double() for name, value in t.items()}
    hidden = aux.double() @ t["fc.weight"].T
    normed = rms(hidden, t["hidden_norm.weight"])
    both = torch.cat((rms(embedded.double(), t["input_layernorm.weight"]), normed), dim=-1)
    count, size = len(both), heads.SIZE["head_dim"]
    q, k, v = ((both @ t[f"self_attn.{n}_proj.weight"].T).view(count, -1, size) for n in "qkv")
    q, k = turned(q), turned(k)
    scores = torch.einsum("tnh,skh->nts", q, k) * size**-0.5  # one key head
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
    seen = torch.einsum("nts,skh->tnh", scores.softmax(-1), v).flatten(1)
    x = (normed if before else hidden) + seen @ t["self_attn.o_proj.weight"].T
    y = rms(x, t["post_attention_layernorm.weight"])
    gate = y @ t["mlp.gate_proj.weight"].T
    x = x + (gate * gate.sigmoid() * (y @ t["mlp.up_proj.weight"].T)) @ t["mlp.down_proj.weight"].T
    return x, rms(x, t["norm.weight"])


@pytest.mark.parametrize("variant", [{}, {"norm_before_residual": True, "norm_output": True}])
@pytest.mark.parametrize("own_embedding", [False, True])
def test_the_head_is_the_papers(variant: dict[str, bool], own_embedding: bool, tiny: Tiny, tmp_path: Path) -> None:
    target = heads.our_model(tiny("llama3"))
    tensors = heads.random_tensors(60, 320, 77)
    if own_embedding:
        tensors["embed_tokens.weight"] = torch.randn(320, 60)
    path = heads.write(tmp_path / "head", tiny("llama3"), tensors, **variant)
    head = weights.load(path, target, dtype=torch.float32, device=CPU)
    assert target.aux_hidden_state_layers == heads.AUX
    ids = torch.randint(0, 320, (37,), generator=torch.Generator().manual_seed(1))
    aux = torch.randn(37, 180, generator=torch.Generator().manual_seed(2)) * 3
    heads.pages_of(head, 37)
    with torch.no_grad():
        logits, onward = head(
            ids, torch.arange(37).int(), heads.context_of(head, 37), torch.arange(37), head.combine(aux)
        )
    table = tensors.get("embed_tokens.weight", target.model.embed_tokens.weight)
    x, normed = dense(tensors, table[ids], aux, before=bool(variant))
    torch.testing.assert_close(onward.double(), normed if variant else x, rtol=0, atol=2e-5)
    named = tensors["d2t"] + torch.arange(77)
    torch.testing.assert_close(
        logits[:, named].double(), normed @ tensors["lm_head.weight"].double().T, rtol=0, atol=2e-5
    )
    others = torch.ones(320).bool()
    others[named] = False
    assert (logits[:, others] == float("-inf")).all()


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_hidden_states_are_those_of_transformers(name: str, tiny: Tiny) -> None:
    from transformers import AutoModelForCausalLM

    from pilotage.models.common.paging import PagedSession

    path = tiny(name)
    ours = heads.our_model(path)
    ours.set_aux_hidden_state_layers((3, 0, 2))
    ids = torch.randint(0, 320, (29,), generator=torch.Generator().manual_seed(5)).tolist()
    kept: list[Tensor] = []

    def call(*arguments: Any) -> Tensor:
        logits, _, aux = ours(*arguments, return_hidden=True)
        kept.append(aux)
        return logits

    PagedSession(model=ours, num_requests=1, max_tokens=32, call=call).step({0: ids})
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        states = reference(torch.tensor([ids]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer][0] for layer in (0, 2, 3)], dim=-1)
    torch.testing.assert_close(kept[0], expected, rtol=0, atol=2e-5)


def test_a_model_that_hands_out_nothing_says_so(tiny: Tiny) -> None:
    with pytest.raises(Unsupported, match="Gemma3ForCausalLM: its layers' hidden states"):
        heads.our_model(tiny("gemma3")).set_aux_hidden_state_layers((1, 2))
    with pytest.raises(Unsupported, match="after \\[9\\] layers; the model has 4"):
        heads.our_model(tiny("llama3")).set_aux_hidden_state_layers((9,))


@pytest.mark.parametrize(
    "config, said",
    [
        ({"num_hidden_layers": 2}, "2 layers"),
        ({"fc_norm": True}, "fc_norm=True"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False"),
        ({"speculators_model_type": "eagle3"}, "speculators_model_type"),
        ({"target_hidden_size": 64}, "hidden states of 64 channels"),
    ],
)
def test_other_variants_are_refused_by_name(config: dict[str, Any], said: str, tiny: Tiny, tmp_path: Path) -> None:
    path = heads.write(tmp_path / "head", tiny("llama3"), heads.random_tensors(60, 320, 77), **config)
    with pytest.raises(Unsupported, match=said):
        weights.load(path, heads.our_model(tiny("llama3")), dtype=torch.float32, device=CPU)


def test_a_vocabulary_that_contradicts_itself(tiny: Tiny, tmp_path: Path) -> None:
    good = heads.random_tensors(60, 320, 77)
    wrong = {
        "without d2t": {name: value for name, value in good.items() if name != "d2t"},
        "77 different tokens": good | {"d2t": -torch.arange(77)},
        "name different tokens": good | {"t2d": ~good["t2d"]},
    }
    for number, (said, tensors) in enumerate(wrong.items()):
        path = heads.write(tmp_path / str(number), tiny("llama3"), tensors)
        with pytest.raises(WeightError, match=said):
            weights.load(path, heads.our_model(tiny("llama3")), dtype=torch.float32, device=CPU)


def test_layers_by_both_keys() -> None:
    base = json.loads('{"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}')
    assert Eagle3Config.from_json(base | {"eagle_aux_hidden_state_layer_ids": [4, 1]}).aux_layers == (1, 4)
    assert Eagle3Config.from_json(base).aux_layers is None
