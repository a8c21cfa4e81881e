"""The reader against safetensors' own, and against files that are damaged in every way we know."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from pilotage.core.errors import BadInput, PilotageError, WeightError
from pilotage.weights import lazy
from pilotage.weights.lazy import SafetensorsFile

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (0, 4), (5, 3), (4, 3, 2)])
def test_whole_tensors_come_back_bit_by_bit(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    save_file({"x": tensor, "other": torch.ones(3)}, tmp_path / "m.safetensors")
    found = SafetensorsFile(tmp_path / "m.safetensors").tensors["x"]
    assert found.get_shape() == list(shape) and found.dtype == dtype
    read = found[()] if shape == () else found[:]
    assert read.dtype == dtype and read.shape == tensor.shape and bits(read) == bits(tensor)


def test_nan_and_negative_zero_keep_their_bits(tmp_path: Path) -> None:
    tensor = torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.bfloat16)
    save_file({"x": tensor}, tmp_path / "m.safetensors")
    assert bits(SafetensorsFile(tmp_path / "m.safetensors").tensors["x"][:]) == bits(tensor)


bound = st.one_of(st.none(), st.integers(-8, 8))
ranges = st.builds(slice, bound, bound)
indices = st.one_of(
    ranges, st.integers(-5, 4), st.tuples(ranges, ranges), st.tuples(ranges, ranges, ranges),
    st.tuples(ranges, st.just(1)), st.just(Ellipsis), st.tuples(st.just(Ellipsis), st.just(0)),
    st.builds(slice, bound, bound, st.integers(1, 3)),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(index=indices, block=st.sampled_from([1, 64, 1 << 20]))
def test_every_index_reads_what_a_tensor_gives(
    tmp_path_factory: pytest.TempPathFactory, index: Any, block: int
) -> None:
    tensor = torch.arange(5 * 6 * 3).view(5, 6, 3)
    path = tmp_path_factory.mktemp("lazy") / "m.safetensors"
    save_file({"x": tensor}, path)
    file = SafetensorsFile(path)
    original = lazy._BLOCK_BYTES
    lazy._BLOCK_BYTES = block  # columns are cut out block by block; one row a block is the hard case
    try:
        read = file.tensors["x"][index]
    finally:
        lazy._BLOCK_BYTES = original
    assert torch.equal(read, tensor[index])
    # The result must not keep a larger read alive.
    assert read.untyped_storage().nbytes() == read.numel() * read.element_size()


def test_rows_read_their_own_bytes_only(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(100, 10), "b": torch.zeros(100, 10)}, tmp_path / "m.safetensors")
    file = SafetensorsFile(tmp_path / "m.safetensors")
    assert file.bytes_read == 0
    _ = file.tensors["b"][10:20]
    assert file.bytes_read == 10 * 10 * 4


def write_raw(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize("keep", [0, 4, 8, 40, -40, -1])
def test_a_file_cut_anywhere_is_refused_by_name(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "cut.safetensors"
    save_file({"first": torch.ones(4), "second": torch.ones(8)}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadInput, match=r"cut\.safetensors.*(truncated|not a safetensors file)") as caught:
        SafetensorsFile(path)
    if keep == -1:
        assert "second" in str(caught.value)


entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DAMAGED = {
    "not JSON": (b"{nonsense", 8, "damaged"),
    "a list": ([], 8, "damaged"),
    "no shape": ({"x": {"dtype": "F32", "data_offsets": [0, 8]}}, 8, "x"),
    "text offsets": ({"x": {**entry, "data_offsets": ["a", 8]}}, 8, "x"),
    "negative shape": ({"x": {**entry, "shape": [-2]}}, 8, "x"),
    "too few bytes for the shape": ({"x": {**entry, "shape": [3]}}, 8, "x"),
    "a hole": ({"x": {**entry, "data_offsets": [4, 12]}}, 12, "x"),
    "an overlap": ({"x": entry, "y": {**entry, "data_offsets": [4, 12]}}, 12, "y"),
    "bytes left over": ({"x": entry}, 12, "after its last tensor"),
    "unknown dtype": ({"x": {**entry, "dtype": "F4"}}, 8, "F4"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path, case: str) -> None:
    header, size, named = DAMAGED[case]
    path = tmp_path / "damaged.safetensors"
    write_raw(path, header, bytes(size))
    with pytest.raises(PilotageError) as caught:
        SafetensorsFile(path)
    assert isinstance(caught.value, BadInput | WeightError)
    assert "damaged.safetensors" in str(caught.value) and named in str(caught.value)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"x": torch.ones(1000)}, path)
    file = SafetensorsFile(path)
    with open(path, "r+b") as handle:
        handle.truncate(500)
    with pytest.raises(BadInput, match="became shorter"):
        _ = file.tensors["x"][:]
