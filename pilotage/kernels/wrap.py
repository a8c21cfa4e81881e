"""`wrap_kernel` and `wrap_nki`: any kernel as one operator for torch.compile, autograd and export.

    scaled = wrap_kernel(my_kernel, fallback=my_definition)
    y = scaled[grid](x, weight)

The fallback is plain torch with the kernel's arguments, annotated. It gives the operator its schema, the shapes and
dtypes of its results while a graph is traced, and its gradient; the kernel itself never runs while tracing. Of tensors
that are divided over ranks (DTensor) each rank runs the kernel on its part where a `Sharding` rule says how, and the
fallback where none does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pilotage.core.errors import BadInput, ConfigError, Unsupported
from pilotage.kernels import sharding as dividing
from pilotage.kernels.arguments import Arguments
from pilotage.kernels.launch import Launch, launch_nki, launch_torch
from pilotage.kernels.sharding import Sharding

NAMESPACE = "pilotage_kernels"

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_UNTRACEABLE = "it cannot be traced: nothing says what shapes it returns"
_TAKEN: Counter[str] = Counter()


def wrap_kernel(
    kernel: Callable[..., Any],
    fallback: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    mutates_args: Sequence[str] = (),
    sharding: Sharding | None = None,
    launch: Launch = launch_torch,
) -> WrappedKernel:
    """Make a kernel callable from a model: `wrap_kernel(kernel, fallback)[grid](*args)`.

    Args:
        kernel: called by `launch` with exactly the arguments of `fallback`.
        fallback: plain torch, same arguments and results, every argument and the result annotated. None leaves a
            kernel that runs eagerly and can neither be traced nor differentiated.
        name: of the operator, `torch.ops.pilotage_kernels.<name>`; default: the kernel's own. A name that is taken gets
            a number, so kernels have to be wrapped in one order in every process that shares compiled graphs: wrap
            them where modules are imported.
        mutates_args: tensors that the kernel writes in place, as a KV cache; the fallback has to write them too. Such
            an operator has no gradient.
        sharding: how the kernel's work is divided over ranks; None: of tensors that are divided the fallback is run.
        launch: runs the kernel: `launch(kernel, grid, args, kwargs)` with torch tensors, and returns torch tensors.

    Raises:
        ConfigError: the fallback's annotations do not make a schema, `mutates_args` names no tensor of it, or the
            sharding rule does not fit it.
    """
    return WrappedKernel(kernel, fallback, name, tuple(mutates_args), sharding, launch)


def wrap_nki(
    kernel: Callable[..., Any],
    fallback: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    mutates_args: Sequence[str] = (),
    sharding: Sharding | None = None,
) -> WrappedKernel:
    """Wrap a kernel written with `@nki.jit`, as the onboarding guide does: `wrap_nki(kernel)[grid](...)`.

    Tensors on the CPU go through the NKI interpreter, tensors on a NeuronCore to the kernel as they are.

    Args:
        kernel, fallback, name, mutates_args, sharding: as in `wrap_kernel`.
    """
    return wrap_kernel(kernel, fallback, name=name, mutates_args=mutates_args, sharding=sharding, launch=launch_nki)


class WrappedKernel:
    """A kernel behind an operator; `self[grid](*args)` or, without a grid, `self(*args)`.

    Attributes:
        name: of the operator within `torch.ops.pilotage_kernels`.
        kernel: what was wrapped.
        fallback: its plain-torch definition, or None.
        sharding: its rule under DTensor, or None.
        op: the operator's overload, for `torch.library.opcheck` and as it stands in graphs; None without a fallback.
    """

    def __init__(
        self,
        kernel: Callable[..., Any],
        fallback: Callable[..., Any] | None,
        name: str | None,
        mutates_args: tuple[str, ...],
        sharding: Sharding | None,
        launch: Launch,
    ) -> None:
        self.kernel, self.fallback, self.mutates_args, self._launch = kernel, fallback, mutates_args, launch
        self.sharding = sharding
        self.name = _free_name(name or getattr(kernel, "__name__", None) or type(kernel).__name__)
        self.op: Any = None
        self.__doc__ = (fallback or kernel).__doc__
        if fallback is not None:
            self._arguments = Arguments(fallback, self.name)
            self._checked: set[tuple[Any, ...]] = set()
            self.op = _define(self)
            if sharding is not None:
                dividing.require_fit(self.op, self._arguments.names, sharding)
        elif mutates_args or sharding is not None:
            what = "mutates_args" if mutates_args else "sharding"
            raise ConfigError(
                f"{what} says nothing without a fallback", where=f"wrap_kernel({self.name})", do="give a fallback"
            )

    @property
    def _fallback(self) -> Callable[..., Any]:
        assert self.fallback is not None, "only an operator asks for it, and only with a fallback is there one"
        return self.fallback

    def __repr__(self) -> str:
        return f"WrappedKernel({self.name})"

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return partial(self._call, _grid(grid))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call([], *args, **kwargs)

    def _call(self, grid: list[int], /, *args: Any, **kwargs: Any) -> Any:
        if self.op is None:
            _refuse_to_trace(self.name, [*args, *kwargs.values()])
            return self._launch(self.kernel, tuple(grid), args, kwargs)
        if any(map(dividing.divided, [*args, *kwargs.values()])):
            if self.sharding is None:
                return self._fallback(*args, **kwargs)
            dividing.register(self.op, self._arguments.names, self.sharding, self.mutates_args)
        return self.op(*self._arguments.flat(args, kwargs), grid)

    def run(self, *values: Any) -> Any:
        """Launch the kernel on the operator's own flat arguments, the grid last, and hold what comes back to the fake.

        Raises:
            BadInput: the kernel returned other shapes or dtypes than the fallback, whose shapes graphs rely on.
        """
        *arguments, grid = values
        args, kwargs = self._arguments.call(arguments)
        results = _as_tuple(self._launch(self.kernel, tuple(grid), args, kwargs))
        key = tuple(_facts(value) if isinstance(value, Tensor) else str(value) for value in arguments)
        if key not in self._checked:
            self._hold(results, arguments)
            self._checked.add(key)
        inputs = {_storage(value) for value in arguments if isinstance(value, Tensor)}
        owned = [result.clone() if _storage(result) in inputs else result.contiguous() for result in results]
        return self._arguments.returned(owned)

    def _hold(self, results: Sequence[Tensor], arguments: Sequence[Any]) -> None:
        meta = [value.to("meta") if isinstance(value, Tensor) else value for value in arguments]
        device = {value.device for value in arguments if isinstance(value, Tensor)}
        expected = _as_tuple(self.fake(*meta, []))
        for index, (got, want) in enumerate(zip(results, expected, strict=False)):
            if (got.shape, got.dtype) != (want.shape, want.dtype):
                raise BadInput(
                    f"result {index} is {tuple(got.shape)} {got.dtype}, "
                    f"the fallback's {tuple(want.shape)} {want.dtype}",
                    where=f"kernel {self.name}",
                    do="make both agree: a compiled graph takes the shapes from the fallback",
                )
        if len(results) != len(expected):
            raise BadInput(
                f"the kernel returned {len(results)} tensors and the fallback {len(expected)}",
                where=f"kernel {self.name}",
                do="return the same number; results that are written in place belong in mutates_args",
            )
        if len(device) == 1 and any(result.device not in device for result in results):
            raise BadInput("results are on another device than the arguments", where=f"kernel {self.name}")

    def fake(self, *values: Any) -> Any:
        """Return tensors of the results' shapes and dtypes, by running the fallback on tensors without data."""
        arguments = [
            value.clone() if name in self.mutates_args and isinstance(value, Tensor) else value
            for name, value in zip(self._arguments.names, values[:-1], strict=True)
        ]
        args, kwargs = self._arguments.call(arguments)
        with torch.no_grad():
            results = _as_tuple(self._fallback(*args, **kwargs))
        empty = [torch.empty(result.shape, dtype=result.dtype, device=result.device) for result in results]
        return self._arguments.returned(empty)

    def vjp(self, grads: Sequence[Tensor], needed: Sequence[int], *values: Any) -> list[Tensor]:
        """Return the gradients of the tensors at the flat positions `needed`, through the fallback.

        Args:
            grads: one for each result that is of a float dtype.
        """
        values = values[:-1]
        # A kernel runs below autograd; the fallback has to be recorded all the same.
        below = torch._C.DispatchKey.AutogradFunctionality
        with torch._C._SetExcludeDispatchKeyGuard(below, False), torch.enable_grad():
            leaves = {at: values[at].detach().requires_grad_() for at in needed}
            args, kwargs = self._arguments.call([leaves.get(at, value) for at, value in enumerate(values)])
            results = [out for out in _as_tuple(self._fallback(*args, **kwargs)) if out.is_floating_point()]
            reached = [(out, grad) for out, grad in zip(results, grads, strict=True) if out.requires_grad]
            outputs, weights = [out for out, _ in reached], [grad for _, grad in reached]
            found = torch.autograd.grad(outputs, list(leaves.values()), weights, allow_unused=True)
        taken = {_storage(grad) for grad in grads}
        owned: list[Tensor] = []
        for leaf, grad in zip(leaves.values(), found, strict=True):
            grad = torch.zeros_like(leaf) if grad is None else grad
            owned.append(grad.detach().clone() if _storage(grad) in taken else grad.detach().contiguous())
            taken.add(_storage(owned[-1]))
        return owned


