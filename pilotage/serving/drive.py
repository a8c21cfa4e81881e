"""Drive a started engine step by step: when each request arrives, how much is computed in a step, who is preempted.

The scheduler is vLLM's own; only its token budget, its free pages and the arrival of requests are set from outside, so
what the model computes is what it would compute under that load. For engines that `launch.engine` started: their
scheduler lives in this process, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from pilotage.core.errors import PilotageError
from pilotage.serving.speculation import DRAFTS_KEY

if TYPE_CHECKING:
    from vllm import LLM

FORCE_KEY = "pilotage_force"
# A schedule that makes no progress for so many steps never will.
STALLED = 64


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request that is made to follow given tokens.

    Attributes:
        tokens: prompt and forced continuation, at least one token of each.
        prompt: how many of them are the prompt.
        arrives: step before which it is handed in.
        drafts: what is drafted after each count of output tokens, where the engine speculates; empty: its own drafts.
        forced: False where the engine chooses as many tokens by itself, the most likely ones.
    """

    tokens: tuple[int, ...]
    prompt: int
    arrives: int = 0
    drafts: tuple[tuple[int, ...], ...] = ()
    forced: bool = True

    @property
    def continuation(self) -> tuple[int, ...]:
        """The tokens after the prompt."""
        return self.tokens[self.prompt :]

    def says(self, tokens: Sequence[int]) -> Request:
        """Return the request with another continuation, in whose drafts the same tokens are right and wrong."""
        said = tuple(tokens)
        drafts = []
        for after, drafted in enumerate(self.drafts[: len(said)]):
            due = said[after : after + len(drafted)]
            right = [a == b for a, b in zip(drafted, self.continuation[after:], strict=False)]
            drafts.append(tuple(t if ok else _another(t, self.tokens) for t, ok in zip(due, right, strict=False)))
        return replace(self, tokens=(*self.tokens[: self.prompt], *said), drafts=tuple(drafts))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What happens to a number of requests.

    Attributes:
        requests: in the order in which they are handed in.
        budgets: most tokens to compute in each step; the last one holds for all that follow; empty: the engine's own.
        one_by_one: each request is handed in when the one before it has finished; `arrives` is then not read.
        cold: forget what earlier schedules left in the prefix cache.
        forget: forget it before each request as well.
        preempt: steps before which every running request is preempted and its pages are taken away.
        squeeze: (first step, last step, pages): from the first of these steps to the one before the last only so many
            pages are free, and the scheduler preempts whom it wants.
    """

    requests: tuple[Request, ...]
    budgets: tuple[int, ...] = ()
    one_by_one: bool = False
    cold: bool = True
    forget: bool = False
    preempt: tuple[int, ...] = ()
    squeeze: tuple[int, int, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values; `from_json` reads them."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Schedule:
        """Build a schedule from what `to_json` returned, also after a trip through a JSON file."""
        known = dict(values)
        known["requests"] = tuple(
            Request(
                tokens=tuple(item["tokens"]),
                prompt=item["prompt"],
                arrives=item["arrives"],
                drafts=tuple(tuple(ids) for ids in item.get("drafts", ())),
                forced=bool(item.get("forced", True)),
            )
            for item in known["requests"]
        )
        for name in ("budgets", "preempt"):
            known[name] = tuple(known.get(name, ()))
        if known.get("squeeze") is not None:
            known["squeeze"] = tuple(known["squeeze"])
        return cls(**known)


@dataclass(frozen=True, kw_only=True)
class Drove:
    """What a run of a schedule came to.

    Attributes:
        steps: of the engine.
        preempted: how often a request was.
        drafted: tokens.
        said: what each request answered.
    """

    steps: int
    preempted: int
    drafted: int = 0
    said: tuple[tuple[int, ...], ...] = ()


class NotFollowed(PilotageError):
    """A request answered other tokens than those that it was forced to, or none because nothing moved any more.

    Attributes:
        request: its number.
        said, forced: tokens.
        drove: what the run came to all the same.
    """

    def __init__(self, request: int, said: Sequence[int], forced: Sequence[int], drove: Drove) -> None:
        what = f"request {request} said {list(said)[:8]}..., not the forced {list(forced)[:8]}..."
        if not said:
            what = f"request {request} was not answered: nothing has moved for {STALLED} steps"
        super().__init__(what, where=FORCE_KEY)
        self.request, self.said, self.forced, self.drove = request, tuple(said), tuple(forced), drove

    @property
    def position(self) -> int:
        """Number of the first output token that is another one."""
        pairs = zip(self.said, self.forced, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.said), len(self.forced)))


def drive(llm: LLM, schedule: Schedule) -> Drove:
    """Run a schedule to its end; request i of the schedule has the request id "i" (and vLLM's own suffix).

    Raises:
        NotFollowed: a request did not follow its tokens, or nothing moves any more.
    """
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    if schedule.cold:
        _forget(llm)
    own_budget = scheduler.max_num_scheduled_tokens
    held: list[Any] = []
    pool = scheduler.kv_cache_manager.block_pool
    waiting = list(enumerate(schedule.requests))
    said: dict[str, list[int]] = {}
    step = idle = preempted = drafted = 0
    seen: dict[str, int] = {}
    computed = -1
    try:
        while waiting or engine.has_unfinished_requests():
            while waiting and (
                not engine.has_unfinished_requests() if schedule.one_by_one else waiting[0][1].arrives <= step
            ):
                number, request = waiting.pop(0)
                if schedule.forget:
                    _forget(llm)
                _add(engine, number, request)
            if schedule.budgets:
                scheduler.max_num_scheduled_tokens = schedule.budgets[min(step, len(schedule.budgets) - 1)]
            if step in schedule.preempt:
                llm.reset_prefix_cache(reset_running_requests=True)
            if schedule.squeeze is not None:
                first, last, leave = schedule.squeeze
                if first <= step < last:
                    held += pool.get_new_blocks(max(0, pool.get_num_free_blocks() - leave))
                if step == last:
                    pool.free_blocks(held)
                    held = []
            drafted += sum(len(request.spec_token_ids) for request in scheduler.requests.values())
            outputs = engine.step()
            for output in outputs:
                if output.finished:
                    said[output.request_id] = list(output.outputs[0].token_ids)
            running = {request.request_id: request.num_preemptions for request in scheduler.requests.values()}
            preempted += sum(max(0, count - seen.get(name, 0)) for name, count in running.items())
            seen.update(running)
            before, computed = computed, sum(request.num_computed_tokens for request in scheduler.requests.values())
            idle = 0 if outputs or computed != before else idle + 1
            if idle > STALLED:
                break  # whoever has not finished has not answered
            step += 1
    finally:
        scheduler.max_num_scheduled_tokens = own_budget
        if held:
            pool.free_blocks(held)
        if engine.has_unfinished_requests():
            engine.abort_request([str(number) for number in range(len(schedule.requests))])
    answers = tuple(tuple(said.get(str(number), ())) for number in range(len(schedule.requests)))
    drove = Drove(steps=step, preempted=preempted, drafted=drafted, said=answers)
    for number, request in enumerate(schedule.requests):
        given = answers[number]
        if len(given) != len(request.continuation) or (request.forced and given != request.continuation):
            raise NotFollowed(number, answers[number], request.continuation, drove)
    return drove


def _another(token: int, tokens: Sequence[int]) -> int:
    return next((other for other in tokens if other != token), token + 1)


def _add(engine: Any, number: int, request: Request) -> None:
    from vllm import SamplingParams

    forced = list(request.continuation)
    extra: dict[str, Any] = {FORCE_KEY: forced} if request.forced else {}
    params = SamplingParams(
        temperature=0.0,
        max_tokens=len(forced),
        ignore_eos=True,
        detokenize=False,
        extra_args={**extra, **({DRAFTS_KEY: request.drafts} if request.drafts else {})},
    )
    engine.add_request(str(number), {"prompt_token_ids": list(request.tokens[: request.prompt])}, params)


def _forget(llm: LLM) -> None:
    if not llm.reset_prefix_cache():
        raise PilotageError("pages are still in use", where="reset_prefix_cache", do="let running requests finish")


def numbers(request_ids: Sequence[str]) -> list[int]:
    """Return the number that each of vLLM's request ids starts with; see `drive`."""
    return [int(name.split("-")[0]) for name in request_ids]
