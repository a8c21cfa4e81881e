"""The functions of `nki.language` that are no operators, against values worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nki_tiles import got, hbm, tile

from pilotage.kernels.nki import NkiValidationError
from pilotage.kernels.nki import language as nl


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sum", [[8], [-6]]),
        ("max", [[5], [-1]]),
        ("min", [[1], [-3]]),
        ("prod", [[10], [-6]]),
        ("mean", [[8 / 3], [-2]]),
        ("var", [[((1 - 8 / 3) ** 2 + (2 - 8 / 3) ** 2 + (5 - 8 / 3) ** 2) / 3], [2 / 3]]),
        ("all", [[1], [1]]),
    ],
)
def test_reductions(name: str, expected: list[Any]) -> None:
    assert np.allclose(got(getattr(nl, name)(tile([[1, 2, 5], [-1, -2, -3]]), axis=1)), expected, rtol=1e-6)


def test_reductions_of_several_dimensions_and_of_part_of_them() -> None:
    cube = tile([[[1, 2], [3, 4]]])
    assert got(nl.sum(cube, axis=(1, 2))) == [[10]]
    assert got(nl.sum(cube, axis=[2])) == [[3, 7]]
    assert nl.max(cube, axis=-1, keepdims=True).shape == (1, 2, 1)
    assert got(nl.all(tile([[1, 0], [2, 3]]), axis=1)) == [[0], [1]]
    with pytest.raises(NkiValidationError, match="up to the very last"):
        nl.sum(cube, axis=1)
    with pytest.raises(NkiValidationError, match="reduce the last free dimensions"):
        nl.sum(cube, axis=0)


def test_softmax_and_rms_norm() -> None:
    assert np.allclose(got(nl.softmax(tile([[0, math.log(3)]]))), [[0.25, 0.75]], rtol=1e-6)
    assert np.allclose(got(nl.softmax(tile([[1e4, 1e4]]))), [[0.5, 0.5]])
    normed = nl.rms_norm(tile([[3, 4]]), tile([[2, 1]]), axis=1, n=2, epsilon=0.0)
    assert np.allclose(got(normed), [[6 / math.sqrt(12.5), 4 / math.sqrt(12.5)]], rtol=1e-6)


def test_matmul_and_transpose() -> None:
    a, b = tile([[1, 2], [3, 4]]), tile([[10, 20], [30, 40]])
    assert got(nl.matmul(a, b)) == [[70, 100], [150, 220]]
    assert got(nl.matmul(a, b, transpose_x=True)) == [[100, 140], [140, 200]]
    turned = nl.transpose(tile([[1, 2, 3]]))
    assert turned.shape == (3, 1) and turned.buffer is nl.psum and got(turned) == [[1], [2], [3]]


def test_choosing_and_shaping() -> None:
    assert got(nl.where(tile([[1, 0, 2]]), tile([[1, 2, 3]]), -1.0)) == [[1, -1, 3]]
    assert got(nl.gather_flattened(tile([[1, 2, 3]]), tile([[2, 0, 2, 1]], nl.uint32))) == [[3, 1, 3, 2]]
    with pytest.raises(NkiValidationError, match="out of range"):
        nl.gather_flattened(tile([[1, 2]]), tile([[2]], nl.uint32))
    assert nl.expand_dims(tile([[1, 2]]), 1).shape == (1, 1, 2)
    assert got(nl.broadcast_to(tile([[1], [2]]), (2, 2))) == [[1, 1], [2, 2]]
    assert got(nl.dropout(tile([[1, 2]]), 0.0)) == [[1, 2]]


def test_operators_of_tiles_and_constants() -> None:
    assert got(nl.add(tile([[1, 2]]), tile([[3, 4]]))) == [[4, 6]]
    assert got(nl.multiply(tile([[1, 2]]), 3)) == [[3, 6]]
    assert got(nl.maximum(tile([[1], [5]]), tile([[2, 3], [4, 9]]))) == [[2, 3], [5, 9]]
    with pytest.raises(NkiValidationError, match="load it into SBUF first"):
        nl.add(hbm([[1, 2]]), 1)
    with pytest.raises(NkiValidationError, match="do not broadcast"):
        nl.add(tile([[1, 2]]), tile([[1, 2, 3]]))


def test_making() -> None:
    assert np.isnan(got(nl.ndarray((1, 2), nl.float32))).all() and got(nl.ndarray((1, 2), nl.int32)) == [[4, 4]]
    assert got(nl.zeros((1, 2), nl.bfloat16)) == [[0, 0]] and got(nl.ones((1, 2), nl.int8)) == [[1, 1]]
    like = nl.zeros_like(tile([[1, 2]]))
    assert got(like) == [[0, 0]] and like.dtype == nl.float32
    assert np.isnan(got(nl.empty_like(like))).all()
    assert got(nl.shared_identity_matrix(2)) == [[1, 0], [0, 1]]
    constant = nl.shared_constant(np.array([[1.5, 2.0]], np.float32), nl.bfloat16)
    assert constant.buffer is nl.shared_hbm and got(constant) == [[1.5, 2.0]]
    nl.random_seed(tile([[3]], nl.uint32))
    first = got(nl.rand((1, 8), nl.float32))
    nl.random_seed(tile([[3]], nl.uint32))
    assert got(nl.rand((1, 8), nl.float32)) == first and min(first[0]) >= 0 and max(first[0]) < 1


def test_a_constant_from_a_file(tmp_path: Path) -> None:
    np.save(tmp_path / "constant.npy", np.array([[7, 8]], np.int32))
    assert got(nl.shared_constant(str(tmp_path / "constant.npy"))) == [[7, 8]]


def test_loads_and_stores() -> None:
    there = hbm([[1, 2, 3], [4, 5, 6]])
    here = nl.load(there[:, 1:3], dtype=nl.bfloat16)
    assert here.buffer is nl.sbuf and here.dtype == nl.bfloat16 and got(here) == [[2, 3], [5, 6]]
    assert got(nl.load_transpose2d(there)) == [[1, 4], [2, 5], [3, 6]]
    nl.store(there[0:1, 0:2], tile([[8, 9]]))
    nl.store(there[1:2, :], 0.0)
    assert got(there) == [[8, 9, 3], [0, 0, 0]]
    mask = np.array([[True, False, True]])
    nl.store(there[0:1, :], tile([[1, 1, 1]]), mask=mask)
    assert got(there)[0] == [1, 9, 1]


def test_loops() -> None:
    assert [list(loop(1, 6, 2)) for loop in (nl.affine_range, nl.sequential_range, nl.static_range)] == [[1, 3, 5]] * 3
    assert [int(at) for at in nl.dynamic_range(2, 5)] == [2, 3, 4]
    seen: list[int] = []
    nl.fori_loop(0, 3, lambda at: seen.append(int(at)))
    assert seen == [0, 1, 2]
    with pytest.raises(NkiValidationError, match="returns a value"):
        nl.fori_loop(0, 1, lambda at: at)  # type: ignore[arg-type, return-value]
    left: list[int] = []

    def halved(value: nl.VirtualRegister) -> nl.VirtualRegister:
        left.append(int(value))
        return nl.VirtualRegister(int(value) // 2)

    nl.while_loop(nl.VirtualRegister(5), halved)
    assert left == [5, 2, 1]


def test_where_things_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert [nl.is_sbuf(nl.sbuf), nl.is_psum(nl.sbuf), nl.is_hbm(nl.shared_hbm), nl.is_on_chip(nl.psum)] == [
        True,
        False,
        True,
        True,
    ]
    assert (nl.program_id(), nl.num_programs(), nl.program_ndim()) == (0, 1, 0)
    with nl.no_reorder():
        nl.device_print("it holds", tile([[1.5]]))
    assert capsys.readouterr().out == "it holds [[1.5]]\n"
