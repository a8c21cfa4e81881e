"""Plan and write the files of a new model package."""

from __future__ import annotations

import importlib.util
import keyword
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from pilotage.arch.diff.compare import compare, raw_config
from pilotage.arch.diff.side import Side, side
from pilotage.arch.diff.work import WorkItem
from pilotage.arch.scaffold.donor import MODELS, Donor
from pilotage.arch.scaffold.model_file import model_file
from pilotage.arch.scaffold.names import Names
from pilotage.arch.scaffold.other_files import (
    config_file,
    exports,
    plain_file,
    table,
    training_file,
    weights_file,
)
from pilotage.arch.scaffold.registry import with_entry
from pilotage.core import store
from pilotage.core.errors import BadInput, ConfigError

# A donor's own architecture, as a config: what `pilotage diff` compares the new model with.
_DONOR_MODELS = {"llama3": "tiny:llama3", "gemma3": "tiny:gemma3", "qwen2": "tiny:qwen2", "qwen3": "tiny:qwen3"}


@dataclass(frozen=True, kw_only=True)
class Scaffold:
    """What was written.

    Attributes:
        files: every file, in the order of writing.
        work_items: what is marked in them.
        package: dotted name of the new package.
        tests: the test file.
        notes: what the user should know.
    """

    files: tuple[Path, ...]
    work_items: tuple[WorkItem, ...]
    package: str
    tests: Path
    notes: tuple[str, ...]


def scaffold(
    name: str,
    model: str,
    donor: str = "llama3",
    out: Path | None = None,
    *,
    force: bool = False,
    root: Path | None = None,
) -> Scaffold:
    """Write a model package with every work item as a marked place.

    Args:
        name: of the package: lower case, a Python identifier.
        model: what it is for: whatever `pilotage diff` takes.
        donor: the package under `pilotage/models` to copy.
        out: directory of a project of its own to write; None for `pilotage/models/<name>` in the source tree.
        force: overwrite a package that is there.
        root: the source tree; the one that this module runs from by default.

    Raises:
        BadInput: a name that cannot be one or is taken, an unknown donor, or a source tree that is not there.
        ConfigError: the model's config names no architecture.
        Unavailable, Unsupported: as `pilotage diff`.
    """
    found = Donor.read(donor)
    if donor not in _DONOR_MODELS:
        raise BadInput(
            f"no config is known for the donor {donor!r}", where="--donor", do=f"use one of {', '.join(_DONOR_MODELS)}"
        )
    root = root or MODELS.parent.parent
    _check_name(name, out, force, root)
    raw = raw_config(model)
    new = side(model, raw)
    architecture = _architecture(new)
    package = name if out is not None else f"pilotage.models.{name}"
    modeling = new.source.path.name if new.source else None
    names = Names(name=name, package=package, architecture=architecture, donor=found, modeling=modeling)
    donor_model = _DONOR_MODELS[donor]
    items = list(compare(side(donor_model, raw_config(donor_model)), new).work_items)
    notes: list[str] = []
    inside, beside = _files(names, new, items, donor_model, external=out is not None, notes=notes)
    if out is None:
        directory, tests = root / "pilotage" / "models" / name, root / "tests" / "parity" / f"test_{name}.py"
        placed = {directory / path: text for path, text in inside.items()}
        placed |= {root / path: text for path, text in beside.items()}
        registry = root / "pilotage" / "models" / "registry.py"
        changed, note = with_entry(registry.read_text(), architecture, f"{package}.factory:{architecture}")
        notes.append(note)
        placed[registry] = changed
    else:
        directory, tests = out / name, out / "tests" / f"test_{name}.py"
        placed = {directory / path: text for path, text in inside.items()}
        placed |= {out / path: text for path, text in beside.items()}
    for path, text in placed.items():
        store.write_text(path, text)
    return Scaffold(
        files=tuple(placed), work_items=tuple(items), package=package, tests=tests, notes=tuple(n for n in notes if n)
    )


