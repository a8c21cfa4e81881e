"""The import names `nki` and `neuronxcc.nki`, taken only where the real packages are absent.

The finder stands last in `sys.meta_path`: it is asked when nobody else has the name, so an installed package wins.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from pilotage.kernels.nki.launch import Kernel, jit, simulate

_ROOTS = ("nki", "neuronxcc")


def _alias(target: str) -> Callable[[ModuleType], None]:
    def fill(module: ModuleType) -> None:
        source = importlib.import_module(target)
        module.__dict__.update({name: value for name, value in vars(source).items() if not name.startswith("__")})

    return fill


def _nki(module: ModuleType) -> None:
    module.__dict__.update(jit=jit, simulate=simulate, Kernel=Kernel, __version__="0.3.0")
    for child in ("language", "isa", "typing", "dtype", "collectives"):
        setattr(module, child, importlib.import_module(f"{module.__name__}.{child}"))


def _legacy_jit(function: Any = None, **options: Any) -> Any:
    if function is None:
        return lambda inner: _legacy_jit(inner, **options)
    base = function.function if isinstance(function, Kernel) else function
    return Kernel(base, legacy=True, simulated=options.get("mode") == "simulation")


def _simulate_kernel(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    made = simulate(kernel if isinstance(kernel, Kernel) else _legacy_jit(kernel))
    return made(*args, **kwargs)


def _needs_device(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        from pilotage.core.errors import Unavailable

        raise Unavailable(
            "this measures on a device, and there is none", where=f"nki.{name}", do="use pilotage kernels estimate"
        )

    return refuse


def _legacy_nki(module: ModuleType) -> None:
    module.__dict__.update(jit=_legacy_jit, trace=_legacy_jit, simulate_kernel=_simulate_kernel, baremetal=_legacy_jit)
    module.__dict__.update(benchmark=_needs_device("benchmark"), profile=_needs_device("profile"))
    for child in ("language", "isa", "compiler", "typing"):
        setattr(module, child, importlib.import_module(f"{module.__name__}.{child}"))


def _typing(module: ModuleType) -> None:
    class tensor:
        """Annotates a tensor with its shape."""

        def __class_getitem__(cls, shape: Any) -> type:
            return cls

    module.__dict__.update(tensor=tensor, mutable_tensor=tensor)


def _static_cast(module: ModuleType) -> None:
    from pilotage.kernels.nki.legacy.language import static_cast

    module.__dict__["static_cast"] = static_cast


def _allclose(module: ModuleType) -> None:
    import numpy as np

    module.__dict__["allclose"] = np.allclose


def _plain(module: ModuleType) -> None:
    pass


_HERE = "pilotage.kernels.nki"
_MODULES: dict[str, Callable[[ModuleType], None]] = {
    "nki": _nki,
    "nki.language": _alias(f"{_HERE}.language"),
    "nki.isa": _alias(f"{_HERE}.isa"),
    "nki.isa.constants": _alias(f"{_HERE}.isa.constants"),
    "nki.typing": _typing,
    "nki.dtype": _alias(f"{_HERE}.dtypes"),
    "nki.collectives": _alias(f"{_HERE}.collectives"),
    "neuronxcc": _plain,
    "neuronxcc.nki": _legacy_nki,
    "neuronxcc.nki.language": _alias(f"{_HERE}.legacy.language"),
    "neuronxcc.nki.isa": _alias(f"{_HERE}.legacy.isa"),
    "neuronxcc.nki.isa.constants": _alias(f"{_HERE}.isa.constants"),
    "neuronxcc.nki.compiler": _alias(f"{_HERE}.legacy.compiler"),
    "neuronxcc.nki.typing": _typing,
    "neuronxcc.starfish": _plain,
    "neuronxcc.starfish.support": _plain,
    "neuronxcc.starfish.support.dtype": _static_cast,
    "neuronxcc.starfish.support.util": _allclose,
}


class _Finder:
    """Finds the modules above, and loads them."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        root = name.partition(".")[0]
        if name not in _MODULES or (name != root and not _is_ours(root)):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__path__"] = []
        module.__dict__["__pilotage__"] = True
        _MODULES[module.__name__](module)


_FINDER = _Finder()


def _is_ours(root: str) -> bool:
    return getattr(sys.modules.get(root), "__pilotage__", False)


def install() -> bool:
    """Make `import nki` work; an installed package keeps its name.

    Returns:
        True if the interpreter stands behind `nki`.
    """
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)  # type: ignore[arg-type]
    return not real("nki")


def uninstall() -> None:
    """Give the names back."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)  # type: ignore[arg-type]
    for name in [one for one in sys.modules if one.partition(".")[0] in _ROOTS and _is_ours(one.partition(".")[0])]:
        if name.partition(".")[0] != name:
            del sys.modules[name]
    for root in _ROOTS:
        if _is_ours(root):
            del sys.modules[root]


def real(root: str = "nki") -> bool:
    """Tell whether the real package is installed."""
    if root in sys.modules:
        return not _is_ours(root)
    spec = importlib.machinery.PathFinder.find_spec(root)
    return spec is not None
