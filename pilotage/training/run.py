"""The training loop: from a recipe to checkpoints, going on where an earlier run was cut off."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pilotage.arch import source
from pilotage.core.errors import BadInput, ConfigError, Unavailable
from pilotage.training import build, checkpoint, sources
from pilotage.training.engine import Batch, Engine
from pilotage.training.mesh import Mesh, finish, make_mesh, start
from pilotage.training.metrics import FILE, Metrics
from pilotage.training.packing import Rows, rows_of_step
from pilotage.training.recipe import Recipe
from pilotage.training.schedule import factor


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        steps: done, those of earlier runs included. resumed_from: the step that this one began after.
        loss: of the last step. evaluation: mean loss over the evaluation files, None without any.
        tokens: learned from in this run. seconds: of its steps.
        model: directory that transformers and vLLM load.
        parameters: of the whole model. trainable: of these, those that are learned.
    """

    steps: int
    resumed_from: int
    loss: float | None
    evaluation: float | None
    tokens: int
    seconds: float
    model: Path
    parameters: int
    trainable: int

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        rate = self.tokens / self.seconds if self.seconds else None
        return {**self.__dict__, "model": str(self.model), "tokens_per_second": rate}


@dataclass(frozen=True, kw_only=True)
class Watcher:
    """What the command line wants to hear of."""

    begins: Callable[[int, int], None] = lambda step, steps: None
    step: Callable[[int, dict[str, float]], None] = lambda step, values: None
    saved: Callable[[Path], None] = lambda path: None


@dataclass
class _Run:
    recipe: Recipe
    mesh: Mesh
    tokenizer: Any
    engine: Engine
    optimizer: torch.optim.Optimizer
    train: Rows
    held_out: Rows | None
    base: Path | None
    out: Path
    config: Any
    sizes: tuple[int, int]
    watcher: Watcher
    metrics: Metrics | None = field(default=None)


def train(recipe: Recipe, *, resume: bool = False, fresh: bool = False, watcher: Watcher | None = None) -> Outcome:
    """Run a recipe in this process, which may be one of several that torchrun started.

    A run that finds checkpoints of the same recipe goes on from the last whole one. Where, on how many processes and
    how often something is written may have changed; what is computed may not.

    Args:
        recipe: what to do.
        resume: there must be a checkpoint.
        fresh: remove what earlier runs have left.
        watcher: told what happens, in every process.

    Raises:
        PilotageError: a recipe, file or machine that does not do; see its text.
    """
    if resume and fresh:
        raise BadInput("one of them at most", where="--resume, --fresh")
    joined = start(recipe.device)
    mesh = make_mesh(recipe.parallelism(), recipe.device)
    with _locked(Path(recipe.out), mesh):
        _clear(Path(recipe.out), mesh, fresh=fresh)
        outcome = _loop(_prepare(recipe, mesh, watcher or Watcher()), resume=resume)
    if joined:
        # A process that failed does not come here: the others may be waiting for it elsewhere.
        finish()
    return outcome


def _prepare(recipe: Recipe, mesh: Mesh, watcher: Watcher) -> _Run:
    _check_batch(recipe, mesh)
    base = source.resolve(recipe.model.start) if recipe.model.start is not None else None
    tokenizer = build.tokenizer(recipe.model, base)
    # One process tokenises; the others find it done.
    rows: list[Rows | None] = []
    for turn in (True, False):
        if mesh.first is turn:
            section = recipe.data
            padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
            tokens = sources.load(section, section.train, section.train_hub, tokenizer)
            rows.append(Rows(tokens, section.sequence_length, padding))
            held = sources.load(section, section.evaluation, None, tokenizer) if section.evaluation else None
            rows.append(Rows(held, section.sequence_length, padding) if held is not None else None)
        if mesh.devices is not None:
            dist.barrier()
    model = build.model(recipe, base, tokenizer)
    _check_length(recipe, model)
    parameters = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    config = model.config
    engine = Engine(
        model.to(recipe.device),
        mesh,
        recipe.parallelism(),
        device=recipe.device,
        autocast=torch.bfloat16 if recipe.model.autocast else None,
    )
    train, held_out = rows
    assert train is not None
    return _Run(
        recipe=recipe,
        mesh=mesh,
        tokenizer=tokenizer,
        engine=engine,
        optimizer=make_optimizer(recipe, engine),
        train=train,
        held_out=held_out,
        base=base,
        out=Path(recipe.out),
        config=config,
        sizes=(parameters, trainable),
        watcher=watcher,
    )


