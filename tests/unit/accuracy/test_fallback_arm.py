"""What a model without a package has cached, paired with the reference's cache; and which modules it must have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pilotage.accuracy.arms.base import LayerKV
from pilotage.accuracy.arms.fallback import paired, require_named_modules
from pilotage.core.errors import Unsupported


def layer(name: str, heads: int, width: int, value: float) -> LayerKV:
    rows = torch.full((3, heads, width), value)
    return LayerKV(layer=name, first=1, keys=rows, values=rows)


def test_layers_are_paired_in_the_order_of_the_model_and_without_their_padding() -> None:
    ours = [[layer(f"transformer.h.{n}.attn", 2, 8, float(n)) for n in (10, 2, 0)]]
    theirs = [[layer(f"layers.{n}.self_attn", 2, width, 0.0) for n, width in enumerate((8, 6, 8))]]
    (found,) = paired(ours, theirs)
    assert [one.layer for one in found] == ["layers.0.self_attn", "layers.1.self_attn", "layers.2.self_attn"]
    assert [float(one.keys[0, 0, 0]) for one in found] == [0.0, 2.0, 10.0]
    assert found[1].keys.shape == found[1].values.shape == (3, 2, 6) and found[1].first == 1


@pytest.mark.parametrize(
    ("count", "heads", "said"), [(2, 2, "attend 2 times, and Hugging Face caches 1"), (1, 3, r"\[\[3, 8\].*\[2, 8\]")]
)
def test_what_cannot_be_paired_is_refused(count: int, heads: int, said: str) -> None:
    ours = [[layer(f"model.layers.{n}.self_attn", heads, 8, 0.0) for n in range(count)]]
    with pytest.raises(Unsupported, match=said):
        paired(ours, [[layer("layers.0.self_attn", 2, 8, 0.0)]])


def test_a_decoder_with_other_names_is_refused_by_what_it_lacks() -> None:
    def decoder(**parts: Any) -> Any:
        module = torch.nn.Module()
        for name, part in parts.items():
            module.add_module(name, part)
        return SimpleNamespace(get_decoder=lambda: module)

    block = torch.nn.Module()
    block.add_module("self_attn", torch.nn.Identity())
    block.add_module("mlp", torch.nn.Identity())
    require_named_modules(decoder(layers=torch.nn.ModuleList([block]), norm=torch.nn.Identity()))
    with pytest.raises(Unsupported, match="no layers, norm"):
        require_named_modules(decoder(h=torch.nn.ModuleList([block]), ln_f=torch.nn.Identity()))
    other = torch.nn.Module()
    other.add_module("self_attn", torch.nn.Identity())
    with pytest.raises(Unsupported, match=r"no layers\.1\.mlp"):
        require_named_modules(decoder(layers=torch.nn.ModuleList([block, other]), norm=torch.nn.Identity()))
