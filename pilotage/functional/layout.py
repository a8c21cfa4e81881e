"""Shapes in words: "... N H" for a tensor, and the numbers that the letters stand for in a call.

The letters are those of core/shapes.md. `...` stands for any leading dimensions; their product is T. A dimension may be
an expression of letters: "2*F", "B+1".
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Mapping, Sequence

from pilotage.core.errors import BadInput

Layout = Mapping[str, str]
LEADING = "..."
_TOKENS = "T"


def evaluate(expression: str, dims: Mapping[str, int]) -> int | None:
    """Compute an expression of letters, integers, `+ - * // %` and brackets; None if a letter is not known."""
    try:
        return _value(_parsed(expression), dims)
    except KeyError:
        return None
    except ZeroDivisionError:
        return None


def letters(expression: str) -> set[str]:
    """Return the letters of an expression."""
    return {node.id for node in ast.walk(_parsed(expression)) if isinstance(node, ast.Name)}


def bind(
    layout: Layout, shapes: Mapping[str, Sequence[int]], known: Mapping[str, int] | None = None
) -> tuple[dict[str, int], list[str]]:
    """Find what the letters stand for.

    Args:
        layout: of each tensor argument.
        shapes: of the tensors that are given.
        known: values of names that are not read from shapes.

    Returns:
        The letters' values, and what does not fit together, in words.
    """
    dims: dict[str, int] = dict(known or {})
    open_: list[tuple[str, str, int]] = []
    conflicts: list[str] = []
    for name, shape in shapes.items():
        if name not in layout:
            continue
        words = layout[name].split()
        if words[:1] == [LEADING]:
            words = words[1:]
            if len(shape) < len(words):
                conflicts.append(f"{name} has {len(shape)} dimensions, not at least {len(words)}")
                continue
            open_.append((name, _TOKENS, math.prod(shape[: len(shape) - len(words)])))
            shape = shape[len(shape) - len(words) :]
        elif len(words) != len(shape):
            conflicts.append(f"{name} has {len(shape)} dimensions, not {len(words)} ({layout[name]})")
            continue
        open_ += [(name, word, size) for word, size in zip(words, shape, strict=True)]
    progress = True
    while progress:
        progress = False
        for name, word, size in open_:
            unknown = letters(word) - dims.keys()
            if len(unknown) == 1:
                solved = _solve(word, size, next(iter(unknown)), dims)
                if solved is None:
                    conflicts.append(f"{name}: no {next(iter(unknown))} makes {word} = {size}")
                    solved = -1  # known to be wrong: said once
                dims[next(iter(unknown))] = solved
                progress = True
    for name, word, size in open_:
        value = evaluate(word, dims)
        if value is not None and value != size and all(dims[letter] != -1 for letter in letters(word)):
            conflicts.append(f"{name}: {word} is {value} elsewhere, and {size} here")
    return {letter: value for letter, value in dims.items() if value != -1}, conflicts


def shape(words: str, dims: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of a tensor laid out as `words`.

    Raises:
        BadInput: a letter has no value.
    """
    out = []
    for word in words.split():
        word = _TOKENS if word == LEADING else word
        value = evaluate(word, dims)
        if value is None:
            missing = ", ".join(sorted(letters(word) - dims.keys()))
            raise BadInput(f"{missing} is not given", where=f"shape [{words}]", do=f"give it: --dims {missing}=...")
        out.append(value)
    return tuple(out)


def all_letters(layout: Layout) -> set[str]:
    """Return every letter of a layout."""
    words = [_TOKENS if word == LEADING else word for text in layout.values() for word in text.split()]
    return {letter for word in words for letter in letters(word)}


def _solve(word: str, size: int, unknown: str, dims: Mapping[str, int]) -> int | None:
    """Solve `word` = size for its one unknown letter; expressions are linear in each letter."""
    at_0, at_1 = (evaluate(word, {**dims, unknown: value}) for value in (0, 1))
    if at_0 is None or at_1 is None or at_1 == at_0 or (size - at_0) % (at_1 - at_0):
        return None
    return (size - at_0) // (at_1 - at_0)


@functools.lru_cache(maxsize=512)
def _parsed(expression: str) -> ast.expr:
    try:
        return ast.parse(expression, mode="eval").body
    except SyntaxError as error:
        raise BadInput(f"{expression!r} is no expression of dimensions", where="layout") from error


def _value(node: ast.expr, dims: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return dims[node.id]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, dims), _value(node.right, dims)
        match node.op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.FloorDiv():
                return left // right
            case ast.Mod():
                return left % right
    raise BadInput(f"{ast.unparse(node)!r} is no expression of dimensions", where="layout", do="use + - * // %")
