"""`pilotage localise`: which module of the served model is at fault?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotage.cli._common import STYLES, Json, Model, command_line, print_json

if TYPE_CHECKING:
    from pilotage.accuracy.localise import Localisation

ORDER = 55

SHOWN = 12


def verb(app: typer.Typer) -> None:
    """Register the command."""

    @app.command(short_help="Name the module at fault.")
    def localise(
        model: Model,
        reference: Annotated[
            str | None,
            typer.Option(
                metavar="MODEL", help="Compare with this checkpoint (the original of a converted one) instead of MODEL."
            ),
        ] = None,
        arm: Annotated[
            list[str] | None, typer.Option(metavar="DTYPE", help="Only this arm: float32 or bfloat16.")
        ] = None,
        engine: Annotated[
            bool, typer.Option("--engine", help="Run in the vLLM engine, compiled, instead of in this process.")
        ] = False,
        eager: Annotated[bool, typer.Option("--eager", help="Do not compile the engine's graphs.")] = False,
        ranks: Annotated[
            int, typer.Option(metavar="N", help="Tensor-parallel ranks; more than one needs --engine.")
        ] = 1,
        condition: Annotated[
            Path | None,
            typer.Option(
                metavar="FILE", help="Run this condition: the `how` of a result of `pilotage invariance --json`."
            ),
        ] = None,
        json: Json = False,
    ) -> None:
        """Hand the reference's values onward at every site and score what each site makes of them.

        A site's error is then its own. It is held against what clean computations of the same site do, measured on the
        same model, and the first culprit is checked by its effect: restoring it must restore the logits.

        Exits with 0 if nothing is at fault, 1 if something is, 2 if something could not be measured.
        """
        from pilotage.accuracy import localise as accuracy
        from pilotage.core.errors import BadInput
        from pilotage.core.store import read_json

        if (eager or ranks > 1) and not engine and condition is None:
            raise BadInput("this is about the engine", where="--eager" if eager else "--ranks", do="add --engine")
        if condition is not None:
            how = accuracy.Condition.from_json(read_json(condition))
        else:
            how = accuracy.Condition(engine=engine, eager=eager, ranks=ranks)
        found = accuracy.localise(
            model,
            reference=reference,
            arms=tuple(arm or accuracy.ARMS),
            condition=how,
            command=command_line(),
        )
        if json:
            print_json(found.to_json())
        else:
            _show(found)
        raise typer.Exit(found.status.exit_code)


def _show(found: Localisation) -> None:
    from rich.console import Console

    console = Console()
    against = "" if found.reference == found.model else f" against {found.reference}"
    style = STYLES[found.status.value]
    console.print(f"[bold]{found.model}[/bold]{against}: [{style}]{found.summary()}[/{style}]", highlight=False)
    if found.culprits:
        console.print(_culprits(found))
        if len(found.culprits) > SHOWN:
            console.print(f"[dim]and {len(found.culprits) - SHOWN} more; --json lists them[/dim]", highlight=False)
    for arm in found.arms:
        if arm.causal:
            console.print(_causal(arm.arm, arm.causal), highlight=False)
        if arm.unmeasured:
            console.print(f"[yellow]{arm.arm}: {arm.unmeasured}[/yellow]", highlight=False)
    sites = ", ".join(f"{len(arm.sites)} in {arm.arm} ({arm.target})" for arm in found.arms)
    spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in found.seconds.items())
    console.print(f"[dim]sites scored: {sites}; {spent}[/dim]", highlight=False)


def _causal(arm: str, says: Mapping[str, Any]) -> str:
    text = f"{arm}: relative error of the logits {says['before']:.2g}"
    for name, what in (("after_first", f"with {says['restored']} restored"), ("after_all", "with all culprits")):
        if says[name] is not None:
            text += f", {what} {says[name]:.2g}"
    return f"{text}; a clean model has up to {says['clean']:.2g}"


def _culprits(found: Localisation) -> Any:
    from rich.table import Column, Table

    # A module's name is what one copies from here: the other columns give way.
    named = [Column("module", no_wrap=True, min_width=max(len(culprit.module) for culprit in found.culprits[:SHOWN]))]
    table = Table("", *named, "site", "score", "arm", "where", "what", title="culprits", title_justify="left")
    for number, culprit in enumerate(found.culprits[:SHOWN], 1):
        says = culprit.evidence
        phases = [f"{phase} {share:.0%}" for phase, share in says.get("wrong_rows_by_phase", {}).items()]
        where = "wrong rows: " + ", ".join(phases) if phases else ""
        if says.get("first_wrong_position") is not None:
            where += f"; from position {says['first_wrong_position']} on"
        what = [culprit.what] if culprit.what else []
        what += [f"differs: {name}" for name in says.get("parameters", [])]
        what += [f"{name} is {v['target']}, not {v['reference']}" for name, v in says.get("config", {}).items()]
        what += [text for text in says.get("constants", {}).values() if text != culprit.what]
        table.add_row(
            str(number),
            culprit.module,
            culprit.site,
            f"{culprit.score:.3g}",
            says.get("arm", ""),
            where,
            "\n".join(what),
        )
    return table
