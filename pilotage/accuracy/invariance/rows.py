"""What a condition computed: logit rows by (stream, position), and how each of them came about."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pilotage.core.errors import PilotageError
from pilotage.core.store import read_json
from pilotage.serving.drive import Drove, NotFollowed, drive, numbers

if TYPE_CHECKING:
    from pilotage.accuracy.invariance.plans import Plan


@dataclass(frozen=True)
class Way:
    """How one position of a request was computed.

    Attributes:
        kind, size: of the graph.
        offset: packed token of the graph at which the request's share starts.
        start, count: the request's chunk: first position and tokens.
    """

    kind: str
    size: int
    offset: int
    start: int
    count: int

    def __str__(self) -> str:
        at = f"tokens {self.start} to {self.start + self.count - 1}" if self.count > 1 else f"token {self.start}"
        return f"{at} at {self.offset} of the {self.kind} graph of {self.size}"


Key = tuple[int, int]  # request, position


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of one condition.

    Attributes:
        logits: request and position -> [V] fp32.
        ways: request -> position -> how it was computed last; positions that came from the prefix cache are absent.
        drove: what the schedule came to; None where it was not driven from here.
    """

    logits: Mapping[Key, Tensor]
    ways: Mapping[int, Mapping[int, Way]]
    drove: Drove | None = None

    def history(self, request: int, inherits: Sequence[int | None] = ()) -> dict[int, Way]:
        """Return how every position of a request was computed, those from the prefix cache by whoever wrote them."""
        own = self.ways.get(request, {})
        parent = inherits[request] if request < len(inherits) else None
        if parent is None:
            return dict(own)
        return {**self.history(parent, inherits), **own}


def run(llm: Any, plan: Plan, positions: Sequence[int]) -> Rows:
    """Run a condition on a driven engine and read what it recorded.

    Args:
        llm: from `launch.engine`.
        plan: the condition.
        positions: positions whose logits are wanted, of every request.
    """
    with tempfile.TemporaryDirectory(prefix="pilotage-rows-") as directory:
        llm.collective_rpc("record_start", args=(directory, list(positions)))
        try:
            drove = drive(llm, plan.schedule)
        except NotFollowed as error:
            drove = error.drove  # judged by `tokens.judge`
        finally:
            files = llm.collective_rpc("record_stop")[0]
        return _without_drafts(read(Path(directory), files, drove=drove), plan, drove)


def _without_drafts(found: Rows, plan: Plan, drove: Drove) -> Rows:
    """Drop rows past the last token of the stream that was fed: only drafts that fell were ever computed there."""
    ends = []
    for request, said in zip(plan.schedule.requests, drove.said, strict=True):
        wrong = [n for n, pair in enumerate(zip(said, request.continuation, strict=False)) if pair[0] != pair[1]]
        ends.append(min([len(request.tokens) - 1, *(request.prompt + n for n in wrong)]))
    return Rows(
        logits={key: row for key, row in found.logits.items() if key[1] < ends[key[0]]},
        ways={request: {p: w for p, w in ways.items() if p < ends[request]} for request, ways in found.ways.items()},
        drove=found.drove,
    )


def read(
    directory: Path,
    files: Sequence[str],
    *,
    drove: Drove | None = None,
    number: Callable[[Sequence[str]], list[int]] = numbers,
) -> Rows:
    """Read a recording.

    Args:
        directory: what `record_start` was given.
        files: what `record_stop` returned.
        drove: for the result.
        number: vLLM's request ids -> the numbers of the requests.
    """
    from safetensors import safe_open

    of = number(read_json(directory / "requests.json"))
    logits: dict[Key, Tensor] = {}
    for name in files:
        with safe_open(name, framework="pt") as file:
            values = file.get_tensor("logits")
            requests, positions = file.get_tensor("request").tolist(), file.get_tensor("position").tolist()
        for row, (request, position) in enumerate(zip(requests, positions, strict=True)):
            # After a preemption the later row counts: it is what the cache then holds.
            logits[of[request], position] = values[row].clone()
    ways: dict[int, dict[int, Way]] = {}
    for forward in read_json(directory / "forwards.json"):
        offset = 0
        for request, start, count in forward["requests"]:
            way = Way(forward["kind"], forward["size"], offset, start, count)
            ways.setdefault(of[request], {}).update(dict.fromkeys(range(start, start + count), way))
            offset += count
    return Rows(logits=logits, ways=ways, drove=drove)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One row under two conditions.

    Attributes:
        stream, position: which row. request: its request in the second condition.
        relative: |second - first| / |first| in the Euclidean norm; inf where either is not finite.
        same_way: it and everything before it in its request was computed by the same graphs at the same places.
        equal: bit by bit.
        way: how the second condition computed it.
    """

    stream: int
    position: int
    request: int
    relative: float
    same_way: bool
    equal: bool
    way: Way


def differences(
    first: Rows,
    first_streams: Sequence[int],
    second: Rows,
    plan_streams: Sequence[int],
    *,
    inherits: Sequence[int | None] = (),
    same_engine: bool = True,
) -> list[Difference]:
    """Compare every row that both conditions computed.

    Args:
        first: the reference condition; each stream appears in it once.
        first_streams: stream of each of its requests.
        second: the other condition.
        plan_streams: stream of each of its requests.
        inherits: see `plans.Plan`.
        same_engine: both ran the same compiled graphs.
    """
    at = {stream: request for request, stream in enumerate(first_streams)}
    found = []
    for request, stream in enumerate(plan_streams):
        if stream not in at:
            raise PilotageError(f"stream {stream} has no reference", where="invariance")
        before, after = first.history(at[stream]), second.history(request, inherits)
        split = _first_other(before, after) if same_engine else 0
        for position, way in sorted(second.ways.get(request, {}).items()):
            a, b = first.logits.get((at[stream], position)), second.logits.get((request, position))
            if a is None or b is None:
                continue
            equal = torch.equal(a, b)
            found.append(
                Difference(
                    stream=stream,
                    position=position,
                    request=request,
                    relative=0.0 if equal else relative(b, a),
                    same_way=position < split,
                    equal=equal,
                    way=way,
                )
            )
    return found


def _first_other(before: Mapping[int, Way], after: Mapping[int, Way]) -> int:
    """Return the first position that was computed in another way, or not at all."""
    position = 0
    while position in before and before[position] == after.get(position):
        position += 1
    return position


def relative(actual: Tensor, expected: Tensor) -> float:
    """Return |actual - expected| / |expected|; inf where a value of either is not finite."""
    a, e = actual.double(), expected.double()
    error, size = float((a - e).norm()), float(e.norm())
    if not (torch.isfinite(a).all() and torch.isfinite(e).all()):
        return float("inf")
    return error / size if size else (0.0 if error == 0 else float("inf"))