def _define(wrapped: WrappedKernel) -> Any:
    """Define the operator, its fake implementation and its gradient; returns the overload."""
    name, arguments = wrapped.name, wrapped._arguments
    schema = arguments.schema(wrapped.mutates_args)
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, wrapped.run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", wrapped.fake, lib=_LIBRARY)
    if wrapped.mutates_args:
        _LIBRARY.impl(name, partial(_refuse_gradient, wrapped), "Autograd", with_keyset=True)
    else:
        _define_gradient(wrapped, schema)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _define_gradient(wrapped: WrappedKernel, schema: str) -> None:
    name = wrapped.name
    parameters = schema[1 : schema.rindex(") ->")]
    backward_name = f"{name}_backward"
    _LIBRARY.define(
        f"{backward_name}(Tensor[] grads, SymInt[] needed, {parameters}) -> Tensor[]",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    _LIBRARY.impl(backward_name, wrapped.vjp, "CompositeExplicitAutograd")

    def fake(grads: Sequence[Tensor], needed: Sequence[int], *values: Any) -> list[Tensor]:
        return [torch.empty(values[at].shape, dtype=values[at].dtype, device=values[at].device) for at in needed]

    torch.library.register_fake(f"{NAMESPACE}::{backward_name}", fake, lib=_LIBRARY)
    backward_op = getattr(getattr(torch.ops, NAMESPACE), backward_name).default

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.at = [at for at, value in enumerate(inputs) if isinstance(value, Tensor)]
        ctx.save_for_backward(*(inputs[at] for at in ctx.at))
        ctx.rest = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.floats = [result.is_floating_point() for result in _as_tuple(output)]

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values = list(ctx.rest)
        for at, value in zip(ctx.at, ctx.saved_tensors, strict=True):
            values[at] = value
        needed = [at for at in ctx.at if ctx.needs_input_grad[at]]
        wanted = [grad for grad, is_float in zip(grads, ctx.floats, strict=True) if is_float]
        out: list[Tensor | None] = [None] * len(values)
        # Torch's own operators know how to be divided: where the tensors are, the fallback's gradient is taken apart.
        vjp = wrapped.vjp if any(map(dividing.divided, [*values, *wanted])) else backward_op
        for at, grad in zip(needed, vjp(wanted, needed, *values), strict=True):
            out[at] = grad
        return tuple(out)

    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_LIBRARY)


