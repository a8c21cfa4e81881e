"""Capture and replacement in the running engine: what happens around each forward.

The tapped graphs write their sites' rows into buffers; after each forward the rows of real tokens go to disk with
their request and position. Before each forward the reference rows and masks of its tokens are put where the graph
reads them. Which sites a graph taps is part of its compile key; whether anything is saved or replaced is not.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pilotage import parallel
from pilotage.core import sites
from pilotage.core.config import TargetConfig
from pilotage.core.errors import BadInput, ConfigError, Unsupported
from pilotage.probe import reference
from pilotage.probe.captures import CaptureWriter
from pilotage.probe.discovery import SiteInfo, describe
from pilotage.probe.plan import Taps
from pilotage.probe.replacement import TensorReplacer
from pilotage.serving.batch import Forward, StepInputs
from pilotage.serving.captured import Captured
from pilotage.serving.platform import PROMPT_KEY

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

ARM = "target"


class Probing:
    """The taps of a runner, and what is done with them.

    Args:
        model: loaded.
        config: its `tensor_capture` and `tensor_replacement` are read.
        num_tokens, num_sampled: token rows and logit rows of the largest graph.

    Attributes:
        taps: those that every forward runs with now; None for untapped graphs.

    Raises:
        ConfigError: a pattern or a reference names a site that this model does not have.
    """

    def __init__(self, model: torch.nn.Module, config: TargetConfig, *, num_tokens: int, num_sampled: int) -> None:
        self.model, self.config = model, config
        self.size = (num_tokens, num_sampled)
        self.group = parallel.get_tp_group()
        self.taps: Taps | None = None
        self.writer: CaptureWriter | None = None
        self.speculates = False  # whether requests may have drafts; set by the runner
        self._unsettled: list[Captured] = []
        self.capturing: list[str] = []
        self.replacer: TensorReplacer | None = None
        self.replacing: list[str] = []
        self.observer: dict[str, Any] | None = None
        self._known: dict[str, SiteInfo] | None = None
        self._asked: dict[str, SiteInfo] = {}
        # A reference in the configuration: the platform gives its requests pages of their own.
        self._salted = False
        self._prompt_of: dict[str, int | None] = {}
        self._requests: Counter[str] = Counter()
        self._fixed: Taps | None = None
        self._configure()

    def _configure(self) -> None:
        capture, replacement = self.config.tensor_capture, self.config.tensor_replacement
        if capture is None and replacement is None:
            return
        captured = self._select(capture["sites"], "tensor_capture.sites", captured=True) if capture is not None else []
        replaced: list[str] = []
        if replacement is not None:
            if "tensors_path" in replacement:
                self.replace_start(
                    replacement["tensors_path"], replacement.get("prompt_token_ids_path"), replacement.get("sites")
                )
                replaced, self._salted = self.replacing, True
            else:
                replaced = self._select(replacement["sites"], "tensor_replacement.sites")
        self._tap(captured, replaced)
        self._fixed = self.taps

    @property
    def known(self) -> dict[str, SiteInfo]:
        """All sites of the model."""
        if self._known is None:
            self._known = describe(self.model)
        return self._known

    def _select(self, patterns: Sequence[str], where: str, *, captured: bool = False) -> list[str]:
        """Pick sites of the model; `captured`: only those whose value the model hands to a tap."""
        names = [name for name, info in self.known.items() if not captured or info.shape is not None]
        return sites.select(patterns, names, where=where)

    def _tap(self, capture: Sequence[str], replace: Sequence[str]) -> None:
        """Make sure that the taps have these sites; graphs of another set of sites are compiled when first needed."""
        if self._fixed is not None:
            capture = [*dict.fromkeys((*self._fixed.capture, *capture))]
            replace = [*dict.fromkeys((*self._fixed.replace, *replace))]
        device = next(self.model.parameters()).device
        if (capture or replace) and device.type != "cpu":
            raise Unsupported(
                "what is captured and replaced is kept in host memory", where=f"target {device.type}", do="use the CPU"
            )
        if not capture and not replace:
            self.taps = None
        elif self.taps is None or not self.taps.covers(capture, replace):
            self.taps = Taps(
                self.model,
                capture=capture,
                replace=replace,
                num_tokens=self.size[0],
                num_sampled=self.size[1],
                known={**self.known, **self._asked},
            )

    def capture_start(self, directory: str, patterns: Sequence[str] | None = None) -> list[str]:
        """Write the rows of every forward from now on; returns the sites.

        Raises:
            ConfigError: no patterns here nor in the configuration, or one that matches nothing.
        """
        if patterns is None:
            configured = self.config.tensor_capture
            if configured is None:
                raise ConfigError("which sites?", where="capture_start", do="give patterns, or tensor_capture.sites")
            patterns = configured["sites"]
        names = self._select(patterns, "capture_start", captured=True)
        self._tap(names, self.replacing)
        self.capturing = names
        if self.group.rank == 0:
            self.writer = CaptureWriter(directory, arm=ARM, notes=self._notes())
        return names

    def _notes(self) -> dict[str, Any]:
        shares = {
            name: f"rank {self.group.rank} of {self.group.world_size}"
            for name in self.capturing
            if self.known[name].full_shape is None
        }
        return {"shares": shares, "world_size": self.group.world_size}

    def capture_stop(self) -> dict[str, Any]:
        """Stop writing; returns {"directory", "steps", "observer"} on the first rank."""
        writer, self.writer, self.capturing = self.writer, None, []
        self._unsettled.clear()
        self._tap([], self.replacing)
        if writer is None:
            return {}
        replaced = {"replacement": self.receipt()} if self.replacer is not None else {}
        writer.close(observer=self.observer, **replaced)
        return {"directory": str(writer.directory), "steps": writer.num_steps, "observer": self.observer}

    def replace_start(
        self, tensors_path: str, prompt_token_ids_path: str | None = None, patterns: Sequence[str] | None = None
    ) -> list[str]:
        """Hand the reference onward from now on; returns the sites.

        Keys and values of replaced runs must serve nobody else: reset the prefix cache before and after, or switch it
        off. (With `tensor_replacement` in the configuration, requests are salted instead.)

        Args:
            tensors_path, prompt_token_ids_path: see `probe.reference.load_replacer`.
            patterns: of its sites; None for all of them.

        Raises:
            ConfigError: a site that this model does not have.
            BadInput: the reference cannot be used.
        """
        offered = reference.names_in(tensors_path)
        if patterns is not None:
            offered = sites.select(patterns, offered, where="tensor_replacement.sites")
        names = self._select(offered, f"tensor_replacement, {tensors_path}")
        replacer = reference.load_replacer(tensors_path, prompt_token_ids_path, sites=names, convert=self._converter())
        self.replacing = [name for name in names if name in set(replacer.modules)]
        # What the model only asks for has the shape and dtype of its reference.
        self._asked = {
            name: dataclasses.replace(self.known[name], shape=shape, dtype=dtype, full_shape=shape)
            for name, (shape, dtype) in replacer.row_types().items()
            if self.known[name].shape is None
        }
        self._tap(self.capturing, self.replacing)
        assert self.taps is not None
        self.taps.leave_live()
        self.replacer = replacer
        self._prompt_of.clear()
        self._requests.clear()
        self._salted = False
        return self.replacing

    def replace_stop(self) -> dict[str, Any]:
        """Replace nothing from now on; returns the receipt."""
        receipt = self.receipt()
        self.replacer, self.replacing = None, []
        if self.taps is not None:
            self.taps.leave_live()
        self._tap(self.capturing, [])
        return receipt

    def replace_sites(self, patterns: Sequence[str]) -> list[str]:
        """Replace only these of the reference's sites from now on; the graphs stay. Returns the sites."""
        if self.replacer is None:
            raise BadInput("there is no reference", where="replace_sites", do="call replace_start first")
        self.replacing = sites.select(patterns, self.replacer.modules, where="replace_sites") if patterns else []
        assert self.taps is not None
        self.taps.leave_live()
        return self.replacing

    def _converter(self) -> Callable[[str, Tensor], Tensor]:
        """Give reference rows the shape, dtype and share that this rank's graph has."""

        def convert(site: str, rows: Tensor) -> Tensor:
            info = self.known[site]
            if info.shape is None:
                return rows
            whole = info.full_shape or info.shape
            if tuple(rows.shape[1:]) != whole:
                if rows[0].numel() != torch.Size(whole).numel():
                    raise BadInput(
                        f"the reference has rows of shape {list(rows.shape[1:])}, the model {list(whole)}", where=site
                    )
                rows = rows.reshape(-1, *whole)
            return info.share(rows, self.group.rank, self.group.world_size).to(info.dtype).contiguous()

        return convert

    def before(self, inputs: StepInputs, forward: Forward, ids: Sequence[str], states: Mapping[str, Any]) -> None:
        """Put the reference of a forward's tokens where the graph reads it.

        Args:
            inputs: filled for this forward.
            forward: its rows and token counts.
            ids: request id of each of its rows.
            states: vLLM's request states by id.
        """
        if self.replacer is None or self.taps is None or not self.replacing:
            return
        for req_id in ids:
            if req_id not in self._prompt_of:
                self._prompt_of[req_id] = self._register(req_id, states[req_id])
        total = sum(forward.num_tokens)
        owner = torch.full((inputs.size,), -1, dtype=torch.int64)
        owner[:total] = _owners(forward)
        positions = torch.zeros(inputs.size, dtype=torch.int64)
        positions[:total] = _addresses(forward, ids, states)
        if inputs.verifies:
            self._leave_wrong_drafts(owner, positions, inputs, forward, ids)
        size = (inputs.size, inputs.num_sampled)
        rows_of = [name for name in self.replacing if not self.known[name].sampled]
        if rows_of:
            context = self.taps.context(*size, sampled=False)
            self.replacer.fill(context, ids, positions, owner, modules=rows_of)
        sampled = [name for name in self.replacing if self.known[name].sampled]
        if sampled:
            rows = inputs.sampling_positions
            of_rows = torch.full((inputs.num_sampled,), -1, dtype=torch.int64)
            of_rows[: inputs.sampled] = owner[rows[: inputs.sampled]]
            context = self.taps.context(*size, sampled=True)
            self.replacer.fill(context, ids, positions[rows], of_rows, modules=sampled, counted=not rows_of)

    def _leave_wrong_drafts(
        self, owner: Tensor, positions: Tensor, inputs: StepInputs, forward: Forward, ids: Sequence[str]
    ) -> None:
        """Take drafts that are not the reference's tokens out of `owner` [T]: their rows are nobody's and stay live."""
        assert self.replacer is not None
        differs = self.replacer.differs(ids, positions, owner, inputs.input_ids)
        counts = torch.tensor(forward.num_tokens)
        differs[counts.cumsum(0) - counts] = False  # the token before the drafts is the request's own
        owner[differs] = -1
        self._requests["drafts"] += int(differs.sum())

    def _register(self, req_id: str, state: CachedRequestState) -> int | None:
        assert self.replacer is not None
        # Found in the prefix cache, or computed before the replacement began.
        self._requests["cached"] += state.num_computed_tokens
        params = state.sampling_params
        stated = ((params.extra_args if params is not None else None) or {}).get(PROMPT_KEY)
        try:
            prompt = self.replacer.register_request(req_id, state.prompt_token_ids or [], prompt=stated)
        except KeyError:
            self._requests["unknown"] += 1
            return None
        self._requests["known"] += 1
        return prompt

    def after(
        self,
        inputs: StepInputs,
        forward: Forward,
        ids: Sequence[str],
        states: Mapping[str, Any],
    ) -> None:
        """Save the rows of a forward's tokens.

        Args:
            inputs, forward, ids, states: as for `before`.
        """
        if not self.capturing:
            return
        assert self.taps is not None
        total = sum(forward.num_tokens)
        rows = {name: self.taps.rows(name, total, inputs.sampled) for name in self.capturing}
        rows.update(self._joined({name: rows[name] for name in rows if self.known[name].shard_dim is not None}))
        if self.writer is None:
            return
        for req_id in ids:
            self.writer.request(req_id, states[req_id].prompt_token_ids or [])
        step = Captured(
            rows=rows,
            requests=[req_id for req_id, count in zip(ids, forward.num_tokens, strict=True) for _ in range(count)],
            positions=_addresses(forward, ids, states),
            tokens=inputs.input_ids[:total],
            sampled=inputs.sampling_positions[: inputs.sampled],
        )
        if self.speculates:  # some rows may be of drafts that fall, also in a prefill graph
            self._unsettled.append(step.copied())
        else:
            self.writer.add(step.rows, **step.index())

    def settle(self, computed: Callable[[], Mapping[str, int]]) -> None:
        """Save what was held back until it was known which drafts stand; those that fell are no request's rows.

        Args:
            computed: returns by request how many of its positions are computed for good; asked where rows are held.
        """
        held, self._unsettled = self._unsettled, []
        if not held or self.writer is None:
            return
        ends = computed()
        for step in held:
            kept = step.until(ends)
            if kept.requests:
                self.writer.add(kept.rows, **kept.index())

    def _joined(self, shares: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather the ranks' shares of rows on the first rank; elsewhere the shares stay."""
        if not shares:
            return {}
        flat = torch.cat([share.contiguous().view(-1).view(torch.uint8) for share in shares.values()])
        world, first = self.group.world_size, self.group.rank == 0
        gathered = [torch.empty_like(flat) for _ in range(world)] if first else None
        process_group = self.group.process_group
        torch.distributed.gather(flat, gathered, group=process_group, group_dst=0)
        if gathered is None:
            return dict(shares)
        joined: dict[str, Tensor] = {}
        offset = 0
        for name, share in shares.items():
            length = share.numel() * share.element_size()
            parts = [item[offset : offset + length].clone().view(share.dtype).view(share.shape) for item in gathered]
            joined[name] = self.known[name].join(parts)
            offset += length
        return joined

    def finished(self, req_ids: Sequence[str]) -> None:
        """Forget requests that have ended."""
        for req_id in req_ids:
            if self._prompt_of.pop(req_id, None) is not None and self.replacer is not None:
                self.replacer.forget_request(req_id)

    def receipt(self) -> dict[str, Any]:
        """Count what was replaced.

        Returns:
            `rows`: see `TensorReplacer.receipt`, and `cached`, rows that were computed before and only found, and
            `drafts`, rows of drafts that were not the reference's tokens, left live, if there were any;
            `requests`: with and without a reference; `sites`; `zeroed`: sites whose model code takes zero where a row
            has no reference; `whole`: whether every row that counts was replaced: none that was missed, none zeroed,
            none found in pages that may hold keys of another plan.
        """
        if self.replacer is None:
            return {}
        rows = {**self.replacer.receipt(), "cached": self._requests["cached"]}
        zeroed = [name for name in self.replacing if self.known[name].bare]
        if self._requests["drafts"]:
            rows["drafts"] = self._requests["drafts"]
            rows["padding"] -= rows["drafts"]
        lacking = rows["missed"] + (rows["live"] if zeroed else 0) + (0 if self._salted else rows["cached"])
        return {
            "rows": rows,
            "requests": {name: self._requests[name] for name in ("known", "unknown")},
            "sites": list(self.replacing),
            "zeroed": zeroed,
            "whole": lacking == 0 and rows["replaced"] > 0,
        }


def _owners(forward: Forward) -> Tensor:
    """Return the number of each packed token's request among those of its forward."""
    return torch.repeat_interleave(torch.arange(len(forward.num_tokens)), torch.tensor(forward.num_tokens))


def _addresses(forward: Forward, ids: Sequence[str], states: Mapping[str, Any]) -> Tensor:
    """Return each packed token's position in its request, from what was scheduled.

    Not from the graph's inputs: where those are wrong, the rows are still these tokens' rows.
    """
    pairs = zip(ids, forward.num_tokens, strict=True)
    starts = [(states[req_id].num_computed_tokens, count) for req_id, count in pairs]
    return torch.cat([torch.arange(start, start + count) for start, count in starts])