def make_optimizer(recipe: Recipe, engine: Engine) -> torch.optim.Optimizer:
    """Build AdamW; matrices decay, vectors do not."""
    options = recipe.optimizer
    parameters = list(engine.parameters().values())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    # One kernel for everything where parameters are plain; shards on different meshes go one by one.
    plain = engine.mesh.devices is None
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=options.lr,
        betas=options.betas,
        eps=options.eps,
        fused=plain,
        foreach=False,
    )


def _loop(run: _Run, *, resume: bool) -> Outcome:
    recipe, mesh = run.recipe, run.mesh
    done = _go_on(run, resume=resume)
    if mesh.first:
        run.metrics = Metrics(run.out, step=done, tensorboard=recipe.log.tensorboard)
    run.watcher.begins(done, recipe.steps)
    first, loss, tokens, spent = done, None, 0, 0.0
    evaluation: float | None = None
    try:
        for step in range(done, recipe.steps):
            began = time.perf_counter()
            values, learned = _step(run, step)
            seconds = time.perf_counter() - began
            loss, tokens, spent, done = values["loss"], tokens + learned, spent + seconds, step + 1
            values["tokens_per_second"] = learned / seconds
            due = recipe.evaluation.every and done % recipe.evaluation.every == 0
            if run.held_out is not None and (due or done == recipe.steps):
                evaluation = values["evaluation_loss"] = evaluate(run.engine, run.held_out, recipe)
            if run.metrics is not None and (done % recipe.log.every == 0 or "evaluation_loss" in values):
                run.metrics.add(done, values)
            run.watcher.step(done, values)
            every = recipe.checkpoint.every
            if done == recipe.steps or (every and done % every == 0):
                _save(run, done, values)
    finally:
        if run.metrics is not None:
            run.metrics.close()
    if evaluation is None and run.held_out is not None:
        evaluation = evaluate(run.engine, run.held_out, recipe)
    model = _export(run, checkpoint.directory(run.out, done))
    return Outcome(
        steps=done,
        resumed_from=first,
        loss=loss,
        evaluation=evaluation,
        tokens=tokens,
        seconds=spent,
        model=model,
        parameters=run.sizes[0],
        trainable=run.sizes[1],
    )


def _step(run: _Run, step: int) -> tuple[dict[str, float], int]:
    recipe, schedule = run.recipe, run.recipe.schedule
    # Dropout depends on the step alone, not on what was drawn before it.
    torch.manual_seed(recipe.seed * 1_000_003 + step * 1009 + run.mesh.dp_rank)
    lr = recipe.optimizer.lr * factor(
        step, steps=recipe.steps, warmup_steps=schedule.warmup_steps, kind=schedule.kind, final=schedule.final
    )
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    rows = rows_of_step(step, rows=recipe.batch.rows, count=len(run.train), seed=recipe.seed)
    batches = _own(run.train, rows, recipe, run.mesh)
    run.optimizer.zero_grad()
    loss = run.engine.forward_backward(batches)
    norm = run.engine.clip(recipe.optimizer.max_norm)
    run.optimizer.step()
    return {"loss": loss, "norm": norm, "lr": lr}, run.engine.targets


def _own(rows: Rows, indices: list[int], recipe: Recipe, mesh: Mesh) -> list[Batch]:
    """Take this rank's share of a step's rows and cut it into micro-batches."""
    each = len(indices) // mesh.dp
    own, size = indices[mesh.dp_rank * each : (mesh.dp_rank + 1) * each], recipe.batch.micro_rows
    return [rows.batch(own[at : at + size]) for at in range(0, each, size)]


def evaluate(engine: Engine, rows: Rows, recipe: Recipe) -> float:
    """Return the mean loss over all tokens of `rows`."""
    mesh = engine.mesh
    chunk = recipe.batch.micro_rows * mesh.dp * max(mesh.pp, 1)
    total = count = 0.0
    for at in range(0, len(rows), chunk):
        # Rows past the end have no targets, and every rank has as many.
        loss, targets = engine.evaluate(_own(rows, list(range(at, at + chunk)), recipe, mesh))
        total, count = total + loss * targets, count + targets
    return total / count


