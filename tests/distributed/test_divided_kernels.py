"""Kernels of tensors that are divided over two ranks: a rank runs its part where a rule says how, else torch does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

pytestmark = pytest.mark.distributed
RAN: list[tuple[int, ...]] = []


def projected(x: Tensor, weight: Tensor, bias: Tensor | None, factor: float) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias) * factor


def projected_numpy(x, weight, bias, factor):  # type: ignore[no-untyped-def]
    RAN.append((*x.shape, len(weight)))
    out = x @ weight.T if bias is None else x @ weight.T + bias
    return (out * np.float32(factor)).astype(x.dtype)


def write_rows(cache: Tensor, rows: Tensor) -> None:
    cache.add_(rows)


def write_rows_numpy(cache, rows):  # type: ignore[no-untyped-def]
    RAN.append(cache.shape)
    cache += rows


def outcome(rank: int) -> dict[str, Any]:
    os.environ["NKI_SIMULATOR"] = "1"
    import pilotage.functional as NF
    from pilotage.kernels import Sharding, launch_numpy, wrap_kernel

    rule = Sharding(tensors={"x": "T D", "weight": "F D", "bias": "F"}, results=("T F",), split=("T", "F"), sums=("D",))
    divided = wrap_kernel(projected_numpy, projected, name="divided", sharding=rule, launch=launch_numpy)
    undivided = wrap_kernel(projected_numpy, projected, name="undivided", launch=launch_numpy)
    heads = Sharding(tensors={"cache": "P K", "rows": "P K"}, results=(), split=("K",))
    writing = wrap_kernel(
        write_rows_numpy, write_rows, mutates_args=("cache",), sharding=heads, name="writing", launch=launch_numpy
    )
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, wide = (torch.randn(shape, generator=generator) for shape in ((6, 8), (4, 8), (4,), (6, 4)))

    def place(value: Tensor, placement: Any, gradient: bool = False) -> DTensor:
        out = distribute_tensor(value, mesh, [placement])
        return out.requires_grad_(gradient)

    found: dict[str, Any] = {"truth": projected(x, weight, bias, 0.5), "no bias": projected(x, weight, None, 0.5)}
    for name, (at_x, at_weight, at_bias) in {
        "T": (Shard(0), Replicate(), Replicate()),
        "F": (Replicate(), Shard(0), Shard(0)),
        "D": (Shard(1), Shard(1), None),
        "D with bias": (Shard(1), Shard(1), Replicate()),
    }.items():
        RAN.clear()
        out = divided(
            place(x, at_x), place(weight, at_weight), None if at_bias is None else place(bias, at_bias), factor=0.5
        )
        found[name] = {"ran": list(RAN), "placed": out.placements, "whole": out.full_tensor()}

    def loss(kernel: Any, *leaves: Tensor) -> None:
        out = kernel(*leaves, 0.5)
        (out * (place(wide, Replicate()) if isinstance(out, DTensor) else wide)).sum().backward()

    leaves = [place(x, Shard(0), True), place(weight, Replicate(), True), place(bias, Replicate(), True)]
    loss(divided, *leaves)
    plain = [value.clone().requires_grad_() for value in (x, weight, bias)]
    loss(projected, *plain)
    found["gradients"] = [(one.grad.full_tensor(), other.grad) for one, other in zip(leaves, plain, strict=True)]

    RAN.clear()
    out = torch.compile(lambda x, w: divided(x, w, None, 0.5) + 1, backend="aot_eager", fullgraph=True)(
        place(x, Shard(0)), place(weight, Replicate())
    )
    found["compiled"] = {"ran": list(RAN), "placed": out.placements, "whole": out.full_tensor() - 1}
    RAN.clear()
    out = undivided(place(x, Shard(0)), place(weight, Replicate()), None, factor=0.5)
    found["without a rule"] = {"ran": list(RAN), "placed": out.placements, "whole": out.full_tensor()}

    cache = place(torch.zeros(6, 4), Shard(1))
    RAN.clear()
    writing(cache, place(wide, Replicate()))
    found["in place"] = {"ran": list(RAN), "whole": cache.full_tensor(), "truth": wide}
    try:
        writing(place(torch.zeros(6, 4), Shard(0)), place(wide, Replicate()))
    except RuntimeError as error:  # torch wraps ours
        found["refused"] = str(error)

    NF.reset_receipt()
    gain = torch.rand(8, generator=generator)
    normed = NF.rms_norm(place(x, Shard(0)), place(gain, Replicate()), eps=1e-6)
    out = NF.o_proj(place(x, Shard(1)), place(weight, Shard(1)))
    found["ours"] = {
        "norm": (normed.placements, normed.full_tensor(), NF.rms_norm(x, gain, eps=1e-6)),
        "o_proj": (out.placements, out.full_tensor(), torch.nn.functional.linear(x, weight)),
    }
    heads_first = torch.randn(6, 2, 8, generator=generator)
    whole = {name: place(torch.zeros(6, dtype=torch.int32), Replicate()) for name in ("token_to_req", "positions")}
    starts = place(torch.tensor([0, 6], dtype=torch.int32), Replicate())
    q = place(heads_first, Replicate())
    explained = NF.explain("flash_attention", q, q, q, **whole, query_start_loc=starts, scale=1.0)
    found["explained"] = (explained["implementation"], explained["refused"]["nki"], explained["refused"]["sdpa"])
    found["receipt"] = {
        name: [row["implementation"] for row in rows if row["selections"]] for name, rows in NF.receipt().items()
    }
    return found


def test_each_rank_runs_its_part(tmp_path: Path) -> None:
    for found in run(outcome, 2, tmp_path):
        part = {
            "T": ([(3, 8, 4)], Shard(0)),
            "F": ([(6, 8, 2)], Shard(1)),
            "D": ([(6, 4, 4)], Partial()),
        }
        for name, (ran, placed) in part.items():
            assert (found[name]["ran"], found[name]["placed"]) == (ran, (placed,)), name
            truth = found["no bias" if name == "D" else "truth"]
            torch.testing.assert_close(found[name]["whole"], truth)
        # A bias would be added once a rank: the shares are brought together first.
        torch.testing.assert_close(found["D with bias"]["whole"], found["truth"])
        assert found["D with bias"]["placed"] != (Partial(),)
        for ours, truth in found["gradients"]:
            torch.testing.assert_close(ours, truth)
        assert (found["compiled"]["ran"], found["compiled"]["placed"]) == ([(3, 8, 4)], (Shard(0),))
        torch.testing.assert_close(found["compiled"]["whole"], found["no bias"])
        assert found["without a rule"]["ran"] == [], "torch's operators are divided instead"
        torch.testing.assert_close(found["without a rule"]["whole"], found["no bias"])
        assert found["in place"]["ran"] == [(6, 2)]
        torch.testing.assert_close(found["in place"]["whole"], found["in place"]["truth"])
        assert "it writes cache in place, divided as no rule of it has it" in found["refused"]
        for name, placed in (("norm", Shard(0)), ("o_proj", Partial())):
            got_placed, got, truth = found["ours"][name]
            assert got_placed == (placed,), name
            torch.testing.assert_close(got, truth, rtol=1e-5, atol=1e-5)
        assert {name: set(ran) for name, ran in found["receipt"].items()} == {"rms_norm": {"nki"}, "o_proj": {"nki"}}
        implementation, nki, sdpa = found["explained"]
        assert implementation == "torch"
        assert "divided over ranks, and there is no sharding rule" in nki and "divided over ranks" in sdpa
