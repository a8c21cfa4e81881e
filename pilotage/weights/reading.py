"""Read the shares of many parameters, one step ahead of whoever takes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from pilotage.core.errors import WeightError
from pilotage.weights.lazy import LazyTensor
from pilotage.weights.loaders import LazySlice, get_weight_loader, keeps_dtype

# Narrower floats (fp8) are values only together with their scales, which a plain parameter does not have.
_PLAIN_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def read_shares(
    parameters: Mapping[str, nn.Parameter],
    sources: Mapping[str, Sequence[LazySlice]],
    *,
    rank: int,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (parameter name, this rank's tensor on `device`) in the order of the parameters.

    One share is read ahead while the caller handles the one before, so memory stays near what was yielded plus two
    tensors.

    Args:
        parameters: give loader, shape and dtype; their own values are neither read nor written.
        sources: the checkpoint slices of each parameter, for its loader.
        rank: what the loaders are asked for.
        device: where the tensors go.
        dtype: of floating tensors; None means each parameter's own, as does `keep_dtype`.

    Raises:
        WeightError: a shape or dtype that does not fit, naming parameter and checkpoint tensor.
    """

    def read(name: str) -> Tensor:
        return read_share(name, parameters[name], sources[name], rank=rank, device=device, dtype=dtype)

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights") as pool:
        names = list(parameters)
        ahead: Future[Tensor] | None = pool.submit(read, names[0]) if names else None
        for position, name in enumerate(names):
            assert ahead is not None
            tensor = ahead.result()
            ahead = pool.submit(read, names[position + 1]) if position + 1 < len(names) else None
            yield name, tensor
            del tensor


def read_share(
    name: str,
    parameter: nn.Parameter,
    slices: Sequence[LazySlice],
    *,
    rank: int,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Read one parameter's share; arguments and errors as for `read_shares`."""
    own = dtype is None or not parameter.dtype.is_floating_point or keeps_dtype(parameter)
    wanted = parameter.dtype if own or dtype is None else dtype
    for part in slices:
        problem = dtype_problem(wanted, part) if isinstance(part, LazyTensor) else None
        if problem is not None:
            raise WeightError(f"{describe([part])} {problem}", where=name, do="use an unquantised checkpoint")
    try:
        tensor = get_weight_loader(parameter).load(slices, rank)
    except WeightError as error:
        if error.where is not None and name in error.where:
            raise
        raise WeightError(str(error), where=f"parameter {name}") from error
    if tensor.shape != parameter.shape:
        raise WeightError(
            f"{describe(slices)} gives {list(tensor.shape)}, the parameter is {list(parameter.shape)}",
            where=name,
            do="check the model's configuration against the checkpoint",
        )
    return tensor.to(device=device, dtype=wanted)


def dtype_problem(wanted: torch.dtype, source: LazyTensor) -> str | None:
    """Say why a checkpoint dtype means something else in a parameter of dtype `wanted`, None if it does not."""
    if source.dtype == wanted or (source.dtype in _PLAIN_FLOATS and wanted in _PLAIN_FLOATS):
        return None
    return f"is {source.dtype_name} in {source.file.path.name}, the parameter is {wanted}"


def describe(slices: Sequence[LazySlice]) -> str:
    """Return "name [shape]" of each slice, for messages."""
    return " + ".join(f"{getattr(part, 'name', 'a tensor')} {part.get_shape()}" for part in slices)
