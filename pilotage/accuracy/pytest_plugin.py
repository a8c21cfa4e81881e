"""Level 3 as a pytest plugin: `pytest --pilotage-model tiny:gemma3`, and fixtures for a model package's own tests.

Without paths on the command line exactly the module checks run: those of the package's tests that use a fixture of this
plugin, or, where none does, one test for each module and dtype. With paths, everything in them runs.

    def test_module(pilotage_module):          # once for each module of the model, in each dtype
        pilotage_module.assert_close()

    def test_mlp_on_two_ranks(pilotage_modules):
        pilotage_modules.assert_close("layers.*.mlp", dtype="bfloat16", ranks=2)

A package names its models once, in pytest's configuration: `pilotage_models = tiny:gemma3`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pilotage.core.nouns import Status

DTYPES = ("float32", "bfloat16")
FIXTURES = ("pilotage_module", "pilotage_modules", "pilotage_checkpoint", "pilotage_model")
_NONE = "no model: give --pilotage-model or set pilotage_models in pytest's configuration"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("pilotage", "module checks of a pilotage model")
    group.addoption(
        "--pilotage-model",
        action="append",
        metavar="MODEL",
        help="check the modules of this model against Hugging Face; may be given more than once",
    )
    group.addoption("--pilotage-dtype", action="append", metavar="DTYPE", help="only float32, or only bfloat16")
    group.addoption("--pilotage-module", action="append", metavar="PATTERN", help="only these modules: layers.*.mlp")
    group.addoption("--pilotage-ranks", type=int, default=1, metavar="N", help="tensor-parallel ranks (default 1)")
    group.addoption(
        "--pilotage-weights",
        choices=("real", "perturbed"),
        default="real",
        help="perturbed: a tiny twin of the architecture whose weights hide nothing",
    )
    parser.addini("pilotage_models", "models whose modules this package's tests check", type="args", default=[])


@dataclass(frozen=True)
class Question:
    """What one run of the checks depends on."""

    model: str
    dtype: str
    patterns: tuple[str, ...] | None
    ranks: int
    weights: str


@functools.cache
def _checked(question: Question) -> tuple[dict[str, Any], ...]:
    """Run the checks once; every test of the same model and dtype reads from here."""
    from pilotage.accuracy.modules import ModulePlan
    from pilotage.accuracy.validate import validate

    weights: Any = question.weights
    plan = ModulePlan(patterns=question.patterns, weights=weights, ranks=question.ranks)
    result = validate(question.model, arms=(question.dtype,), levels=(3,), checks=plan)
    return tuple(result.modules)


@functools.cache
def _names(model: str, patterns: tuple[str, ...] | None, weights: str) -> tuple[str, ...]:
    """List the modules of a model without its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from pilotage.accuracy import modules
    from pilotage.accuracy.arms import hf
    from pilotage.arch import source, twin

    config = source.load_config(model)
    if weights == "perturbed":
        shrunk = twin.shrink(config.to_dict())
        config = AutoConfig.for_model(**shrunk)
    loader: Any = AutoModelForCausalLM
    with hf.quiet(), torch.device("meta"):
        skeleton = loader.from_config(config)
    wanted, ropes = modules.listed(skeleton, patterns)
    return (*(name for name, _ in wanted), *(["rotary_emb"] if ropes else []))


def _settle(entries: Sequence[dict[str, Any]]) -> None:
    """Raise what the entries' verdicts say, all of them in one message.

    Raises:
        AssertionError: a module errs more than the baseline.
        NotMeasured: it cannot be told, or there is no such module.
    """
    from pilotage.accuracy.testing import NotMeasured
    from pilotage.core.nouns import Status, worst

    statuses: list[Status] = [Status(entry["verdict"]["status"]) for entry in entries]
    status = worst(statuses)
    if status is Status.PASS:
        return
    lines = [
        f"{entry['dtype']} {entry['module']}: {entry['verdict']['status']}: {entry['verdict']['metric']}="
        f"{entry['verdict']['estimate']}, bound {entry['verdict']['bound']} ({entry['verdict']['bound_source']})"
        for entry, found in zip(entries, statuses, strict=True)
        if found is not Status.PASS
    ] or ["nothing was compared"]
    raise (AssertionError if status is Status.FAIL else NotMeasured)("\n".join(lines))