def _go_on(run: _Run, *, resume: bool) -> int:
    """Read the last whole checkpoint, if there is one; returns the steps it is after."""
    last: list[Any] = [None]
    if run.mesh.first:
        checkpoint.sweep(run.out)
        found = checkpoint.whole(run.out)
        last = [found[-1] if found else None]
    if run.mesh.devices is not None:
        dist.broadcast_object_list(last, src=0)
    path = last[0]
    if path is None:
        if resume:
            raise BadInput("there is no checkpoint to resume from", where=str(run.out), do="leave --resume out")
        return 0
    _check_recipe(path, run.recipe)
    rename = build.adapter_name if run.recipe.lora is not None else str
    state = checkpoint.load(path, run.engine, run.optimizer, rename=rename)
    return int(state["step"])


def _check_recipe(path: Path, recipe: Recipe) -> None:
    from pilotage.core import store

    before, now = store.read_json(path / checkpoint.STATE)["recipe"], recipe.fixed()
    changed = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    if changed:
        raise ConfigError(
            f"{', '.join(changed)} changed since this run began",
            where=str(path),
            do="put the recipe back, name another directory under out, or start over with --fresh",
        )


def _save(run: _Run, step: int, values: dict[str, float]) -> None:
    path, recipe = checkpoint.directory(run.out, step), run.recipe

    def others(directory: Path) -> None:
        if recipe.lora is not None:
            build.adapter_config(recipe.lora, str(run.base)).save_pretrained(str(directory))
        else:
            run.config.save_pretrained(str(directory))
        run.tokenizer.save_pretrained(str(directory))
        _copy_generation_config(run.base, directory)

    checkpoint.save(
        path,
        run.engine,
        run.optimizer,
        {"step": step, "rows": step * recipe.batch.rows, "recipe": recipe.fixed(), "metrics": values},
        write_others=others,
        rename=build.adapter_name if recipe.lora is not None else str,
        file=build.ADAPTER_FILE if recipe.lora is not None else "model",
    )
    if run.mesh.first:
        checkpoint.prune(run.out, recipe.checkpoint.keep)
    run.watcher.saved(path)


def _copy_generation_config(base: Path | None, directory: Path) -> None:
    if base is not None and (base / "generation_config.json").is_file():
        shutil.copyfile(base / "generation_config.json", directory / "generation_config.json")


def _export(run: _Run, last: Path) -> Path:
    """Return a directory that is a model: the last checkpoint, or the base model with its adapters merged in."""
    if run.recipe.lora is None:
        return last
    path = run.out / "model"
    if run.mesh.first:
        from pilotage.core import store

        assert run.base is not None
        model = build.merged(run.recipe, run.base, run.tokenizer, last)
        with store.new_directory(path) as temporary:
            model.save_pretrained(temporary / "weights")
            for file in (temporary / "weights").iterdir():
                file.rename(temporary / file.name)
            (temporary / "weights").rmdir()
            run.tokenizer.save_pretrained(temporary)
            _copy_generation_config(run.base, temporary)
    if run.mesh.devices is not None:
        dist.barrier()
    return path


def _check_batch(recipe: Recipe, mesh: Mesh) -> None:
    each = mesh.dp * recipe.batch.micro_rows
    if recipe.batch.rows % each:
        raise ConfigError(
            f"{recipe.batch.rows} rows do not divide over {mesh.dp} ranks of micro-batches of "
            f"{recipe.batch.micro_rows}",
            where="batch.rows",
            do=f"use a multiple of {each}",
        )
    if recipe.batch.rows // each < mesh.pp:
        raise ConfigError(
            f"{recipe.batch.rows // each} micro-batches do not fill pp={mesh.pp} stages",
            where="batch",
            do="make rows larger, or micro_rows smaller",
        )


def _check_length(recipe: Recipe, model: Any) -> None:
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and recipe.data.sequence_length > longest:
        raise ConfigError(
            f"{recipe.data.sequence_length} is more than the model's max_position_embeddings={longest}",
            where="data.sequence_length",
        )


def _clear(out: Path, mesh: Mesh, *, fresh: bool) -> None:
    if fresh and mesh.first:
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
        shutil.rmtree(out / "tensorboard", ignore_errors=True)
        shutil.rmtree(out / "model", ignore_errors=True)
        (out / FILE).unlink(missing_ok=True)
    if mesh.devices is not None:
        dist.barrier()


@contextlib.contextmanager
def _locked(out: Path, mesh: Mesh) -> Iterator[None]:
    """Hold the run's directory; the lock ends with the process, however it ends."""
    if not mesh.first:
        yield
        return
    from pilotage.core import store

    with store.as_storage_error(out):
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Unavailable(
                "another run is using this directory", where=str(out), do="wait for it to end, or name another one"
            ) from error
        yield
    finally:
        os.close(handle)
