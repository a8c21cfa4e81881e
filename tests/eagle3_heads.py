"""Tiny EAGLE3 checkpoints: random weights, and a head fitted to the served model so that it is right at times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from pilotage.models import registry
from pilotage.models.common.paging import build_metadata
from pilotage.models.eagle3 import weights

AUX = (1, 2, 3)
SIZE = {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 12, "intermediate_size": 84}


def our_model(path: Path) -> Any:
    """Our model of a checkpoint, as the worker builds it, in fp32."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    entry = registry.find(config.architectures)
    assert entry is not None
    with torch.device("meta"):
        model = entry.load().from_configs(config)
    model.load_weights(path)
    return model


def random_tensors(
    hidden: int, vocab: int, draft_vocab: int, states: int = len(AUX), seed: int = 0
) -> dict[str, Tensor]:
    """All tensors of a checkpoint but its embedding, far from what an initialisation would give."""
    draw = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=draw) * columns**-0.5

    def norm() -> Tensor:
        return 1 + 0.3 * torch.randn(hidden, generator=draw)

    heads, kv, head = SIZE["num_attention_heads"], SIZE["num_key_value_heads"], SIZE["head_dim"]
    inner = SIZE["intermediate_size"]
    offsets = torch.randperm(vocab, generator=draw)[:draft_vocab].sort().values
    known = torch.zeros(vocab, dtype=torch.bool)
    known[offsets] = True
    return {
        "d2t": offsets - torch.arange(draft_vocab),
        "t2d": known,
        "fc.weight": matrix(hidden, states * hidden),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": matrix(heads * head, 2 * hidden) * 1.5,
        "midlayer.self_attn.k_proj.weight": matrix(kv * head, 2 * hidden) * 1.5,
        "midlayer.self_attn.v_proj.weight": matrix(kv * head, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": matrix(hidden, heads * head),
        "midlayer.mlp.gate_proj.weight": matrix(inner, hidden),
        "midlayer.mlp.up_proj.weight": matrix(inner, hidden),
        "midlayer.mlp.down_proj.weight": matrix(hidden, inner),
        "norm.weight": norm(),
        "lm_head.weight": matrix(draft_vocab, hidden),
    }


def write(directory: Path, target: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """Write a checkpoint of a head for the model in `target`."""
    served = json.loads((target / "config.json").read_text())
    directory.mkdir(parents=True, exist_ok=True)
    text = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "hidden_size": served["hidden_size"],
        "vocab_size": served["vocab_size"],
        "draft_vocab_size": len(tensors["lm_head.weight"]),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(AUX)},
        **SIZE,
        **config,
    }
    (directory / "config.json").write_text(json.dumps(text))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def pages_of(head: Any, tokens: int) -> None:
    """Give the head a cache of one request."""
    spec = head.get_kv_spec().layers[0]
    shape = (tokens, spec.num_kv_heads, 1, spec.head_size)
    head.bind_kv_cache({spec.name: [torch.full(shape, torch.nan), torch.full(shape, torch.nan)]})


def context_of(head: Any, tokens: int) -> Any:
    """The metadata of one request's first tokens, in pages of one slot."""
    return build_metadata(
        [head.get_kv_spec().layers[0].name],
        num_computed=[0],
        num_new=[tokens],
        block_table=torch.arange(tokens)[None],
        block_size=1,
        num_tokens=tokens,
    )


@torch.no_grad()
def fitted(
    directory: Path, target: Path, texts: Sequence[Sequence[int]], begins: Sequence[int], states: Sequence[Tensor]
) -> Path:
    """Write a head whose last matrix is fitted to what follows in `texts`.

    Args:
        directory: where it goes.
        target: the served model's checkpoint.
        texts: what the served model says, prompts included.
        begins: where in each text the served model begins.
        states: of each text [tokens, states * D], the served model's hidden states at `AUX`.
    """
    config = json.loads((target / "config.json").read_text())
    tensors = random_tensors(config["hidden_size"], config["vocab_size"], 250)
    write(directory, target, tensors)
    head = weights.load(directory, our_model(target), dtype=torch.float32, device=torch.device("cpu"))
    assert head.target_ids is not None
    rows, wanted = [], []
    for text, begin, aux in zip(texts, begins, states, strict=True):
        count = len(text) - 2
        pages_of(head, count)
        ids = torch.tensor(text[1:-1])
        kept: list[Tensor] = []
        handle = head.norm.register_forward_hook(lambda module, given, out, kept=kept: kept.append(out))
        head(ids, torch.arange(count).int(), context_of(head, count), torch.arange(1), head.combine(aux[:count]))
        handle.remove()
        first = max(begin - 2, 0)
        rows.append(kept[0][first:])
        wanted.append(torch.tensor(text[2 + first :]))
    x, y = torch.cat(rows).double(), torch.cat(wanted)
    named = torch.nn.functional.one_hot(y, config["vocab_size"]).double()[:, head.target_ids]
    solved = torch.linalg.solve(x.T @ x + 0.05 * torch.eye(x.shape[1]).double(), x.T @ named).T.float()
    return write(directory, target, tensors | {"lm_head.weight": 30 * solved.contiguous()})
