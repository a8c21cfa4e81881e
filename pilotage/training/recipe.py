"""The recipe of a training run: one YAML file, read strictly."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import pydantic
import yaml
from pydantic import ConfigDict, Field, PositiveInt

from pilotage.core.errors import BadInput, ConfigError
from pilotage.training.mesh import Parallel

# What may change between a run and its continuation: where and how, not what is computed.
FREE = ("parallel", "checkpoint", "evaluation", "log", "out", "device")


class Section(pydantic.BaseModel):
    """Keys that are not known are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(Section):
    """What is trained: exactly one of `start` and `config`.

    Attributes:
        start: MODEL to go on from: a directory, a Hugging Face id, gemma3-270m, tiny:llama3, ...
        config: a new model: the contents of its config.json, or the path of that file.
        tokenizer: directory of the tokenizer; `start` brings its own.
        dtype: of parameters, gradients and optimizer state.
        autocast: compute products in bfloat16 while parameters stay float32.
        attention: Hugging Face's name of the attention function.
        gradient_checkpointing: compute activations again instead of keeping them.
        implementation: "pilotage" for our class of the architecture, "transformers" for theirs.
    """

    start: str | None = None
    config: dict[str, Any] | str | None = None
    tokenizer: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    autocast: bool = False
    attention: Literal["sdpa", "eager", "flex_attention"] = "sdpa"
    gradient_checkpointing: bool = False
    implementation: Literal["pilotage", "transformers"] = "pilotage"


class HubData(Section):
    """A data set of the Hugging Face hub, or of a directory that `datasets` reads."""

    name: str
    subset: str | None = None
    split: str = "train"


class DataSection(Section):
    """What is learned from.

    Attributes:
        train: files or patterns (`docs/**/*.txt`); `.jsonl` files hold one object a line, others are text.
        train_hub: a data set instead.
        evaluation: files or patterns that are never trained on.
        field: of a JSON object or row, the text. One with `prompt` and `completion` instead has targets only in the
            second.
        documents: "file": a text file is a document; "paragraph": blank lines divide it.
        sequence_length: tokens of a row; documents are packed into rows and do not see one another.
    """

    train: list[str] = []
    train_hub: HubData | None = None
    evaluation: list[str] = []
    field: str = "text"
    documents: Literal["file", "paragraph"] = "file"
    sequence_length: PositiveInt = 512


class BatchSection(Section):
    """Rows of an optimiser step over all processes, and of one forward on one of them."""

    rows: PositiveInt = 8
    micro_rows: PositiveInt = 1


