"""Tensors that stay on disk: the safetensors format, read by byte range."""

from __future__ import annotations

import json
import math
import os
import struct
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pilotage.core.errors import BadInput, WeightError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
# Columns are cut out of whole rows, a block of rows at a time.
_BLOCK_BYTES = 4 << 20


class SafetensorsFile:
    """One .safetensors file: header checked on opening, data read on demand. Safe to read from several threads.

    Attributes:
        path: the file.
        tensors: name -> `LazyTensor`, in the order of the data.
        bytes_read: bytes of tensor data read so far.

    Raises:
        BadInput: not a safetensors file, cut short, or with a header that contradicts itself; names the first tensor
            concerned.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        self._lock = threading.Lock()
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise BadInput(f"cannot be read ({error.strerror})", where=str(path)) from error
        size = os.fstat(self._descriptor).st_size
        header, self._data_start = self._read_header(size)
        self.tensors: dict[str, LazyTensor] = {}
        end = 0
        entries = sorted(((name, entry) for name, entry in header.items()), key=lambda item: _offsets(item[1]))
        for name, entry in entries:
            tensor = self._tensor(name, entry)
            if tensor.start != end:
                raise BadInput(
                    f"the data of {name} starts at byte {tensor.start}, the tensor before it ends at {end}",
                    where=str(path),
                    do="fetch the file again",
                )
            end = tensor.start + tensor.nbytes
            if self._data_start + end > size:
                raise BadInput(
                    f"the file is truncated: {size} bytes, and {name} ends at byte {self._data_start + end}",
                    where=str(path),
                    do="fetch the file again",
                )
            self.tensors[name] = tensor
        if self._data_start + end != size:
            raise BadInput(
                f"the file has {size - self._data_start - end} bytes after its last tensor",
                where=str(path),
                do="fetch the file again",
            )

    def __del__(self) -> None:
        descriptor = getattr(self, "_descriptor", None)
        if descriptor is not None:
            os.close(descriptor)

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill `buffer` with the data bytes from `start` on.

        Raises:
            BadInput: the file ends before (it was changed after it was opened), or cannot be read.
        """
        filled = 0
        while filled < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[filled:]], self._data_start + start + filled)
            except OSError as error:
                raise BadInput(f"cannot be read ({error.strerror})", where=str(self.path)) from error
            if count == 0:
                raise BadInput("the file became shorter while it was read", where=str(self.path), do="fetch it again")
            filled += count
        with self._lock:
            self.bytes_read += filled

    def _read_header(self, size: int) -> tuple[dict[str, Any], int]:
        damaged = "not a safetensors file, or its header is damaged"
        prefix = os.pread(self._descriptor, 8, 0)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else None
        if length is None or length > _MAX_HEADER_BYTES:
            raise BadInput(damaged, where=str(self.path), do="fetch the file again")
        if 8 + length > size:
            raise BadInput(
                f"the file is truncated inside its header: {size} bytes of at least {8 + length}",
                where=str(self.path),
                do="fetch the file again",
            )
        try:
            header = json.loads(os.pread(self._descriptor, length, 8))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise BadInput(f"{damaged} ({error})", where=str(self.path), do="fetch the file again") from error
        if not isinstance(header, dict):
            raise BadInput(damaged, where=str(self.path), do="fetch the file again")
        header.pop("__metadata__", None)
        return header, 8 + length

    def _tensor(self, name: str, entry: Any) -> LazyTensor:
        try:
            shape = tuple(int(size) for size in entry["shape"])
            start, end = (int(offset) for offset in entry["data_offsets"])
            dtype_name = entry["dtype"]
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(
                f"the header's entry of {name} is damaged ({error!r})", where=str(self.path), do="fetch the file again"
            ) from error
        if dtype_name not in _DTYPES:
            raise WeightError(
                f"its dtype {dtype_name} cannot be read", where=f"{name} in {self.path}", do="convert the checkpoint"
            )
        tensor = LazyTensor(self, name, shape, _DTYPES[dtype_name], dtype_name, start)
        if min(shape, default=0) < 0 or end - start != tensor.nbytes:
            raise BadInput(
                f"the header gives {name} {end - start} bytes, {list(shape)} in {dtype_name} needs {tensor.nbytes}",
                where=str(self.path),
                do="fetch the file again",
            )
        return tensor


class LazyTensor:
    """A tensor on disk; indexing reads the part asked for.

    Attributes:
        file: where it is.
        name: its name in the checkpoint.
        shape: of the whole tensor.
        dtype: torch dtype.
        dtype_name: as the file spells it, e.g. "BF16".
        start: first byte within the file's data.
    """

    def __init__(
        self, file: SafetensorsFile, name: str, shape: tuple[int, ...], dtype: torch.dtype, dtype_name: str, start: int
    ) -> None:
        self.file, self.name, self.shape = file, name, shape
        self.dtype, self.dtype_name, self.start = dtype, dtype_name, start

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def get_shape(self) -> list[int]:
        """Return the shape as a list, as safetensors' own slices do."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return the dtype as the file spells it, e.g. "BF16"."""
        return self.dtype_name

    def __getitem__(self, index: Any) -> Tensor:
        """Read the part at `index`: anything that indexes a tensor; the result owns its memory.

        Ranges of the first two dimensions are cut while reading: rows read their own bytes only, columns pass whole
        rows through a small buffer. What else the index says is applied to that part.
        """
        if not self.shape and index == slice(None):
            return self._read(0, 1).clone()  # all of a scalar
        items = index if isinstance(index, tuple) else (index,)
        simple = len(items) <= len(self.shape) and all(isinstance(item, int | slice) for item in items)
        if not simple or not items or not _is_range(items[0]):
            return self._read(0, self.shape[0] if self.shape else 1)[index].clone()
        start, stop, _ = items[0].indices(self.shape[0])
        rest = items[1:]
        if rest and _is_range(rest[0]):
            first, last, _ = rest[0].indices(self.shape[1])
            part = self._read_columns(start, max(start, stop), first, max(first, last))
            rest = (slice(None), *rest[1:])
        else:
            part = self._read(start, max(start, stop))
        whole = all(item == slice(None) for item in rest)
        return part if whole else part[(slice(None), *rest)].clone()

    def _read(self, start: int, stop: int) -> Tensor:
        """Read rows [start, stop) of the first dimension; a scalar counts as one row."""
        shape = (stop - start, *self.shape[1:]) if self.shape else ()
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        storage = torch.empty(math.prod(shape) * self.dtype.itemsize, dtype=torch.uint8)
        self.file.read_into(storage.numpy().data, self.start + start * row_bytes)
        return storage.view(self.dtype).view(shape)

    def _read_columns(self, start: int, stop: int, first: int, last: int) -> Tensor:
        """Read [start, stop) x [first, last) of the first two dimensions."""
        if (first, last) == (0, self.shape[1]):
            return self._read(start, stop)
        part = torch.empty((stop - start, last - first, *self.shape[2:]), dtype=self.dtype)
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        rows = max(1, _BLOCK_BYTES // max(1, row_bytes))
        for row in range(start, stop, rows):
            end = min(row + rows, stop)
            part[row - start : end - start] = self._read(row, end)[:, first:last]
        return part


def _is_range(item: object) -> bool:
    return isinstance(item, slice) and item.step in (None, 1)


def _offsets(entry: Any) -> tuple[int, int]:
    """Sort key: damaged entries come first and are refused when they are parsed."""
    try:
        start, end = entry["data_offsets"]
        return int(start), int(end)
    except (KeyError, TypeError, ValueError):
        return -1, -1
