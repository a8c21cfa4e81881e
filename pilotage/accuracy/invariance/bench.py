"""One started engine, with the rows that all of its conditions are held against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotage.accuracy import prompts
from pilotage.accuracy.invariance import plans, rows, tokens
from pilotage.accuracy.invariance import streams as token_streams
from pilotage.accuracy.invariance.judge import Result, judge
from pilotage.accuracy.invariance.noise import Noise
from pilotage.accuracy.invariance.plans import Plan
from pilotage.accuracy.invariance.rows import Rows
from pilotage.accuracy.invariance.streams import DRAFTS, Sizes, Streams
from pilotage.core.nouns import Status, Verdict

# Logits that may be held at a time for one condition; a model with a large vocabulary is compared at fewer positions.
MAX_LOGITS = 96 * 1024 * 1024

SHARP = "float32, eager"
SERVED = "bfloat16, compiled"
UNCOMPILED = "bfloat16, eager"
RANKS = "float32, compiled, 2 ranks"
SERVER = "bfloat16, compiled, vllm serve"
DRAFTING = "float32, eager, drafts"
ENGINES = (SHARP, DRAFTING, RANKS, SERVED, UNCOMPILED, SERVER)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """An engine: its name, its sizes, and the arguments of `launch.engine`."""

    name: str
    dtype: str
    sizes: Sizes
    options: Mapping[str, Any]

    def how(self, plan: Plan) -> dict[str, Any]:
        """Return what starts this engine and runs this condition again, as JSON values."""
        return {"engine": dict(self.options), "schedule": plan.schedule.to_json(), "streams": list(plan.streams)}


def settings(path: Path, name: str) -> Settings:
    """Return the settings of one of `ENGINES` for a checkpoint.

    The served ones are those that `smoke`, `validate` and `bench` use, so that all share compiled graphs. The fp32
    ones have smaller pages and buckets of odd sizes: more edges, and edges that do not coincide.
    """
    from pilotage.arch import source
    from pilotage.arch.spec import ArchSpec
    from pilotage.serving import settings as shared
    from pilotage.serving.platform import BLOCK_SIZE

    spec = ArchSpec.from_hf(source.load_config(str(path)))
    windows = (spec.sliding_window,) if spec.sliding_window is not None else ()
    if name in (SERVED, UNCOMPILED, SERVER):
        options = shared.shared(path)
        target = options["additional_config"]
        sizes = Sizes(
            block=BLOCK_SIZE,
            windows=windows,
            token_buckets=tuple(target["num_batched_tokens_buckets"]),
            seq_buckets=tuple(target["num_seqs_buckets"]),
            max_len=options["max_model_len"],
        )
        return Settings(
            name=name, dtype=shared.DTYPE, sizes=sizes, options={**options, "enforce_eager": name == UNCOMPILED}
        )
    longest = min(shared.shared(path)["max_model_len"], max([176, *(2 * window + 176 for window in windows)]))
    buckets = [size for size in (24, 72) if size < longest]
    ranks = name == RANKS
    speculation: dict[str, Any] = {}
    if name == DRAFTING:
        # Requests name most of their drafts; where they do not, these are taken from the text.
        ngram = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
        speculation["speculative_config"] = {**ngram, "num_speculative_tokens": DRAFTS}
    sizes = Sizes(
        block=16,
        windows=windows,
        token_buckets=(longest,) if ranks else (*buckets, longest),
        seq_buckets=(6,) if ranks else (1, 3, 6),
        max_len=longest,
    )
    return Settings(
        name=name,
        dtype="float32",
        sizes=sizes,
        options={
            "dtype": "float32",
            "max_model_len": longest,
            "max_num_seqs": 6,
            "block_size": sizes.block,
            "enforce_eager": not ranks,
            "tensor_parallel_size": 2 if ranks else 1,
            # One step after another: conditions name steps.
            "async_scheduling": False,
            "additional_config": {
                "num_batched_tokens_buckets": list(sizes.token_buckets),
                "num_seqs_buckets": list(sizes.seq_buckets),
            },
            **speculation,
        },
    )


def drawn(path: Path, sizes: Sizes) -> Streams:
    """Cut the streams from our own text by the model's tokenizer."""
    from pilotage.accuracy.arms.tokenizer import encoder
    from pilotage.arch import source
    from pilotage.arch.spec import ArchSpec

    spec = ArchSpec.from_hf(source.load_config(str(path)))
    bos = spec.bos_token_id[0] if isinstance(spec.bos_token_id, list | tuple) else spec.bos_token_id
    encode = encoder(path)

    def draw(lengths: Sequence[int]) -> Sequence[Sequence[int]]:
        return prompts.token_ids(encode, lengths, vocab_size=spec.vocab_size, bos=bos)

    return token_streams.make(sizes, draw)


