"""Kernels: what `nki.jit` makes, and how one is run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import torch

from pilotage.core.environment import switched_on
from pilotage.core.errors import Unavailable
from pilotage.kernels.nki import session
from pilotage.kernels.nki.cost import Ledger
from pilotage.kernels.nki.dtypes import Array, DType, convert, resolve
from pilotage.kernels.nki.faults import fault
from pilotage.kernels.nki.language import NKIObject
from pilotage.kernels.nki.memory import MemoryRegion, Storage, wrap
from pilotage.kernels.nki.tensor import NkiTensor

SIMULATOR = "NKI_SIMULATOR"
_TORCH_BITS = {1: torch.uint8, 2: torch.int16}


def simulating() -> bool:
    """Tell whether NKI_SIMULATOR asks for the interpreter."""
    return switched_on(SIMULATOR) is not None


class Kernel:
    """A kernel: call it with arrays, `kernel[2](...)` on both cores, or from another kernel with its tensors."""

    def __init__(self, function: Callable[..., Any], *, legacy: bool = False, simulated: bool = False) -> None:
        self.function = function
        self.legacy = legacy
        self.simulated = simulated
        self.grid: tuple[int, ...] = ()
        self.__name__ = getattr(function, "__name__", "kernel")
        self.__doc__ = function.__doc__
        self.__wrapped__ = function

    def __repr__(self) -> str:
        return f"Kernel({self.__name__}{list(self.grid) if self.grid else ''})"

    def __getitem__(self, grid: Any) -> Kernel:
        sizes = tuple(int(getattr(one, "size", one)) for one in (grid if isinstance(grid, tuple | list) else (grid,)))
        if not self.legacy and (len(sizes) != 1 or sizes[0] not in (1, 2)):
            fault(f"{self.__name__}[{', '.join(map(str, sizes))}]", do="a kernel runs on 1 or 2 cores: [1] or [2]")
        out = Kernel(self.function, legacy=self.legacy, simulated=self.simulated)
        out.grid = sizes
        return out

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if session.in_kernel():
            return self.function(*args, **kwargs)
        if not (self.simulated or simulating()):
            raise Unavailable(
                "there is no NeuronCore and no compiler for one",
                where=f"NKI kernel {self.__name__}",
                do=f"set {SIMULATOR}=1, or call nki.simulate(kernel)",
            )
        return run(self, args, kwargs)[0]


def jit(function: Any = None, **options: Any) -> Any:
    """Make a function a kernel."""
    if function is None:
        return lambda inner: jit(inner, **options)
    if isinstance(function, Kernel):
        return function
    return Kernel(function)


def simulate(kernel: Any) -> Kernel:
    """Make a kernel that always runs in the interpreter."""
    base = kernel if isinstance(kernel, Kernel) else Kernel(kernel)
    out = Kernel(base.function, legacy=base.legacy, simulated=True)
    out.grid = base.grid
    return out


class _Arguments:
    """Arrays turned into tensors in HBM, and back when the kernel has run."""

    def __init__(self, shared: bool) -> None:
        self.region = MemoryRegion.shared_hbm if shared else MemoryRegion.private_hbm
        self.given: dict[int, tuple[Storage, Any]] = {}
        self.copies: list[tuple[Storage, Any]] = []
        self.any_torch = False

    def enter(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self.any_torch = True
            return self._tensor(_to_numpy(value), resolve(value.dtype), value)
        if isinstance(value, np.ndarray):
            return self._tensor(value, resolve(value.dtype), value)
        if isinstance(value, tuple | list) and not isinstance(value, DType):
            if hasattr(value, "_fields"):
                return type(value)(*[self.enter(one) for one in value])
            return type(value)(self.enter(one) for one in value)
        if isinstance(value, dict):
            return {name: self.enter(one) for name, one in value.items()}
        if isinstance(value, NKIObject) and hasattr(value, "__dict__"):
            for name, one in list(vars(value).items()):
                entered = self.enter(one)
                if entered is not one:
                    setattr(value, name, entered)
        return value

    def _tensor(self, array: Array, dtype: DType, original: Any) -> NkiTensor:
        direct = array.flags.c_contiguous and array.dtype.itemsize == dtype.held.itemsize and array.flags.writeable
        held = array if direct else np.array(convert(array, dtype), order="C")
        storage = wrap(held, dtype, self.region)
        if not direct:
            self.copies.append((storage, array))
        self.given[id(storage)] = (storage, original)
        out = NkiTensor.whole(storage)
        return out

    def finish(self) -> None:
        """Write what a kernel changed back into arguments that had to be copied."""
        for storage, array in self.copies:
            if array.flags.writeable:
                array[...] = storage.typed().reshape(storage.shape).astype(array.dtype)

    def leave(self, value: Any) -> Any:
        if isinstance(value, NkiTensor):
            if value.on_chip:
                fault(f"the kernel returns {value!r}", do="copy it to a tensor in shared HBM and return that")
            known = self.given.get(id(value.storage))
            if known is not None and value.shape == tuple(known[1].shape):
                return known[1]
            array = value.read().astype(value.dtype.exact)
            return _to_torch(array, value.dtype) if self.any_torch else array.copy()
        if isinstance(value, tuple | list):
            return type(value)(self.leave(one) for one in value)
        if isinstance(value, dict):
            return {name: self.leave(one) for name, one in value.items()}
        return value


def _to_numpy(value: torch.Tensor) -> Array:
    value = value.detach()
    dtype = resolve(value.dtype)
    if dtype.kind == "low" and dtype.exact != np.dtype(np.float16):
        bits: Array = value.view(_TORCH_BITS[dtype.itemsize]).numpy()
        return bits.view(dtype.exact)
    if value.dtype is torch.bool:
        return value.view(torch.uint8).numpy()
    return value.numpy()


def _to_torch(array: Array, dtype: DType) -> torch.Tensor:
    array = np.ascontiguousarray(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    if dtype.kind == "low" and dtype.itemsize == 1:
        return torch.from_numpy(array.view(np.uint8).copy()).view(getattr(torch, str(dtype), torch.uint8))
    return torch.from_numpy(array.copy())


_WATCHING: list[list[tuple[str, list[Ledger]]]] = []


@contextlib.contextmanager
def watched() -> Iterator[list[tuple[str, list[Ledger]]]]:
    """Give a list that is filled with the name of every kernel run inside the block, and what each core did."""
    seen: list[tuple[str, list[Ledger]]] = []
    _WATCHING.append(seen)
    try:
        yield seen
    finally:
        _WATCHING[:] = [one for one in _WATCHING if one is not seen]


def run(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Ledger]]:
    """Run a kernel in the interpreter; give its results and what each core did."""
    launch = session.Launch(grid=kernel.grid, legacy=kernel.legacy)
    arguments = _Arguments(shared=launch.cores > 1)
    entered = [arguments.enter(one) for one in args]
    named = {name: arguments.enter(one) for name, one in kwargs.items()}
    cores = [session.Core(launch, at) for at in range(launch.cores)]
    if launch.cores == 2 and not kernel.legacy:
        results = _together(kernel, cores, entered, named)
    else:
        results = [_on(core, kernel, entered, named) for core in cores]
    out = arguments.leave(results[0])
    arguments.finish()
    ledgers = [core.ledger for core in cores]
    for seen in _WATCHING:
        seen.append((kernel.__name__, ledgers))
    return out, ledgers


def _on(core: session.Core, kernel: Kernel, args: list[Any], kwargs: dict[str, Any]) -> Any:
    with session.running(core):
        session.enter()
        try:
            return kernel.function(*args, **kwargs)
        finally:
            session.leave()


def _together(kernel: Kernel, cores: list[session.Core], args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    results: list[Any] = [None] * len(cores)
    failures: list[BaseException | None] = [None] * len(cores)

    def one(at: int) -> None:
        core = cores[at]
        with core.launch.baton:
            try:
                results[at] = _on(core, kernel, args, kwargs)
            except BaseException as error:
                failures[at] = error
                core.launch.rendezvous.abort(error)

    threads = [threading.Thread(target=one, args=(at,), name=f"core {at}") for at in range(len(cores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The core that only heard of the other's failure is not the one to blame.
    for error in sorted(
        (one for one in failures if one is not None), key=lambda error: isinstance(error, RuntimeError)
    ):
        raise error
    return results
