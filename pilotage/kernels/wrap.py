"""`wrap_kernel` and `wrap_nki`: any kernel as one operator for torch.compile, autograd and export.

    scaled = wrap_kernel(my_kernel, fallback=my_definition)
    y = scaled[grid](x, weight)

The fallback is plain torch with the kernel's arguments, annotated. It gives the operator its schema, the shapes and
dtypes of its results while a graph is traced, and its gradient; the kernel itself never runs while tracing. Opaque
operators have no sharding rule: under DTensor the definition has to run instead.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pilotage.core.errors import BadInput, ConfigError, Unsupported
from pilotage.kernels.launch import Launch, launch_nki, launch_torch

NAMESPACE = "pilotage_kernels"
GRID = "grid"

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_UNTRACEABLE = "it cannot be traced: nothing says what shapes it returns"
_TAKEN: Counter[str] = Counter()


def wrap_kernel(
    kernel: Callable[..., Any],
    fallback: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    mutates_args: Sequence[str] = (),
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
        launch: runs the kernel: `launch(kernel, grid, args, kwargs)` with torch tensors, and returns torch tensors.

    Raises:
        ConfigError: the fallback's annotations do not make a schema, or `mutates_args` names no tensor of it.
    """
    return WrappedKernel(kernel, fallback, name, tuple(mutates_args), launch)


def wrap_nki(
    kernel: Callable[..., Any],
    fallback: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    mutates_args: Sequence[str] = (),
) -> WrappedKernel:
    """Wrap a kernel written with `@nki.jit`, as the onboarding guide does: `wrap_nki(kernel)[grid](...)`.

    Tensors on the CPU go through the NKI interpreter, tensors on a NeuronCore to the kernel as they are.

    Args:
        kernel, fallback, name, mutates_args: as in `wrap_kernel`.
    """
    return wrap_kernel(kernel, fallback, name=name, mutates_args=mutates_args, launch=launch_nki)


