"""Both integration patterns of the tensor replacement document, on a real mixture of experts, compiled.

gpt-oss is the document's model: its router keeps the largest logits and takes the softmax among them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pilotage.functional as NF
from pilotage.accuracy.arms.module import OurModules
from pilotage.accuracy.tensor_replacement import TensorReplacer, get_replacement_tensor, set_active_context
from pilotage.models.common.paging import PagedSession
from pilotage.models.gpt_oss import model as gpt_oss
from pilotage.probe import sites_of

PROMPTS = [[11, 12, 13, 14, 15, 16, 17], [21, 22, 23, 24, 25]]
STREAMS = [[*PROMPTS[0], 31, 32, 33], [*PROMPTS[1], 41, 42, 43]]
BUCKET = 16


def pattern_1(self: Any, x: Tensor) -> Tensor:
    """What is downstream wants affinities: the replaced logits go through the rest of the routing pipeline."""
    replacement_logits = get_replacement_tensor(f"{self.name}.router")
    if replacement_logits is not None:
        top_values, top_indices = torch.topk(replacement_logits.to(torch.float32), self.top_k, dim=-1)
        top_values = torch.nn.functional.softmax(top_values, dim=-1)
        affinities = torch.zeros(
            replacement_logits.shape[0], self.router.weight.shape[0], device=x.device, dtype=torch.float32
        ).scatter_(1, top_indices, top_values)
    else:
        affinities = NF.expert_affinities(self.router(x), top_k=self.top_k, rule="topk_softmax")
    return self.experts(x, affinities)


def pattern_2(self: Any, x: Tensor) -> Tensor:
    """What is downstream takes logits: the replacement is an optional argument."""

    def run_moe_block(hidden_states: Tensor, router_logits_override: Tensor | None = None) -> Tensor:
        logits = self.router(hidden_states) if router_logits_override is None else router_logits_override
        return self.experts(hidden_states, NF.expert_affinities(logits, top_k=self.top_k, rule="topk_softmax"))

    return run_moe_block(x, router_logits_override=get_replacement_tensor(f"{self.name}.router"))


def with_live(self: Any, x: Tensor) -> Tensor:
    """Beyond the document: with the live value, rows without a reference keep it."""
    logits = get_replacement_tensor(f"{self.name}.router", self.router(x))
    return self.experts(x, NF.expert_affinities(logits, top_k=self.top_k, rule="topk_softmax"))


def as_shipped(self: Any, x: Tensor) -> Tensor:
    return SHIPPED(self, x)


SHIPPED = gpt_oss.GptOssMLP.forward


@pytest.mark.parametrize("forward", [pattern_1, pattern_2, with_live, as_shipped])
def test_router_logits_are_replaced_without_recompiling(
    forward: Callable[..., Tensor], tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setattr(gpt_oss.GptOssMLP, "forward", forward)
    model = OurModules(tiny("gpt_oss"), torch.float32, 32).model
    names = [name for name in sites_of(model) if name.endswith(".router") and name.count(".") == 4]
    layers = len(model.model.layers)
    assert len(names) == layers
    experts = model.config.num_experts
    generator = torch.Generator().manual_seed(1)
    routed = [
        {name: torch.randn(len(stream), experts, generator=generator) * 4 for name in names} for stream in STREAMS
    ]
    captures = [
        {
            name: [value[None, : len(prompt)], *(value[None, : end + 1] for end in range(len(prompt), len(value)))]
            for name, value in capture.items()
        }
        for prompt, capture in zip(PROMPTS, routed, strict=True)
    ]
    replacer = TensorReplacer(captures, prompt_token_ids=PROMPTS)
    for number, prompt in enumerate(PROMPTS):
        replacer.register_request(f"r{number}", prompt)

    def run(call: Any, replaced: bool) -> dict[tuple[int, int], Tensor]:
        """Prefill both prompts in one packed step, then decode three tokens of each."""
        session = PagedSession(model=model, num_requests=2, max_tokens=32, call=call)
        found: dict[tuple[int, int], Tensor] = {}
        done = [0, 0]
        for step in range(4):
            new = {
                n: STREAMS[n][: len(PROMPTS[n])] if step == 0 else [STREAMS[n][len(PROMPTS[n]) + step - 1]]
                for n in (0, 1)
            }
            positions = [done[n] + i for n, ids in new.items() for i in range(len(ids))]
            owner = [n for n, ids in new.items() for _ in ids]
            bucket = BUCKET if step == 0 else 4
            pad = bucket - len(positions)
            if replaced:
                set_active_context(
                    replacer.build_context(
                        ["r0", "r1"], positions + [0] * pad, step == 0, "cpu", slot_req=owner + [-1] * pad
                    )
                )
            try:
                logits = session.step(new, bucket=bucket)
            finally:
                set_active_context(None)
            for n, rows in logits.items():
                for row in rows:
                    found[n, done[n]] = row
                    done[n] += 1
        return found

    def expected() -> dict[tuple[int, int], Tensor]:
        """The same logits by a router that is patched to say them, without any replacement."""
        found: dict[tuple[int, int], Tensor] = {}
        for number, stream in enumerate(STREAMS):
            with monkeypatch.context() as patch:
                for index, layer in enumerate(model.model.layers):
                    value = routed[number][f"model.layers.{index}.mlp.router"]
                    patch.setattr(layer.mlp.router, "forward", lambda x, value=value: value)
                rows = PagedSession(model=model, num_requests=1, max_tokens=32).step({0: stream})[0]
            found.update({(number, position): row for position, row in enumerate(rows)})
        return found

    truth = expected()
    live = run(None, replaced=False)
    eager = run(None, replaced=True)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    before = counters["stats"]["unique_graphs"]
    first = run(compiled, replaced=True)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == before + 2, "one for each bucket, and none for the later steps"
    second = run(compiled, replaced=True)
    assert counters["stats"]["unique_graphs"] == graphs, "compiled again"
    torch._dynamo.reset()
    assert truth.keys() == eager.keys() == live.keys()
    for key, want in truth.items():
        assert (eager[key] - want).abs().max() < 1e-4, key
        assert (first[key] - want).abs().max() < 1e-4 and torch.equal(first[key], second[key]), key
        assert (live[key] - want).abs().max() > 1e-3, key
    assert replacer.receipt()["replaced"] == 3 * sum(len(stream) for stream in STREAMS)
