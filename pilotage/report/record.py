"""What a run directory holds: one record a stage, each a JSON file of its own.

The voyage writes these files and the report reads them, so the format lives here, below both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pilotage.core import store
from pilotage.core.errors import BadInput
from pilotage.core.nouns import Status

SCHEMA = 1
VOYAGE_FILE = "voyage.json"
REPORT_FILE = "report.html"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of the voyage.

    Attributes:
        name: what commands and files call it.
        number: the stage of the onboarding guide that it belongs to.
        title: its name for readers.
        question: what it answers, in one line.
    """

    name: str
    number: int
    title: str
    question: str

    @property
    def file(self) -> str:
        return f"{self.number}-{self.name}.json"


STAGES: tuple[Stage, ...] = (
    Stage(name="diff", number=0, title="Diff", question="What differs from the donor model?"),
    Stage(name="implement", number=1, title="Implement", question="Is there a model package for the architecture?"),
    Stage(name="register", number=2, title="Register", question="Does vLLM find platform and model by itself?"),
    Stage(name="weights", number=3, title="Weights", question="Is every tensor of the checkpoint accounted for?"),
    Stage(name="smoke", number=3, title="Smoke", question="Do the buckets compile, and are the first tokens right?"),
    Stage(name="validate", number=4, title="Validate", question="Is it still the same model, token by token?"),
    Stage(name="bench", number=5, title="Benchmark", question="How fast is it, and against what?"),
)

# Checks that a voyage makes when it is asked to: they take minutes, and most runs do not need them.
EXTRAS: tuple[Stage, ...] = (
    Stage(name="tasks", number=4, title="Tasks", question="Does it score like Hugging Face on the same items?"),
    Stage(
        name="invariance", number=4, title="Invariance", question="Are its answers the same, however they are computed?"
    ),
    Stage(name="localise", number=4, title="Localise", question="Which module is at fault?"),
)


def stage(name: str) -> Stage:
    """Look up a stage or an extra check by its name."""
    for found in (*STAGES, *EXTRAS):
        if found.name == name:
            return found
    names = ", ".join(found.name for found in (*STAGES, *EXTRAS))
    raise BadInput(f"no stage is called {name!r}", do=f"name one of {names}")


@dataclass(frozen=True, kw_only=True)
class StageRecord:
    """What a stage concluded, and what it concluded it from.

    Attributes:
        stage: name of the stage.
        status: pass, fail or not_measured; a crash is not_measured.
        summary: one line for the table of the voyage.
        reason: why the status is not pass; empty when it is.
        completed: the stage ran to its end and `result` is whole. Only a completed stage is kept on resume.
        fingerprint: digest of everything the result depends on.
        started: UTC time in ISO form; seconds: wall time.
        command: the command that does it again, as one would type it.
        exit_code: of the stage's process; None when it needed none.
        log: the log file, relative to the run directory.
        result: the JSON that the stage's own command prints.
    """

    stage: str
    status: Status
    summary: str
    reason: str = ""
    completed: bool = True
    fingerprint: str = ""
    started: str = ""
    seconds: float | None = None
    command: str = ""
    exit_code: int | None = None
    log: str | None = None
    result: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "stage": self.stage,
            "status": self.status.value,
            "summary": self.summary,
            "reason": self.reason,
            "completed": self.completed,
            "fingerprint": self.fingerprint,
            "started": self.started,
            "seconds": self.seconds,
            "command": self.command,
            "exit_code": self.exit_code,
            "log": self.log,
            "result": dict(self.result) if self.result is not None else None,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StageRecord:
        """Read a record back.

        Raises:
            BadInput: it was written by another version, or is no record.
        """
        if value.get("schema") != SCHEMA:
            raise BadInput(f"record of schema {value.get('schema')!r}, not {SCHEMA}", do="run the stage again")
        known = {name: value[name] for name in cls.__dataclass_fields__ if name in value}
        try:
            known["status"] = Status(known["status"])
            return cls(**known)
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"not a stage record ({error})", do="run the stage again") from error


@dataclass(frozen=True, kw_only=True)
class Records:
    """Everything the report is made from.

    Attributes:
        voyage: model, checkpoint, versions, machine, options and command of the run.
        stages: the records that exist, by stage name, extra checks among them.
        unreadable: for stages whose file cannot be read, why.
    """

    voyage: Mapping[str, Any]
    stages: Mapping[str, StageRecord]
    unreadable: Mapping[str, str] = field(default_factory=dict)

    def result(self, name: str) -> Mapping[str, Any] | None:
        """The result of a stage, or None where it has none."""
        record = self.stages.get(name)
        return record.result if record is not None else None


def read(directory: Path) -> Records:
    """Read a run directory. A stage file that is broken is reported as such, never guessed at.

    Raises:
        BadInput: the directory is none, or holds no voyage.
    """
    if not directory.is_dir():
        raise BadInput("no such run directory", where=str(directory), do="start one with `pilotage onboard MODEL`")
    if not (directory / VOYAGE_FILE).exists():
        raise BadInput(
            f"not a run directory (it has no {VOYAGE_FILE})",
            where=str(directory),
            do="name a directory that `pilotage onboard` wrote",
        )
    voyage = store.read_json(directory / VOYAGE_FILE)
    if not isinstance(voyage, dict) or "model" not in voyage:
        raise BadInput("names no model", where=str(directory / VOYAGE_FILE), do="run `pilotage onboard` again")
    stages: dict[str, StageRecord] = {}
    unreadable: dict[str, str] = {}
    for found in (*STAGES, *EXTRAS):
        path = directory / found.file
        if not path.exists():
            continue
        try:
            stages[found.name] = StageRecord.from_json(store.read_json(path))
        except BadInput as error:
            unreadable[found.name] = str(error)
    return Records(voyage=voyage, stages=stages, unreadable=unreadable)