def positions(streams: Streams, sizes: Sizes, vocab_size: int) -> list[int]:
    """Choose the positions whose logits are compared, of every request: all, or those at edges and some between."""
    longest = max(len(tokens) for tokens in streams.tokens) - 1
    total = sum(len(tokens) - 1 for tokens in streams.tokens)
    if total * vocab_size <= MAX_LOGITS:
        return list(range(longest))
    # Where each stream turns from prompt to decode; then what is around an edge, as much of it as fits.
    turns = {prompt + step for prompt in streams.prompts for step in (-1, 0, 1)}
    near = {edge + step for edge in sizes.edges() for step in (-1, 0)} - turns
    most = max(8, MAX_LOGITS // vocab_size // len(streams) - len(turns))
    chosen = [*turns, *plans.thinned(sorted(position for position in near if 0 <= position < longest), most)]
    return sorted(position for position in set(chosen) if 0 <= position < longest)


class Bench:
    """One started engine with its reference rows; judges conditions against them.

    Args:
        llm: from `launch.engine`.
        which: its settings.
        streams: of the run.
        wanted: positions whose logits are compared.
        noise: what clean computations differ by.
        reference: rows of the reference condition, where only those of another engine count; None computes them.
    """

    def __init__(
        self,
        llm: Any,
        which: Settings,
        streams: Streams,
        wanted: Sequence[int],
        noise: Noise,
        reference: Rows | None = None,
    ) -> None:
        self.llm, self.which, self.streams, self.wanted, self.noise = llm, which, streams, wanted, noise
        self.plan = plans.alone(streams)
        self.reference = rows.run(llm, self.plan, wanted) if reference is None else reference

    def run(self, plan: Plan) -> Rows:
        """Put the engine into a condition and return what it computed."""
        return rows.run(self.llm, plan, self.wanted)

    def check(self, plan: Plan, partner: Bench | None = None) -> Result:
        """Run a condition and judge it against the reference, or against that of another engine."""
        if plan.free:
            plain = self.run(plan.chosen())
            assert plain.drove is not None
            if not all(plain.drove.said):
                return self.judged(plan.chosen(), plain, plan.relation, partner=partner)
            plan = plan.chosen(plain.drove.said)
        return self.judged(plan, self.run(plan), plan.relation, partner=partner)

    def judged(self, plan: Plan, found: Rows, relation: str, *, partner: Bench | None = None) -> Result:
        """Judge what a condition computed, and the tokens that it answered.

        Args:
            plan: the condition.
            found: its rows.
            relation: for the result.
            partner: the engine whose reference is compared with; None for this one's own.
        """
        of, how = partner or self, self.which.how(plan)
        compared = []
        if not plan.free:
            compared = rows.differences(
                of.reference,
                of.plan.streams,
                found,
                plan.streams,
                inherits=plan.inherits,
                same_engine=partner is None,
            )
        spoken = None
        if found.drove is not None:
            claim = f"{relation}, {plan.name}"
            spoken = tokens.judge(plan.schedule.requests, found.drove.said, found.logits, claim)
            for entry in spoken[1]:
                stream = plan.streams[entry["request"]]
                entry.update(prompt=self.streams.names[stream], stream=stream)
        result = judge(
            compared,
            self.noise,
            relation=relation,
            engine=self.which.name,
            condition=plan.name,
            names=self.streams.names,
            how=how,
            spoken=spoken,
        )
        why = missed(plan, found)
        if why is None or result.status is Status.FAIL:
            return result
        return unmeasured(relation, self.which.name, plan.name, why, how=how)


def missed(plan: Plan, found: Rows) -> str | None:
    """Say what a condition was to bring about and did not."""
    if plan.relation == plans.SPECULATION and found.drove is not None and not found.drove.drafted:
        return "nothing was drafted"
    if plan.relation == plans.PREEMPTION and found.drove is not None and not found.drove.preempted:
        return "nothing was preempted"
    if plan.relation == plans.HIT:
        computed = [found.ways.get(request, {}) for request in range(len(plan.streams))]
        parents = plan.inherits
        if not any(parent is not None and 0 not in computed[request] for request, parent in enumerate(parents)):
            return "no request found its beginning in the prefix cache"
    return None


def unmeasured(
    relation: str,
    engine: str,
    condition: str,
    reason: str,
    *,
    counted: bool = True,
    how: Mapping[str, Any] | None = None,
) -> Result:
    """Make the result of a relation that could not be looked at."""
    verdict = Verdict(
        claim=f"{relation}, {condition}",
        metric="condition",
        estimate=None,
        bound=None,
        bound_source=reason,
        n=0,
        status=Status.NOT_MEASURED,
    )
    return Result(
        relation=relation,
        engine=engine,
        condition=condition,
        verdicts=[verdict],
        reason=reason,
        counted=counted,
        how=how or {},
    )