def _check_name(name: str, out: Path | None, force: bool, root: Path) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise BadInput("not a package name", where=name, do="use lower-case letters, digits and _, a letter first")
    if out is None:
        if not (root / "pyproject.toml").is_file() or not (root / "pilotage" / "models").is_dir():
            raise BadInput(
                "pilotage is not installed from a source tree, so there is no tree to write into",
                where=str(root),
                do="name a directory for a package of its own with --out DIR",
            )
        target = root / "pilotage" / "models" / name
    else:
        target = out / name
        specification = importlib.util.find_spec(name)
        if specification is not None and not (target / "__init__.py").is_file():
            raise BadInput(
                "a package of this name is installed already",
                where=name,
                do="choose another name, e.g. " + f"{name}_model",
            )
        if out.exists() and not out.is_dir():
            raise BadInput("not a directory", where=str(out), do="name a directory with --out")
    if target.exists() and not force:
        raise BadInput("it is there already", where=str(target), do="choose another name, or overwrite it with --force")


def _architecture(new: Side) -> str:
    named = new.spec.architecture
    if new.source is not None and new.spec.wrapper_type is None and named is None:
        named = new.source.root
    if not named:
        raise ConfigError(
            "no architectures", where=f"config.json of {new.name}", do="name the class, e.g. LlamaForCausalLM"
        )
    return named


def _files(
    names: Names, new: Side, items: list[WorkItem], donor_model: str, *, external: bool, notes: list[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """The content of every file: those of the package by name, those of the project by path."""
    donor = names.donor
    inside = {
        "__init__.py": exports(names, f"{names.prefix}: a port that started from {donor.name}"),
        "config.py": config_file(donor, names, items, new.spec),
        "model.py": model_file(donor, names, items),
        "factory.py": plain_file(donor, names, "factory.py"),
        "weights.py": weights_file(donor, names, items),
        "README.md": _render("readme.md.j2", names, new, items, donor_model, external),
    }
    if "hf.py" in donor.files:
        inside["hf.py"] = training_file(donor, names, new.fields.get("model_type"))
    for extra in donor.files:
        inside.setdefault(extra, plain_file(donor, names, extra))
    twin = _twin(new, notes)
    tests = "tests" if external else "tests/parity"
    beside = {}
    if external:
        beside["pyproject.toml"] = _render("pyproject.toml.j2", names, new, items, donor_model, external)
    beside[f"{tests}/test_{names.name}.py"] = _render("test.py.j2", names, new, items, donor_model, external)
    if twin is not None:
        beside[f"{tests}/{names.name}_config.json"] = twin
    return inside, beside


def _twin(new: Side, notes: list[str]) -> str | None:
    import json

    from pilotage.arch.twin import shrink
    from pilotage.core.errors import Unsupported

    try:
        return json.dumps(shrink(new.raw), indent=2) + "\n"
    except Unsupported as error:
        notes.append(f"no tiny twin to test against: {error.what}; the parity tests say so")
        return None


def _render(template: str, names: Names, new: Side, items: list[WorkItem], donor_model: str, external: bool) -> str:
    text = resources.files(__package__).joinpath(template).read_text()
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    spec = new.spec
    fields = [
        (name, _short(field.value), field.source_key or "", "stated" if field.stated else "default")
        for name, field in spec.fields.items()
        if field.value not in (None, False, (), {}, 0) or field.stated
    ]
    return environment.from_string(text).render(
        names=names,
        model=new.name,
        label=new.label,
        items=items,
        donor_model=donor_model,
        external=external,
        fields=table(fields),
        work=table([(item.title, item.touches.replace("; ", ", "), item.row) for item in items]),
    )


def _short(value: Any) -> str:
    from pilotage.arch.diff.traits import pattern
    from pilotage.arch.fields import jsonable

    if isinstance(value, tuple) and value and all(isinstance(part, str) for part in value):
        return pattern(value)
    text = str(jsonable(value))
    return text if len(text) <= 80 else f"{text[:77]}..."
