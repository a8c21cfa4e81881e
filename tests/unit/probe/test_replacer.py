"""Tensor replacement: the worked examples of its document, with their numbers, and what goes beyond it."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pilotage.accuracy.tensor_replacement import (
    TensorReplacer,
    flatten_steps,
    get_replacement_tensor,
    set_active_context,
)
from pilotage.core.errors import BadInput
from pilotage.core.tap import tap
from pilotage.probe import Captures, CaptureWriter

ROUTER = "model.layers.0.mlp.router"


def rows(prompt: int, count: int) -> torch.Tensor:
    """Row p of prompt i is (100 i + p, -(100 i + p) - 1): no row is zero, and each says whose it is."""
    value = torch.arange(count, dtype=torch.float32) + 100 * prompt
    return torch.stack((value, -value - 1), dim=1)


def steps(prompt: int, length: int, decoded: int = 0) -> list[torch.Tensor]:
    """Step 0 is the prefill; later ones hold the whole sequence, of which only the last row is right."""
    found = [rows(prompt, length)[None]]
    for step in range(1, decoded + 1):
        whole = torch.full((1, length + step, 2), float("nan"))
        whole[0, -1] = rows(prompt, length + step)[-1]
        found.append(whole)
    return found


def replacer(prompts: list[list[int]], decoded: int = 0) -> TensorReplacer:
    captures = [{ROUTER: steps(number, len(ids), decoded)} for number, ids in enumerate(prompts)]
    return TensorReplacer(captures, prompt_token_ids=prompts)


def slots(context: Any) -> list[float | None]:
    """The first feature of each slot; None for a zero row."""
    value = context[ROUTER]
    return [float(row[0]) if row.any() else None for row in value]


@pytest.fixture(autouse=True)
def no_context() -> Any:
    yield
    set_active_context(None)


def test_steps_are_flattened_to_one_row_a_position() -> None:
    flat = flatten_steps(steps(0, 3, decoded=2))
    assert torch.equal(flat, rows(0, 5)), "all of the prefill, then the last token of each step"
    assert flatten_steps([torch.ones(1, 4, 6, 8)]).shape == (4, 6, 8)
    with pytest.raises(BadInput, match="one prompt a capture"):
        flatten_steps([torch.ones(2, 4, 6)])


def test_prompts_are_resolved_as_in_the_first_example() -> None:
    found = replacer([[10, 20, 30], [40, 50]])
    assert found.register_request("req-abc", [10, 20, 30, 77, 88]) == 0
    assert found.register_request("req-def", [40, 50]) == 1
    assert found._resolve_prompt_idx("req-abc") == 0
    assert found._resolve_prompt_idx("req-def") == 1
    context = found.build_context(["req-abc", "req-def"], [2, 0], False, "cpu")
    assert slots(context) == [2, 100]


@pytest.mark.parametrize(
    ("tokens", "prompt"),
    [([1, 2, 3, 4, 5], 1), ([1, 2, 3, 77, 88], 0), ([1, 2, 3, 4], 0), ([1, 2, 3], 0), ([1, 2, 3, 4, 5, 6], 1)],
)
def test_the_longest_match_wins(tokens: list[int], prompt: int) -> None:
    assert replacer([[1, 2, 3], [1, 2, 3, 4, 5]]).register_request("r", tokens) == prompt


def test_the_known_corner_case_and_how_a_caller_settles_it() -> None:
    found = replacer([[1, 2, 3], [1, 2, 3, 4, 5]])
    assert found.register_request("retry", [1, 2, 3, 4, 5]) == 1, "as documented: the longer prompt"
    assert found.register_request("retry", [1, 2, 3, 4, 5], prompt=0) == 0
    with pytest.raises(KeyError, match="do not begin with those of prompt 1"):
        found.register_request("retry", [1, 2, 3], prompt=1)
    with pytest.raises(KeyError):
        found.register_request("retry", [1, 2, 3], prompt=2)


def test_teacher_forcing_prompts_again_under_a_new_id() -> None:
    found = replacer([[1, 2, 3]], decoded=3)
    assert found.register_request("abc-123", [1, 2, 3]) == 0
    assert found.register_request("def-456", [1, 2, 3, 77, 88]) == 0
    # The retry prefills the extended prompt: its positions are rows that decode steps gave.
    context = found.build_context(["def-456"], [0, 1, 2, 3, 4], True, "cpu")
    assert slots(context)[1:] == [1, 2, 3, 4] and torch.equal(context[ROUTER], rows(0, 5))
    assert slots(found.build_context(["def-456"], [5, 0, 0, 0], False, "cpu")) == [5, None, None, None]


def test_a_collision_of_hashes_is_no_match() -> None:
    assert hash((-1,)) == hash((-2,)), "two token contents of one hash"
    found = TensorReplacer([{ROUTER: [torch.ones(1, 1, 2)]}], prompt_token_ids=[[-1]])
    with pytest.raises(KeyError, match="none of the 1 stored prompts"):
        found.register_request("r", [-2])


def test_an_unknown_prompt_raises_and_its_rows_stay_live() -> None:
    found = replacer([[10, 20, 30]])
    with pytest.raises(KeyError):
        found.register_request("stranger", [10, 20])
    found.register_request("known", [10, 20, 30])
    context = found.build_context(["stranger", "known"], [1, 1, 0], False, "cpu")
    assert slots(context) == [None, 1, None] and context.mask.tolist() == [False, True, False]
    assert found.receipt() == {"replaced": 1, "missed": 0, "live": 1, "padding": 1}


def test_prefill_ends_at_the_first_repeated_position() -> None:
    found = replacer([[1, 2, 3, 4]])
    found.register_request("r", [1, 2, 3, 4])
    context = found.build_context(["r"], [0, 1, 2, 3, 0, 0, 0, 0], True, "cpu")
    assert torch.equal(context[ROUTER][:4], rows(0, 4)) and not context[ROUTER][4:].any()
    assert context.mask.tolist() == [True] * 4 + [False] * 4
    # A chunk in the middle: the padding's position 0 stands for itself once, as the document's rule has it.
    assert slots(found.build_context(["r"], torch.tensor([2, 3, 3, 3]), True, "cpu")) == [2, 3, None, None]
    with pytest.raises(BadInput, match="prefill of 2 requests"):
        found.build_context(["r", "s"], [0, 1], True, "cpu")


TWO = [[7] * 12, [8] * 12]


@pytest.mark.parametrize(
    ("positions", "requests", "tokens_per_req", "expected"),
    [
        ([5, 3, 0, 0], 2, 1, [5, 103, None, None]),
        ([8, 9, 10, 11], 1, 4, [8, 9, 10, 11]),
        ([8, 9, 10, 11, 5, 6, 7, 8], 2, 4, [8, 9, 10, 11, 105, 106, 107, 108]),
        ([8, 9, 10, 11, 0, 0, 0, 0], 1, 4, [8, 9, 10, 11, None, None, None, None]),
    ],
    ids=["standard decode", "speculative, one request", "speculative, two requests", "speculative, padded"],
)
def test_decode_slots_belong_to_requests_as_in_the_examples(
    positions: list[int], requests: int, tokens_per_req: int, expected: list[float | None]
) -> None:
    found = replacer(TWO)
    ids = [f"r{number}" for number in range(requests)]
    for number, req_id in enumerate(ids):
        found.register_request(req_id, TWO[number])
    context = found.build_context(ids, positions, False, "cpu", tokens_per_req)
    assert slots(context) == expected
    assert context.mask.tolist() == [value is not None for value in expected]


def test_slot_req_settles_any_batch() -> None:
    """Two prefills, a decode and padding in one forward, in no order."""
    found = replacer(TWO)
    for number in (0, 1):
        found.register_request(f"r{number}", TWO[number])
    context = found.build_context(
        ["r1", "r0", "r1"], [0, 1, 4, 5, 9, 0, 99], True, "cpu", slot_req=[0, 0, 1, 1, 2, -1, 0]
    )
    assert slots(context) == [100, 101, 4, 5, 109, None, None]
    assert found.receipt() == {"replaced": 5, "missed": 1, "live": 0, "padding": 1}
    with pytest.raises(BadInput, match="2 owners for 3 slots"):
        found.build_context(["r1"], [0, 1, 2], True, "cpu", slot_req=[0, 0])


def test_drafts_of_other_tokens_are_told_apart(tmp_path: Path) -> None:
    """Positions and tokens of the reference, as captures note them; what is not known differs from nothing."""
    with CaptureWriter(tmp_path / "c", arm="hf") as writer:
        writer.request("0", [5, 6])
        writer.add({ROUTER: rows(0, 4)}, requests=["0"] * 4, positions=range(4), tokens=[5, 6, 7, 8])
    found = TensorReplacer.from_captures(Captures.open(tmp_path / "c"))
    found.register_request("r", [5, 6])
    position, owner = torch.tensor([1, 2, 3, 4, 2, 3]), torch.tensor([0, 0, 0, 0, 1, -1])
    differs = found.differs(["r", "unknown"], position, owner, torch.tensor([6, 7, 9, 1, 1, 1]))
    assert differs.tolist() == [False, False, True, False, False, False]
    plain = replacer(TWO)
    plain.register_request("r", TWO[0])
    assert not plain.differs(["r"], position, owner.clamp(max=0), torch.zeros(6)).any()


def test_warmup_has_the_shapes_and_no_reference() -> None:
    context = replacer(TWO).warmup_context(num_tokens=256, device=torch.device("cpu"))
    assert context[ROUTER].shape == (256, 2) and not context[ROUTER].any() and not context.mask.any()


def test_a_context_that_somebody_holds_is_not_overwritten() -> None:
    found = replacer(TWO)
    found.register_request("r", TWO[0])
    first = found.build_context(["r"], [3, 0], False, "cpu")
    view = found.build_context(["r"], [4, 0], False, "cpu")[ROUTER][:1]
    for position in (5, 6, 7):
        found.build_context(["r"], [position, 0], False, "cpu")
    assert slots(first) == [3, None] and float(view[0, 0]) == 4


def test_each_replica_has_a_context_of_its_own() -> None:
    captures = [{ROUTER: steps(number, 12)} for number in (0, 1)]
    replicas = [TensorReplacer(captures, prompt_token_ids=TWO) for _ in range(2)]
    for number, replica in enumerate(replicas):
        replica.register_request("r", TWO[number])
    contexts = [replica.build_context(["r"], [2 + n, 0], False, "cpu") for n, replica in enumerate(replicas)]
    assert [slots(context) for context in contexts] == [[2, None], [103, None]]


def test_the_active_context() -> None:
    assert get_replacement_tensor(ROUTER) is None, "not configured"
    live = torch.full((4, 2), 7.0)
    assert get_replacement_tensor(ROUTER, live) is live
    found = replacer([[1, 2, 3]])
    found.register_request("r", [1, 2, 3])
    context = found.build_context(["r"], [2, 0, 0, 0], False, "cpu")
    set_active_context(context)
    assert get_replacement_tensor(ROUTER) is context[ROUTER]
    assert get_replacement_tensor("model.layers.1.mlp.router") is None
    merged = get_replacement_tensor(ROUTER, live)
    assert merged.tolist() == [[2, -3], [7, 7], [7, 7], [7, 7]], "rows without a reference stay live"
    assert torch.equal(tap(ROUTER, live), merged), "tap is the same seam"
    assert get_replacement_tensor(ROUTER, live.bfloat16()).dtype == torch.bfloat16
    nan = torch.full((4, 2), float("nan"))
    context[ROUTER][1:] = float("nan")
    assert not get_replacement_tensor(ROUTER, live).isnan().any(), "a row that is not chosen does not leak"
    assert get_replacement_tensor(ROUTER, nan)[0].tolist() == [2, -3]
    set_active_context(None)
    assert get_replacement_tensor(ROUTER) is None
    set_active_context({ROUTER: torch.ones(4, 2)})  # a plain dictionary replaces every row
    assert get_replacement_tensor(ROUTER, live).tolist() == [[1, 1]] * 4


def test_prefixes_modules_that_differ_and_missing_positions(tmp_path: Path) -> None:
    other = "model.layers.1.mlp.router"
    with CaptureWriter(tmp_path, arm="hf_fp32") as writer:
        for name, prompt in (("a", [1, 2, 3]), ("b", [4, 5])):
            writer.request(name, prompt)
        writer.add({ROUTER: rows(0, 4)[1:]}, requests=["a"] * 3, positions=[1, 2, 3], tokens=[2, 3, 9])
        writer.add({ROUTER: rows(1, 2), other: rows(1, 2)}, requests=["b"] * 2, positions=[0, 1], tokens=[4, 5])
    found = TensorReplacer.from_captures(Captures.open(tmp_path), convert=lambda _, value: value.double())
    assert found.register_request("x", [1, 2, 3, 9]) == 0 and found.register_request("y", [4, 5]) == 1
    context = found.build_context(["x", "y"], [0, 3, 4, 0, 1, 2], True, slot_req=[0, 0, 0, 1, 1, 1])
    assert slots(context) == [None, 3, None, 100, 101, None] and context[ROUTER].dtype == torch.float64
    assert context.masks[ROUTER].tolist() == [False, True, False, True, True, False]
    assert context.masks[other].tolist() == [False, False, False, True, True, False]
    assert context.mask.tolist() == [False, False, False, True, True, False], "every module has one"


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(BadInput, match="2 captures for 1 prompts"):
        TensorReplacer([{}, {}], prompt_token_ids=[[1]])
    with pytest.raises(BadInput, match="different shapes"):
        TensorReplacer([{ROUTER: torch.ones(1, 1, 2)}, {ROUTER: torch.ones(1, 1, 3)}], prompt_token_ids=[[1], [2]])
    with pytest.warns(UserWarning, match="step 0 has 2 rows and the prompt 3 tokens"):
        TensorReplacer([{ROUTER: torch.ones(1, 2, 2)}], prompt_token_ids=[[1, 2, 3]])


def test_the_gather_is_vectorised() -> None:
    """8,192 slots of 48 modules of width 128: at most 1.7 times one gather of the same rows."""
    modules = [f"model.layers.{index}.mlp.router" for index in range(48)]
    length, count = 1024, 8
    prompts = [[number] * length for number in range(count)]
    captures = [{name: torch.randn(1, length, 128) for name in modules} for _ in prompts]
    found = TensorReplacer(captures, prompt_token_ids=prompts)
    ids = [f"r{number}" for number in range(count)]
    for req_id, prompt in zip(ids, prompts, strict=True):
        found.register_request(req_id, prompt)
    positions = torch.arange(length).repeat(count)
    owners = torch.arange(count).repeat_interleave(length)
    index = owners * length + positions
    flat = [torch.cat([capture[name][0] for capture in captures]) for name in modules]
    out = [torch.empty(len(index), 128) for _ in modules]
    ours, gathers = [], []
    for attempt in range(12):
        start = time.perf_counter()
        for source, target in zip(flat, out, strict=True):
            torch.index_select(source, 0, index, out=target)
        middle = time.perf_counter()
        context = found.build_context(ids, positions, True, "cpu", slot_req=owners)
        end = time.perf_counter()
        assert torch.equal(context[modules[7]], out[7])
        del context
        if attempt >= 2:
            gathers.append(middle - start)
            ours.append(end - middle)
    ratio = statistics.median(ours) / statistics.median(gathers)
    print(f"build_context {statistics.median(ours) * 1e3:.1f} ms, {ratio:.2f} times one gather")
    assert ratio <= 1.7
