"""Every model against its transformers twin: tiny, perturbed, with scattered pages that were NaN before they were
written. Streams are longer than three sliding windows, so that masks, patterns and bases show."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from twins import ATTENTION, BLOCK_SIZE, NAMES, hf_logits, hf_model, our_model, paged_logits, prompts

import pilotage.functional as NF
from pilotage.accuracy.testing import assert_close_three_way
from pilotage.core.errors import PilotageError
from pilotage.models.common import BackendConfig
from pilotage.models.common.paging import PagedSession, build_metadata
from pilotage.nn import unpack

LENGTHS = (67, 6, 33)  # the tiny models' window is 16
PREFILLS: dict[str, dict[str, Any]] = {
    "packed": {},
    "nothing cached": {"fresh": True},
    "chunked": {"chunk": 13},
    "chunked, in segments": {"chunk": 13, "kv_segment_size": 4 * BLOCK_SIZE},
}
TOLERANCE = 4e-5
Tiny = Callable[..., Path]


def session_of(model: Any, **more: Any) -> PagedSession:
    return PagedSession(model=model, num_requests=4, max_tokens=96, block_size=BLOCK_SIZE, **more)


# Mistral is Llama's layer with Gemma's window, and Mixtral that with Qwen's experts: both whole in `make test-all`.
COVERED = [pytest.param(name, marks=pytest.mark.slow) if name in ("mistral", "mixtral") else name for name in NAMES]


@pytest.fixture(scope="module", params=COVERED)
def twin(request: pytest.FixtureRequest, tiny: Tiny) -> tuple[Path, list[list[int]], list[torch.Tensor], Any]:
    path = tiny(request.param)
    streams = prompts(LENGTHS)
    return path, streams, hf_logits(hf_model(path), streams), our_model(path)


@pytest.mark.parametrize("implementation", ["torch", "sdpa"])
@pytest.mark.parametrize("prefill", PREFILLS)
def test_fp32_logits_equal_hf(twin: Any, prefill: str, implementation: str) -> None:
    _, streams, expected, model = twin
    chosen = {name: implementation for name in ATTENTION[:3]} | {"write_kv": "torch"}
    with NF.forced(chosen):
        got = paged_logits(session_of(model), streams, **PREFILLS[prefill])
    for one, reference in zip(got, expected, strict=True):
        # The largest logit is about 12, so this is 3e-6 of it; `test_planted_faults_show` has the other side.
        torch.testing.assert_close(one, reference, rtol=0, atol=TOLERANCE)
        assert torch.equal(one.argmax(-1), reference.argmax(-1))


def test_bf16_errs_no_more_than_hf_in_bf16(twin: Any) -> None:
    path, streams, expected, _ = twin
    baseline = hf_logits(hf_model(path, torch.bfloat16), streams)
    got = paged_logits(session_of(our_model(path, torch.bfloat16)), streams, chunk=24)
    kept = settled(path, streams)
    assert kept.float().mean() > 0.5
    assert_close_three_way(
        target=torch.cat(got)[kept].float(),
        expected=torch.cat(expected)[kept],
        baseline=torch.cat(baseline)[kept].float(),
        name="logits",
    )


def settled(path: Path, streams: list[list[int]]) -> torch.Tensor:
    """Tell the rows whose experts bf16 can tell apart; at a tie two sound computations go separate ways."""
    model = hf_model(path)
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    found: list[torch.Tensor] = []
    hooks = [module.register_forward_hook(lambda *call: found.append(_scores(call[2]))) for module in routers]
    kept = []
    for stream in streams:
        found.clear()
        hf_logits(model, [stream])
        row = torch.ones(len(stream), dtype=torch.bool)
        for scores in found:
            top = scores.topk(model.config.num_experts_per_tok + 1).values
            row &= (top[:, -2] - top[:, -1]) > 2.0**-6 * scores.abs().amax(-1)
        kept.append(row)
    for hook in hooks:
        hook.remove()
    return torch.cat(kept)


def _scores(output: Any) -> torch.Tensor:
    scores: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return scores.detach().flatten(0, -2).float()


def test_packed_projections_change_nothing(twin: Any) -> None:
    path, streams, _, model = twin
    separate = our_model(path)
    for layer in separate.model.layers:
        # Latent attention has no projections that share an input and are divided.
        alone = getattr(layer.self_attn, "kv_source", None) is not None  # the queries of a layer without keys
        query = None if alone else getattr(layer.self_attn, "q_proj", None)
        for linear in (query, getattr(layer.mlp, "gate_proj", None)):
            if linear is not None:  # experts have none
                assert linear.__dict__["packed"] is not None
                unpack(linear)
    packed_logits = paged_logits(session_of(model), streams)
    for one, other in zip(packed_logits, paged_logits(session_of(separate), streams), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


def test_one_graph_per_bucket_and_none_after(twin: Any) -> None:
    _, streams, expected, model = twin
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    got = paged_logits(session_of(model, call=compiled), streams, chunk=13, bucket=48)
    for one, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(one, reference, rtol=0, atol=TOLERANCE)
    assert counters["stats"]["unique_graphs"] == 2  # one prefill bucket, one decode bucket; 11 steps
    assert not counters["graph_break"]
    with torch.compiler.set_stance("fail_on_recompile"):
        paged_logits(session_of(model, call=compiled), prompts((40, 3, 21), seed=1), chunk=13, bucket=48)


def test_pages_of_other_requests_do_not_matter(twin: Any) -> None:
    """The same request alone and beside others has the same bits: nothing of a neighbour leaks in."""
    _, streams, _, model = twin
    with NF.forced({name: "sdpa" for name in ATTENTION[:3]}):
        together = paged_logits(session_of(model), streams, bucket=160)
        alone = paged_logits(session_of(model), streams[:1], bucket=160)
    torch.testing.assert_close(together[0], alone[0], rtol=0, atol=1e-5)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with every bias": ("llama3", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied, one key/value head": ("llama3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama, linear RoPE": (
        "llama3",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 3e4, "factor": 4.0}},
    ),
    "qwen2 with sliding layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    ),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "qwen3, YaRN": (
        "qwen3",
        {
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen3_moe, kept probabilities as they are, experts in every second layer": (
        "qwen3_moe",
        {"norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 2},
    ),
    "qwen3_moe with sliding layers": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 9},
    ),
    "mixtral with a window, one expert a token": ("mixtral", {"sliding_window": 11, "num_experts_per_tok": 1}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "gemma2 without bounds": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gpt_oss without scaled RoPE": (
        "gpt_oss",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 15e4}, "num_experts_per_tok": 4},
    ),
    "deepseek_v3, queries at once": ("deepseek_v3", {"q_lora_rank": None}),
    "deepseek_v3 with biases, halves rotated, weights as they are": (
        "deepseek_v3",
        {"attention_bias": True, "rope_interleave": False, "norm_topk_prob": False},
    ),
    "deepseek_v3 without scaled RoPE, one group": (
        "deepseek_v3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "n_group": 1, "topk_group": 1},
    ),
    "gemma4 with experts, nothing shared, no inputs of the layers": (
        "gemma4",
        {
            **{"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 44},
            **{"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        },
    ),
    "gemma4, values of their own": ("gemma4", {"attention_k_eq_v": False, "use_double_wide_mlp": False}),
    "gemma3 with capped logits": ("gemma3", {"final_logit_softcapping": 3.0}),
    "gemma3, scaled RoPE in full layers": (
        "gemma3",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            }
        },
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_the_config_equal_hf(tiny: Tiny, variant: str) -> None:
    name, overrides = VARIANTS[variant]
    path = tiny(name, **overrides)
    streams = prompts(LENGTHS)
    got = torch.cat(paged_logits(session_of(our_model(path)), streams, chunk=24))
    torch.testing.assert_close(got, torch.cat(hf_logits(hf_model(path), streams)), rtol=0, atol=TOLERANCE)


def test_plain_torch_layers_give_the_same(twin: Any) -> None:
    _, streams, expected, model = twin
    plain = type(model)(model.config, BackendConfig(linear="torch"))
    plain.load_state_dict(model.state_dict())
    plain.pack()  # finds nothing that it may pack
    got = paged_logits(session_of(plain), streams)
    torch.testing.assert_close(torch.cat(got), torch.cat(expected), rtol=0, atol=TOLERANCE)


def test_the_other_arguments_of_forward(twin: Any) -> None:
    """A plain dictionary as metadata, hidden rows, embedded prompts and a mask of the logits."""
    _, streams, expected, model = twin
    if getattr(model.config, "per_layer_input_size", 0):
        none = torch.zeros(1)
        with pytest.raises(PilotageError, match="token ids"):
            model(none, none, {}, none, inputs_embeds=none, is_token_ids=none)
        return
    session, ids = session_of(model), streams[2]
    context = build_metadata(
        session.layer_names,
        num_computed=[0],
        num_new=[len(ids)],
        block_table=session.block_table[:1],
        block_size=BLOCK_SIZE,
        num_tokens=40,
    )
    input_ids = torch.tensor(ids + [0] * (40 - len(ids)))
    embeds, is_token = model.embed_input_ids(input_ids), torch.arange(40) % 3 != 0
    mask = torch.rand(1, 320) > 0.5
    last = torch.tensor([len(ids) - 1])
    with torch.no_grad():
        logits, hidden = model(
            torch.where(is_token, input_ids, 0),
            context["positions"],
            {name: context[name] for name in session.layer_names},
            last,
            logit_mask=mask,
            rank=0,
            inputs_embeds=torch.where(is_token[:, None], torch.nan, embeds),
            is_token_ids=is_token,
            return_hidden=True,
        )
    reference = torch.where(mask[0], expected[2][-1], -torch.inf)
    torch.testing.assert_close(logits[0], reference, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(model.compute_logits(hidden[: len(ids)]), expected[2], rtol=0, atol=TOLERANCE)


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "window off by one": ("gemma3", {"sliding_window": 17}),
    "one RoPE base for both kinds": (
        "gemma3",
        {
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 1e6} for kind in ("sliding_attention", "full_attention")
            }
        },
    ),
    "head size as the scale": ("gemma3", {"query_pre_attn_scalar": 20}),
    "scaled frequencies of the part that turns": (
        "gemma4",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            }
        },
    ),
    "exact gelu": ("gemma3", {"hidden_activation": "gelu"}),
    "norm epsilon": ("qwen3", {"rms_norm_eps": 1e-5}),
    "neighbouring channels as halves": ("deepseek_v3", {"rope_interleave": False}),
    "YaRN's factor on the scores dropped": (
        "deepseek_v3",
        {
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 2e4, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0},
                **{"attention_factor": (0.1 * 2.0794415 + 1) / (0.07 * 2.0794415 + 1)},
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "routing weights as they are": ("deepseek_v3", {"norm_topk_prob": False}),
    "all groups of experts open": ("deepseek_v3", {"topk_group": 4}),
    "factor of the routed experts": ("deepseek_v3", {"routed_scaling_factor": 1.0}),
    "the model's norm epsilon in the latents' norms": ("deepseek_v3", {"rms_norm_eps": 1e-6}),
    "RoPE scaling dropped": ("llama3", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_show(tiny: Tiny, tmp_path: Path, fault: str) -> None:
    name, edit = FAULTS[fault]
    path = tiny(name)
    for file in path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | edit))
    streams = prompts(LENGTHS)
    expected = torch.cat(hf_logits(hf_model(path), streams))
    got = torch.cat(paged_logits(session_of(our_model(tmp_path)), streams))
    assert (got - expected).abs().max() > 2 * TOLERANCE
