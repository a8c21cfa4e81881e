"""Tasks by name or by file, as lm-eval's task objects; what cannot be had says why."""

from __future__ import annotations

import contextlib
import difflib
import functools
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pilotage.accuracy.tasks.plan import OWN_TASK
from pilotage.core.errors import BadInput, Unavailable

DATA = Path(__file__).parent / "data"
# Builders of `datasets` that read files of this machine.
_LOCAL_BUILDERS = {"json", "csv", "parquet", "text", "arrow"}


def require() -> None:
    """Raise unless lm-eval is installed.

    Raises:
        Unavailable: it is not.
    """
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise Unavailable("lm-eval is not installed", do='run: pip install "pilotage[tasks]"') from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep lm-eval and datasets to their errors while tasks are loaded and run."""
    import datasets
    import lm_eval.api.model
    import lm_eval.api.task

    places = (lm_eval.api.model, lm_eval.api.task)
    tqdm = places[0].tqdm
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "lm_eval.evaluator")]
    levels = [logger.level for logger in loggers]
    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    for place in places:
        place.tqdm = functools.partial(tqdm, disable=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for place in places:
            place.tqdm = tqdm
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()


@functools.cache
def _manager() -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager()


@functools.cache
def _hub_answers() -> bool:
    from huggingface_hub import constants

    from pilotage.arch import source

    return not constants.HF_HUB_OFFLINE and source._hub_answers(constants.ENDPOINT)


def files(name: str) -> list[Path] | None:
    """Return the task files that `name` stands for: ours, a file, or those of a directory; None for an lm-eval name.

    Raises:
        BadInput: it is written like a path, and there is nothing.
    """
    if name == OWN_TASK or (DATA / f"{name}.yaml").is_file():
        return [DATA / f"{name}.yaml"]
    path = Path(name).expanduser()
    if path.is_dir():
        found = sorted(path.glob("*.yaml"))
        if not found:
            raise BadInput("holds no task file (*.yaml)", where=str(path), do="name a directory of lm-eval task files")
        return found
    if path.is_file():
        return [path]
    if path.suffix in (".yaml", ".yml") or "/" in name:
        raise BadInput("no such task file", where=name, do="name a file or directory of lm-eval tasks, or a task name")
    return None


def load(name: str) -> dict[str, Any]:
    """Return lm-eval's task objects behind a name or path, by task name.

    Raises:
        BadInput: no task has this name (the nearest is named), or the file is no task.
        Unavailable: its data are on the hub, which cannot be reached.
    """
    require()
    with quiet():
        found = files(name)
        if found is None:
            return _from_name(name)
        tasks: dict[str, Any] = {}
        for path in found:
            tasks |= _from_file(path)
        return tasks


def _from_file(path: Path) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        config = dict(load_yaml(path, resolve_func=True))
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise BadInput(f"cannot be read as a task ({reason[0] if reason else error})", where=str(path)) from error
    if not isinstance(config.get("task"), str) and "group" not in config:
        raise BadInput("has no `task:` name", where=str(path), do="write it as an lm-eval task file")
    if config.get("dataset_path") in _LOCAL_BUILDERS and "dataset_kwargs" in config:
        # Relative to the task file, wherever the command is run.
        kwargs = dict(config["dataset_kwargs"])
        if "data_files" in kwargs:
            kwargs["data_files"] = _absolute(kwargs["data_files"], path.resolve().parent)
        config["dataset_kwargs"] = kwargs
    return _built(TaskManager(include_defaults=False), config, str(path), config.get("dataset_path"))


def _absolute(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {key: _absolute(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_absolute(item, folder) for item in value]
    return str(value) if "://" in str(value) else str(folder / str(value))


def _from_name(name: str) -> dict[str, Any]:
    manager = _manager()
    if name not in manager.task_index:
        near = difflib.get_close_matches(name, [OWN_TASK, *manager.all_tasks], n=1, cutoff=0.0)
        raise BadInput(f"lm-eval has no task {name!r}", where="--task", do=f"did you mean {near[0]!r}?")
    return _built(manager, name, name, None)


def _built(manager: Any, spec: Any, where: str, builder: Any) -> dict[str, Any]:
    local = builder in _LOCAL_BUILDERS or (isinstance(builder, str) and Path(builder).expanduser().exists())
    try:
        # Without a hub nobody waits for one: what is in the local cache loads, everything else fails at once.
        with contextlib.nullcontext() if local or _hub_answers() else _offline():
            return dict(manager.load([spec])["tasks"])
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0] if lines else ''}"
        if local:
            raise BadInput(f"its data cannot be loaded ({reason})", where=where) from error
        if not _hub_answers():
            raise Unavailable(
                f"its data are on the Hugging Face hub, which cannot be reached ({reason})",
                where=where,
                do="run it where there is a hub or a cached copy, or use a local task file",
            ) from error
        raise Unavailable(f"its data cannot be loaded ({reason})", where=where) from error


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    import datasets.config
    import huggingface_hub.constants

    places = [(datasets.config, "HF_HUB_OFFLINE"), (huggingface_hub.constants, "HF_HUB_OFFLINE")]
    before = [getattr(module, key) for module, key in places]
    for module, key in places:
        setattr(module, key, True)
    try:
        yield
    finally:
        for (module, key), value in zip(places, before, strict=True):
            setattr(module, key, value)
