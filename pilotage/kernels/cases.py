"""Arguments for an operator, made from the letters of its layout: to explain a call, to check and to time it.

Where random numbers make no sense (page tables, token positions, cos and sin) a builder makes what belongs together.
Whatever belongs to nobody, a page that no request owns, is NaN: reading it shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pilotage.core.errors import BadInput
from pilotage.functional import layout, registry
from pilotage.functional.call import Call, TensorSpec

DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
DIMS = {
    "T": 6,
    "D": 64,
    "F": 96,
    "N": 4,
    "K": 2,
    "H": 32,
    "B": 3,
    "C": 16,
    "M": 5,
    "E": 8,
    "V": 101,
    "J": 12,
    "L": 24,
}
_USUAL = {  # requests longer than a window
    "flash_attention": {"T": 40},
    "segmented_attention": {"T": 40},
}
_FIXED = {  # tensors whose dtype is not the model's
    "token_to_req": torch.int32,
    "positions": torch.int32,
    "query_start_loc": torch.int32,
    "block_table": torch.int32,
    "seq_lens": torch.int32,
    "slot_mapping": torch.int64,
    "input_ids": torch.int64,
    "affinities": torch.float32,
    "sampling_params": torch.float32,
    "noise": torch.float64,
    "k_scale": torch.float32,
    "v_scale": torch.float32,
    "sinks": torch.float32,
    "scale": torch.float32,
}
MUTATED = {"write_kv": ("k_cache", "v_cache"), "write_rows": ("cache",)}
CHOOSES = ("expert_affinities",)  # some of each row, by comparing its elements
PADDING = 2  # tokens of an attention batch that belong to no request


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of an operator.

    Attributes:
        dims: what the letters stand for.
        dtype: of the float tensors.
        arguments: by name.
        rows: leading rows of the results that mean something; None for all.
        seed: of its random numbers.
        label: what is special about it.
    """

    operator: str
    dims: Mapping[str, int]
    dtype: torch.dtype
    arguments: Mapping[str, Any]
    rows: int | None = None
    seed: int = 0
    label: str = ""

    @property
    def call(self) -> Call:
        """The facts that domains judge."""
        args, kwargs = self.split(self.arguments)
        return registry.call_of(self.operator, *args, **kwargs)

    def split(self, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Lay arguments out as the operator's signature takes them."""
        parameters = registry.signature_of(self.operator).parameters.values()
        given = [item for item in parameters if item.name in arguments]
        positional = [item for item in given if item.kind is not item.KEYWORD_ONLY]
        by_name = positional != [item for item in parameters if item.kind is not item.KEYWORD_ONLY][: len(positional)]
        if by_name:
            return [], dict(arguments)
        return [arguments[item.name] for item in positional], {
            item.name: arguments[item.name] for item in given if item.kind is item.KEYWORD_ONLY
        }


def complete(operator: str, dims: Mapping[str, int]) -> dict[str, int]:
    """Fill in the letters that are not given; a letter that follows from others follows."""
    out = {**DIMS, **_USUAL.get(operator, {}), **dims}
    if "N" in dims and "K" not in dims and out["N"] % out["K"]:
        out["K"] = 1
    if "K" in dims and "N" not in dims:
        out["N"] = 2 * out["K"]
    out.setdefault("R", out["H"])
    if "B" not in dims:
        out["B"] = out["T"] if operator == "attention_decode" else max(1, min(out["B"], out["T"] // 2))
    if "M" not in dims:
        out["M"] = max(out["M"], -(-out["T"] // out["C"]))
    out.setdefault("P", out["B"] * out["M"] + 2)
    return out


def options_of(operator: str, dims: Mapping[str, int], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for the arguments that are no tensors: those given, else the first example where one is needed.

    Raises:
        BadInput: an argument without a default and without an example.
    """
    examples = registry.examples_of(operator)
    tensors = registry.layout_of(operator)
    out = {}
    for name, item in registry.signature_of(operator).parameters.items():
        if name in given:
            out[name] = given[name]
        elif name not in tensors and item.default is item.empty:
            if name not in examples:
                raise BadInput(f"no value is known for {name}", where=operator, do=f"give one: --option {name}=...")
            out[name] = examples[name][0]
    return {name: _numbers(value, dims) for name, value in out.items()}


def specs(
    operator: str,
    dims: Mapping[str, int],
    dtype: torch.dtype,
    *,
    options: Mapping[str, Any] | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
    optional: Sequence[str] = (),
    device: str = "cpu",
) -> dict[str, Any]:
    """Return the arguments of a call with `TensorSpec` for tensors.

    Args:
        dims: complete; see `complete`.
        options: arguments that are no tensors.
        dtypes: of single tensors, where it is not `dtype`.
        optional: tensors with a default that are given all the same.
    """
    arguments = options_of(operator, dims, options or {})
    values = {**dims, **{name: value for name, value in arguments.items() if type(value) is int}}
    parameters = registry.signature_of(operator).parameters
    for name, words in registry.layout_of(operator).items():
        if parameters[name].default is not parameters[name].empty and name not in optional:
            continue
        own = (dtypes or {}).get(name) or _FIXED.get(name, dtype)
        arguments[name] = TensorSpec(own, layout.shape(words, values), device, False)
    return arguments


def build(
    operator: str,
    dims: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    options: Mapping[str, Any] | None = None,
    optional: Sequence[str] = (),
    seed: int = 0,
    device: str = "cpu",
    label: str = "",
) -> Case:
    """Make a call with random tensors.

    Args:
        dims: letters that are not the default.
        dtype: of the float tensors.
        options: arguments that are no tensors.
        optional: tensors with a default that are given all the same.
        seed: of the random numbers, which are made on the CPU.
    """
    dims = complete(operator, dims or {})
    generator = torch.Generator().manual_seed(seed)
    wanted = specs(operator, dims, dtype, options=options, optional=optional)
    arguments = {
        name: _random(spec, generator) if isinstance(spec, TensorSpec) else spec for name, spec in wanted.items()
    }
    rows = None
    builder = _BUILDERS.get(operator)
    if builder is not None:
        rows = builder(arguments, dims, generator)
    on_device = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}
    return Case(operator=operator, dims=dims, dtype=dtype, arguments=on_device, rows=rows, seed=seed, label=label)


Builder = Callable[[dict[str, Any], Mapping[str, int], torch.Generator], int | None]


def builds(operator: str, builder: Builder) -> None:
    """Have `builder(arguments, dims, generator)` replace the random arguments of an operator that need more sense.

    It changes `arguments` in place, and returns how many leading rows of the results mean something, or None for all.
    """
    _BUILDERS[operator] = builder


def _random(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    if not spec.dtype.is_floating_point:
        return torch.zeros(spec.shape, dtype=spec.dtype)
    values = torch.randn(spec.shape, generator=generator)
    if len(spec.shape) > 1:  # sums over the last dimension stay of order one
        values = values * (3 / math.sqrt(max(spec.shape[-1], 9)))
    return values.to(spec.dtype)


def _numbers(value: Any, dims: Mapping[str, int]) -> Any:
    """Replace a tuple of expressions by its numbers."""
    if isinstance(value, tuple) and value and all(isinstance(part, str) for part in value):
        return tuple(layout.evaluate(part, dims) for part in value)
    return value


def _cut(total: int, parts: int, generator: torch.Generator) -> list[int]:
    """Cut a number of tokens into requests of unlike lengths, at least one each where there are enough."""
    parts = max(1, min(parts, total))
    cuts = sorted((torch.randperm(max(total - 1, 1), generator=generator)[: parts - 1] + 1).tolist())
    return [end - start for start, end in zip([0, *cuts], [*cuts, total], strict=True)]


def _batch(arguments: dict[str, Any], dims: Mapping[str, int], new: list[int], lengths: list[int]) -> int:
    """Fill in which request each token is of; requests that are missing at the end are padding."""
    tokens, requests = dims["T"], dims["B"]
    real = sum(new)
    owner = [row for row, count in enumerate(new) for _ in range(count)]
    at = [length - count + i for length, count in zip(lengths, new, strict=True) for i in range(count)]
    starts = [0]
    for count in (*new, *[0] * (requests - len(new))):
        starts.append(starts[-1] + count)
    arguments["token_to_req"] = torch.tensor(owner + [0] * (tokens - real), dtype=torch.int32)
    arguments["positions"] = torch.tensor(at + [0] * (tokens - real), dtype=torch.int32)
    arguments["query_start_loc"] = torch.tensor(starts, dtype=torch.int32)
    if "seq_lens" in arguments:
        arguments["seq_lens"] = torch.tensor(lengths + [0] * (requests - len(new)), dtype=torch.int32)
    return real


def _new_tokens(dims: Mapping[str, int], generator: torch.Generator) -> list[int]:
    real = dims["T"] - PADDING if dims["T"] > PADDING else dims["T"]
    return _cut(real, dims["B"], generator)


def _packed(arguments: dict[str, Any], dims: Mapping[str, int], generator: torch.Generator) -> int:
    new = _new_tokens(dims, generator)
    return _batch(arguments, dims, new, new)


def _paged(arguments: dict[str, Any], dims: Mapping[str, int], generator: torch.Generator) -> int:
    new = _new_tokens(dims, generator)
    room = dims["M"] * dims["C"]
    if max(new) > room:
        raise BadInput(
            f"a request of {max(new)} tokens in {dims['M']} pages of {dims['C']}",
            where="M",
            do="give more pages a request, --dims M=..., or more requests, B=...",
        )
    lengths = [count + int(torch.randint(0, room - count + 1, (1,), generator=generator)) for count in new]
    lengths[0] = room  # one request fills its pages
    real = _batch(arguments, dims, new, lengths)
    order = torch.randperm(dims["P"], generator=generator).tolist()
    table = torch.full((dims["B"], dims["M"]), order[-1], dtype=torch.int32)
    owned = torch.zeros(dims["P"], dims["C"], dtype=torch.bool)
    for row, length in enumerate(lengths):
        for page in range(-(-length // dims["C"])):
            table[row, page] = order.pop(0)
            owned[table[row, page], : length - page * dims["C"]] = True
    arguments["block_table"] = table
    for name in ("k_cache", "v_cache"):
        lost = ~owned[:, None, :, None].expand(arguments[name].shape)
        arguments[name] = arguments[name].float().masked_fill(lost, float("nan")).to(arguments[name].dtype)
    return real


def _rotary(arguments: dict[str, Any], dims: Mapping[str, int], generator: torch.Generator) -> None:
    shape = arguments["cos"].shape
    angles = torch.rand((*shape[:-1], shape[-1] // 2), generator=generator) * 2 * math.pi
    angles = torch.cat((angles, angles), dim=-1)
    arguments["cos"], arguments["sin"] = (f(angles).to(arguments["q"].dtype) for f in (torch.cos, torch.sin))


def _slots(arguments: dict[str, Any], dims: Mapping[str, int], generator: torch.Generator) -> None:
    count = dims["P"] * dims["C"]
    slots = torch.randperm(count, generator=generator)[: dims["T"]]
    slots[::5] = -1  # padding
    arguments["slot_mapping"] = slots


def _token_ids(arguments: dict[str, Any], dims: Mapping[str, int], generator: torch.Generator) -> None:
    arguments["input_ids"] = torch.randint(0, dims["V"], arguments["input_ids"].shape, generator=generator)


def _affinities(arguments: dict[str, Any], dims: Mapping[str, int], generator: torch.Generator) -> None:
    scores = torch.rand(arguments["affinities"].shape, generator=generator)
    kept, chosen = scores.topk(arguments["top_k"], dim=-1)
    arguments["affinities"] = torch.zeros_like(scores).scatter(-1, chosen, kept / kept.sum(-1, keepdim=True))


def _sampling(arguments: dict[str, Any], dims: Mapping[str, int], generator: torch.Generator) -> None:
    rows, vocabulary = arguments["logits"].shape
    top_k = torch.randint(0, vocabulary, (rows,), generator=generator).float()
    others = torch.rand((2, rows), generator=generator)
    others[1, ::3] = 0  # the most likely token
    arguments["sampling_params"] = torch.stack((top_k, 0.2 + 0.8 * others[0], others[1]), dim=-1)
    arguments["noise"] = torch.rand(rows, generator=generator, dtype=torch.float64)
    arguments["logits"] = arguments["logits"] * 8


def _one_scale(arguments: dict[str, Any], dims: Mapping[str, int], generator: torch.Generator) -> None:
    arguments["scale"] = torch.tensor(0.013)


_BUILDERS: dict[str, Builder] = {
    "flash_attention": _packed,
    "segmented_attention": _paged,
    "attention_decode": _paged,
    "rotary": _rotary,
    "write_kv": _slots,
    "write_rows": _slots,
    "embedding": _token_ids,
    "experts": _affinities,
    "sample_tokens": _sampling,
    "quantise_kv": _one_scale,
}
