"""Which kernels ran: the receipts of the stages that started an engine, merged to one row an implementation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pilotage.report.record import Records
from pilotage.report.text import number


def receipts(records: Records) -> list[dict[str, Any]]:
    """The receipts in the order of the stages; validation leaves one for each of its arms.

    Each is {"stage", "rows", "fallbacks"}; `fallbacks` has operator -> call sites at which a kernel that was made for
    this device had to be passed over, None where the receipt does not say.
    """
    found: list[tuple[str, Any]] = [("smoke", (records.result("smoke") or {}).get("receipt"))]
    validate = (records.result("validate") or {}).get("receipt")
    if isinstance(validate, Mapping):
        if "operators" in validate:
            found.append(("validate", validate))
        else:
            found += [(f"validate, {arm}", receipt) for arm, receipt in validate.items()]
    invariance = (records.result("invariance") or {}).get("receipt")
    if isinstance(invariance, Mapping):
        found += [(f"invariance, {engine}", receipt) for engine, receipt in invariance.items()]
    return [
        {"stage": stage, "rows": rows, "fallbacks": _fallbacks(receipt.get("kernel_fallbacks"))}
        for stage, receipt in found
        if isinstance(receipt, Mapping) and (rows := merged(receipt.get("operators")))
    ]


def merged(operators: Any) -> list[dict[str, Any]]:
    """One row for each operator and implementation, with all reasons and all refusals of the others.

    Args:
        operators: operator -> [{"implementation", "selections", "reason", "refused": {name: reason}, "fallback"}].
    """
    if not isinstance(operators, Mapping):
        return []
    rows: list[dict[str, Any]] = []
    for operator, entries in operators.items():
        by_name: dict[str, dict[str, Any]] = {}
        for entry in entries if isinstance(entries, list) else []:
            if not isinstance(entry, Mapping):
                continue
            name = str(entry.get("implementation", "?"))
            row = by_name.setdefault(
                name,
                {
                    "operator": operator,
                    "implementation": name,
                    "selections": 0,
                    "reasons": [],
                    "refused": [],
                    "fallback": False,
                },
            )
            row["fallback"] = row["fallback"] or bool(entry.get("fallback"))
            row["selections"] += int(number(entry.get("selections")) or 0)
            _once(row["reasons"], entry.get("reason"))
            for other, why in (entry.get("refused") or {}).items():
                _once(row["refused"], f"{other}: {why}")
        rows += by_name.values()
    return rows


def _fallbacks(counts: Any) -> dict[str, int] | None:
    if not isinstance(counts, Mapping):
        return None
    return {str(operator): int(number(count) or 0) for operator, count in counts.items()}


def _once(into: list[str], value: Any) -> None:
    if value is not None and str(value) not in into:
        into.append(str(value))
