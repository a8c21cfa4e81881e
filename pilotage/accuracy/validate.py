"""Is the served model still the same model? What `pilotage validate` does, in order."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pilotage.accuracy import comparison, controls, encoding, gates, kv_controls, metrics, prompts, same_config
from pilotage.accuracy import kv as kv_cache
from pilotage.accuracy import modules as module_checks
from pilotage.accuracy.arms import hf
from pilotage.accuracy.arms.base import Stream, require_known
from pilotage.accuracy.arms.fallback import note, paired, require_named_modules
from pilotage.accuracy.arms.tokenizer import encoder, has_tokenizer
from pilotage.accuracy.comparison import ArmResult, Reference
from pilotage.accuracy.gates import ControlErrors
from pilotage.accuracy.modules import ModulePlan
from pilotage.accuracy.tasks.plan import TaskPlan
from pilotage.core.errors import BadInput, Unsupported
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
        tasks: results of level 1, JSON-ready.
    """

    model: str
    reference: str
    arms: list[ArmResult]
    modules: list[dict[str, Any]]
    verdicts: list[Verdict]
    streams: list[Stream]
    command: str
    seconds: dict[str, float] = field(default_factory=dict)
    tasks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def status(self) -> Status:
        modules = [Status(module["verdict"]["status"]) for module in self.modules]
        tasks = [Status(task["status"]) for task in self.tasks]
        verdicts = [verdict.status for verdict in self.verdicts]
        return worst([*tasks, *(arm.status for arm in self.arms), *modules, *verdicts])

    def to_json(self) -> dict[str, Any]:
        """The result as JSON; a number that is not finite, for which JSON has no word, becomes null."""
        return _finite(self._json())

    def _json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "reference": self.reference,
            "status": self.status.value,
            "tasks": self.tasks,
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
        kv: the same for the KV cache; None where it is not compared.
    """

    arm: str
    baseline: Tensor
    baseline_name: str
    controls: list[ControlErrors]
    about: dict[str, Any]
    kv: kv_cache.KVSide | None = None


def prompt_ids(path: Path, spec: ArchSpec) -> tuple[list[list[int]], int]:
    """Return prompts for a checkpoint, by its own tokenizer where it has one, and how many tokens to add to each."""
    sizes = prompts.lengths(sliding_window=spec.sliding_window, max_position=spec.max_position)
    bos = spec.bos_token_id[0] if isinstance(spec.bos_token_id, list | tuple) else spec.bos_token_id
    ids = prompts.token_ids(encoder(path), sizes.prompts, vocab_size=spec.vocab_size, bos=bos)
    return ids, sizes.new_tokens


def hugging_face(
    reference: Reference,
    model: Any,
    arm: str,
    key: Sequence[Any],
    *,
    rounded: Any = None,
    kv: kv_cache.Cache | None = None,
) -> Side:
    """Measure baseline and controls of one dtype.

    Args:
        reference: tokens and fp32 logits.
        model: the reference model in fp32; used, and left as it was, in the fp32 arm.
        arm: dtype.
        key: what the reference's checkpoint and rounding are, for the cache.
        rounded: dtype that the reference's weights were rounded to, or None.
        kv: the reference's KV cache, for a comparison of that as well.
    """
    dtype = getattr(torch, arm)
    side: kv_cache.KVSide | None = None

    def cached_side(other: Any) -> kv_cache.KVSide | None:
        if kv is None:
            return None
        baseline = [hf.keys_values(other, stream) for stream in reference.streams]
        return kv_controls.side(other, reference.streams, kv, baseline, [*key, arm])

    skip: tuple[str, ...] = ()
    if dtype is torch.float32:
        # The reference itself runs sdpa: its baseline is the same model under the other attention implementation.
        hf.set_attention(model, "eager")
        baseline = comparison.joined(hf.HFArm(model, "baseline"), reference.streams)
        side = cached_side(model)
        hf.set_attention(model, "sdpa")
        name, skip = "Hugging Face float32, eager attention", (controls.EAGER,)
    else:
        model = hf.load(reference.path, dtype, rounded_to=rounded)
        baseline = comparison.joined(hf.HFArm(model, "baseline"), reference.streams)
        side = cached_side(model)
        name = f"Hugging Face {arm}, sdpa attention"
    errors = metrics.row_errors(baseline, reference.logits)
    tokens = [[list(stream.tokens), stream.prompt, list(stream.positions)] for stream in reference.streams]
    found, missing, from_cache = controls.cached(
        [*key, arm, tokens],
        lambda: controls.measure(model, reference.streams, reference.logits, errors, reference.phases, skip=skip),
    )
    about = {"from_cache": from_cache, "missing": missing, "rms_ratio": {c.name: c.estimate for c in found}}
    return Side(arm=arm, baseline=baseline, baseline_name=name, controls=found, about=about, kv=side)


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
    kv: bool = True,
    levels: Sequence[int] | None = None,
    tasks: TaskPlan | None = None,
    checks: ModulePlan | None = None,
    prompt_tokens: Sequence[Sequence[int]] | None = None,
    command: str = "",
    observe: Observe | None = None,
) -> Validation:
    """Compare a served model with Hugging Face's on up to three levels.

    Level 1 runs tasks; what deviates there becomes the prompts of level 2 unless every task passed. Level 2
    teacher-forces the real engine and compares logits and KV cache. Level 3 compares single modules.

    Args:
        model: MODEL of the command line.
        reference: a checkpoint to compare with instead of the model's own.
        arms: dtypes of levels 2 and 3.
        eager: do not compile the engine's graphs. The fp32 arm never does: it judges the model's code, and nobody
            serves its graphs; the serving dtype's arm judges what is shipped.
        modules: False leaves level 3 out.
        kv: compare the KV cache at level 2.
        levels: of 1, 2 and 3; None for 2 and 3.
        tasks: what level 1 runs; None for the task that ships with pilotage.
        checks: which modules level 3 compares, and how; None for one layer of each kind, and the last.
        prompt_tokens: prompts of level 2 instead of the built-in ones.
        command: the command line, for the report.
        observe: replaces the engine: (arm, streams) -> observation. For measuring the gates themselves.

    Raises:
        PilotageError: something is missing or cannot be used.
    """
    from pilotage.arch import source
    from pilotage.arch.spec import ArchSpec
    from pilotage.serving import settings

    require_known(arms, ARMS)
    chosen = {level for level in levels or (2, 3) if modules or level != 3}
    if not chosen or chosen - {1, 2, 3}:
        raise BadInput(f"there are levels 1, 2 and 3, not {sorted(chosen)}", where="--level")
    clock = Clock()
    path = source.resolve(model)
    ref_path = source.resolve(reference) if reference is not None else path
    spec = ArchSpec.from_hf(source.load_config(str(path)))
    ref_spec = ArchSpec.from_hf(source.load_config(str(ref_path)))
    noted = note(path, modules=3 in chosen)
    verdicts = [noted] if noted is not None else []
    if ref_path != path:
        verdicts.append(same_config.config_verdict(spec, ref_spec))
        if has_tokenizer(path) and has_tokenizer(ref_path):
            verdicts.append(encoding.encoding_verdict(encoding.Encoder(path), encoding.Encoder(ref_path)))

    done: list[dict[str, Any]] = []
    if 1 in chosen:
        from pilotage.accuracy.tasks import run as level_1

        tasks = tasks or TaskPlan()
        found = level_1.run(path, ref_path, tasks, eager=eager)
        done = [result.to_json() for result in found]
        handed_on = level_1.deviating(found, tasks.hand_on)
        clock("tasks")
        if handed_on and any(result.status is not Status.PASS for result in found):
            chosen.add(2)
            prompt_tokens = handed_on

    stored, ref_stored = storage_dtype(path), storage_dtype(ref_path)
    # A checkpoint converted to fewer bits is compared with its original rounded the same way.
    rounded = stored if stored != ref_stored and stored.itemsize < ref_stored.itemsize else None
    results: list[ArmResult] = []
    checked: list[dict[str, Any]] = []
    streams: list[Stream] = []
    if chosen & {2, 3}:
        hf_model = hf.load(ref_path, torch.float32, rounded_to=rounded)
        ids, new_tokens = prompt_ids(ref_path, ref_spec)
        tokens: Sequence[int] = max(ids, key=len)
        if 2 in chosen:
            # Of a prompt that is longer than what is served the end is taken, where the answer is.
            longest = min(settings.MAX_MODEL_LEN, ref_spec.max_position or settings.MAX_MODEL_LEN) - new_tokens
            given = [list(prompt)[-longest:] for prompt in prompt_tokens or ids]
            truth = comparison.reference(ref_path, hf_model, given, new_tokens)
            streams = truth.streams
            clock("hf_float32")
            key = [controls.digest(ref_path), str(rounded)]
            cache = [hf.keys_values(hf_model, stream) for stream in streams] if kv else None
            sides = []
            for arm in arms:
                sides.append(hugging_face(truth, hf_model, arm, key, rounded=rounded, kv=cache))
                clock(f"controls_{arm}")
            for side in sides:
                results.append(_arm(path, side, truth, cache, eager=eager, observe=observe))
                clock(f"engine_{side.arm}")
            tokens = max(streams, key=lambda stream: len(stream.tokens)).tokens
        if 3 in chosen:
            plan = checks or ModulePlan()
            if noted is not None and (reason := _no_modules(hf_model)) is not None:
                verdicts.append(_not_measured("level 3: no module errs more than Hugging Face's", "module", reason))
            elif plan.weights == "perturbed":
                checked = module_checks.check_twin(path, dtypes=arms, plan=plan)
            else:
                checked = module_checks.check(path, ref_path, hf_model, tokens, dtypes=arms, rounded=rounded, plan=plan)
            clock("modules")
    return Validation(
        model=model,
        reference=reference or model,
        arms=results,
        modules=checked,
        verdicts=verdicts,
        streams=streams,
        command=command,
        seconds=clock.seconds,
        tasks=done,
    )


def _no_modules(model: Any) -> str | None:
    """Say why single modules of a model without a package cannot be compared; None where they can."""
    try:
        require_named_modules(model)
    except Unsupported as error:
        return error.what
    return None


def _not_measured(claim: str, metric: str, why: str) -> Verdict:
    return gates.single(Status.NOT_MEASURED, claim, metric, why)


def _arm(
    path: Path, side: Side, truth: Reference, cache: kv_cache.Cache | None, *, eager: bool, observe: Observe | None
) -> ArmResult:
    """Run the target in one dtype and judge it."""
    if observe is not None:
        observation = observe(side.arm, truth.streams)
    else:
        from pilotage.accuracy.arms.engine import EngineArm

        uncompiled = eager or side.arm == "float32"
        arm = EngineArm(path, side.arm, enforce_eager=uncompiled, kv=side.kv is not None)
        observation = arm.observe(truth.streams)
    result = comparison.compare(
        truth,
        torch.cat(list(observation.logits)),
        side.baseline,
        side.controls,
        arm=side.arm,
        about=side.about,
        receipt=observation.receipt,
        baseline_name=side.baseline_name,
    )
    if side.kv is None or cache is None or not observation.kv:
        return result
    if (stored := kv_cache.rounded_cache(observation.receipt)) is not None:
        verdict = kv_cache.not_comparable(stored, arm=side.arm)
        return dataclasses.replace(result, verdicts=[*result.verdicts, verdict])
    kept = observation.kv
    if observation.receipt.get("fallback"):
        try:
            kept = paired(kept, cache)
        except Unsupported as error:
            claim = f"{side.arm}: KV cache: no layer's keys or values err more than a clean implementation's"
            verdict = _not_measured(claim, "kv_rms_ratio", error.what)
            return dataclasses.replace(result, verdicts=[*result.verdicts, verdict])
    found = kv_cache.judge(kept, cache, side.kv, arm=side.arm)
    return dataclasses.replace(result, verdicts=[*result.verdicts, *found.verdicts], kv=found.to_json())
