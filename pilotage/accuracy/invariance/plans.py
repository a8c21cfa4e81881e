"""Under which conditions the streams are run: pure, from a handful of sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pilotage.accuracy.invariance.streams import DRAFTS, Falls, Sizes, Streams
from pilotage.serving.drive import Request, Schedule

# Of the ways in which drafts fall, those that a large model is asked for.
SPARSE = ("all drafts stand", "all drafts fall", "drafts fall in turn")
# More conditions of one kind than this cost minutes on a large model and find nothing more.
MANY = 40
FEW = 9

MATES = "batch mates"
ORDER = "order"
PADDING = "padding and bucket edges"
CHUNKS = "chunking"
HIT = "prefix hit"
PREEMPTION = "preemption"
DECODE = "decode against prefill"
REPETITION = "repetition"
COMPILED = "eager and compiled"
PARALLEL = "tensor parallel 1 and 2"
SERVER = "server against offline"
SPECULATION = "speculation off and on"
RELATIONS = (
    REPETITION,
    MATES,
    ORDER,
    PADDING,
    CHUNKS,
    HIT,
    PREEMPTION,
    DECODE,
    COMPILED,
    PARALLEL,
    SERVER,
    SPECULATION,
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One condition.

    Attributes:
        relation: one of `RELATIONS`.
        name: what is special about it.
        schedule: what is run.
        streams: the stream of each request.
        inherits: for requests that may find their beginning in the prefix cache, the request whose pages those are.
        free: the requests choose their tokens, and the drafts are made of what they chose: no stream has their rows.
    """

    relation: str
    name: str
    schedule: Schedule
    streams: tuple[int, ...]
    inherits: tuple[int | None, ...] = ()
    free: bool = False

    def chosen(self, said: Sequence[Sequence[int]] | None = None) -> Plan:
        """Return the condition with requests that choose, drafted for what they `said` when nothing was drafted.

        Without that, the run that tells: nothing is drafted.
        """
        if said is None:
            requests = [
                replace(request, forced=False, drafts=((),) * len(request.continuation))
                for request in self.schedule.requests
            ]
        else:
            pairs = zip(self.schedule.requests, said, strict=True)
            requests = [replace(request.says(tokens), forced=False) for request, tokens in pairs]
        return replace(self, schedule=replace(self.schedule, requests=tuple(requests)))


def _all(streams: Streams, order: Iterable[int], every: int = 0) -> tuple[tuple[Request, ...], tuple[int, ...]]:
    chosen = tuple(order)
    return tuple(streams.request(s, arrives=every * i) for i, s in enumerate(chosen)), chosen


def alone(streams: Streams, relation: str = REPETITION, name: str = "alone") -> Plan:
    """The reference condition: one request at a time, nothing in the prefix cache, prompts in as few chunks as fit."""
    requests, order = _all(streams, range(len(streams)))
    return Plan(
        relation=relation,
        name=name,
        schedule=Schedule(requests=requests, one_by_one=True, forget=True),
        streams=order,
    )


def together(streams: Streams, relation: str = MATES, name: str = "all at once") -> Plan:
    """Handed in at once."""
    requests, order = _all(streams, streams.company)
    return Plan(relation=relation, name=name, schedule=Schedule(requests=requests), streams=order)


def conditions(sizes: Sizes, streams: Streams, *, thorough: bool = True) -> list[Plan]:
    """Return every condition that one engine can be put in, the reference not among them.

    Args:
        sizes: of the engine.
        streams: from `streams.make`.
        thorough: many edges and cuts, for models where a step takes milliseconds; otherwise the most telling ones.
    """
    count = len(streams.company)
    plans = [together(streams)]
    requests, order = _all(streams, range(count), every=1)
    plans.append(Plan(relation=MATES, name="one more each step", schedule=Schedule(requests=requests), streams=order))
    # The longest request last, behind others that already decode; those leave the batch one after another.
    requests, order = _all(streams, [*range(1, count), 0], every=2)
    plans.append(
        Plan(relation=MATES, name="the longest joins last", schedule=Schedule(requests=requests), streams=order)
    )
    requests, order = _all(streams, reversed(range(count)))
    plans.append(Plan(relation=ORDER, name="reversed", schedule=Schedule(requests=requests), streams=order))
    requests, order = _all(streams, [*range(1, count), 0])
    plans.append(Plan(relation=ORDER, name="rotated", schedule=Schedule(requests=requests), streams=order))
    plans += _padding(sizes, streams, MANY if thorough else FEW)
    plans += _chunks(sizes, streams, MANY if thorough else FEW)
    plans += _hits(sizes, streams)
    plans += _preemptions(sizes, streams)
    plans.append(_prefilled(streams))
    plans.append(alone(streams, name="alone, later"))
    return plans


