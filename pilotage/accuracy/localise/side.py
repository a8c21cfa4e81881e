"""Hugging Face's side of a localisation: the same for every target of a checkpoint, and most of the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy.arms import hf
from pilotage.accuracy.arms.tapped import Handed, HFTapped, Request, Rows
from pilotage.accuracy.localise import course, score, variants
from pilotage.core.progress import track


class Side:
    """What a clean computation makes of every site, in one dtype.

    Args:
        dtype: of the arm.
        requests: what is fed.
        expected: computes the expected rows, in fp32.
        control: what the controls run on.
        ranks: of the target.
        sites: those that reference and target both have.
        top_k: experts of a token, None where there are none.

    Attributes:
        handed: site -> for each request the rows that are handed onward.
        expected: site -> [rows, width] given those.
        controls: site -> what each control makes of it.
        dtypes: site -> dtype that Hugging Face's model of the arm has there.
        looked_up: site -> Hugging Face's own rows, of look-ups in a half precision: all that is correct has those bits.
        stream: the reference's residual stream, running free.
        logits: the reference's, running free.
        control_logits: by control, running free. control_stream: the first one's.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        requests: Sequence[Request],
        expected: HFTapped,
        control: HFTapped,
        ranks: int,
        sites: Sequence[str],
        top_k: int | None,
    ) -> None:
        free = expected.observe(requests, sites)
        self.logits = joined(free["logits"])
        self.stream = {site: free[site] for site in course.in_stream(sites)}
        self.handed = {site: [rows.to(dtype) for rows in found] for site, found in free.items()}
        if top_k is not None:
            part_ties(self.handed, top_k)
        handed = Handed(rows=self.handed)
        # In fp32 handing its own rows onward changes nothing.
        rows = free if dtype is torch.float32 else expected.observe(requests, sites, handed)
        self.expected = {site: joined(found) for site, found in rows.items()}
        self.controls: dict[str, list[score.SiteErrors]] = {site: [] for site in sites}
        # Some places are computed in fp32 whatever the arm: what rounds there is no clean computation.
        self.dtypes: dict[str, torch.dtype] = {}
        self.looked_up: dict[str, Tensor] = {}
        self.control_logits: dict[str, Tensor] = {}
        self.control_stream: Rows = {}
        chosen = variants.variants(dtype, ranks)
        for variant in track(chosen, f"clean controls, {str(dtype).removeprefix('torch.')}"):
            with variant.applied(control.model):
                for site, clean in control.observe(requests, sites, handed).items():
                    self.dtypes[site] = torch.float32 if clean[0].dtype is torch.float32 else dtype
                    self.controls[site].append(score.measure(joined(clean), self.expected[site]))
                    if looks_up(site) and dtype is not torch.float32:
                        self.looked_up.setdefault(site, joined(clean))
                wanted = ["logits"] if self.control_stream else [*self.stream, "logits"]
                rows = control.observe(requests, wanted)
            self.control_stream = self.control_stream or rows
            self.control_logits[variant.name] = joined(rows["logits"])


def looks_up(site: str) -> bool:
    """Whether a site is rows of a table times a constant: exact in fp32 whoever computes it, and then rounded once."""
    return site.startswith("model.embed_tokens")


@dataclass
class Known:
    """What is measured of one checkpoint, for as many targets as there are.

    Attributes:
        path: of the reference.
        rounded: see `hf.load`.
        sequences: prompts with their greedy continuations, and the prompts' lengths; None until they are needed.
    """

    path: Path
    rounded: torch.dtype | None = None
    sequences: tuple[list[tuple[int, ...]], list[int]] | None = None
    _models: dict[str, tuple[HFTapped, HFTapped]] = field(default_factory=dict)
    _sides: dict[tuple[Any, ...], Side] = field(default_factory=dict)
    _fp32: Any = None

    @property
    def fp32(self) -> Any:
        """Hugging Face's model in fp32."""
        if self._fp32 is None:
            self._fp32 = hf.load(self.path, torch.float32, rounded_to=self.rounded)
        return self._fp32

    def models(self, arm: str) -> tuple[HFTapped, HFTapped]:
        """Return what computes the expected rows, and what the controls run on."""
        if arm not in self._models:
            dtype = getattr(torch, arm)
            if dtype is torch.float32:
                both = HFTapped(self.fp32)
                self._models[arm] = both, both
            else:
                # fp32 arithmetic on the arm's own weights: what is left is the arithmetic's error.
                expected = hf.load(self.path, torch.float32, rounded_to=dtype)
                self._models[arm] = HFTapped(expected), HFTapped(hf.load(self.path, dtype, rounded_to=self.rounded))
        return self._models[arm]

    def side(self, arm: str, requests: Sequence[Request], ranks: int, sites: Sequence[str], top_k: int | None) -> Side:
        """Return an arm's side; measured once for the same requests, ranks and sites."""
        key = (arm, tuple(requests), ranks, tuple(sites))
        if key not in self._sides:
            expected, control = self.models(arm)
            self._sides[key] = Side(getattr(torch, arm), requests, expected, control, ranks, sites, top_k)
        return self._sides[key]


def joined(rows: Sequence[Tensor]) -> Tensor:
    """Put the rows of all requests into one [rows, width]."""
    return torch.cat([found.reshape(found.shape[0], -1) for found in rows])


def part_ties(handed: Rows, top_k: int) -> None:
    """Keep rounding from making two routers' logits equal where the choice is between them.

    Which of two equal experts is taken is nobody's fault. The second is lowered by one spacing of the dtype, for every
    arm alike.
    """
    for site, found in handed.items():
        if not site.endswith(".router"):
            continue
        for rows in found:
            if rows.shape[-1] <= top_k:
                continue
            values, order = rows.sort(dim=-1, descending=True, stable=True)
            tied = values[:, top_k - 1] == values[:, top_k]
            if not bool(tied.any()):
                continue
            lower = values[:, top_k - 1 : top_k].expand_as(values)
            below = lower - lower.abs() * torch.finfo(rows.dtype).eps
            later = torch.arange(rows.shape[-1]) >= top_k
            parted = torch.where(tied[:, None] & later & (values == lower), below, values)
            rows.scatter_(-1, order, parted)