class OptimizerSection(Section):
    """AdamW; matrices decay, vectors (norms and biases) do not."""

    lr: float = Field(3e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    max_norm: float | None = Field(1.0, gt=0)


class ScheduleSection(Section):
    """The learning rate: up linearly for `warmup_steps`, then down to `final` times the peak at the last step."""

    kind: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = Field(0, ge=0)
    final: float = Field(0.1, ge=0, le=1)


class LoraSection(Section):
    """Low-rank adapters on frozen weights, by peft."""

    rank: PositiveInt = 8
    alpha: float = 16.0
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: list[str] = ["q_proj", "k_proj", "v_proj", "o_proj"]


class ParallelSection(Section):
    """How the processes divide the model; see `mesh.Parallel`."""

    pp: PositiveInt = 1
    tp: PositiveInt = 1
    sequence_parallel: bool = False
    dp: PositiveInt | None = None
    ep: PositiveInt = 1


class EvaluationSection(Section):
    """Every how many steps the evaluation files are scored; 0: at the end only."""

    every: int = Field(0, ge=0)


class CheckpointSection(Section):
    """Every how many steps a checkpoint is written (0: at the end only), and how many are kept."""

    every: int = Field(0, ge=0)
    keep: PositiveInt = 2


class LogSection(Section):
    """Metrics go to metrics.jsonl at each `every`-th step, and to TensorBoard files if asked for."""

    every: PositiveInt = 1
    tensorboard: bool = False


class Recipe(Section):
    """A training run.

    Attributes:
        out: directory of checkpoints and metrics.
        steps: optimiser steps.
        seed: of new weights, of the order of the rows and of dropout.
        device: "cpu" or "cuda".
    """

    out: str
    model: ModelSection
    data: DataSection
    steps: PositiveInt
    seed: int = 0
    device: Literal["cpu", "cuda"] = "cpu"
    batch: BatchSection = BatchSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    lora: LoraSection | None = None
    parallel: ParallelSection = ParallelSection()
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()

    @classmethod
    def from_dict(cls, values: Any, where: str = "recipe") -> Self:
        """Check plain values.

        Raises:
            ConfigError: a key that is unknown, with the nearest known one; a value of the wrong kind; or keys that
                contradict one another.
        """
        if not isinstance(values, Mapping):
            raise ConfigError("expected keys and values", where=where)
        try:
            recipe = cls.model_validate(dict(values))
        except pydantic.ValidationError as error:
            raise _as_config_error(cls, error, where) from error
        recipe._check(where)
        return recipe

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a YAML file; relative paths in it are relative to it.

        Raises:
            BadInput: no such file, or not YAML.
            ConfigError: see `from_dict`.
        """
        try:
            values = yaml.safe_load(path.read_text())
        except FileNotFoundError as error:
            raise BadInput(
                "no such file", where=str(path), do="name a recipe, e.g. examples/train/small.yaml"
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"cannot be read ({error})", where=str(path)) from error
        except yaml.YAMLError as error:
            raise BadInput(f"not YAML ({str(error).splitlines()[-1].strip()})", where=str(path)) from error
        return cls.from_dict(values, str(path)).relative_to(path.resolve().parent)

    def relative_to(self, directory: Path) -> Self:
        """Make the paths of files absolute, from `directory`."""
        changed = self.model_dump()
        changed["out"] = str(directory / self.out)
        for key in ("train", "evaluation"):
            changed["data"][key] = [str(directory / Path(pattern).expanduser()) for pattern in changed["data"][key]]
        for key in ("start", "config", "tokenizer"):
            value = changed["model"][key]
            if isinstance(value, str) and (directory / value).exists():
                changed["model"][key] = str(directory / value)
        return type(self).model_validate(changed)

    def parallelism(self) -> Parallel:
        """Return the sizes of the mesh."""
        return Parallel(**self.parallel.model_dump())

    def fixed(self) -> dict[str, Any]:
        """Return what a continuation must share with the run that it continues."""
        return {key: value for key, value in self.model_dump(mode="json").items() if key not in FREE}

    def digest(self) -> str:
        """Identify `fixed`."""
        return hashlib.sha256(json.dumps(self.fixed(), sort_keys=True).encode()).hexdigest()[:16]

    def _check(self, where: str) -> None:
        if (self.model.start is None) == (self.model.config is None):
            raise ConfigError("give exactly one of start and config", where=f"{where}, model")
        if self.model.config is not None and self.model.tokenizer is None:
            raise ConfigError("a new model needs a tokenizer", where=f"{where}, model.tokenizer")
        if bool(self.data.train) == (self.data.train_hub is not None):
            raise ConfigError("give exactly one of train and train_hub", where=f"{where}, data")
        if self.schedule.warmup_steps >= self.steps:
            raise ConfigError(
                f"{self.schedule.warmup_steps} warm-up steps of {self.steps}", where=f"{where}, schedule.warmup_steps"
            )
        if self.model.autocast and self.model.dtype != "float32":
            raise ConfigError("autocast is for float32 parameters", where=f"{where}, model.autocast")
        if self.lora is not None and self.model.start is None:
            raise ConfigError("adapters are for a model that exists", where=f"{where}, lora", do="set model.start")
        if self.evaluation.every and not self.data.evaluation:
            raise ConfigError("nothing to evaluate on", where=f"{where}, evaluation.every", do="set data.evaluation")


def _as_config_error(cls: type[Recipe], error: pydantic.ValidationError, where: str) -> ConfigError:
    """Say the first problem as ours: unknown keys first, for they explain keys that are missing."""
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    problem = problems[0]
    path = [str(part) for part in problem["loc"]]
    place = f"{where}, {'.'.join(path[:-1])}" if path[:-1] else where
    if problem["type"] == "extra_forbidden":
        known = list(_section(cls, path[:-1]).model_fields)
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.0)[0]
        return ConfigError(f'unknown key "{path[-1]}"', where=place, do=f'did you mean "{near}"?')
    if problem["type"] == "missing":
        return ConfigError(f'"{path[-1]}" is missing', where=place)
    return ConfigError(f"{problem['msg']}, not {problem['input']!r}", where=f"{where}, {'.'.join(path)}")


def _section(cls: Any, path: list[str]) -> Any:
    """Find the section that a path of keys leads to."""
    for key in path:
        annotation = cls.model_fields[key].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        cls = next(option for option in options if isinstance(option, type) and issubclass(option, Section))
    return cls