def speculations(streams: Streams, *, thorough: bool = True) -> list[Plan]:
    """Return the conditions of an engine that speculates, held against the reference of one that does not.

    Args:
        streams: from `streams.make`.
        thorough: every place at which a draft can fall by itself; otherwise all of them in turn.
    """
    ways: dict[str, Falls] = {
        "all drafts stand": lambda after, n: False,
        "all drafts fall": lambda after, n: True,
        "the second of three falls": lambda after, n: n == 1,
        "the last of three falls": lambda after, n: n == 2,
        "drafts fall in turn": lambda after, n: n >= after % (DRAFTS + 1),
    }
    plans = []
    for name, falls in ways.items():
        if name not in SPARSE and not thorough:
            continue
        chosen = tuple(streams.company)
        requests = tuple(streams.request(s, arrives=i, drafts=falls) for i, s in enumerate(chosen))
        plan = Plan(relation=SPECULATION, name=name, schedule=Schedule(requests=requests), streams=chosen)
        plans.append(plan)
        if name in ("drafts fall in turn", *(("all drafts stand",) if thorough else ())):
            # Forced tokens hide from which row of logits a token is taken.
            plans.append(replace(plan, name=f"{name}, tokens chosen", free=True))
    turns = ways["drafts fall in turn"]
    requests = tuple(streams.request(s, drafts=turns) for s in streams.company)
    plans.append(
        Plan(
            relation=SPECULATION,
            name="drafts fall in turn, preempted at steps 2 and 4",
            schedule=Schedule(requests=requests, preempt=(2, 4)),
            streams=tuple(streams.company),
        )
    )
    # What was written for drafts that fell lies in pages that the next request finds.
    pair = (streams.request(0, drafts=ways["all drafts fall"]), streams.request(0, drafts=turns))
    plans.append(
        Plan(
            relation=SPECULATION,
            name="a prefix hit after drafts that fell",
            schedule=Schedule(requests=pair, one_by_one=True),
            streams=(0, 0),
            inherits=(None, 0),
        )
    )
    requests, order = _all(streams, streams.company)
    plans.append(
        Plan(relation=SPECULATION, name="drafts from the text", schedule=Schedule(requests=requests), streams=order)
    )
    return plans


