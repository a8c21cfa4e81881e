"""`pilotage validate`: is the served model still the same model, token by token and module by module?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotage.cli._common import STYLES, Json, Model, command_line, print_json

if TYPE_CHECKING:
    from pilotage.accuracy.training import TrainingValidation
    from pilotage.accuracy.validate import Validation
    from pilotage.core.nouns import Verdict

ORDER = 50


def verb(app: typer.Typer) -> None:
    """Register the command."""

    @app.command(short_help="Compare the served model with Hugging Face, in three ways.")
    def validate(
        model: Model,
        reference: Annotated[
            str | None,
            typer.Option(
                metavar="MODEL", help="Compare with this checkpoint (the original of a converted one) instead of MODEL."
            ),
        ] = None,
        arm: Annotated[
            list[str] | None, typer.Option(metavar="DTYPE", help="Only this arm: bfloat16 or float32.")
        ] = None,
        level: Annotated[
            list[int] | None,
            typer.Option(
                "--level", min=1, max=3, help="1 tasks, 2 tokens and KV cache, 3 modules; repeatable. [default: 2, 3]"
            ),
        ] = None,
        task: Annotated[
            list[str] | None,
            typer.Option(
                metavar="TASK", help="Level 1: an lm-eval task name, or a task file or directory. [default: our own]"
            ),
        ] = None,
        threshold: Annotated[
            list[str] | None,
            typer.Option(
                metavar="TASK[/METRIC]=SCORE", help="Level 1: the least score, or a mean and tolerance: 0.45+-0.03."
            ),
        ] = None,
        limit: Annotated[int | None, typer.Option(min=1, help="Level 1: only the first items of each task.")] = None,
        num_fewshot: Annotated[int | None, typer.Option(min=0, help="Level 1: examples before each item.")] = None,
        max_length: Annotated[int | None, typer.Option(min=2, help="Level 1: longest request in tokens.")] = None,
        through: Annotated[
            str, typer.Option(metavar="WAY", help="Level 1: reach the target through a server, or an engine.")
        ] = "server",
        module: Annotated[
            list[str] | None, typer.Option(metavar="PATTERN", help="Level 3: only these modules: layers.*.mlp.")
        ] = None,
        weights: Annotated[
            str, typer.Option(metavar="KIND", help="Level 3: real, or perturbed (a tiny twin of the architecture).")
        ] = "real",
        ranks: Annotated[int, typer.Option(min=1, help="Level 3: tensor-parallel ranks.")] = 1,
        modules: Annotated[bool, typer.Option(help="Check single modules as well.")] = True,
        train: Annotated[
            bool,
            typer.Option(
                "--train", help="Compare training instead: logits, loss and every parameter's gradient; checkpoints."
            ),
        ] = False,
        eager: Annotated[
            bool, typer.Option("--eager", help="Do not compile the engine's graphs (float32 never does).")
        ] = False,
        json: Json = False,
    ) -> None:
        """Compare a served model with Hugging Face's: tasks, tokens and KV cache, modules.

        With --train it is the training class: forward, loss and the gradient of each parameter under padding, packing,
        checkpointing, accumulation and torch.compile, and checkpoints both ways; --eager leaves torch.compile out.

        Level 1 runs tasks on both and hands what deviates to level 2. Level 2 teacher-forces the fp32 reference's
        tokens through the real engine and judges its errors by clean controls. Level 3 compares single modules.

        Exits with 0 if everything passes, 1 if anything fails, 2 if something could not be measured.
        """
        if train:
            _train(model, tuple(arm) if arm else None, compiled=not eager, json=json, reference=reference, level=level)
        from pilotage.accuracy import validate as accuracy
        from pilotage.accuracy.modules import ModulePlan
        from pilotage.accuracy.tasks import plan

        result = accuracy.validate(
            model,
            reference=reference,
            arms=tuple(arm or accuracy.ARMS),
            levels=level,
            tasks=plan.TaskPlan(
                tasks=tuple(task or (plan.OWN_TASK,)),
                thresholds=tuple(plan.threshold(text) for text in threshold or ()),
                limit=limit,
                num_fewshot=num_fewshot,
                max_length=max_length,
                dtype=arm[0] if arm and len(arm) == 1 else "bfloat16",
                through=_one_of(through, ("server", "engine"), "--through"),
            ),
            checks=ModulePlan(
                patterns=tuple(module) if module else None,
                weights=_one_of(weights, ("real", "perturbed"), "--weights"),
                ranks=ranks,
            ),
            modules=modules,
            eager=eager,
            command=command_line(),
        )
        if json:
            print_json(result.to_json())
        else:
            _show(result)
        raise typer.Exit(result.status.exit_code)


def _train(model: str, arms: Any, *, compiled: bool, json: bool, **refused: Any) -> None:
    from pilotage.accuracy import training
    from pilotage.core.errors import BadInput

    odd = next((name for name, value in refused.items() if value), None)
    if odd is not None:
        raise BadInput("training is compared with the model's own checkpoint, on no level", where=f"--{odd} --train")
    command = command_line()
    result = training.validate_training(model, arms=arms or training.ARMS, compiled=compiled, command=command)
    if json:
        print_json(result.to_json())
    else:
        _show_training(result)
    raise typer.Exit(result.status.exit_code)


def _show_training(result: TrainingValidation) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    style = STYLES[result.status.value]
    console.print(
        f"[bold]{result.model}[/bold] trained by {result.training_class}: [{style}]{result.status.value}[/{style}]",
        highlight=False,
    )
    table = Table("", "dtype", "case", "gradients off", "largest", "relative error", "baseline's", title_justify="left")
    for case in result.cases:
        style = STYLES[case.status.value]
        off = [entry["parameter"] for entry in case.parameters if entry["status"] != "pass"]
        largest = max(case.parameters, key=lambda entry: entry["relative_l2"] or 0.0)
        table.add_row(
            f"[{style}]{case.status.value.replace('_', ' ')}[/{style}]",
            case.arm,
            case.case,
            f"{len(off)} of {len(case.parameters)}",
            largest["parameter"],
            _number(largest["relative_l2"]),
            _number(largest["baseline_relative_l2"]),
        )
    console.print(table)
    bad = [verdict for case in result.cases for verdict in case.verdicts if verdict.status.value != "pass"]
    for verdict in [*bad, *result.verdicts]:
        style = STYLES[verdict.status.value]
        console.print(
            f"[{style}]{verdict.status.value.replace('_', ' ')}[/{style}] {verdict.claim}: {verdict.metric} "
            f"{_number(verdict.estimate)}, bound {_number(verdict.bound)} (n={verdict.n})",
            highlight=False,
        )
    spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result.seconds.items())
    console.print(f"[dim]{spent}[/dim]", highlight=False)


def _one_of(value: str, known: tuple[str, ...], where: str) -> Any:
    from pilotage.core.errors import BadInput

    if value not in known:
        raise BadInput(f"{value!r} is neither {' nor '.join(known)}", where=where)
    return value


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3g}"


def _show(result: Validation) -> None:
    from rich.console import Console

    console = Console()
    against = "" if result.reference == result.model else f" against {result.reference}"
    style = STYLES[result.status.value]
    console.print(f"[bold]{result.model}[/bold]{against}: [{style}]{result.status.value}[/{style}]", highlight=False)
    if _all(result):
        console.print(_verdicts(result))
    for source in dict.fromkeys(verdict.bound_source for verdict in _all(result)):
        console.print(f"[dim]bound: {source}[/dim]", highlight=False)
    if result.tasks:
        console.print(_tasks(result))
    if result.modules:
        console.print(_modules(result))
    if result.arms:
        console.print(_numbers(result))
    spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result.seconds.items())
    console.print(f"[dim]{spent}[/dim]", highlight=False)


def _all(result: Validation) -> list[Verdict]:
    from pilotage.core.nouns import Status, Verdict

    tasks = [
        Verdict(**{**verdict, "status": Status(verdict["status"])})
        for task in result.tasks
        for verdict in task["verdicts"]
    ]
    return [*result.verdicts, *tasks, *(verdict for arm in result.arms for verdict in arm.verdicts)]


def _verdicts(result: Validation) -> Any:
    from rich.table import Table

    table = Table("", "claim", "estimate", "95% interval", "bound", "n", title="verdicts", title_justify="left")
    order = ["fail", "not_measured", "pass"]
    for verdict in sorted(_all(result), key=lambda verdict: order.index(verdict.status.value)):
        style = STYLES[verdict.status.value]
        interval = f"{_number(verdict.interval[0])} to {_number(verdict.interval[1])}" if verdict.interval else ""
        claim = verdict.claim
        if verdict.status.value == "not_measured":
            claim += f"\n  {verdict.bound_source}"
        if "layer" in verdict.evidence:
            claim += f" (largest: {verdict.evidence['layer']}, {verdict.evidence['kind']})"
        if verdict.evidence.get("disagree"):
            said = verdict.evidence["bhattacharyya_says"].replace("_", " ")
            claim += f"\n  a Bhattacharyya coefficient of {_number(verdict.evidence['bhattacharyya'])} says {said}"
        if "position" in verdict.evidence:
            claim += f" (largest: stream {verdict.evidence['stream']}, position {verdict.evidence['position']})"
        for name, values in verdict.evidence.get("differing", {}).items():
            claim += f"\n  {name}: {values['target']} here, {values['reference']} in the reference"
        for text in verdict.evidence.get("texts", []):
            claim += f"\n  {text['text']!r}: {text['target']} here, {text['reference']} in the reference"
        table.add_row(
            f"[{style}]{verdict.status.value.replace('_', ' ')}[/{style}]",
            claim,
            _number(verdict.estimate),
            interval,
            _number(verdict.bound),
            str(verdict.n),
        )
    return table


def _numbers(result: Validation) -> Any:
    from rich.table import Table

    table = Table("", *(arm.arm for arm in result.arms), title="numbers", title_justify="left")
    columns = []
    for arm in result.arms:
        rows = [row["target"] for row in arm.by_position]
        ties = sum(tie["tie"] for tie in arm.ties)
        cells = {
            "rows compared": str(arm.n_tokens),
            "baseline": arm.baseline,
            "top-1 differs": f"{len(arm.ties)}, {ties} of them ties",
            "max divergence, ulps": _number(_largest([row["ulps"] for row in rows])),
            "max KL, nats": _number(_largest([row["kl"] for row in rows])),
        }
        for k, found in arm.topk_errors.items():
            cells[f"top-{k} error" if k != "all" else "error over all"] = (
                f"{_number(found['target'])}, baseline {_number(found['baseline'])}"
            )
        columns.append(cells)
    for name in columns[0] if columns else []:
        table.add_row(name, *(cells[name] for cells in columns))
    return table


def _tasks(result: Validation) -> Any:
    from rich.table import Table

    columns = ("task", "metric", "items", "target", "reference", "difference", "95% interval", "p", "deviating")
    table = Table(*columns, title="tasks", title_justify="left")
    for task in result.tasks:
        for metric, found in task["metrics"].items():
            low, high = found["interval"]
            table.add_row(
                task["task"],
                metric,
                str(found["n"]),
                _number(found["target"]),
                _number(found["reference"]),
                _number(found["difference"]),
                f"{_number(low)} to {_number(high)}",
                _number(found["p_value"]),
                f"{found['better']} better, {found['worse']} worse",
            )
    return table


def _largest(values: list[float | None]) -> float | None:
    """Return the largest value; None (no finite number) if there is one, because that is larger still."""
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def _modules(result: Validation) -> Any:
    from rich.table import Table

    table = Table("kind", "dtype", "pass", "fail", "not measured", "failing", title="modules", title_justify="left")
    for kind, dtype in dict.fromkeys((module["kind"], module["dtype"]) for module in result.modules):
        chosen = [m for m in result.modules if (m["kind"], m["dtype"]) == (kind, dtype)]
        statuses = [module["verdict"]["status"] for module in chosen]
        failing = [m["module"] for m in chosen if m["verdict"]["status"] == "fail"]
        counts = [str(statuses.count(status)) for status in ("pass", "fail", "not_measured")]
        table.add_row(kind, dtype, *counts, ", ".join(failing[:3]) + (" ..." if failing[3:] else ""))
    return table
