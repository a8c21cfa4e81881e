"""Compare two models from their configs alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotage.arch.diff.checklist import ChecklistRow, checklist
from pilotage.arch.diff.methods import MethodDiff, method_diffs
from pilotage.arch.diff.side import Side, side
from pilotage.arch.diff.tree import Dimensions, TreeRow, tree_diff
from pilotage.arch.diff.work import Pair, WorkItem, work_items
from pilotage.arch.fields import jsonable
from pilotage.core.errors import BadInput

# Records of who saved the file and with what; they say nothing about the model.
_RECORDS = frozenset({"_name_or_path", "transformers_version", "tokenizer_class", "_attn_implementation_autoset"})


@dataclass(frozen=True, kw_only=True)
class ArchDiff:
    """Everything that differs between a donor (a) and a new model (b).

    Attributes:
        a, b: the two models.
        differ: config keys with another value: key -> (a's, b's).
        only_a, only_b: config keys that one model has.
        checklist: the guide's eight rows.
        work_items: what to write, in checklist order.
        modules: the module trees compared, repeated layers folded; empty where one could not be built.
        methods: the methods of the transformers classes compared.
        notes: what could not be looked at, and why.
    """

    a: Side
    b: Side
    differ: Mapping[str, tuple[Any, Any]]
    only_a: Mapping[str, Any]
    only_b: Mapping[str, Any]
    checklist: tuple[ChecklistRow, ...]
    work_items: tuple[WorkItem, ...]
    modules: tuple[TreeRow, ...]
    methods: tuple[MethodDiff, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The diff as JSON-serialisable data; `pilotage diff --json` prints it."""
        return {
            "models": [self.a.name, self.b.name],
            "fields": {
                "differ": {key: [jsonable(a), jsonable(b)] for key, (a, b) in self.differ.items()},
                "only_a": {key: jsonable(value) for key, value in self.only_a.items()},
                "only_b": {key: jsonable(value) for key, value in self.only_b.items()},
            },
            "checklist": [row.to_json() for row in self.checklist],
            "work_items": [found.to_json() for found in self.work_items],
            "modules": [row.to_json() for row in self.modules if row.verdict != "same"],
            "methods": [method.to_json() for method in self.methods if method.verdict != "same"],
            "notes": list(self.notes),
        }


def diff(a: str, b: str) -> ArchDiff:
    """Compare two models; reads their configs and transformers' source, and downloads no weights.

    Args:
        a: the donor: a model already supported. A directory, a config.json, a hub id, or a name that pilotage builds.
        b: the new model.

    Raises:
        BadInput: no such model or file, or one that is not a config.
        Unavailable: the hub is needed and cannot be reached, or the model is gated.
        Unsupported: an architecture unknown to transformers.
        ConfigError: a value that its config class refuses.
    """
    raw_a, raw_b = raw_config(a), raw_config(b)  # A mistake in either name is said before anything slow is done.
    return compare(side(a, raw_a), side(b, raw_b))


def raw_config(model: str) -> dict[str, Any]:
    """The parsed config.json of a model.

    Raises:
        BadInput, Unavailable: as for `diff`.
    """
    from pilotage.arch.source import config_dir
    from pilotage.core.store import read_json

    path = Path(config_dir(model))
    file = path if path.is_file() else path / "config.json"
    raw = read_json(file)
    if not isinstance(raw, dict):
        raise BadInput("not a JSON object", where=str(file), do="name a model's config.json")
    return raw


def compare(a: Side, b: Side) -> ArchDiff:
    """Compare two sides that are already read."""
    fields_a, fields_b = ({key: value for key, value in s.fields.items() if key not in _RECORDS} for s in (a, b))
    pair = Pair(a=a, b=b)
    items = work_items(pair)
    modules: list[TreeRow] = []
    if a.tree is not None and b.tree is not None:
        modules = tree_diff(a.tree, b.tree, Dimensions(a.spec), Dimensions(b.spec))
    return ArchDiff(
        a=a,
        b=b,
        differ={k: (v, fields_b[k]) for k, v in fields_a.items() if k in fields_b and v != fields_b[k]},
        only_a={key: value for key, value in fields_a.items() if key not in fields_b},
        only_b={key: value for key, value in fields_b.items() if key not in fields_a},
        checklist=tuple(checklist(pair, items)),
        work_items=tuple(items),
        modules=tuple(modules),
        methods=tuple(method_diffs(a.source, b.source)),
        notes=tuple(note for found in (a, b) for note in _notes(found)),
    )


def _notes(found: Side) -> list[str]:
    notes = []
    if found.tree_error:
        notes.append(f"{found.name}: the module tree could not be built ({found.tree_error}); config and source decide")
    if found.source is None:
        notes.append(f"{found.name}: transformers has no modelling source for {found.spec.model_type}")
    return notes
