"""Is the served model still the same model? What `pilotage validate` does, in order."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pilotage.accuracy import comparison, controls, metrics, prompts, same_config
from pilotage.accuracy import modules as module_checks
from pilotage.accuracy.arms import hf
from pilotage.accuracy.arms.base import Stream
from pilotage.accuracy.comparison import ArmResult, Reference
from pilotage.accuracy.gates import ControlErrors
from pilotage.core.errors import BadInput
from pilotage.core.nouns import Observation, Status, Verdict, worst

if TYPE_CHECKING:
    from pilotage.arch.spec import ArchSpec

ARMS = ("bfloat16", "float32")
Observe = Callable[[str, Sequence[Stream]], Observation]


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Everything `pilotage validate` found.

    Attributes:
        model: as the user named it.
        reference: the checkpoint that it is compared with.
        arms: by dtype.
        modules: module checks, JSON-ready.
        verdicts: verdicts that belong to no arm.
        streams: tokens that were forced.
        seconds: time of each part.
        command: how to do it again.
    """

    model: str
    reference: str
    arms: list[ArmResult]
    modules: list[dict[str, Any]]
    verdicts: list[Verdict]
    streams: list[Stream]
    command: str
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def status(self) -> Status:
        modules = [Status(module["verdict"]["status"]) for module in self.modules]
        return worst([*(arm.status for arm in self.arms), *modules, *(verdict.status for verdict in self.verdicts)])

    def to_json(self) -> dict[str, Any]:
        """The result as JSON; a number that is not finite, for which JSON has no word, becomes null."""
        return _finite(self._json())

    def _json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "reference": self.reference,
            "status": self.status.value,
            "arms": [arm.to_json() for arm in self.arms],
            "modules": self.modules,
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
            "receipt": {arm.arm: dict(arm.receipt) for arm in self.arms},
            "streams": [{"prompt_tokens": stream.prompt, "tokens": list(stream.tokens)} for stream in self.streams],
            "seconds": {name: round(value, 2) for name, value in self.seconds.items()},
            "versions": versions(),
            "command": self.command,
        }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return comparison.finite(value) if isinstance(value, float) else value


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    found = {"python": platform.python_version()}
    for name in ("pilotage", "torch", "vllm", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


@dataclass(frozen=True, kw_only=True)
class Side:
    """What Hugging Face has to say about one dtype.

    Attributes:
        arm: the dtype.
        baseline: [rows, V] logits.
        baseline_name: how they were computed.
        controls: measured clean controls.
        about: how the controls were had, for the report.
    """

    arm: str
    baseline: Tensor
    baseline_name: str
    controls: list[ControlErrors]
    about: dict[str, Any]


def prompt_ids(path: Path, spec: ArchSpec) -> tuple[list[list[int]], int]:
    """Return prompts for a checkpoint, by its own tokenizer where it has one, and how many tokens to add to each."""
    sizes = prompts.lengths(sliding_window=spec.sliding_window, max_position=spec.max_position)
    bos = spec.bos_token_id[0] if isinstance(spec.bos_token_id, list | tuple) else spec.bos_token_id
    ids = prompts.token_ids(_encoder(path), sizes.prompts, vocab_size=spec.vocab_size, bos=bos)
    return ids, sizes.new_tokens


def _encoder(path: Path) -> Callable[[str], list[int]] | None:
    from transformers import AutoTokenizer

    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        return None
    loader: Any = AutoTokenizer
    with hf.quiet():
        tokenizer = loader.from_pretrained(path)

    def encode(text: str) -> list[int]:
        with hf.quiet():  # the text is longer than some models' context, and is cut before it is used
            return list(tokenizer.encode(text, add_special_tokens=False))

    return encode


def hugging_face(reference: Reference, model: Any, arm: str, key: Sequence[Any], *, rounded: Any = None) -> Side:
    """Measure baseline and controls of one dtype.

    Args:
        reference: tokens and fp32 logits.
        model: the reference model in fp32; used, and left as it was, in the fp32 arm.
        arm: dtype.
        key: what the reference's checkpoint and rounding are, for the cache.
        rounded: dtype that the reference's weights were rounded to, or None.
    """
    dtype = getattr(torch, arm)
    skip: tuple[str, ...] = ()
    if dtype is torch.float32:
        # The reference itself runs sdpa: its baseline is the same model under the other attention implementation.
        model.set_attn_implementation("eager")
        baseline = comparison.joined(hf.HFArm(model, "baseline"), reference.streams)
        model.set_attn_implementation("sdpa")
        name, skip = "Hugging Face float32, eager attention", (controls.EAGER,)
    else:
        model = hf.load(reference.path, dtype, rounded_to=rounded)
        baseline = comparison.joined(hf.HFArm(model, "baseline"), reference.streams)
        name = f"Hugging Face {arm}, sdpa attention"
    errors = metrics.row_errors(baseline, reference.logits)
    tokens = [[list(stream.tokens), stream.prompt, list(stream.positions)] for stream in reference.streams]
    found, missing, from_cache = controls.cached(
        [*key, arm, tokens],
        lambda: controls.measure(model, reference.streams, reference.logits, errors, reference.phases, skip=skip),
    )
    about = {"from_cache": from_cache, "missing": missing, "rms_ratio": {c.name: c.estimate for c in found}}
    return Side(arm=arm, baseline=baseline, baseline_name=name, controls=found, about=about)


def storage_dtype(path: Path) -> torch.dtype:
    """Return the floating dtype that most elements of a checkpoint are stored in; float32 when none is."""
    from safetensors import safe_open

    names = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    counts: dict[torch.dtype, int] = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - a safetensors file is no mapping
                entry = tensors.get_slice(name)
                dtype = names.get(entry.get_dtype())
                if dtype is not None:
                    size = 1
                    for length in entry.get_shape():
                        size *= length
                    counts[dtype] = counts.get(dtype, 0) + size
    return max(counts, key=counts.__getitem__) if counts else torch.float32


class Clock:
    """Adds up the seconds of named parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def __call__(self, name: str) -> None:
        """Give the time since the last call to `name`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def validate(
    model: str,
    *,
    reference: str | None = None,
    arms: Sequence[str] = ARMS,
    eager: bool = False,
    modules: bool = True,
    command: str = "",
    observe: Observe | None = None,
) -> Validation:
    """Compare a served model with Hugging Face's, teacher-forced through the real engine.

    Args:
        model: MODEL of the command line.
        reference: a checkpoint to compare with instead of the model's own.
        arms: dtypes.
        eager: do not compile the engine's graphs. The fp32 arm never does: it judges the model's code, and nobody
            serves its graphs; the serving dtype's arm judges what is shipped.
        modules: run the module checks as well.
        command: the command line, for the report.
        observe: replaces the engine: (arm, streams) -> observation. For measuring the gates themselves.

    Raises:
        PilotageError: something is missing or cannot be used.
    """
    from pilotage.arch import source
    from pilotage.arch.spec import ArchSpec

    unknown = [arm for arm in arms if arm not in ARMS]
    if unknown:
        raise BadInput(f"no arm is called {unknown[0]!r}", where="--arm", do=f"use {' or '.join(ARMS)}")
    clock = Clock()
    path = source.resolve(model)
    ref_path = source.resolve(reference) if reference is not None else path
    spec = ArchSpec.from_hf(source.load_config(str(path)))
    ref_spec = ArchSpec.from_hf(source.load_config(str(ref_path)))
    verdicts = [same_config.config_verdict(spec, ref_spec)] if ref_path != path else []

    stored, ref_stored = storage_dtype(path), storage_dtype(ref_path)
    # A checkpoint converted to fewer bits is compared with its original rounded the same way.
    rounded = stored if stored != ref_stored and stored.itemsize < ref_stored.itemsize else None
    hf_model = hf.load(ref_path, torch.float32, rounded_to=rounded)
    ids, new_tokens = prompt_ids(ref_path, ref_spec)
    truth = comparison.reference(ref_path, hf_model, ids, new_tokens)
    clock("hf_float32")
    key = [controls.digest(ref_path), str(rounded)]
    sides = []
    for arm in arms:
        sides.append(hugging_face(truth, hf_model, arm, key, rounded=rounded))
        clock(f"controls_{arm}")

    results = []
    for side in sides:
        if observe is not None:
            observation = observe(side.arm, truth.streams)
        else:
            from pilotage.accuracy.arms.engine import EngineArm

            uncompiled = eager or side.arm == "float32"
            observation = EngineArm(path, side.arm, enforce_eager=uncompiled).observe(truth.streams)
        results.append(
            comparison.compare(
                truth,
                torch.cat(list(observation.logits)),
                side.baseline,
                side.controls,
                arm=side.arm,
                about=side.about,
                receipt=observation.receipt,
                baseline_name=side.baseline_name,
            )
        )
        clock(f"engine_{side.arm}")
    checked = []
    if modules:
        longest = max(truth.streams, key=lambda stream: len(stream.tokens))
        checked = module_checks.check(path, ref_path, hf_model, longest.tokens, dtypes=arms, rounded=rounded)
        clock("modules")
    return Validation(
        model=model,
        reference=reference or model,
        arms=results,
        modules=checked,
        verdicts=verdicts,
        streams=truth.streams,
        command=command,
        seconds=clock.seconds,
    )