def thinned(values: Sequence[int], most: int) -> list[int]:
    """Keep `most` of ascending values, evenly spread, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def _padding(sizes: Sizes, streams: Streams, most: int) -> list[Plan]:
    """Prefixes of the longest stream with every edge length; two decoded tokens follow each."""
    lengths = thinned(sizes.edges(), 2 * most)
    requests = tuple(streams.request(0, prompt=length, new=2) for length in lengths)
    fill = []
    for size in sizes.token_buckets:
        # Two requests that fill a graph to its last token, leave one, or are one over it.
        for total in (size - 1, size, size + 1):
            second = streams.prompts[1]
            first = total - second
            if 1 <= first <= streams.prompts[0]:
                fill.append((first, total))
    plans = [
        Plan(
            relation=PADDING,
            name=f"prompts of {', '.join(map(str, lengths))} tokens",
            schedule=Schedule(requests=requests, one_by_one=True, forget=True),
            streams=(0,) * len(requests),
        )
    ]
    for first, total in fill:
        pair = (streams.request(0, prompt=first, new=2), streams.request(1, new=2))
        plans.append(
            Plan(
                relation=PADDING,
                name=f"two prompts of {total} tokens together",
                schedule=Schedule(requests=pair),
                streams=(0, 1),
            )
        )
    return plans


def cuts(sizes: Sizes, most: int) -> list[tuple[int, ...]]:
    """Choose token budgets: a first chunk at every edge and the rest at once, and equal chunks of telling sizes.

    Returns:
        Budgets by step, as in `Schedule.budgets`.
    """
    longest = sizes.longest
    rest = sizes.token_buckets[-1]
    marks = [1, 2, sizes.block // 2, *sizes.edges()]
    if most >= MANY:
        marks += range(1, sizes.block)  # every offset in a page
    marks += [window + sizes.block // 2 for window in sizes.windows]
    firsts = thinned(sorted({mark for mark in marks if 1 <= mark < longest}), most)
    sizes_of = [sizes.block - 1, sizes.block, sizes.block + 1, sizes.block // 2 + 1, sizes.token_buckets[0]]
    sizes_of += [window - 1 for window in sizes.windows] + [window + 1 for window in sizes.windows]
    equal = thinned(sorted({size for size in sizes_of if 1 <= size < longest and longest / size <= 64}), most // 2)
    return [(first, rest) for first in firsts] + [(size,) for size in equal]


def _chunks(sizes: Sizes, streams: Streams, most: int) -> list[Plan]:
    plans = []
    for budgets in cuts(sizes, most):
        first = budgets[0]
        name = f"first chunk of {first}" if len(budgets) > 1 else f"chunks of {first}"
        # A second request starts in what the last chunk of the first one leaves of the budget.
        chosen = (0,) if len(budgets) > 1 else (0, streams.company[-1] if len(streams.company) < 3 else 2)
        requests = tuple(streams.request(stream) for stream in chosen)
        plans.append(
            Plan(relation=CHUNKS, name=name, schedule=Schedule(requests=requests, budgets=budgets), streams=chosen)
        )
    return plans


def _hits(sizes: Sizes, streams: Streams) -> list[Plan]:
    """Requests that find pages of earlier ones, and requests that find pages which the same step still computes."""
    block, longest = sizes.block, streams.prompts[0]
    lengths = [n for n in (longest, block + 1, 2 * block, 2 * block + 1, 3 * block - 1) if n <= longest]
    after = [streams.request(0), *(streams.request(0, prompt=n, new=2) for n in lengths)]
    after.append(streams.request(streams.sibling))
    owners = (0,) * (len(lengths) + 1) + (streams.sibling,)
    plans = [
        Plan(
            relation=HIT,
            name="after the request that wrote the pages",
            schedule=Schedule(requests=tuple(after), one_by_one=True),
            streams=owners,
            inherits=(None, *((0,) * (len(lengths) + 1))),
        )
    ]
    if block < longest:
        cut = Schedule(requests=(streams.request(0), streams.request(0)), one_by_one=True, budgets=(block, longest))
        plans.append(
            Plan(relation=HIT, name="after a chunk of one page", schedule=cut, streams=(0, 0), inherits=(None, 0))
        )
    pair = (streams.request(0), streams.request(streams.sibling), streams.request(0, prompt=longest, new=3))
    plans.append(
        Plan(
            relation=HIT,
            name="pages of the same step",
            schedule=Schedule(requests=pair),
            streams=(0, streams.sibling, 0),
            inherits=(None, 0, 0),
        )
    )
    return plans


def _preemptions(sizes: Sizes, streams: Streams) -> list[Plan]:
    requests, order = _all(streams, streams.company)
    half = max(1, sizes.longest // 2)
    plans = [
        Plan(
            relation=PREEMPTION,
            name="everything at steps 3 and 6",
            schedule=Schedule(requests=requests, preempt=(3, 6)),
            streams=order,
        ),
        Plan(
            relation=PREEMPTION,
            name="in the middle of a prompt, and later",
            schedule=Schedule(requests=requests, budgets=(half, half, sizes.token_buckets[-1]), preempt=(1, 5)),
            streams=order,
        ),
        Plan(
            relation=PREEMPTION,
            name="for want of pages",
            schedule=Schedule(requests=_crossing(sizes, streams), squeeze=(2, 16, 0)),
            streams=order,
        ),
    ]
    return plans


def _crossing(sizes: Sizes, streams: Streams) -> tuple[Request, ...]:
    """Requests that all need another page at the same step, the fourth, if they are long enough."""
    requests = []
    for stream in streams.company:
        tokens = streams.tokens[stream]
        page = (len(tokens) - 3) // sizes.block * sizes.block
        requests.append(streams.request(stream, prompt=page - 2 if page > 2 else None))
    return tuple(requests)


def _prefilled(streams: Streams) -> Plan:
    """What the reference decoded, computed as one prompt."""
    chosen = range(len(streams))
    requests = tuple(streams.request(s, prompt=len(streams.tokens[s]) - 1) for s in chosen)
    return Plan(
        relation=DECODE,
        name="all tokens as one prompt",
        schedule=Schedule(requests=requests, one_by_one=True, forget=True),
        streams=tuple(chosen),
    )
