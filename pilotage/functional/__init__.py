"""The operators: `import pilotage.functional as NF`.

Each is a plain-torch definition plus whatever faster implementations have registered for it; `explain()` says what
would run for a call, `receipt()` what did. They compute one rank's share and know nothing of process groups.
"""

from pilotage.functional import descriptions, fused, native, nki, sdpa, triton_kernels  # noqa: F401  they register
from pilotage.functional.attention import (
    KV_8BIT,
    attention_decode,
    flash_attention,
    quantise_kv,
    segmented_attention,
    write_kv,
    write_rows,
)
from pilotage.functional.call import Call, TensorSpec
from pilotage.functional.domain import Domain, Emulator, Limit
from pilotage.functional.latent import latent_queries, latent_values
from pilotage.functional.moe import expert_affinities, experts, router, router_logits
from pilotage.functional.native import load_kernels
from pilotage.functional.norm import rms_norm
from pilotage.functional.padding import likely_only, only_wanted, padded
from pilotage.functional.projections import (
    ACTIVATIONS,
    activation_function,
    embedding,
    gated_activation,
    linear,
    lm_head,
    mlp,
    o_proj,
    qkv_proj,
    softcap,
)
from pilotage.functional.receipts import count_fallbacks, receipt, reset_receipt
from pilotage.functional.registry import DEFINITION, describe, explain, forced, kernels_disabled, operator, register
from pilotage.functional.rotary import RopeFrequencies, rope_frequencies, rope_table, rotary
from pilotage.functional.sampling import greedy_tokens, sample_tokens
from pilotage.functional.screen import Screen, screened

__all__ = [
    "ACTIVATIONS",
    "DEFINITION",
    "KV_8BIT",
    "Call",
    "Domain",
    "Emulator",
    "Limit",
    "RopeFrequencies",
    "Screen",
    "TensorSpec",
    "activation_function",
    "attention_decode",
    "count_fallbacks",
    "describe",
    "embedding",
    "expert_affinities",
    "experts",
    "explain",
    "flash_attention",
    "forced",
    "gated_activation",
    "greedy_tokens",
    "kernels_disabled",
    "latent_queries",
    "latent_values",
    "likely_only",
    "linear",
    "lm_head",
    "load_kernels",
    "mlp",
    "o_proj",
    "only_wanted",
    "operator",
    "padded",
    "qkv_proj",
    "quantise_kv",
    "receipt",
    "register",
    "reset_receipt",
    "rms_norm",
    "rope_frequencies",
    "rope_table",
    "rotary",
    "router",
    "router_logits",
    "sample_tokens",
    "screened",
    "segmented_attention",
    "softcap",
    "write_kv",
    "write_rows",
]