class WrappedKernel:
    """A kernel behind an operator; `self[grid](*args)` or, without a grid, `self(*args)`.

    Attributes:
        name: of the operator within `torch.ops.pilotage_kernels`.
        kernel: what was wrapped.
        fallback: its plain-torch definition, or None.
        op: the operator's overload, for `torch.library.opcheck` and as it stands in graphs; None without a fallback.
    """

    def __init__(
        self,
        kernel: Callable[..., Any],
        fallback: Callable[..., Any] | None,
        name: str | None,
        mutates_args: tuple[str, ...],
        launch: Launch,
    ) -> None:
        self.kernel, self.fallback, self.mutates_args, self._launch = kernel, fallback, mutates_args, launch
        self.name = _free_name(name or getattr(kernel, "__name__", None) or type(kernel).__name__)
        self.op: Any = None
        self.__doc__ = (fallback or kernel).__doc__
        if fallback is not None:
            self._arguments = _Arguments(fallback, self.name)
            self._checked: set[tuple[Any, ...]] = set()
            self.op = _define(self)
        elif mutates_args:
            raise ConfigError(
                "mutates_args says nothing without a fallback", where=f"wrap_kernel({self.name})", do="give a fallback"
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


class _Arguments:
    """The fallback's arguments, by name and as a flat list: an operator's tensors may not be keyword-only."""

    def __init__(self, fallback: Callable[..., Any], kernel: str) -> None:
        self._where = f"wrap_kernel({kernel})"
        signature = inspect.signature(fallback)
        hints = self._hints(fallback)
        self.names = tuple(signature.parameters)
        kinds = inspect.Parameter
        for parameter in signature.parameters.values():
            if parameter.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD):
                raise ConfigError(f"the fallback takes *{parameter.name}", where=self._where, do="name its arguments")
            if parameter.name == GRID:
                raise ConfigError("the fallback has an argument named grid", where=self._where, do="rename it")
            if parameter.name not in hints:
                raise ConfigError(
                    f"argument {parameter.name!r} of the fallback has no annotation",
                    where=self._where,
                    do="annotate it, e.g. `x: Tensor`, `eps: float`, `window: int | None`",
                )
        if "return" not in hints:
            raise ConfigError("the fallback's result has no annotation", where=self._where, do="annotate it")
        parameters = list(signature.parameters.values())
        self._positional = [item.name for item in parameters if item.kind is not kinds.KEYWORD_ONLY]
        self._by_keyword = [item.name for item in parameters if item.kind is kinds.KEYWORD_ONLY]
        self._defaults = {item.name: item.default for item in parameters if item.default is not kinds.empty}
        self._tuples = {name for name in self.names if typing.get_origin(hints[name]) is tuple}
        returns = hints["return"]
        self._single = returns is Tensor
        self._nothing = returns in (None, type(None))
        several = typing.get_origin(returns) is tuple and set(typing.get_args(returns)) == {Tensor}
        if not (self._single or self._nothing or several):
            raise ConfigError(
                f"the fallback returns {returns}", where=self._where, do="return a Tensor, a tuple of them, or None"
            )
        self.schema_of = partial(self._schema, hints)

    def _hints(self, fallback: Callable[..., Any]) -> dict[str, Any]:
        try:
            return typing.get_type_hints(fallback)
        except NameError as error:
            raise ConfigError(
                f"an annotation of the fallback cannot be read ({error})",
                where=self._where,
                do="define the fallback in a module, with its types imported there",
            ) from error

    def _schema(self, hints: dict[str, Any], mutates_args: tuple[str, ...]) -> str:
        """Return "(Tensor x, ..., SymInt[] grid) -> Tensor" without names or defaults: all of them are always given."""
        unknown = [name for name in mutates_args if name not in self.names]
        if unknown:
            raise ConfigError(
                f"mutates_args names {unknown[0]!r}, the fallback's arguments are {', '.join(self.names)}",
                where=self._where,
                do="use one of these",
            )

        def prototype() -> None: ...

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        annotated = {name: Sequence[int] if name in self._tuples else hints[name] for name in self.names}
        prototype.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in annotated.items()]
            + [inspect.Parameter(GRID, kind, annotation=Sequence[int])],
            return_annotation=None if self._nothing else hints["return"],
        )
        try:
            return str(torch.library.infer_schema(prototype, mutates_args=mutates_args))
        except (ValueError, TypeError) as error:
            message = str(error).removeprefix("infer_schema(func): ").split(" Got func")[0]
            raise ConfigError(
                f"the fallback's annotations make no schema: {message}",
                where=self._where,
                do="use Tensor, int, float, bool, str, their optional forms and lists, and tuple[Tensor, Tensor] for "
                "several results",
            ) from error

    def flat(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Lay a call's arguments out in order, defaults filled in."""
        if len(args) > len(self._positional):
            raise TypeError(f"{len(args)} positional arguments, at most {len(self._positional)} are taken")
        given = dict(zip(self._positional, args, strict=False))
        for name, value in kwargs.items():
            if name in given or name not in self.names:
                raise TypeError(f"argument {name!r} is {'given twice' if name in given else 'unknown'}")
            given[name] = value
        values = []
        for name in self.names:
            if name not in given and name not in self._defaults:
                raise TypeError(f"missing argument {name!r}")
            value = given[name] if name in given else self._defaults[name]
            values.append(list(value) if name in self._tuples else value)
        return values

    def call(self, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Turn the flat list into the arguments of the fallback and of the kernel."""
        given = {
            name: tuple(value) if name in self._tuples else value
            for name, value in zip(self.names, values, strict=True)
        }
        return [given[name] for name in self._positional], {name: given[name] for name in self._by_keyword}

    def returned(self, results: Sequence[Tensor]) -> Any:
        if self._nothing:
            return None
        return results[0] if self._single else tuple(results)


def _define(wrapped: WrappedKernel) -> Any:
    """Define the operator, its fake implementation and its gradient; returns the overload."""
    name, arguments = wrapped.name, wrapped._arguments
    schema = arguments.schema_of(wrapped.mutates_args)
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
        for at, grad in zip(needed, backward_op(wanted, needed, *values), strict=True):
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
    return value.untyped_storage().data_ptr()
