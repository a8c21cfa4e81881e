"""`pilotage kernels`: list, explain, search, check, bench and estimate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotage.cli._common import Json, print_json

if TYPE_CHECKING:
    from pilotage.kernels.check import Checked

ORDER = 48

SHOWN = 6  # failures of an implementation that are printed; the JSON has them all

Operator = Annotated[str, typer.Argument(metavar="OP", help="An operator, e.g. rms_norm; `kernels list` names them.")]
Load = Annotated[
    list[Path] | None,
    typer.Option("--load", metavar="FILE", help="Python file that registers implementations; several times."),
]
Shape = Annotated[
    list[str] | None,
    typer.Option(metavar="SHAPE", help="17,2048 of the first tensor, or weight=2048 of a named one; several times."),
]
Dims = Annotated[
    list[str] | None,
    typer.Option(metavar="DIMS", help="N=8,K=2,H=128: letters of core/shapes.md; what is not given has a usual value."),
]
Option = Annotated[
    list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="e.g. window=128; several times.")
]
Dtype = Annotated[
    list[str] | None, typer.Option(metavar="DTYPE", help="bf16, fp32, fp16, or k_cache=fp8 of one; several times.")
]


def verb(app: typer.Typer) -> None:
    """Register the commands."""
    kernels = typer.Typer(no_args_is_help=True, help="Find, explain, check, time and estimate kernels.")
    app.add_typer(kernels, name="kernels", short_help="Find, explain, check, time and estimate kernels.")

    @kernels.command("list")
    def list_(
        operator: Annotated[str | None, typer.Argument(metavar="[OP]", help="Only this operator.")] = None,
        load: Load = None,
        json: Json = False,
    ) -> None:
        """List every implementation of every operator, its domain and whether this machine can run it."""
        table = _registry(load)
        rows = table.rows(operator)
        if json:
            print_json(rows)
            return
        _print(
            ("operator", "implementation", "language", "priority", "targets", "dtypes", "limits", "gradient", "here"),
            [
                (
                    row["operator"],
                    row["implementation"],
                    row["language"],
                    str(row["priority"]),
                    ", ".join(row["targets"]),
                    ", ".join(row["dtypes"]),
                    "; ".join([*row["limits"], *([row["notes"]] if row["notes"] else [])]),
                    "yes" if row["gradient"] else "no",
                    "yes" if row["here"] is None else row["here"],
                )
                for row in rows
            ],
        )

    @kernels.command()
    def explain(
        operator: Operator,
        shape: Shape = None,
        dims: Dims = None,
        dtype: Dtype = None,
        option: Option = None,
        target: Annotated[str, typer.Option(help="cpu, cuda or neuron; it need not be here.")] = "cpu",
        load: Load = None,
        json: Json = False,
    ) -> None:
        """Say which implementation of OP would run for a call on a target, which would not, and why."""
        table = _registry(load)
        call = table.call_for(
            operator,
            shapes=shape or (),
            dims=dims or (),
            dtypes=dtype or ("bf16",),
            options=option or (),
            target=target,
        )
        rows = table.explain(operator, call, target)
        tensors = {
            name: {"shape": list(spec.shape), "dtype": table.short(spec.dtype)} for name, spec in call.tensors.items()
        }
        if json:
            options = {
                name: value for name, value in call.arguments.items() if name not in tensors and value is not None
            }
            print_json({"operator": operator, "target": target, "tensors": tensors, "options": options, "rows": rows})
            return
        described = ", ".join(f"{name} {facts['shape']} {facts['dtype']}" for name, facts in tensors.items())
        _say(f"{operator} on {target}: {described}")
        _print(
            ("implementation", "language", "priority", "verdict", "why", "on this machine"),
            [
                (
                    row["implementation"],
                    row["language"],
                    str(row["priority"]),
                    row["verdict"],
                    row["why"],
                    row["here"] or "yes",
                )
                for row in rows
            ],
        )

    @kernels.command()
    def search(
        text: Annotated[str, typer.Argument(metavar="TEXT", help='e.g. "attention prefill, causal, GQA, head 128".')],
        target: Annotated[str, typer.Option(help="cpu, cuda or neuron.")] = "neuron",
        path: Annotated[
            list[Path] | None, typer.Option(metavar="DIR", help="Folder of a kernel library; several times.")
        ] = None,
        load: Load = None,
        json: Json = False,
    ) -> None:
        """Search our operators and kernel libraries, installed or in DIR, for what TEXT describes.

        In the order of the onboarding guide: what already runs behind an operator, kernels that only have to be
        wrapped, and last what to do where there is neither. Libraries are read, not imported.

        Exits with 1 if nothing fits.
        """
        _registry(load)
        from pilotage.core.errors import EXIT_FAIL
        from pilotage.kernels import search as searching

        query, hits = searching.search(text, target=target, paths=path or ())
        if json:
            print_json({"query": query.to_json(), "target": target, "hits": [hit.to_json() for hit in hits]})
        else:
            _show_hits(query, hits, target)
        if not any(hit.fits for hit in hits):
            raise typer.Exit(EXIT_FAIL)

    @kernels.command()
    def estimate(
        kernel: Annotated[
            str,
            typer.Argument(
                metavar="KERNEL", help="An operator, e.g. rms_norm, for our kernel of it; FILE.py:NAME; or MODULE:NAME."
            ),
        ],
        shape: Shape = None,
        dims: Dims = None,
        dtype: Dtype = None,
        option: Option = None,
        grid: Annotated[int | None, typer.Option(help="Cores: 1 or 2.")] = None,
        json: Json = False,
    ) -> None:
        """Estimate what an NKI kernel would cost on a NeuronCore, from one launch in the interpreter.

        An estimate, not a measurement: bytes, cycles and memory are counted, the time follows from the assumptions
        that are printed with it. Of an operator, sizes that are not given have usual values; of a kernel, every tensor
        has to be given, in order or by name.
        """
        _interpret()
        from pilotage.kernels import estimate as estimating

        found = estimating.estimate(
            kernel, shapes=shape or (), dims=dims or (), dtypes=dtype or ("bf16",), options=option or (), grid=grid
        )
        if json:
            print_json(found.to_dict())
        else:
            for line in found.lines():
                _say(line)

    @kernels.command()
    def check(
        operator: Operator,
        implementation: Annotated[
            str | None, typer.Option(metavar="NAME", help="Only this implementation; default: all.")
        ] = None,
        dtype: Dtype = None,
        dims: Dims = None,
        load: Load = None,
        json: Json = False,
    ) -> None:
        """Run every implementation of OP that can run here against its definition.

        Shapes at and around the edges of each domain, random numbers, NaN and infinity, fresh memory filled with NaN,
        arguments that must not change, repeats, and gradients where they are promised. Kernels for NeuronCores and for
        Triton run in their interpreters.

        Exits with 0 if everything passes, 1 if anything fails, 2 if nothing could be run.
        """
        _interpret()
        table = _registry(load)
        from pilotage.kernels import check as checking

        console = _console(stderr=True)
        with console.status(f"checking {operator}") as status:
            results = checking.check(
                operator,
                implementation=implementation,
                dtypes=[table.parse_dtype(one) for one in dtype or ("fp32", "bf16")],
                dims=table.parse_dims(dims or ()),
                progress=lambda text: status.update(f"checking {operator}: {text}"),
            )
        overall = checking.status_of(results)
        if json:
            rows = [one.to_json() for one in results]
            print_json({"operator": operator, "status": overall.value, "implementations": rows})
        else:
            _show_checked(results, checking.CHECKS)
        raise typer.Exit(overall.exit_code)

    @kernels.command()
    def bench(
        operator: Operator,
        dims: Dims = None,
        dtype: Annotated[str, typer.Option(help="bf16, fp32 or fp16.")] = "bf16",
        option: Option = None,
        rounds: Annotated[int, typer.Option(help="Times that each is measured, side by side.")] = 15,
        load: Load = None,
        json: Json = False,
    ) -> None:
        """Time the implementations of OP that run here, side by side in every round.

        Exits with 2 if there is nothing but the definition to time.
        """
        table = _registry(load)
        from pilotage.core.errors import EXIT_NOT_MEASURED
        from pilotage.kernels import bench as timing

        results = timing.bench(
            operator,
            dims=table.parse_dims(dims or ()),
            dtype=table.parse_dtype(dtype),
            options=table.parse_options(operator, option or ()),
            rounds=rounds,
        )
        if json:
            print_json({"operator": operator, "implementations": [one.to_json() for one in results]})
        else:
            _show_timed(results)
        if sum(one.refused is None for one in results) < 2:
            raise typer.Exit(EXIT_NOT_MEASURED)


def _interpret() -> None:
    """Switch the interpreters on, before anything imports what reads these variables."""
    import os

    for name in ("NKI_SIMULATOR", "TRITON_INTERPRET"):
        os.environ[name] = os.environ.get(name) or "1"


def _registry(load: list[Path] | None) -> Any:
    """Return the table, with all operators and what the files register."""
    import pilotage.functional  # noqa: F401  defines and registers
    from pilotage.kernels import table

    if load:
        from pilotage.kernels import nki

        nki.install()  # kernels for NeuronCores import these names at their top
    table.load(load or ())
    return table


def _console(**options: Any) -> Any:
    from rich.console import Console

    return Console(highlight=False, **options)


def _say(text: str) -> None:
    _console().print(text, markup=False, soft_wrap=True)


def _print(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, no_wrap=name in ("operator", "implementation", "priority"), overflow="fold")
    for row in rows:
        table.add_row(*[escape(cell) for cell in row])
    _console().print(table)


def _show_hits(query: Any, hits: list[Any], target: str) -> None:
    _say(f"looking for: {query}")
    from pilotage.core.targets import TARGETS

    steps = {1: "1. behind an operator: nothing to do", 2: "2. in a library: wrap it"}
    for step, title in steps.items():
        found = [hit for hit in hits if hit.step == step]
        _say(f"\n{title}" + ("" if found else ": nothing found"))
        for hit in found[:SHOWN]:
            against = f"; but {', '.join(hit.against)}" if hit.against else ""
            _say(f"  {'fits' if hit.fits else 'no  '}  {hit.name}  ({', '.join(hit.why)}{against})")
            _say(f"        {hit.where}")
            if hit.fits:
                for line in hit.lines:
                    _say(f"        {line}")
        if len(found) > SHOWN:
            _say(f"  {len(found) - SHOWN} more; --json has them all")
    decorator = {"NKI": ", @nki.jit", "Triton": ", @triton.jit"}
    language = TARGETS[target].language
    written = language + decorator.get(language, "")
    _say(f"\n3. else write one ({written}), wrap it the same way, and check it: docs/kernels.md")


def _show_checked(results: list[Checked], checks: tuple[str, ...]) -> None:
    rows = []
    for one in results:
        ratio = ", ".join(f"{name} {'exact' if value is None else f'{value:.3g}'}" for name, value in one.ratio.items())
        passed = [name for name in checks if (status := one.of(name)) is not None and status.value == "pass"]
        failed = [name for name in checks if (status := one.of(name)) is not None and status.value != "pass"]
        verdict = f"not run: {one.missing}" if one.missing else one.status.value.replace("_", " ")
        rows.append(
            (one.implementation, one.language, str(one.ran), ratio, ", ".join(passed), ", ".join(failed), verdict)
        )
    _print(("implementation", "language", "cases", "error / definition's", "passed", "failed", "verdict"), rows)
    for one in results:
        for finding in one.failures[:SHOWN]:
            _say(f"{one.implementation}: {finding.check}, {finding.case}: {finding.detail}")
        if len(one.failures) > SHOWN:
            _say(f"{one.implementation}: {len(one.failures) - SHOWN} more; --json has them all")
    if not results:
        _say("there is nothing but the definition")


def _show_timed(results: list[Any]) -> None:
    rows = []
    for one in results:
        facts = one.to_json()
        if one.refused is not None:
            rows.append((one.implementation, one.language, "", "", one.refused))
            continue
        time, ratio = facts["microseconds"], facts["ratio"]
        rows.append(
            (
                one.implementation,
                one.language,
                f"{time['median']:.1f} ({time['min']:.1f} to {time['max']:.1f})",
                f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})",
                f"{facts['rounds']} rounds",
            )
        )
    _print(("implementation", "language", "microseconds", "times as fast as the definition", ""), rows)
