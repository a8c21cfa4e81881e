"""Before it serves, a fallback proves itself: packed, padded, chunked and decoded on pages against its own forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pilotage.core.errors import Unsupported
from pilotage.models.common.paging import PagedSession
from pilotage.serving.fallback import attention
from pilotage.serving.fallback.model import WRITE, FallbackForCausalLM, in_a_line

_SIZES = (29, 17)  # tokens of the two probes, if no window of the model is longer
_LONGEST = 96  # a window that is longer than this is known from its mask's function alone
_PAGE = 4
# Largest relative L2 difference of a row of logits: rounding, and what it grows to through some layers.
BOUNDS = {torch.float32: 2e-3, torch.bfloat16: 0.08, torch.float16: 0.02}


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What the check measured.

    Attributes:
        dtype: in which it was computed.
        bound: largest relative L2 difference of a row that passes.
        worst: by way of serving, the largest difference seen.
        rows: rows of logits compared.
    """

    dtype: str
    bound: float
    worst: dict[str, float]
    rows: int


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Prompts, and what Hugging Face's own forward says to them.

    Attributes:
        dtype: in which it was computed; what is compared is computed in the same.
        prompts: token ids.
        expected: of each prompt, logits [tokens, V] in fp32.
    """

    dtype: torch.dtype
    prompts: list[list[int]]
    expected: list[Tensor]


def draw(model: FallbackForCausalLM, *, max_model_len: int, free_bytes: int = 0) -> Probe:
    """Draw prompts longer than the model's windows and run its own forward on them.

    Args:
        model: what will serve, or the same model unsharded.
        max_model_len: no probe is longer.
        free_bytes: memory to spare; with enough of it, weights in half precision are widened for the check, which
            then tells rounding from a fault.
    """
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    widened = free_bytes > 3 * size
    windows = [layer.window for layer in model.layers if layer.window is not None]
    longest = max([_SIZES[0], *(w + 9 for w in windows if w <= _LONGEST)])
    sizes = [min(size, max_model_len - 1) for size in (longest, _SIZES[1])]
    generator = torch.Generator().manual_seed(11)
    vocabulary = model.hf.get_input_embeddings().weight.shape[0]
    first = min(10, vocabulary - 2)
    prompts = [torch.randint(first, vocabulary, (size + 1,), generator=generator).tolist() for size in sizes]
    dtype = torch.float32 if widened else model.get_kv_spec().layers[0].dtype
    with _computing_in(model, dtype):
        return Probe(dtype=dtype, prompts=prompts, expected=[_own_forward(model, prompt) for prompt in prompts])


def prove(model: FallbackForCausalLM, *, max_model_len: int, free_bytes: int = 0, probe: Probe | None = None) -> Proof:
    """Compare the model on pages with Hugging Face's own forward of the same weights.

    Args:
        model: what will serve.
        max_model_len, free_bytes: see `draw`.
        probe: what to compare with; None to draw it from the model itself.

    Raises:
        Unsupported: it does not compute what its own forward does; says in which way of serving it first differed.
    """
    probe = probe or draw(model, max_model_len=max_model_len, free_bytes=free_bytes)
    with _computing_in(model, probe.dtype):
        return _prove(model, probe)


def _prove(model: FallbackForCausalLM, probe: Probe) -> Proof:
    bound, expected = BOUNDS[probe.dtype], probe.expected
    worst: dict[str, float] = {}
    rows = 0
    for way, run in (("alone", _alone), ("packed", _packed), ("in chunks", _chunked)):
        try:
            found = run(model, probe.prompts)
        except Exception as error:
            raise Unsupported(f"{_why(model, way)} ({in_a_line(error)})", where=_name(model), do=WRITE) from error
        worst[way] = max(_distance(a, b) for a, b in zip(found, expected, strict=True))
        rows += sum(len(one) for one in found)
        if not worst[way] <= bound:
            raise Unsupported(
                f"{_why(model, way)} (its logits {way} are {worst[way]:.2g} from its own forward's, relative L2; the "
                f"bound is {bound:g})",
                where=_name(model),
                do=WRITE,
            )
    _check_head(model, probe.prompts[0], expected[0], bound)
    return Proof(dtype=str(probe.dtype).removeprefix("torch."), bound=bound, worst=worst, rows=rows)


_WHY = {
    "alone": "what it computes depends on more than the attention interface hands over",
    "packed": "requests of one batch influence each other, or positions are not taken as given",
    "in chunks": "it remembers more than keys and values between steps, or positions are not taken as given",
}


def _why(model: FallbackForCausalLM, way: str) -> str:
    return "; ".join((_WHY[way], *model.clues))


def _name(model: FallbackForCausalLM) -> str:
    return model.name


def _own_forward(model: FallbackForCausalLM, prompt: list[int]) -> Tensor:
    attention.use(model.hf, "eager")
    try:
        with torch.no_grad():
            logits: Tensor = model.hf(input_ids=torch.tensor([prompt]), use_cache=False, return_dict=True).logits[0]
            return logits.float()
    except Exception as error:
        raise Unsupported(f"its own forward fails ({in_a_line(error)})", where=_name(model), do=WRITE) from error
    finally:
        attention.use(model.hf, attention.NAME)


def _alone(model: FallbackForCausalLM, prompts: list[list[int]]) -> list[Tensor]:
    session = _session(model, prompts)
    return [session.step({i: prompt}, fresh=True)[i].float() for i, prompt in enumerate(prompts)]


def _packed(model: FallbackForCausalLM, prompts: list[list[int]]) -> list[Tensor]:
    session = _session(model, prompts)
    total = sum(map(len, prompts))
    out = session.step(dict(enumerate(prompts)), bucket=total + 5)
    return [out[i].float() for i in range(len(prompts))]


def _chunked(model: FallbackForCausalLM, prompts: list[list[int]]) -> list[Tensor]:
    session = _session(model, prompts)
    rows: list[list[Tensor]] = [[] for _ in prompts]
    cuts = [(0, len(p) // 2, len(p) - 1) for p in prompts]
    for start, end in ((0, 1), (1, 2)):
        new = {i: p[cuts[i][start] : cuts[i][end]] for i, p in enumerate(prompts)}
        for i, out in session.step(new, bucket=sum(map(len, new.values())) + 3).items():
            rows[i].append(out.float())
    for i, out in session.step({i: p[-1:] for i, p in enumerate(prompts)}, decode=True).items():
        rows[i].append(out.float())
    return [torch.cat(one) for one in rows]


def _session(model: FallbackForCausalLM, prompts: list[list[int]]) -> PagedSession:
    return PagedSession(model=model, num_requests=len(prompts), max_tokens=max(map(len, prompts)), block_size=_PAGE)


def _distance(found: Tensor, expected: Tensor) -> float:
    """Largest relative L2 difference of a row; NaN counts as infinite. Forbidden tokens (-inf) must be the same."""
    kept = torch.isfinite(expected)
    if not bool(torch.equal(kept, torch.isfinite(found))):
        return float("inf")
    a, b = torch.where(kept, found, 0.0), torch.where(kept, expected, 0.0)
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-12)).max())


def _check_head(model: FallbackForCausalLM, prompt: list[int], expected: Tensor, bound: float) -> None:
    session = _session(model, [prompt])
    metadata: dict[str, Any] = {}

    def call(ids: Tensor, positions: Tensor, context: Any, sampled: Tensor) -> Tensor:
        logits: Tensor
        logits, metadata["hidden"] = model(ids, positions, context, sampled, return_hidden=True)
        return logits

    session.call = call
    session.step({0: prompt}, fresh=True)
    what = "its head cannot be run apart from its backbone"
    try:
        distance = _distance(model.compute_logits(metadata["hidden"]).float(), expected)
    except Exception as error:
        raise Unsupported(f"{what} ({in_a_line(error)})", where=_name(model), do=WRITE) from error
    if not distance <= bound:
        raise Unsupported(f"{what} (logits {distance:.2g} from its own forward's)", where=_name(model), do=WRITE)


@contextmanager
def _computing_in(model: FallbackForCausalLM, wanted: torch.dtype) -> Iterator[None]:
    """Compute in a dtype inside the block; the tensors themselves come back afterwards, untouched."""
    halves = (torch.bfloat16, torch.float16)
    kept = [
        (tensor, tensor.data)
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.dtype in halves and tensor.dtype != wanted
    ]
    for tensor, data in kept:
        tensor.data = data.to(wanted)
    dtype, model.hf.config.dtype = model.hf.config.dtype, wanted
    try:
        yield
    finally:
        model.hf.config.dtype = dtype
        for tensor, data in kept:
            tensor.data = data
