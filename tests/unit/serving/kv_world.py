"""A small world of requests and pages, run through the real step inputs and operators beside a contiguous oracle.

Every slot that nobody may read holds NaN: pages that are free, slots past a request's end, the page that padding would
be written to. A read of one shows in the output, a write to one shows in the slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import pilotage.functional as NF
from pilotage.models.common.context import PagedContext
from pilotage.serving.batch import LayerGroup, Scheduled, StepInputs, split

HEADS, KV_HEADS, SIZE, VOCAB = 4, 2, 8, 50
BLOCK, MAX_LEN, ROWS = 4, 48, 5
PAGES = 96
TOKENS = 24  # of a prefill graph
DRAFTS = 3  # most tokens of a request in a decode graph
WINDOW = 6
SCALE = 0.4


@dataclass
class Layer:
    """What the context asks of an attention module, and how its layer attends."""

    layer_name: str
    kv_cache: tuple[Tensor, Tensor]
    window: int | None


@dataclass
class Living:
    """A request: its tokens, how many are computed, its pages for each group, and whether it was just (re)started."""

    tokens: list[int]
    pages: list[list[int]]
    computed: int = 0
    fresh: bool = True
    drafts: int = 0


@dataclass
class World:
    """Requests on pages of one pool; two layers with block tables of their own, one of them windowed."""

    seed: int
    block: int = BLOCK
    running: list[Living] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.rng = np.random.default_rng(self.seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        self.embed = {name: draw(VOCAB, h, SIZE) for name, h in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))}
        self.place = {name: draw(MAX_LEN, h, SIZE) for name, h in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))}
        shape = (PAGES, KV_HEADS, self.block, SIZE)
        self.layers = [
            Layer(name, (torch.full(shape, torch.nan), torch.full(shape, torch.nan)), window)
            for name, window in (("full", None), ("windowed", WINDOW))
        ]
        columns = -(-MAX_LEN // self.block)
        groups = [LayerGroup(layer_names=(x.layer_name,), block_size=self.block, max_blocks_per_seq=columns)
                  for x in self.layers]  # fmt: skip
        self.inputs = {
            "prefill": StepInputs("prefill", TOKENS, num_rows=3, groups=groups),
            "decode": StepInputs("decode", ROWS * DRAFTS, num_rows=ROWS, groups=groups, decode_token_threshold=DRAFTS),
        }
        # Page 0 belongs to nobody: vLLM's null block. Handed out in random order.
        self.free = [int(page) for page in self.rng.permutation(np.arange(1, PAGES))]
        self.users: dict[int, int] = {}

    # What can happen to requests.

    def admit(self, length: int, share: int | None) -> None:
        """Start a request; with `share`, on the whole pages that another request has computed."""
        if len(self.running) == ROWS:
            return
        tokens = self.rng.integers(1, VOCAB, max(1, length)).tolist()
        request = Living(tokens=tokens, pages=[[], []])
        if share is not None and self.running:
            other = self.running[share % len(self.running)]
            whole = min(other.computed - other.drafts, len(tokens) - 1) // self.block
            # A windowed layer may have given pages away: share only what both layers still hold.
            while whole and any(page == 0 for pages in other.pages for page in pages[:whole]):
                whole -= 1
            request.tokens[: whole * self.block] = other.tokens[: whole * self.block]
            request.pages = [pages[:whole] for pages in other.pages]
            for page in (page for pages in request.pages for page in pages):
                self.users[page] += 1
            request.computed = whole * self.block
        self.running.append(request)

    def step(self, counts: list[int]) -> None:
        """Compute tokens of every running request (0: it waits), in one or several forwards, and check everything."""
        scheduled = []
        for row, (request, count) in enumerate(zip(self.running, counts, strict=False)):
            if len(request.tokens) == request.computed and len(request.tokens) < MAX_LEN:
                request.tokens.append(int(self.rng.integers(1, VOCAB)))  # what was sampled
            count = min(count, len(request.tokens) - request.computed, TOKENS)
            if count and self._grow(request, request.computed + count):
                scheduled.append(Scheduled(row=row, num_tokens=count, fresh=request.fresh))
        if not scheduled:
            return
        self.rng.shuffle(scheduled)  # type: ignore[arg-type]
        self._forward(scheduled)

    def draft(self, count: int, rejected: int) -> None:
        """Verify `count` drafted tokens a request in one step, then throw the last `rejected` of them away."""
        rows = [r for r in self.running if not r.fresh and r.computed == len(r.tokens) and r.computed + count < MAX_LEN]
        for request in rows:
            request.tokens += self.rng.integers(1, VOCAB, count).tolist()
        # Requests with drafts only, so that every one is within the decode threshold.
        self.step([count if request in rows else 0 for request in self.running])
        for request in rows:
            gone = min(rejected, count, request.computed - 1)
            # Their keys stay in the cache until other tokens are written over them.
            request.computed -= gone
            del request.tokens[request.computed :]
            request.drafts = gone

    def preempt(self, which: int) -> None:
        """Take a request's pages away; it starts again, with what it has said as a part of its prompt."""
        if self.running:
            request = self.running[which % len(self.running)]
            self._release(request)
            request.computed, request.fresh, request.drafts = 0, True, 0

    def finish(self, which: int) -> None:
        if self.running:
            self._release(self.running.pop(which % len(self.running)))

    def slide(self) -> None:
        """Free the pages that the windowed layer can no longer see; its block table keeps the stale numbers."""
        for request in self.running:
            pages = request.pages[1]
            for index in range(max(0, request.computed - WINDOW + 1) // self.block):
                if pages[index]:
                    self._drop(pages[index])
                    # What a runner's table still holds is a page that now is somebody else's, or the null block.
                    pages[index] = 0

    # Pages.

    def _grow(self, request: Living, length: int) -> bool:
        needed = -(-length // self.block)
        if sum(needed - len(pages) for pages in request.pages) > len(self.free):
            return False
        for pages in request.pages:
            while len(pages) < needed:
                page = self.free.pop()
                self.users[page] = 1
                pages.append(page)
        return True

    def _release(self, request: Living) -> None:
        for pages in request.pages:
            for page in pages:
                if page:
                    self._drop(page)
            pages.clear()

    def _drop(self, page: int) -> None:
        self.users[page] -= 1
        if not self.users[page]:
            self.free.insert(int(self.rng.integers(len(self.free) + 1)), page)
            for layer in self.layers:
                for cache in layer.kv_cache:
                    cache[page] = torch.nan

    # A step, and what must hold after it.

    def _forward(self, scheduled: list[Scheduled]) -> None:
        token_ids = np.zeros((ROWS, MAX_LEN), dtype=np.int32)
        num_computed = np.zeros(ROWS, dtype=np.int32)
        columns = -(-MAX_LEN // self.block)
        tables = [np.zeros((ROWS, columns), dtype=np.int32) for _ in self.layers]
        for row, request in enumerate(self.running):
            token_ids[row, : len(request.tokens)] = request.tokens
            num_computed[row] = request.computed
            for group, table in enumerate(tables):
                # Past its pages a row holds what other requests left there.
                table[row] = self.rng.integers(0, PAGES, columns)
                table[row, : len(request.pages[group])] = request.pages[group]
        # A draft step may bring several tokens of a request that is no prefill.
        for forward in split(scheduled, max_tokens=TOKENS, max_prefill_seqs=3, decode_token_threshold=DRAFTS):
            inputs = self.inputs[forward.kind]
            inputs.fill(forward, token_ids=token_ids, num_computed=num_computed, block_tables=tables)
            before = [[cache.clone() for cache in layer.kv_cache] for layer in self.layers]
            outputs = self.attend(inputs)
            for row, count in zip(forward.rows, forward.num_tokens, strict=True):
                self.running[row].computed += count
                self.running[row].fresh = False
                self.running[row].drafts = 0
            self._check_outputs(forward, outputs)
            self._check_pages(before, forward)
            picked = inputs.sampling_positions[: inputs.sampled].tolist()
            last = [end - 1 for end in np.cumsum(forward.num_tokens)]
            assert picked == (list(range(sum(forward.num_tokens))) if inputs.verifies else last)

    def attend(self, inputs: StepInputs) -> list[Tensor]:
        """Do what a model's attention layers do with a step's inputs."""
        tokens, at = inputs.input_ids, inputs.positions.long()
        q, k, v = (self.embed[name][tokens] + self.place[name][at] for name in "qkv")
        context = PagedContext(inputs.attn_metadata)
        return [context.attend(layer, q, k, v, scale=SCALE, window=layer.window) for layer in self.layers]

    def _check_outputs(self, forward: Any, outputs: list[Tensor]) -> None:
        for layer, output in zip(self.layers, outputs, strict=True):
            first = 0
            assert torch.isfinite(output).all(), f"{layer.layer_name}: padding or a canary reached the output"
            for row, count in zip(forward.rows, forward.num_tokens, strict=True):
                request = self.running[row]
                expected = self.oracle(request, request.computed - count, request.computed, layer.window)
                got = output[first : first + count]
                error = float((got - expected).abs().amax())
                assert error < 1e-5, f"{layer.layer_name}, row {row}: off by {error}"
                first += count

    def oracle(self, request: Living, start: int, end: int, window: int | None) -> Tensor:
        """Attend in a contiguous cache that is made anew from the request's tokens."""
        ids, at = torch.tensor(request.tokens[:end]), torch.arange(end)
        q, k, v = (self.embed[name][ids] + self.place[name][at] for name in "qkv")
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
        logits = torch.einsum("qnh,snh->nqs", q[start:], k) * SCALE
        visible = at[None, :] <= at[start:, None]
        if window is not None:
            visible &= at[None, :] > at[start:, None] - window
        weights = logits.masked_fill(~visible, float("-inf")).softmax(-1)
        return torch.einsum("nqs,snh->qnh", weights, v)

    def _check_pages(self, before: list[list[Tensor]], forward: Any) -> None:
        """Written: exactly the slots of the step's tokens, with their keys and values. Everything else is untouched."""
        for group, (layer, old) in enumerate(zip(self.layers, before, strict=True)):
            for name, cache, was in zip("kv", layer.kv_cache, old, strict=True):
                expected = was.clone()
                for row, count in zip(forward.rows, forward.num_tokens, strict=True):
                    request = self.running[row]
                    for position in range(request.computed - count, request.computed):
                        page, offset = request.pages[group][position // self.block], position % self.block
                        value = self.embed[name][request.tokens[position]] + self.place[name][position]
                        expected[page, :, offset] = value
                same = (cache == expected) | (cache.isnan() & expected.isnan())
                wrong = (~same).any(-1).nonzero()[:3].tolist()
                assert not wrong, (
                    f"{layer.layer_name}.{name}: slots (page, head, offset) {wrong} are not what they should be"
                )


def play(seed: int, moves: list[tuple[str, int, int]], implementation: str, *, block: int = BLOCK) -> World:
    """Play moves (what, and two numbers that choose) in a new world, on one implementation of the operators."""
    world = World(seed=seed, block=block)
    chosen = dict.fromkeys(("segmented_attention", "attention_decode", "write_kv"), implementation)
    if implementation == "sdpa":
        chosen["write_kv"] = "torch"
    with torch.no_grad(), NF.forced(chosen):
        for what, a, b in moves:
            if what == "admit":
                world.admit(1 + a % 30, b if b % 2 else None)
            elif what == "step":
                rng = np.random.default_rng(a)
                world.step([int(n) for n in rng.choice([0, 1, 1, 1, 2, 3, 4, 5, 7, 8, 24], size=ROWS)])
            elif what == "full":
                world.step([TOKENS] * ROWS)
            elif what == "draft":
                world.draft(1 + a % DRAFTS, b % (DRAFTS + 1))
            elif what == "preempt":
                world.preempt(a)
            elif what == "finish":
                world.finish(a)
            elif what == "slide":
                world.slide()
    return world
