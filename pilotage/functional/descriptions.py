"""What the arguments of each operator look like, for domains, `pilotage kernels explain` and `check`."""

from __future__ import annotations

import pilotage.functional.attention
import pilotage.functional.latent
import pilotage.functional.moe
import pilotage.functional.norm
import pilotage.functional.projections
import pilotage.functional.rotary
import pilotage.functional.sampling  # noqa: F401  the operators exist before they are described
from pilotage.functional.registry import describe

_TOKENS = {"token_to_req": "T", "positions": "T", "query_start_loc": "B+1"}
_CACHE = {"k_cache": "P K C H", "v_cache": "P K C H"}
_REQUESTS = {"block_table": "B M", "seq_lens": "B"}
_SCALES = {"k_scale": "", "v_scale": ""}
_PAGED = {"q": "T N H", **_CACHE, **_TOKENS, **_REQUESTS, "sinks": "N", **_SCALES}
_ATTENTION = {"scale": (0.125,), "window": (None, 7), "softcap": (None, 5.0)}
_LINEAR = {"x": "... D", "weight": "F D", "bias": "F"}
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")

describe(
    "rms_norm", {"x": "... D", "weight": "D"}, eps=(1e-6, 1e-5), unit_offset=(False, True), round_once=(False, True)
)
describe("rotary", {"q": "... N H", "k": "... K H", "cos": "... R", "sin": "... R"})
describe("embedding", {"input_ids": "...", "weight": "V D"}, scale=(None, 1.5))
describe("linear", _LINEAR)
describe("o_proj", _LINEAR)
describe("lm_head", _LINEAR)
_FUSED = "(N+2*K)*H"
describe("qkv_proj", {"x": "... D", "weight": f"{_FUSED} D", "bias": _FUSED}, sizes=(("N*H", "K*H", "K*H"),))
describe("gated_activation", {"gate": "... F", "up": "... F"}, activation=_ACTIVATIONS)
describe(
    "mlp",
    {"x": "... D", "gate_up_weight": "2*F D", "down_weight": "D F", "gate_up_bias": "2*F", "down_bias": "D"},
    activation=_ACTIVATIONS,
)
describe("softcap", {"x": "... V"}, cap=(30.0, 1.0))
describe(
    "write_kv",
    {**_CACHE, "k": "T K H", "v": "T K H", "slot_mapping": "T"},
)
describe("write_rows", {"cache": "P K C H", "rows": "T K H", "slot_mapping": "T"})
describe("quantise_kv", {"x": "T K H", "scale": ""})
describe("flash_attention", {"q": "T N H", "k": "T K H", "v": "T K H", **_TOKENS, "sinks": "N"}, **_ATTENTION)
describe("segmented_attention", _PAGED, **_ATTENTION, kv_segment_size=(0, 16))
describe("attention_decode", _PAGED, **_ATTENTION)
describe("router_logits", {"hidden_states": "... D", "weight": "E D", "bias": "E"})
describe(
    "expert_affinities",
    {"logits": "... E", "correction": "E"},
    top_k=(2, 1),
    rule=("softmax_topk", "topk_softmax", "sigmoid_groups"),
    renormalize=(False, True),
)
describe(
    "experts",
    {
        "x": "... D",
        "affinities": "... E",
        "gate_up_weight": "E 2*F D",
        "down_weight": "E D F",
        "gate_up_bias": "E 2*F",
        "down_bias": "E D",
    },
    top_k=(2, 1),
    activation=("silu", "gelu_pytorch_tanh"),
    interleaved=(False, True),
)
describe("latent_queries", {"q": "... N H", "kv_b_weight": "N*(H+J) L"})
describe("latent_values", {"latents": "... N L", "kv_b_weight": "N*(skip+J) L"}, skip=(8,))
describe("sample_tokens", {"logits": "T V", "sampling_params": "T 3", "noise": "T"})
describe("greedy_tokens", {"logits": "T V"})
