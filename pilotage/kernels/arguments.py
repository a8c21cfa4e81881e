"""The arguments of a wrapped kernel: an operator's schema from annotations, and calls laid out flat and back."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pilotage.core.errors import ConfigError

GRID = "grid"


class Arguments:
    """The fallback's arguments, by name and as a flat list: an operator's tensors may not be keyword-only."""

    def __init__(self, fallback: Callable[..., Any], kernel: str) -> None:
        """Read the fallback's annotations.

        Raises:
            ConfigError: one is missing, or says what no schema can.
        """
        self._where = f"wrap_kernel({kernel})"
        signature = inspect.signature(fallback)
        hints = _hints(fallback, self._where)
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
        self._hints = hints

    def schema(self, mutates_args: tuple[str, ...]) -> str:
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
        annotated = {name: Sequence[int] if name in self._tuples else self._hints[name] for name in self.names}
        prototype.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in annotated.items()]
            + [inspect.Parameter(GRID, kind, annotation=Sequence[int])],
            return_annotation=None if self._nothing else self._hints["return"],
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
        """Give results as the fallback does: one, a tuple, or None."""
        if self._nothing:
            return None
        return results[0] if self._single else tuple(results)


def _hints(fallback: Callable[..., Any], where: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(fallback)
    except NameError as error:
        raise ConfigError(
            f"an annotation of the fallback cannot be read ({error})",
            where=where,
            do="define the fallback in a module, with its types imported there",
        ) from error
