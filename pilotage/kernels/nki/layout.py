"""Arithmetic of shapes and strides. Pure: no tensors, no memory.

Strides and offsets are in elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Shape = tuple[int, ...]


def row_major(shape: Shape) -> Shape:
    """Give the strides of a dense tensor."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def is_dense(shape: Shape, strides: Shape) -> bool:
    """Tell whether every dimension longer than 1 has its row-major stride."""
    return all(n == 1 or have == want for n, have, want in zip(shape, strides, row_major(shape), strict=True))


def reach(shape: Shape, strides: Shape, offset: int) -> tuple[int, int]:
    """Give the lowest and the highest element that a view touches."""
    low = high = offset
    for size, stride in zip(shape, strides, strict=True):
        if stride < 0:
            low += (size - 1) * stride
        else:
            high += (size - 1) * stride
    return low, high


def restride(shape: Shape, strides: Shape, new: Shape) -> Shape | None:
    """Find the strides that show the same elements in the shape `new`; None if a copy would be needed."""
    if math.prod(shape) != math.prod(new):
        return None
    old = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    blocks: list[list[int]] = []  # runs of dimensions that one stride can walk: [length, inner stride]
    for size, stride in old:
        if blocks and blocks[-1][1] == size * stride:
            blocks[-1] = [blocks[-1][0] * size, stride]
        else:
            blocks.append([size, stride])
    out = [0] * len(new)
    axis = len(new) - 1
    for length, stride in reversed(blocks):
        left = length
        step = stride
        while left > 1:
            if axis < 0 or (new[axis] != 1 and left % new[axis]):
                return None
            out[axis] = step
            step *= new[axis]
            left //= new[axis]
            axis -= 1
    inner = 1
    for at in range(len(new) - 1, -1, -1):
        if new[at] == 1:
            out[at] = inner
        inner = max(inner, out[at] * new[at])
    return tuple(out)


def runs(shape: Shape, strides: Shape) -> tuple[int, int]:
    """Count the contiguous pieces of a view and the elements in each."""
    piece = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != piece:
            break
        piece *= size
    return max(math.prod(shape) // piece, 1), piece


def infer(sizes: Sequence[int], total: int) -> Shape | None:
    """Fill in the one -1 of `sizes`; None where the product cannot be `total`."""
    known = math.prod(one for one in sizes if one != -1)
    if list(sizes).count(-1) == 1 and known and total % known == 0:
        return tuple(total // known if one == -1 else int(one) for one in sizes)
    if -1 in sizes or known != total:
        return None
    return tuple(int(one) for one in sizes)
