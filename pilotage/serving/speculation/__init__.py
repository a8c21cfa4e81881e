"""Speculative decoding: who proposes drafts, and how they are verified.

A request with drafts computes them together with its last token in one decode graph (`tokens_per_req` tokens a
request), which returns logits for each of them. vLLM's rejection sampler decides how many stand; what does not is
computed again at the same positions, over the same slots of the cache.
"""

from __future__ import annotations

from pilotage.serving.speculation.ngram import Ngram
from pilotage.serving.speculation.proposer import (
    DRAFTS_KEY,
    Proposer,
    load,
    named,
    needs_model,
    proposer,
    require_supported,
    tokens_per_req,
)
from pilotage.serving.speculation.rejection import metadata, register

__all__ = [
    "DRAFTS_KEY",
    "Ngram",
    "Proposer",
    "load",
    "metadata",
    "named",
    "needs_model",
    "proposer",
    "register",
    "require_supported",
    "tokens_per_req",
]
