"""Smoke: the weights proven, the buckets compiled, and the first tokens compared with Hugging Face."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotage.core.nouns import Status, Verdict, worst

TEXTS = ("Hello, my name is", "The capital of France is", "def fibonacci(n):\n")
NEW_TOKENS = 24
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Smoke:
    """What a smoke test found.

    Attributes:
        model: MODEL as the user wrote it.
        dtype: serving dtype.
        load_s: seconds to load the weights; start_s: to the first token, everything included.
        prompts: one entry a prompt, as in the JSON.
        receipt: the engine's: operators and buckets.
        verdicts: of the ledger, the graphs and the tokens.
        ledger: counts of the ledger, or None when it was not proven here.
    """

    model: str
    dtype: str
    load_s: float | None
    start_s: float
    prompts: list[dict[str, Any]]
    receipt: Mapping[str, Any]
    verdicts: list[Verdict]
    ledger: Mapping[str, Any] | None

    @property
    def status(self) -> Status:
        return worst([verdict.status for verdict in self.verdicts])

    @property
    def buckets(self) -> list[dict[str, Any]]:
        return list(self.receipt.get("buckets") or [])

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "dtype": self.dtype,
            "status": self.status.value,
            "load_s": self.load_s,
            "start_s": round(self.start_s, 3),
            "compile_s": self.receipt.get("compile_s"),
            "buckets": self.buckets,
            "prompts": self.prompts,
            "receipt": dict(self.receipt),
            "ledger": dict(self.ledger) if self.ledger is not None else None,
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
        }


def smoke(model: str, *, dtype: str | None = None, prove: bool = True, say: Say = lambda text: None) -> Smoke:
    """Prove the weights, start the engine, generate, and compare.

    Args:
        model: MODEL of the command line.
        dtype: serving dtype; None takes the shared setting.
        prove: draw up the ledger first; False when it has just been done.
        say: told what is going on.

    Raises:
        PilotageError: whatever keeps the model from being served.
    """
    from pilotage.arch import source
    from pilotage.serving import settings
    from pilotage.voyage import agreement

    dtype = dtype or settings.DTYPE
    path = source.resolve(model)
    verdicts: list[Verdict] = []
    counts = None
    if prove and _has_package(path):  # without one transformers loads, and the fallback refuses missing tensors
        from pilotage.models.proof import weight_ledger

        say("proving the weights")
        ledger = weight_ledger(model)
        counts = ledger.counts()
        verdicts += ledger.verdicts()

    say("starting the engine and compiling its buckets")
    spoken = _speak(path, dtype)
    proof = spoken.receipt.get("fallback")
    verdicts.append(_graphs_verdict(spoken.receipt, spoken.graphs_before) if proof is None else fallback_verdict(proof))

    say("asking Hugging Face for the same tokens")
    found = _compare(path, dtype, [(prompt, said.tokens) for prompt, said in zip(spoken.ids, spoken.said, strict=True)])
    verdicts.append(agreement.verdict(found, dtype=dtype))
    prompts = [
        {
            "prompt": text,
            "prompt_tokens": len(ids),
            "past_window": spoken.window is not None and len(ids) > spoken.window,
            "token_ids": list(said.tokens),
            "text": said.text,
            "agrees_with_hf": one.agrees,
            "differing": one.differing,
        }
        for text, ids, said, one in zip(spoken.texts, spoken.ids, spoken.said, found, strict=True)
    ]
    return Smoke(
        model=model,
        dtype=dtype,
        load_s=spoken.receipt.get("load_s"),
        start_s=spoken.start_s,
        prompts=prompts,
        receipt=spoken.receipt,
        verdicts=verdicts,
        ledger=counts,
    )


@dataclass(frozen=True, kw_only=True)
class _Spoken:
    texts: list[str]
    ids: list[list[int]]
    said: list[Any]
    receipt: Mapping[str, Any]
    graphs_before: int
    start_s: float
    window: int | None


def _speak(path: Path, dtype: str) -> _Spoken:
    """Start the engine on the prompts; it has ended, and its memory is free, when this returns."""
    from pilotage.arch import source
    from pilotage.arch.spec import ArchSpec
    from pilotage.serving import settings
    from pilotage.serving.greedy import greedy
    from pilotage.serving.launch import engine

    spec = ArchSpec.from_hf(source.load_config(str(path)))
    arguments = settings.shared(path, dtype)
    has_tokenizer = any((path / name).is_file() for name in _TOKENIZER_FILES)
    if not has_tokenizer:
        arguments["skip_tokenizer_init"] = True
    began = time.perf_counter()
    with engine(path, **arguments) as llm:
        start_s = time.perf_counter() - began
        tokenizer = llm.get_tokenizer() if has_tokenizer else None
        texts, ids = _prompts(tokenizer, spec, longest=arguments["max_model_len"] - NEW_TOKENS)
        before = len(llm.collective_rpc("receipt")[0]["buckets"])
        said = greedy(llm, ids, new_tokens=NEW_TOKENS, detokenize=has_tokenizer)
        receipt = llm.collective_rpc("receipt")[0]
    return _Spoken(
        texts=texts,
        ids=ids,
        said=said,
        receipt=receipt,
        graphs_before=before,
        start_s=start_s,
        window=spec.sliding_window,
    )


def _prompts(tokenizer: Any, spec: Any, *, longest: int) -> tuple[list[str], list[list[int]]]:
    """The short texts, and one prompt that reaches past the sliding window where the model has one."""
    from pilotage.accuracy import prompts

    sizes = prompts.lengths(sliding_window=spec.sliding_window, max_position=spec.max_position).prompts
    if tokenizer is None:
        bos = spec.bos_token_id[0] if isinstance(spec.bos_token_id, list | tuple) else spec.bos_token_id
        wanted = [min(size, longest) for size in sizes]
        ids = prompts.token_ids(None, wanted, vocab_size=spec.vocab_size, bos=bos)
        return [f"{len(one)} seeded ids (no tokenizer)" for one in ids], ids
    # As the tokenizer encodes by itself, so that a missing BOS is the tokenizer's word and not ours.
    ids = [list(tokenizer.encode(text)) for text in TEXTS]
    starts_with = {one[0] for one in ids}
    bos = tokenizer.bos_token_id if starts_with == {tokenizer.bos_token_id} else None
    size = min(sizes[-1], longest)
    (long,) = prompts.token_ids(
        lambda text: list(tokenizer.encode(text, add_special_tokens=False)), [size], vocab_size=spec.vocab_size, bos=bos
    )
    return [*TEXTS, tokenizer.decode(long, skip_special_tokens=True)], [*ids, long]


def _has_package(path: Path) -> bool:
    from pilotage.arch import source
    from pilotage.models import registry

    return registry.find(source.load_config(str(path)).architectures or []) is not None


def fallback_verdict(proof: Mapping[str, Any]) -> Verdict:
    """Say that the day-zero fallback served, and what it proved when it was loaded."""
    worst = max(proof["worst"].values())
    return Verdict(
        claim=(
            "No model package: served by the day-zero fallback, slow and uncompiled; at load its logits on pages "
            "equalled Hugging Face's own forward."
        ),
        metric="largest relative L2 difference of a row of logits",
        estimate=worst,
        bound=proof["bound"],
        bound_source=f"rounding in {proof['dtype']}",
        n=proof["rows"],
        status=Status.PASS if worst <= proof["bound"] else Status.FAIL,
        evidence=dict(proof),
    )


def _graphs_verdict(receipt: Mapping[str, Any], before: int) -> Verdict:
    buckets = receipt.get("buckets") or []
    late = buckets[before:]
    return Verdict(
        claim="Every graph was compiled before the first request, and none after it.",
        metric="graphs compiled while serving",
        estimate=float(len(late)),
        bound=0.0,
        bound_source="a bucket is compiled at start-up or never",
        n=len(buckets),
        status=Status.FAIL if late else Status.PASS if buckets else Status.NOT_MEASURED,
        evidence={"late": late},
    )


def _compare(path: Path, dtype: str, pairs: Sequence[tuple[list[int], Sequence[int]]]) -> list[Any]:
    import torch

    from pilotage.accuracy.arms.base import Stream
    from pilotage.accuracy.arms.hf import HFArm, load
    from pilotage.voyage.agreement import agreement

    streams = [
        Stream(
            tokens=(*ids, *said),
            prompt=len(ids),
            positions=tuple(range(len(ids) - 1, len(ids) + len(said) - 1)),
        )
        for ids, said in pairs
    ]

    def logits(kind: torch.dtype) -> list[Any]:
        arm = HFArm(load(path, kind), str(kind))
        return arm.observe(streams).logits

    expected = logits(torch.float32)
    baseline = [None] * len(streams) if dtype == "float32" else logits(getattr(torch, dtype))
    return [
        agreement(stream.tokens, stream.prompt, rows, noise)
        for stream, rows, noise in zip(streams, expected, baseline, strict=True)
    ]
