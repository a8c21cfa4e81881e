"""Train equals serve: the log-probabilities that training computes, against those that the server reported.

Reinforcement learning samples from a server and learns with a trainer; the ratio of their probabilities, which should
be 1, multiplies every gradient. Here both say what they think of the same tokens, and a third arm, Hugging Face at a
higher precision, says how far each of them is from what both mean.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy import gates, one_row
from pilotage.accuracy.arms import hf
from pilotage.accuracy.arms.base import require_known
from pilotage.arch import source
from pilotage.core.nouns import Status, Verdict, worst
from pilotage.core.progress import track

ARMS = ("bfloat16", "float32")
FLOAT32_BOUND = 1e-5  # nats, or of the log-probability where that is larger than one
# What each arm is measured from. Hugging Face computes norms and angles of a float64 model in fp32 all the same.
REFERENCES = {"bfloat16": torch.float32, "float32": torch.float64}
# Two sides, each as far off as Hugging Face in the same dtype, may differ by twice that.
_TWO_SIDES = 2.0
PHASES = ("prefill", "decode")
# The sum of two errors is compared with one arm's.
_TWO_ERRORS = math.sqrt(2)


@dataclass(frozen=True)
class Said:
    """A sequence and what the server said of it.

    Attributes:
        tokens: prompt and continuation.
        prompt: how many of them are the prompt.
        logprobs: [len(tokens) - 1] fp32, of each token but the first after those before it.
    """

    tokens: tuple[int, ...]
    prompt: int
    logprobs: Tensor

    def phase(self, name: str) -> slice:
        """Return which of `logprobs` a phase computed; the first continuation token's comes from the prompt's rows."""
        return slice(0, self.prompt) if name == "prefill" else slice(self.prompt, None)


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """One dtype.

    Attributes:
        arm: the dtype.
        phases: phase -> statistics of train minus serve.
        worst: the tokens that differ most: stream, position, token, both log-probabilities and the reference's.
        cost: seconds of serving and of training's forwards.
        verdicts: of the arm.
    """

    arm: str
    phases: dict[str, dict[str, Any]]
    worst: list[dict[str, Any]]
    cost: dict[str, float]
    verdicts: list[Verdict]


@dataclass(frozen=True, kw_only=True)
class Consistency:
    """What `pilotage consistency` found.

    Attributes:
        model: as the user named it. exact: whether both sides went row by row. arms: one each dtype.
    """

    model: str
    exact: bool
    command: str
    arms: list[ArmResult] = field(default_factory=list)

    @property
    def status(self) -> Status:
        """The worst of all verdicts."""
        return worst([verdict.status for arm in self.arms for verdict in arm.verdicts])

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status.value,
            "model": self.model,
            "exact": self.exact,
            "command": self.command,
            "arms": [
                {
                    "arm": arm.arm,
                    "phases": arm.phases,
                    "worst": arm.worst,
                    "cost": arm.cost,
                    "verdicts": [verdict.to_json() for verdict in arm.verdicts],
                }
                for arm in self.arms
            ],
        }


def consistency(
    model: str,
    *,
    arms: Sequence[str] = ARMS,
    exact: bool = False,
    new_tokens: int = 48,
    temperature: float = 1.0,
    seed: int = 0,
    eager: bool = False,
    command: str = "",
) -> Consistency:
    """Sample from the real engine, and compute the same tokens' log-probabilities as training does.

    Args:
        model: MODEL.
        arms: dtypes, of `ARMS`.
        exact: both sides one row at a time through the same operators; equal bit by bit, or it fails.
        new_tokens: of each of four sequences.
        temperature: of sampling; log-probabilities are those before it.
        seed: of sampling.
        eager: do not compile the engine.
        command: for the result.

    Raises:
        BadInput: an unknown arm.
        Unsupported: no training class for the architecture.
    """
    require_known(arms, ARMS)
    path = source.resolve(model)
    found = [
        _arm(path, arm, exact=exact, new_tokens=new_tokens, temperature=temperature, seed=seed, eager=eager)
        for arm in track(list(arms), "train equals serve")
    ]
    return Consistency(model=model, exact=exact, command=command, arms=found)


def _arm(
    path: Path, arm: str, *, exact: bool, new_tokens: int, temperature: float, seed: int, eager: bool
) -> ArmResult:
    dtype: torch.dtype = getattr(torch, arm)
    began = time.perf_counter()
    said, shape = serve(path, arm, exact=exact, new_tokens=new_tokens, temperature=temperature, seed=seed, eager=eager)
    served = time.perf_counter()
    trained = train(path, dtype, said, shape if exact else None)
    done = time.perf_counter()
    reference, baseline = (_hugging_face(path, of, said) for of in (REFERENCES[arm], dtype))
    return judge(
        said, trained, reference, baseline, arm=arm, exact=exact, cost={"serve": served - began, "train": done - served}
    )


@dataclass(frozen=True)
class Pages:
    """How a server lays out its cache: longest sequence, and slots in a page."""

    max_tokens: int
    block_size: int


def serve(
    path: Path, dtype: str, *, exact: bool, new_tokens: int, temperature: float, seed: int, eager: bool = False
) -> tuple[list[Said], Pages]:
    """Sample from the engine; returns what it said, and its pages."""
    from pilotage.accuracy import prompts
    from pilotage.serving import settings
    from pilotage.serving.launch import engine

    spec = source.load_config(str(path)).get_text_config()
    window, longest = getattr(spec, "sliding_window", None), spec.max_position_embeddings
    sizes = prompts.lengths(sliding_window=window, max_position=longest - new_tokens).prompts
    arguments = settings.shared(path, dtype)
    if exact:
        # A row at a time through every page that a sequence may have: as few of these as there must be.
        arguments |= {**one_row.ENGINE, "max_model_len": max(sizes) + new_tokens + 1}
    with _kernels(exact), engine(path, **{**arguments, "enforce_eager": exact or eager}) as llm:
        from vllm import SamplingParams

        tokenizer: Any = llm.get_tokenizer()
        ids = prompts.token_ids(
            lambda text: list(tokenizer.encode(text, add_special_tokens=False, verbose=False)),
            sizes,
            vocab_size=spec.vocab_size,
            bos=tokenizer.bos_token_id,
        )
        params = [
            SamplingParams(
                temperature=temperature,
                seed=seed + row,
                max_tokens=new_tokens,
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                prompt_logprobs=0,
            )
            for row in range(len(ids))
        ]
        requests: Any = [{"prompt_token_ids": prompt} for prompt in ids]
        outputs = llm.generate(requests, params, use_tqdm=False)
        pages = Pages(llm.llm_engine.model_config.max_model_len, llm.llm_engine.vllm_config.cache_config.block_size)
    return [_said(output) for output in outputs], pages


def _said(output: Any) -> Said:
    prompt, new = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    rows = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    tokens = (*prompt, *new)
    told = [row[token].logprob for row, token in zip(rows, tokens[1:], strict=True)]
    return Said(tokens=tokens, prompt=len(prompt), logprobs=torch.tensor(told, dtype=torch.float32))


def _kernels(exact: bool) -> Any:
    import contextlib

    return one_row.definitions() if exact else contextlib.nullcontext()


def train(path: Path, dtype: torch.dtype, said: Sequence[Said], pages: Pages | None) -> list[Tensor]:
    """Compute the log-probabilities of sequences with the class that trains, gradients enabled.

    Args:
        path: the checkpoint.
        dtype: of the model.
        said: the sequences.
        pages: go one row at a time through pages like these; None for a forward over each sequence.

    Returns:
        For each sequence [len(tokens) - 1] fp32.
    """
    from pilotage.models import registry

    face = registry.training_class(source.load_config(str(path)).architectures or [])
    with hf.quiet():
        model = face.from_pretrained(path, dtype=dtype).train()
    found = []
    with _kernels(pages is not None):
        for one in said:
            if pages is None:
                logits = model(input_ids=torch.tensor([one.tokens]), use_cache=False).logits[0]
            else:
                inputs = one.tokens[:-1]  # nobody asks what follows the last one
                logits = one_row.one_row_logits(model, inputs, max_tokens=pages.max_tokens, block_size=pages.block_size)
            found.append(one_row.token_logprobs(logits, one.tokens).detach())
    return found


@torch.inference_mode()
def _hugging_face(path: Path, dtype: torch.dtype, said: Sequence[Said]) -> list[Tensor]:
    model = hf.load(path, dtype)
    return [
        one_row.token_logprobs(model(input_ids=torch.tensor([one.tokens]), use_cache=False).logits[0], one.tokens)
        for one in said
    ]


def judge(
    said: Sequence[Said],
    trained: Sequence[Tensor],
    reference: Sequence[Tensor],
    baseline: Sequence[Tensor],
    *,
    arm: str,
    exact: bool,
    cost: dict[str, float],
) -> ArmResult:
    """Compare the two sides, by phase. Pure.

    Args:
        said: what the server said.
        trained: what training computed of the same tokens.
        reference: Hugging Face at a higher precision, see `REFERENCES`.
        baseline: Hugging Face in the arm's dtype; its error is the dtype's own noise.
        arm: "bfloat16" or "float32".
        exact: nothing may differ.
        cost: seconds, for the result.
    """
    phases, verdicts = {}, []
    for phase in PHASES:
        serve, train, expected, other = (
            torch.cat([values[one.phase(phase)] for one, values in zip(said, rows, strict=True)]).double()
            for rows in ([one.logprobs for one in said], trained, reference, baseline)
        )
        difference = train - serve
        phases[phase] = statistics(difference) | {
            "train_rms_error": _rms(train - expected),
            "serve_rms_error": _rms(serve - expected),
            "baseline_rms_error": _rms(other - expected),
        }
        verdicts += _verdicts(phase, serve, train, expected, other, arm=arm, exact=exact)
    rows = [
        {
            "stream": index,
            "position": position + 1,
            "token": one.tokens[position + 1],
            "train": float(values[position]),
            "serve": float(one.logprobs[position]),
            "reference": float(right[position]),
        }
        for index, (one, values, right) in enumerate(zip(said, trained, reference, strict=True))
        for position in range(len(one.logprobs))
    ]
    rows.sort(key=lambda row: -abs(row["train"] - row["serve"]))
    return ArmResult(arm=arm, phases=phases, worst=rows[:5], cost=cost, verdicts=verdicts)


def statistics(difference: Tensor) -> dict[str, Any]:
    """Describe log-probability differences [n]: their size, and the ratio that importance weights are made of."""
    ratio = difference.abs().exp()
    return {
        "n": difference.numel(),
        "equal": int((difference == 0).sum()),
        "max_abs": float(difference.abs().max()),
        "rms": _rms(difference),
        "mean_ratio": float(ratio.mean()),
        "p99_ratio": float(ratio.quantile(0.99)),
        "max_ratio": float(ratio.max()),
        # Of the policies, where positive: samples are the server's, so this estimates KL(serve || train).
        "kl": float((difference.exp() - 1 - difference).mean()),
    }


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _verdicts(
    phase: str, serve: Tensor, train: Tensor, expected: Tensor, baseline: Tensor, *, arm: str, exact: bool
) -> list[Verdict]:
    if exact:
        said = f"{arm}, {phase}: training and serving say log-probabilities that are equal, bit by bit"
        return [_largest(said, "max |dlogp|", train - serve, 0.0, "nothing may differ")]
    if arm == "float32":
        said = f"{arm}, {phase}: training and serving say log-probabilities that are equal within fp32 rounding"
        # A log-probability of -17 has fewer digits behind the point than one of -1.
        size = expected.abs().clamp_min(1.0)
        source = f"{FLOAT32_BOUND:g}, or {_TWO_SIDES:g} times the error of Hugging Face in fp32"
        found = []
        for metric, unit in (("max |dlogp| / max(1, |logp|)", size), ("max |dlogp|", torch.ones_like(size))):
            noise = _TWO_SIDES * float(((baseline - expected) / unit).abs().max())
            bound = max(FLOAT32_BOUND, noise) if math.isfinite(noise) else FLOAT32_BOUND
            found.append(_largest(said, metric, (train - serve) / unit, bound, source))
        return found
    column = (slice(None), None)
    found = gates.three_way(
        serve[column], expected[column], baseline[column], rtol=0.0, name=f"{arm}, {phase}: serving"
    )
    found += gates.three_way(
        train[column], expected[column], baseline[column], rtol=0.0, name=f"{arm}, {phase}: training"
    )
    # Two independent errors differ by sqrt(2) of one; more means that the two sides do not compute the same.
    found += gates.three_way(
        (expected + (train - serve) / _TWO_ERRORS)[column],
        expected[column],
        baseline[column],
        rtol=0.0,
        name=f"{arm}, {phase}: training minus serving, over sqrt(2)",
    )
    return found


def _largest(claim: str, metric: str, difference: Tensor, bound: float, source: str) -> Verdict:
    largest = float(difference.abs().max())
    return Verdict(
        claim=claim,
        metric=metric,
        estimate=largest if math.isfinite(largest) else None,
        bound=bound,
        bound_source=source,
        n=difference.numel(),
        status=gates.by_value(largest, bound),
    )
