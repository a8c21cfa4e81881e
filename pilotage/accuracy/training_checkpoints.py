"""Do checkpoints survive the training face? Saved, read by transformers and by the serving model: equal to the bit."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pilotage.accuracy.arms import hf
from pilotage.arch import source
from pilotage.core.errors import Unsupported
from pilotage.core.nouns import Status, Verdict
from pilotage.models import registry
from pilotage.models.proof import map_of
from pilotage.weights import SafetensorsCheckpoint
from pilotage.weights.map import same_bytes

SHOWN = 5  # names of tensors in a verdict


def checkpoint_verdicts(cls: Any, path: Path) -> list[Verdict]:
    """Save what was loaded, and let Hugging Face and the serving loader read it; every byte must be as before.

    Args:
        cls: the training class.
        path: the checkpoint.
    """
    with hf.quiet():
        face = cls.from_pretrained(path, dtype="auto")
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "saved"
        with hf.quiet():
            face.save_pretrained(saved)
        return [_same_files(path, saved), _hf_reads(face, saved), _serving_reads(path, saved)]


def _exact(claim: str, metric: str, odd: Sequence[str], n: int, **evidence: Any) -> Verdict:
    return Verdict(
        claim=claim,
        metric=metric,
        estimate=float(len(odd)),
        bound=0.0,
        bound_source="moving values changes none",
        n=n,
        status=Status.FAIL if odd else Status.PASS if n else Status.NOT_MEASURED,
        evidence={"differing": list(odd)[:SHOWN], **evidence},
    )


def _same_files(path: Path, saved: Path) -> Verdict:
    before, after = SafetensorsCheckpoint(path), SafetensorsCheckpoint(saved)
    tied, dropped = _repeats(path)
    names = [name for name in before.keys() if name not in dropped]  # noqa: SIM118  no mapping
    odd = [
        name
        for name in names
        if name not in tied and (name not in after or not same_bytes(before[name][:], after[name][:]))
    ]
    odd += [name for name in after.keys() if name not in before]  # noqa: SIM118
    return _exact("a saved checkpoint holds the tensors that were loaded", "tensors_differing", odd, len(names))


def _repeats(path: Path) -> tuple[set[str], set[str]]:
    """Return names that a save may leave out: tied copies, and tensors that the map drops with a reason."""
    plan = map_of(_serving_model(path)).plan(SafetensorsCheckpoint(path).keys())
    return set(plan.copies), set(plan.drops) - set(plan.copies)


def _hf_reads(face: nn.Module, saved: Path) -> Verdict:
    theirs = hf.load(saved, next(face.parameters()).dtype, attention="sdpa")
    ours, other = dict(face.named_parameters(remove_duplicate=False)), theirs.state_dict(keep_vars=True)
    names = [name for name in other if name in ours]
    odd = [name for name in names if not same_bytes(ours[name].detach(), other[name].detach())]
    odd += sorted((ours.keys() ^ other.keys()) - set(names))
    return _exact("transformers loads it to the same values", "parameters_differing", odd, len(names))


def _serving_model(path: Path, served_as: Path | None = None) -> Any:
    """Build the model that serves a checkpoint, on the meta device.

    Args:
        path: its directory.
        served_as: of the checkpoint that says which architecture this is, where another does: a class of the user's
            own saves its own name.
    """
    architectures = source.load_config(str(served_as or path)).architectures
    entry = registry.find(architectures or [])
    if entry is None:
        raise Unsupported(f"no model package serves {architectures}", where=str(path))
    with torch.device("meta"):
        return entry.load().from_configs(source.load_config(str(path)))


def _serving_reads(path: Path, saved: Path) -> Verdict:
    before, after = _serving_model(path), _serving_model(saved, served_as=path)
    before.load_weights(path)
    after.load_weights(saved)
    wanted, found = dict(before.named_parameters()), dict(after.named_parameters())
    odd = [name for name in wanted if name not in found or not same_bytes(wanted[name].detach(), found[name].detach())]
    return _exact("the serving loader reads it to the same values", "parameters_differing", odd, len(wanted))
