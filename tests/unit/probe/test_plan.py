"""Sites of a model, and plans for them: found without computing, absent where nothing is planned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pilotage.core.errors import ConfigError
from pilotage.core.tap import TapPlan, active, tap
from pilotage.models.common.paging import PagedSession, build_metadata
from pilotage.probe import SiteInfo, Taps, sites_of
from pilotage.serving import pieces

LAYER = [
    ".input",
    ".input_layernorm.input",
    ".input_layernorm",
    ".self_attn.input",
    ".self_attn.q",
    ".self_attn.k",
    ".self_attn.v",
    ".self_attn.q_rope",
    ".self_attn.k_rope",
    ".self_attn.heads",
    ".self_attn.o_proj.input",
    ".self_attn.o_proj",
    ".self_attn",
    ".mid",
    ".post_attention_layernorm.input",
    ".post_attention_layernorm",
    ".mlp.input",
    ".mlp",
    "",
]
ENDS = ["model.norm.input", "model.norm", "lm_head.input", "lm_head"]


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Any:
    from pilotage.accuracy.arms.module import OurModules

    return OurModules(tiny("llama3", num_hidden_layers=3), torch.float32, 32).model


def test_every_site_in_the_order_of_computation(model: Any) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pages = model.model.layers[0].self_attn.kv_cache
    expected = ["model.embed_tokens", *(f"model.layers.{i}{part}" for i in range(3) for part in LAYER), *ENDS]
    assert sites_of(model) == expected
    assert model.model.layers[0].self_attn.kv_cache is pages, "the model keeps its pages"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_without_weights_or_pages_has_the_same_sites(model: Any) -> None:
    with torch.device("meta"):
        bare = type(model)(model.config, model.backend)
    # Not packed, so the projections are called as modules.
    extra = {name for name in sites_of(bare) if ".mlp." in name and "_proj" in name}
    assert [name for name in sites_of(bare) if name not in extra] == sites_of(model)
    assert not any("kv_cache" in module.__dict__ for module in bare.modules())


def test_rows_are_those_of_the_modules(model: Any) -> None:
    taps = Taps(model, capture=["model.layers.1.**", "model.layers.[0,1]", "lm_head"], num_tokens=16, num_sampled=8)
    assert taps.capture[0] == "model.layers.0" and taps.capture[-1] == "lm_head" and len(taps.capture) == 2 + 18 + 1
    seen: dict[str, torch.Tensor] = {}

    def listen(site: str, x: torch.Tensor) -> torch.Tensor:
        seen[site] = x.clone()
        return x

    tokens = [3, 1, 4, 1, 5]
    session = PagedSession(model=model, num_requests=1, max_tokens=16)
    with taps.hooks(), active(TapPlan(listener=listen)):
        plain = session.step({0: tokens})[0]
    session = PagedSession(model=model, num_requests=1, max_tokens=16)
    with taps.active(5, 5):
        again = session.step({0: tokens})[0]
    assert torch.equal(plain, again)
    assert torch.equal(taps.rows("lm_head", 5, 5), plain)
    for name in taps.capture:
        assert torch.equal(taps.rows(name, 5, 5), seen[name]), name
    assert torch.equal(taps.rows("model.layers.1.input", 5, 5), taps.rows("model.layers.0", 5, 5))
    assert not any(buffer[5:].any() for buffer in taps.buffers.values())


def test_masked_rows_are_replaced_and_the_live_value_is_recorded(model: Any) -> None:
    name = "model.layers.1"
    taps = Taps(model, capture=[name, "model.layers.2.input"], replace=[name], num_tokens=8, num_sampled=8)
    taps.references[name].fill_(float("nan"))
    session = PagedSession(model=model, num_requests=1, max_tokens=16)
    plain = session.step({0: [7, 8, 9]})[0]

    def run() -> torch.Tensor:
        session = PagedSession(model=model, num_requests=1, max_tokens=16)
        with taps.active(3, 3):
            return session.step({0: [7, 8, 9]})[0]

    assert torch.equal(run(), plain), "all masks are false, and NaN does not leak"
    taps.references[name].fill_(0.5)
    taps.masks[name][1] = True
    changed = run()
    assert torch.equal(changed[0], plain[0]) and not torch.equal(changed[1], plain[1])
    assert (taps.rows("model.layers.2.input", 3, 3)[1] == 0.5).all()
    assert not (taps.rows(name, 3, 3)[1] == 0.5).any()
    taps.leave_live()
    assert torch.equal(run(), plain)


def graph_of(model: Any, taps: Taps | None) -> torch.fx.GraphModule:
    found: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.append(graph)
        return graph.forward

    session = PagedSession(model=model, num_requests=1, max_tokens=16)
    context = build_metadata(
        session.layer_names,
        num_computed=[0],
        num_new=[8],
        block_table=session.block_table,
        block_size=session.block_size,
        num_tokens=8,
    )
    torch._dynamo.reset()
    with torch.no_grad():
        call = torch.compile(type(model).forward, fullgraph=True, dynamic=False, backend=backend)
        arguments = (torch.zeros(8, dtype=torch.int64), context["positions"], context, torch.arange(8))
        if taps is None:
            call(model, *arguments)
        else:
            with taps.active(8, 8):
                call(model, *arguments)
    torch._dynamo.reset()
    return found[0]


def structures(graph: torch.fx.GraphModule) -> list[str]:
    return [pieces.structure(nodes, *pieces._boundary(nodes)) for nodes in pieces.cut(graph.graph)]


def test_taps_are_absent_from_a_graph_without_a_plan_and_shared_by_equal_layers(model: Any) -> None:
    plain = graph_of(model, None)
    assert not [node for node in plain.graph.nodes if node.target == "copy_"]
    taps = Taps(
        model,
        capture=["model.layers.*", "**.q_rope", "**.mid", "**.mlp.input"],
        replace=["model.layers.*", "**.heads"],
        num_tokens=8,
        num_sampled=8,
    )
    tapped = graph_of(model, taps)
    assert len([node for node in tapped.graph.nodes if node.target == "copy_"]) == len(taps.capture)
    before, after = structures(plain), structures(tapped)
    assert len(before) == len(after) and len(set(before)) == len(set(after)) < len(after)


def test_patterns_that_match_nothing_are_named(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"tensor_capture: 'model\.layers\.7' .*nearest"):
        Taps(model, capture=["model.layers.7"], num_tokens=8, num_sampled=8)
    with pytest.raises(ConfigError, match="no site"):
        Taps(model, replace=["model.layers.0.mlp.router"], num_tokens=8, num_sampled=8)


@pytest.mark.parametrize(("shards", "world"), [(2, 2), (2, 4), (4, 4)])
def test_shares_of_ranks_make_whole_rows(shards: int, world: int) -> None:
    info = SiteInfo(name="s", shape=(8 // shards, 3), shard_dim=0, num_shards=shards, full_shape=(8, 3))
    rows = torch.randn(5, 8, 3)
    parts = [info.share(rows, rank, world) for rank in range(world)]
    assert all(part.shape == (5, 8 // shards, 3) for part in parts)
    assert torch.equal(info.join(parts), rows)


def test_a_tap_without_a_plan_is_the_value_itself() -> None:
    x = torch.ones(2)
    assert tap("anywhere", x) is x
