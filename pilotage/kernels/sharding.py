"""How the work of an opaque operator is divided over ranks: a rule for DTensor, in the letters of core/shapes.md.

    linear = wrap_nki(kernel, fallback, sharding=Sharding(
        tensors={"x": "T D", "weight": "F D", "bias": "F"}, results=("T F",), split=("T", "F"), sums=("D",)))

With that, rows divided over ranks stay divided, so do the outputs of a weight that is divided by its first dimension,
and of weights divided by their second each rank computes a share of the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from pilotage.core.errors import ConfigError, Unsupported

if TYPE_CHECKING:  # it takes a second to import, and most have no use for it
    from torch.distributed.tensor import Placement

Rule: TypeAlias = "tuple[list[Placement], list[Placement | None]]"  # of the results, of the arguments


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Along which dimensions an operator may be divided.

    Attributes:
        tensors: tensor argument -> its dimensions, one letter each.
        results: dimensions of each result.
        split: letters along which a part of each result follows from the same part of the arguments that have the
            letter and from the whole of those that have not.
        sums: letters that are summed over: what follows from parts of the arguments adds up to the results. Applied
            where every tensor that is given has the letter: one that has not would be added once a rank.
    """

    tensors: Mapping[str, str]
    results: tuple[str, ...]
    split: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"{', '.join(self.split)} divided"] if self.split else []
        parts += [f"{', '.join(self.sums)} summed"] if self.sums else []
        return ", ".join(parts)

    def rules(self, names: Sequence[str], given: Sequence[str]) -> list[Rule]:
        """Return the ways to place the arguments `names` on one dimension of a mesh; `given` are no None."""
        from torch.distributed.tensor import Partial, Replicate

        whole: Rule = ([Replicate() for _ in self.results], [Replicate() if name in given else None for name in names])
        out = [whole]
        for letter in self.split:
            out.append(
                (
                    [_along(words, letter) for words in self.results],
                    [self._placed(name, letter, given) for name in names],
                )
            )
        for letter in self.sums:
            if all(letter in self.tensors[name].split() for name in given):
                out.append(([Partial() for _ in self.results], [self._placed(name, letter, given) for name in names]))
        return out

    def _placed(self, name: str, letter: str, given: Sequence[str]) -> Placement | None:
        return _along(self.tensors[name], letter) if name in given else None


def _along(words: str, letter: str) -> Placement:
    from torch.distributed.tensor import Replicate, Shard

    return Shard(words.split().index(letter)) if letter in words.split() else Replicate()


def divided(value: Any) -> bool:
    """Tell whether a value is a tensor that is divided over ranks."""
    if type(value) in (Tensor, Parameter) or not isinstance(value, Tensor):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def local(value: Any) -> Any:
    """Return this rank's part of a divided tensor, anything else as it is."""
    return value.to_local() if divided(value) else value


_REGISTERED: set[Any] = set()


@torch.compiler.assume_constant_result  # Dynamo calls it, instead of tracing what it does
def register(op: Any, names: Sequence[str], sharding: Sharding, mutated: Sequence[str] = ()) -> None:
    """Tell DTensor how an operator is divided, unless it knows.

    Args:
        op: its overload; its arguments are `names` and a grid.
        names, sharding: see `require_fit`.
        mutated: tensors that it writes in place.
    """
    if op in _REGISTERED:
        return
    _REGISTERED.add(op)
    from torch.distributed.tensor.experimental import register_sharding

    def placements(*values: Any) -> list[Rule]:
        specs = {name: value for name, value in zip(names, values, strict=False) if hasattr(value, "placements")}
        rules = sharding.rules([*names, "grid"], list(specs))
        for name in mutated:  # a copy placed otherwise would be written, and forgotten
            at = list(names).index(name)
            rules = [rule for rule in rules if set(specs[name].placements) == {rule[1][at]}]
        if not rules:
            raise Unsupported(
                f"it writes {', '.join(mutated)} in place, divided as no rule of it has it",
                where=f"kernel {op}",
                do=f"divide along {' or '.join(sharding.split) or 'nothing'}",
            )
        return rules

    register_sharding(op)(placements)


def require_fit(op: Any, names: Sequence[str], sharding: Sharding) -> None:
    """Hold a rule against an operator.

    Raises:
        ConfigError: it names other tensors, other results, or letters that they do not have.
    """
    where = f"sharding of {op}"
    tensors = {
        argument.name for argument in op._schema.arguments if "Tensor" in str(argument.type) and argument.name in names
    }
    if set(sharding.tensors) != tensors:
        raise ConfigError(
            f"tensors {sorted(sharding.tensors)} for the arguments {sorted(tensors)}",
            where=where,
            do="give the dimensions of each tensor argument",
        )
    if len(sharding.results) != len(op._schema.returns):
        raise ConfigError(
            f"{len(sharding.results)} results of {len(op._schema.returns)}", where=where, do="give those of each result"
        )
    for letter in sharding.split:
        if any(letter not in words.split() for words in sharding.results):
            raise ConfigError(f"{letter} is split, and a result has no {letter}", where=where, do="it may be in sums")
    for letter in sharding.sums:
        if any(letter in words.split() for words in sharding.results):
            raise ConfigError(f"{letter} is summed over, and a result has it", where=where, do="it may be in split")
