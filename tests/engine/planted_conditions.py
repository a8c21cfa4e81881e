"""Faults that one request alone does not show: only company, chunks, padding, a prefix hit or preemption does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from pilotage.accuracy.invariance import plans
from pilotage.functional import registry
from pilotage.serving.batch import StepInputs
from pilotage.serving.requests import Requests

Plant = Callable[[pytest.MonkeyPatch], None]


def after_fill(patch: pytest.MonkeyPatch, change: Callable[[StepInputs, Any], None]) -> None:
    """Apply `change` to every step's inputs."""
    real = StepInputs.fill

    def fill(self: StepInputs, forward: Any, **how: Any) -> None:
        real(self, forward, **how)
        change(self, forward)

    patch.setattr(StepInputs, "fill", fill)


def in_attention(
    patch: pytest.MonkeyPatch, operators: tuple[str, ...], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Apply `change` to the keyword arguments of every implementation of attention operators."""
    for operator in operators:
        for name, implementation in list(registry._OPERATORS[operator].items()):

            def faulty(*tensors: Any, _real: Any = implementation.function, **how: Any) -> Any:
                return _real(*tensors, **change(how))

            patch.setitem(registry._OPERATORS[operator], name, implementation._replace(function=faulty))


def wrong_slot_of_the_second(patch: pytest.MonkeyPatch) -> None:
    def change(inputs: StepInputs, forward: Any) -> None:
        for group, slots in zip(inputs.groups, inputs.slot_mappings, strict=True):
            second = (inputs.token_to_req == 1) & (slots >= 0)
            size = group.block_size
            slots[second] = slots[second] // size * size + (slots[second] + 1) % size

    after_fill(patch, change)


def query_start_off_at_a_full_bucket(patch: pytest.MonkeyPatch) -> None:
    def change(inputs: StepInputs, forward: Any) -> None:
        if inputs.kind == "prefill" and sum(forward.num_tokens) == inputs.size:
            inputs.query_start_loc[inputs.query_start_loc == inputs.size] -= 1

    after_fill(patch, change)


def window_ignores_the_chunk(patch: pytest.MonkeyPatch) -> None:
    """Once something is cached the window is dropped."""

    def change(how: dict[str, Any]) -> dict[str, Any]:
        cached = int(how["positions"][0]) > 0
        return {**how, "window": None} if cached else how

    in_attention(patch, ("segmented_attention",), change)


def position_of_a_hit_starts_at_zero(patch: pytest.MonkeyPatch) -> None:
    entered: set[int] = set()
    real = Requests.update

    def update(self: Requests, step: Any) -> Any:
        scheduled = real(self, step)
        entered.clear()
        new = {data.req_id for data in step.scheduled_new_reqs if data.num_computed_tokens}
        entered.update(self.batch.req_id_to_index[name] for name in new)
        return scheduled

    def change(inputs: StepInputs, forward: Any) -> None:
        for local, row in enumerate(forward.rows):
            if row in entered:
                mine = inputs.token_to_req == local
                mine[int(inputs.query_start_loc[-1]) :] = False
                inputs.positions[mine] -= inputs.cached_seq_len[local]

    patch.setattr(Requests, "update", update)
    after_fill(patch, change)


def a_padded_decode_forgets_a_key(patch: pytest.MonkeyPatch) -> None:
    """In a decode graph with padded rows the last request does not see its newest key."""

    def change(inputs: StepInputs, forward: Any) -> None:
        last = len(forward.rows) - 1
        if inputs.kind == "decode" and 1 < len(forward.rows) < inputs.num_rows:
            inputs.seq_lens[last] -= 1

    after_fill(patch, change)


def resumed_requests_keep_their_old_pages(patch: pytest.MonkeyPatch) -> None:
    real = Requests._cached

    def cached(self: Requests, data: Any, position: int, req_id: str) -> Any:
        old = [list(pages) for pages in self.states[req_id].block_ids]
        state = real(self, data, position, req_id)
        if req_id in data.resumed_req_ids:
            new = self.states[req_id].block_ids
            self.states[req_id].block_ids = tuple([*a, *b] for a, b in zip(old, new, strict=True))
        return state

    patch.setattr(Requests, "_cached", cached)


def decode_window_one_longer(patch: pytest.MonkeyPatch) -> None:
    def change(how: dict[str, Any]) -> dict[str, Any]:
        return {**how, "window": how["window"] + 1} if how.get("window") else how

    in_attention(patch, ("attention_decode",), change)


def tables_swapped_when_three_decode(patch: pytest.MonkeyPatch) -> None:
    def change(inputs: StepInputs, forward: Any) -> None:
        if inputs.kind == "decode" and len(forward.rows) >= 3:
            for table in inputs.block_tables:
                table[[1, 2]] = table[[2, 1]]

    after_fill(patch, change)


def padding_overwrites_the_first_slot(patch: pytest.MonkeyPatch) -> None:
    """Hidden where a step fills its graph."""

    def change(inputs: StepInputs, forward: Any) -> None:
        for slots in inputs.slot_mappings:
            slots[slots < 0] = slots[0].clone()

    after_fill(patch, change)


def a_chunk_that_starts_inside_a_page_begins_it_anew(patch: pytest.MonkeyPatch) -> None:
    """The rest of a page is written from its first slot on."""

    def change(inputs: StepInputs, forward: Any) -> None:
        if inputs.kind != "prefill":
            return
        for local in range(len(forward.rows)):
            start = int(inputs.cached_seq_len[local])
            for group, slots in zip(inputs.groups, inputs.slot_mappings, strict=True):
                if start % group.block_size:
                    mine = (inputs.token_to_req == local) & (slots >= 0)
                    first = mine & (inputs.positions // group.block_size == start // group.block_size)
                    slots[first] -= start % group.block_size

    after_fill(patch, change)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A planted fault, the relations that must break, and those that must hold.

    Attributes:
        plant: applies it.
        breaks: relations that must fail.
        holds: relations that must not.
        phase: of the first broken row of each relation that must fail, or None.
        streams: the prompts that may break, or None.
    """

    plant: Plant
    breaks: tuple[str, ...]
    holds: tuple[str, ...] = (plans.REPETITION,)
    phase: str | None = None
    streams: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        return getattr(self.plant, "__name__", "fault").replace("_", " ")


FAULTS = (
    Fault(
        plant=wrong_slot_of_the_second,
        breaks=(plans.MATES, plans.ORDER),
        holds=(plans.REPETITION, plans.DECODE),
    ),
    Fault(plant=query_start_off_at_a_full_bucket, breaks=(plans.PADDING,), phase="prefill"),
    Fault(plant=window_ignores_the_chunk, breaks=(plans.CHUNKS,), phase="prefill"),
    Fault(
        plant=position_of_a_hit_starts_at_zero,
        breaks=(plans.HIT,),
        holds=(plans.REPETITION, plans.CHUNKS, plans.ORDER, plans.DECODE, plans.PADDING),
        phase="prefill",
    ),
    Fault(
        plant=a_padded_decode_forgets_a_key,
        breaks=(plans.MATES,),
        holds=(plans.REPETITION, plans.DECODE),
        phase="decode",
    ),
    Fault(
        plant=resumed_requests_keep_their_old_pages,
        breaks=(plans.PREEMPTION,),
        holds=(plans.REPETITION, plans.MATES, plans.CHUNKS, plans.HIT),
    ),
    Fault(
        plant=decode_window_one_longer,
        breaks=(plans.DECODE,),
        holds=(plans.REPETITION, plans.MATES, plans.CHUNKS),
        streams=("longest", "middle", "past a bucket", "one page", "sibling of the longest"),
    ),
    Fault(
        plant=tables_swapped_when_three_decode,
        breaks=(plans.MATES, plans.ORDER),
        holds=(plans.REPETITION, plans.DECODE, plans.PADDING),
        phase="decode",
    ),
    Fault(plant=padding_overwrites_the_first_slot, breaks=(plans.PADDING,)),
    Fault(
        plant=a_chunk_that_starts_inside_a_page_begins_it_anew,
        breaks=(plans.CHUNKS,),
        holds=(plans.REPETITION, plans.MATES, plans.DECODE),
    ),
)


def on_the_second_rank(worker: Any) -> int:
    """Run inside each worker: the second rank's attention forgets its window once something is cached."""
    import torch.distributed

    from pilotage.functional import registry as operators

    rank = torch.distributed.get_rank()
    if rank == 1:
        for name, implementation in list(operators._OPERATORS["segmented_attention"].items()):

            def faulty(*tensors: Any, _real: Any = implementation.function, **how: Any) -> Any:
                if int(how["positions"][0]) > 0:
                    how = {**how, "window": None}
                return _real(*tensors, **how)

            operators._OPERATORS["segmented_attention"][name] = implementation._replace(function=faulty)
    return rank


def wrong_share_of_the_second_rank(worker: Any) -> int:
    """Run inside each worker: the second rank's columns of o_proj are off by one."""
    import torch.distributed

    rank = torch.distributed.get_rank()
    if rank == 1:
        found = [p for name, p in worker.model.named_parameters() if name.endswith("o_proj.weight")]
        for weight in found:
            weight.data.copy_(weight.data.roll(1, dims=1))
        assert found
    return rank