@dataclass(frozen=True)
class ModuleCase:
    """One module of a model in one dtype.

    Attributes:
        name: relative to the decoder, "layers.0.mlp".
        question: the checks that it is part of.
    """

    name: str
    question: Question

    @property
    def dtype(self) -> str:
        return self.question.dtype

    def entries(self) -> list[dict[str, Any]]:
        """Return what was measured: {"module", "kind", "dtype", "verdict"} of the module and its variants."""
        return [
            entry
            for entry in _checked(self.question)
            if entry["module"] == self.name or entry["module"].startswith(f"{self.name} (")
        ]

    def assert_close(self) -> None:
        """Assert that the module errs no more than Hugging Face's at the same precision; see `_settle`."""
        _settle(self.entries())


class ModuleItem(pytest.Item):
    """A test that needs no test file."""

    case: ModuleCase

    def runtest(self) -> None:
        self.case.assert_close()

    def repr_failure(self, excinfo: Any, style: Any = None) -> str:
        if isinstance(excinfo.value, AssertionError):
            return str(excinfo.value)
        return str(super().repr_failure(excinfo))

    def reportinfo(self) -> tuple[Path, None, str]:
        return Path(self.case.question.model), None, self.name


class Modules:
    """The checks of a model as a fixture."""

    def __init__(self, model: str, weights: str) -> None:
        self.model, self.weights = model, weights

    def check(self, *patterns: str, dtype: str = "float32", ranks: int = 1) -> list[dict[str, Any]]:
        """Check the modules that match (none given: one layer of each kind, and the last); see `modules.check`."""
        return list(_checked(Question(self.model, dtype, patterns or None, ranks, self.weights)))

    def assert_close(self, *patterns: str, dtype: str = "float32", ranks: int = 1) -> None:
        """Check them, and raise unless all pass."""
        _settle(self.check(*patterns, dtype=dtype, ranks=ranks))


def _models(config: pytest.Config) -> list[str]:
    return config.getoption("pilotage_model") or list(config.getini("pilotage_models"))


def _cases(config: pytest.Config) -> Iterator[ModuleCase]:
    patterns = tuple(config.getoption("pilotage_module") or ()) or None
    weights = config.getoption("pilotage_weights")
    for model in _models(config):
        names = _names(model, patterns, weights)
        for dtype in config.getoption("pilotage_dtype") or DTYPES:
            question = Question(model, dtype, patterns, config.getoption("pilotage_ranks"), weights)
            for name in names:
                yield ModuleCase(name, question)


def _id(case: ModuleCase) -> str:
    return f"{case.question.model}-{case.dtype}-{case.name}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give tests that ask for a module every module, and tests that ask for a model every model."""
    if "pilotage_module" in metafunc.fixturenames:
        metafunc.parametrize("pilotage_module", list(_listed(metafunc.config)), ids=_id)
    elif "pilotage_model" in metafunc.fixturenames:
        metafunc.parametrize("pilotage_model", _models(metafunc.config), scope="session")


def _listed(config: pytest.Config) -> list[ModuleCase]:
    from pilotage.core.errors import PilotageError

    try:
        return list(_cases(config))
    except PilotageError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the module checks where no test has asked for them; without paths, leave everything else out."""
    if not config.getoption("pilotage_model"):
        return
    ours = [item for item in items if set(FIXTURES) & set(getattr(item, "fixturenames", ()))]
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        rest = [item for item in items if item not in ours]
        if rest:
            config.hook.pytest_deselected(items=rest)
        items[:] = ours
    if not ours:
        for case in _listed(config):
            item = ModuleItem.from_parent(session, name=f"module[{_id(case)}]")
            item.case = case
            items.append(item)


@pytest.fixture(scope="session")
def pilotage_model(request: pytest.FixtureRequest) -> str:
    """The model under test, as the user named it; a test that asks for it runs once for each."""
    models = _models(request.config)
    if not models:
        pytest.skip(_NONE)
    return str(getattr(request, "param", models[0]))


@pytest.fixture(scope="session")
def pilotage_checkpoint(pilotage_model: str) -> Path:
    """The directory of the model's checkpoint."""
    from pilotage.arch import source

    return source.resolve(pilotage_model)


@pytest.fixture(scope="session")
def pilotage_modules(pilotage_model: str, request: pytest.FixtureRequest) -> Modules:
    """The module checks of the model, for tests that choose modules, dtype and ranks themselves."""
    return Modules(pilotage_model, request.config.getoption("pilotage_weights"))


@pytest.fixture
def pilotage_module(request: pytest.FixtureRequest) -> ModuleCase:
    """One module of the model in one dtype; a test that asks for it runs once for each."""
    if not hasattr(request, "param"):
        pytest.skip(_NONE)
    case: ModuleCase = request.param
    return case