def _refuse_gradient(wrapped: WrappedKernel, keyset: Any, *values: Any) -> Any:
    wanted = [
        name
        for name, value in zip(wrapped._arguments.names, values[:-1], strict=True)
        if isinstance(value, Tensor) and value.requires_grad
    ]
    if wanted and torch.is_grad_enabled():
        raise Unsupported(
            f"{wanted[0]} needs a gradient, and a kernel that writes its arguments has none",
            where=f"kernel {wrapped.name}",
            do="run it under torch.no_grad(), or the definition instead",
        )
    return wrapped.op.redispatch(keyset & torch._C._after_autograd_keyset, *values)


def _refuse_to_trace(name: str, values: Sequence[Any]) -> None:
    if torch.compiler.is_compiling():
        _refuse(name, _UNTRACEABLE)
    fake = torch._subclasses.FakeTensor
    tensors = [value for value in values if isinstance(value, Tensor)]
    if any(isinstance(value, fake) or value.is_meta for value in tensors):
        _refuse(name, _UNTRACEABLE)
    if any(map(dividing.divided, tensors)):
        _refuse(name, "it cannot be divided over ranks")
    if torch.is_grad_enabled() and any(value.requires_grad for value in tensors):
        _refuse(name, "it has no gradient")


@torch.compiler.assume_constant_result  # Dynamo calls it, instead of tracing the making of an exception
def _refuse(name: str, what: str) -> None:
    raise Unsupported(
        f"wrapped without a fallback, {what}",
        where=f"kernel {name}",
        do="give one: wrap_kernel(kernel, fallback) or wrap_nki(kernel, fallback), plain torch with annotations",
    )


def _grid(grid: Any) -> list[int]:
    sizes = list(grid) if isinstance(grid, (tuple, list)) else [grid]
    for size in sizes:
        if isinstance(size, (bool, float, str)) or size is None:
            raise BadInput(f"a grid is made of integers, not {size!r}", where="kernel[grid]")
    return sizes


def _free_name(wanted: str) -> str:
    name = re.sub(r"\W", "_", wanted).strip("_") or "kernel"
    _TAKEN[name] += 1
    return name if _TAKEN[name] == 1 else _free_name(f"{name}_{_TAKEN[name]}")


def _as_tuple(results: Any) -> tuple[Tensor, ...]:
    if results is None:
        return ()
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _facts(value: Tensor) -> tuple[Any, ...]:
    return (tuple(value.shape), value.dtype, value.device)


def _storage(value: Tensor) -> int:
    return dividing.local(value).untyped_storage().data_ptr()
