"""Which module is at fault? What `pilotage localise` does, in order."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pilotage.accuracy import prompts, same_config
from pilotage.accuracy.arms import hf
from pilotage.accuracy.arms.base import require_known
from pilotage.accuracy.arms.tapped import PagedTapped, Request
from pilotage.accuracy.localise import around, blame, evidence
from pilotage.accuracy.localise.arm import ArmReport, Bench, Target, conclude
from pilotage.accuracy.localise.blame import Culprit, Facts
from pilotage.accuracy.localise.side import Known
from pilotage.core.errors import BadInput
from pilotage.core.nouns import Status

ARMS = ("float32", "bfloat16")
# (checkpoint, dtype, tokens of the longest request) -> what is localised.
MakeTarget = Callable[[Path, torch.dtype, int], Target]


@dataclass(frozen=True, kw_only=True)
class Condition:
    """How the target is run.

    Attributes:
        engine: in the vLLM engine; else by itself in this process, where nothing is compiled.
        eager: the engine does not compile.
        ranks: tensor-parallel ranks of the engine.
        options: further arguments of `serving.launch.engine`.
        schedule: `serving.drive.Schedule` as JSON values: its requests replace the usual ones.
    """

    engine: bool = False
    eager: bool = False
    ranks: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    schedule: Mapping[str, Any] | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Condition:
        """Read the `how` of a condition that `pilotage invariance --json` lists.

        Raises:
            BadInput: it has no engine or no schedule.
        """
        if not isinstance(values, Mapping) or not {"engine", "schedule"} <= values.keys():
            raise BadInput("a condition has an engine and a schedule", where="--condition")
        options = dict(values["engine"])
        return cls(
            engine=True,
            eager=bool(options.pop("enforce_eager", False)),
            ranks=int(options.pop("tensor_parallel_size", 1)),
            # Whatever is found in the prefix cache under that condition is to be found here.
            options={"enable_prefix_caching": True}
            | {name: value for name, value in options.items() if name != "dtype"},
            schedule=values["schedule"],
        )

    def target(self, path: Path, dtype: torch.dtype, longest: int) -> Target:
        """Make what is localised."""
        if not self.engine:
            return PagedTapped(path, dtype, longest)
        from pilotage.accuracy.arms.tapped_engine import TappedEngine

        return TappedEngine(
            path,
            dtype,
            longest,
            eager=self.eager,
            ranks=self.ranks,
            options=self.options,
            schedule=self.schedule,
        )


@dataclass(frozen=True, kw_only=True)
class Localisation:
    """Everything `pilotage localise` found.

    Attributes:
        model: as the user named it.
        reference: the checkpoint that it is compared with.
        culprits: ranked; empty when nothing is at fault.
        arms: by dtype.
        config: the verdict about the two configs, JSON-ready; None where they are one.
        requests: what was fed.
        command: how to do it again.
        seconds: time of each part.
    """

    model: str
    reference: str
    culprits: list[Culprit]
    arms: list[ArmReport]
    config: dict[str, Any] | None
    requests: list[Request]
    command: str
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def status(self) -> Status:
        if self.culprits:
            return Status.FAIL
        if not self.arms or any(arm.unmeasured for arm in self.arms):
            return Status.NOT_MEASURED
        return Status.PASS

    def summary(self) -> str:
        """Say the result in one line."""
        if not self.culprits:
            return "none" if self.status is Status.PASS else "none found, but not everything could be measured"
        first = self.culprits[0]
        layers = f" (layers {', '.join(map(str, first.layers))})" if len(first.layers) > 1 else ""
        return f"{first.module}, site {first.site}{layers}"

    def to_json(self) -> dict[str, Any]:
        from pilotage.accuracy.validate import versions

        causal = next((arm.causal for arm in self.arms if arm.causal), None)
        return {
            "model": self.model,
            "reference": self.reference,
            "status": self.status.value,
            "culprits": [culprit.to_json() for culprit in self.culprits],
            "causal": causal,
            "config": self.config,
            "arms": [arm.to_json() for arm in self.arms],
            "requests": [{"tokens": list(request.tokens), "parts": list(request.parts)} for request in self.requests],
            "seconds": {name: round(value, 2) for name, value in self.seconds.items()},
            "versions": versions(),
            "command": self.command,
        }


def feed(
    sequences: Sequence[Sequence[int]], sizes: Sequence[int], *, vocab_size: int, parts: bool = True
) -> list[Request]:
    """Say how streams are fed: whole prompts, prompts in two and three parts, and the longest both ways.

    Args:
        sequences: prompts with their continuations.
        sizes: tokens of each prompt.
        vocab_size: decides how many rows of logits are kept.
        parts: False for whole prompts alone, where the engine cuts them.
    """
    rows = 2 * sum(len(tokens) for tokens in sequences)
    everything = rows * vocab_size <= prompts.MAX_LOGITS

    def request(tokens: Sequence[int], size: int, pieces: int) -> Request:
        cuts = [0, *(round(size * (i + 1) / pieces) + (i % 2) for i in range(pieces - 1)), size]
        kept = prompts.compared(len(tokens), size, everything=everything)
        return Request(
            tokens=tuple(tokens), parts=tuple(b - a for a, b in itertools.pairwise(cuts) if b > a), kept=kept
        )

    if not parts:
        return [request(tokens, size, 1) for tokens, size in zip(sequences, sizes, strict=True)]
    found = [
        request(tokens, size, min(size, (1, 2, 3, 1)[index % 4]))
        for index, (tokens, size) in enumerate(zip(sequences, sizes, strict=True))
    ]
    longest = max(range(len(sizes)), key=lambda index: sizes[index])
    return [*found, request(sequences[longest], sizes[longest], min(sizes[longest], 3))]


def scheduled(schedule: Mapping[str, Any], *, vocab_size: int) -> list[Request]:
    """Return the requests of a schedule."""
    everything = sum(len(item["tokens"]) for item in schedule["requests"]) * vocab_size <= prompts.MAX_LOGITS
    return [
        Request(
            tokens=tuple(item["tokens"]),
            parts=(int(item["prompt"]),),
            kept=prompts.compared(len(item["tokens"]), int(item["prompt"]), everything=everything),
            arrives=int(item["arrives"]),
            drafts=tuple(tuple(ids) for ids in item.get("drafts", ())),
            forced=bool(item.get("forced", True)),
        )
        for item in schedule["requests"]
    ]


def localise(
    model: str,
    *,
    reference: str | None = None,
    arms: Sequence[str] = ARMS,
    condition: Condition | None = None,
    target: MakeTarget | None = None,
    known: Known | None = None,
    command: str = "",
) -> Localisation:
    """Name the modules of a served model whose own error is larger than a clean computation's.

    Args:
        model: MODEL of the command line.
        reference: a checkpoint to compare with instead of the model's own.
        arms: dtypes.
        condition: how the target is run; None for in this process.
        target: makes what is localised, instead of what the condition says. For measuring the gates themselves.
        known: Hugging Face's side as an earlier call has measured it, for several targets of one checkpoint.
        command: the command line, for the report.

    Raises:
        PilotageError: something is missing or cannot be used.
    """
    from pilotage.accuracy.validate import Clock, prompt_ids, storage_dtype
    from pilotage.arch import source
    from pilotage.arch.spec import ArchSpec

    require_known(arms, ARMS)
    clock, how = Clock(), condition or Condition()
    path = source.resolve(model)
    ref_path = source.resolve(reference) if reference is not None else path
    spec, ref_spec = (ArchSpec.from_hf(source.load_config(str(found))) for found in (path, ref_path))
    stored, ref_stored = storage_dtype(path), storage_dtype(ref_path)
    rounded = stored if stored != ref_stored and stored.itemsize < ref_stored.itemsize else None
    known = known or Known(path=ref_path, rounded=rounded)
    if known.path != ref_path or known.rounded != rounded:
        raise BadInput(f"what is known is of {known.path}", where=str(ref_path), do="measure each reference by itself")
    vocabulary = int(known.fp32.get_output_embeddings().weight.shape[0])
    if how.schedule is not None:
        requests = scheduled(how.schedule, vocab_size=vocabulary)
    else:
        if known.sequences is None:
            ids, new_tokens = prompt_ids(ref_path, ref_spec)
            known.sequences = hf.greedy(known.fp32, ids, new_tokens), [len(prompt) for prompt in ids]
        requests = feed(*known.sequences, vocab_size=vocabulary, parts=not how.engine)
    longest = max(len(request.tokens) for request in requests)
    clock("hf_float32")

    config = same_config.config_verdict(spec, ref_spec) if ref_path != path else None
    facts: Facts | None = None
    reports: list[ArmReport] = []
    for name in arms:
        with contextlib.ExitStack() as stack:
            served = (target or how.target)(path, getattr(torch, name), longest)
            if hasattr(served, "close"):
                stack.callback(served.close)
            arm = Bench(name, requests, known, served, how.ranks)
            report = arm.measure(ref_spec.num_experts_per_token)
            facts = facts or _facts(arm, arm.expected.model, config)
            reports.append(conclude(arm, report, blame.rank(report.findings, facts)))
        clock(f"arm_{name}")
    assert facts is not None
    missteps = list(dict.fromkeys(step for report in reports for step in report.missteps))
    return Localisation(
        model=model,
        reference=reference or model,
        culprits=[
            *around.culprits(missteps),
            *blame.rank([finding for report in reports for finding in report.findings], facts),
        ],
        arms=reports,
        config=config.to_json() if config is not None else None,
        requests=requests,
        command=command,
        seconds=clock.seconds,
    )


def _facts(arm: Bench, expected: Any, config: Any) -> Facts:
    fields = dict(config.evidence["differing"]) if config is not None else {}
    routers = arm.expected.taps.router_names()
    model = getattr(arm.target, "model", None)
    if model is None:
        return Facts(reference_sites=arm.reference_sites, routers=routers, fields=fields)
    constants: dict[str, str] = {}
    if arm.dtype is torch.float32:
        constants = evidence.norms(model, expected)
        table = evidence.rotary(model, expected)
        if table is not None:
            constants["model.rotary_emb"] = table
    return Facts(
        reference_sites=arm.reference_sites,
        target_modules=frozenset(name for name, _ in model.named_modules()),
        routers=routers,
        parameters=evidence.differing_parameters(model, expected),
        fields=fields,
        constants=constants,
    )
