"""`pilotage smoke`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pilotage.cli._common import Json, Model, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from pilotage.voyage.smoke import Smoke

ORDER = 40


def verb(app: typer.Typer) -> None:
    @app.command()
    def smoke(
        model: Model,
        dtype: Annotated[str, typer.Option(help="Serving dtype: bfloat16 or float32.")] = "bfloat16",
        no_ledger: Annotated[
            bool, typer.Option("--no-ledger", help="Leave out the weight ledger, when it was just proven.")
        ] = False,
        as_json: Json = False,
    ) -> None:
        """Prove the weights, compile the buckets, and compare the first tokens with Hugging Face."""
        from rich.console import Console

        from pilotage.core.errors import BadInput
        from pilotage.voyage.smoke import smoke as run

        if dtype not in ("bfloat16", "float32"):
            raise BadInput(f"{dtype!r} is no serving dtype", where="--dtype", do="use bfloat16 or float32")
        errors = Console(stderr=True)
        result = run(model, dtype=dtype, prove=not no_ledger, say=lambda text: errors.print(f"smoke: {text}"))
        if as_json:
            print_json(result.to_json())
        else:
            _show(Console(), result)
        raise typer.Exit(result.status.exit_code)


def _show(console: Console, result: Smoke) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    if result.ledger is not None:
        counts = result.ledger
        console.print(
            f"weights: {counts['tensors']} tensors, {counts['loaded']} loaded, {counts['dropped']} dropped, "
            f"{counts['errors']} in error"
        )
    load = f"{result.load_s:.1f} s" if result.load_s is not None else "unknown"
    compiled = result.receipt.get("compile_s")
    graphs = f"{len(result.buckets)} graphs in {compiled:.1f} s" if compiled is not None else "no graphs"
    console.print(f"loaded in {load}; {graphs}; the engine was ready after {result.start_s:.1f} s ({result.dtype})")

    table = Table("kind", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("size", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("cache")
    for bucket in result.buckets:
        where = "from disk" if bucket["cached"] else "compiled"
        table.add_row(bucket["kind"], str(bucket["size"]), f"{bucket['seconds']:.1f}", where)
    console.print(table)

    table = Table("agrees with HF", "prompt", "text", box=box.SIMPLE_HEAD, pad_edge=False)
    words = {True: "[green]✓ equal[/green]", "tie": "[yellow]≈ tie[/yellow]", False: "[red]✗ differs[/red]"}
    for prompt in result.prompts:
        size = f" ({prompt['prompt_tokens']} tokens)"
        shown = prompt["prompt"] if len(prompt["prompt"]) < 40 else "…" + prompt["prompt"][-39:]
        table.add_row(words[prompt["agrees_with_hf"]], escape(repr(shown) + size), escape(repr(prompt["text"])))
    console.print(table)
    for prompt in result.prompts:
        for entry in prompt["differing"]:
            console.print(
                f"  position {entry['position']}: {entry['token']}, Hugging Face {entry['reference']}; its logits are "
                f"{entry['gap']:.4g} apart (a tie below {entry['tie_below']:.4g})"
            )

    operators = result.receipt.get("operators") or {}
    table = Table("operator", "implementation", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("call sites", justify="right")
    table.add_column("why")
    for operator, entries in operators.items():
        for entry in entries:
            table.add_row(
                *(escape(str(x)) for x in (operator, entry["implementation"], entry["selections"], entry["reason"]))
            )
    console.print(table)
    signs = {
        "pass": "[green]✓ pass[/green]",
        "fail": "[red]✗ fail[/red]",
        "not_measured": "[yellow]○ not measured[/yellow]",
    }
    for verdict in result.verdicts:
        console.print(f"{signs[verdict.status.value]}  {escape(verdict.claim)} (n = {verdict.n})")
