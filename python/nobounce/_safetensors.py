"""Tensors of safetensors files, whose bytes go straight into the memory of a GPU or the host."""

from __future__ import annotations

import json
import math
import os
import struct
from typing import Any, Literal

from ._files import Files, read_file
from .errors import FileError

#: Longest header that the format allows.
_MAX_HEADER = 100_000_000

# Names of types in torch and numpy, and bytes of an item.
_TYPES = {
    "F64": ("float64", "float64", 8), "F32": ("float32", "float32", 4), "F16": ("float16", "float16", 2), "BF16": ("bfloat16", None, 2),
    "I64": ("int64", "int64", 8), "I32": ("int32", "int32", 4), "I16": ("int16", "int16", 2), "I8": ("int8", "int8", 1),
    "U64": ("uint64", "uint64", 8), "U32": ("uint32", "uint32", 4), "U16": ("uint16", "uint16", 2), "U8": ("uint8", "uint8", 1),
    "BOOL": ("bool", "bool", 1), "C64": ("complex64", "complex64", 8), "F8_E8M0": ("float8_e8m0fnu", None, 1),
    "F8_E4M3": ("float8_e4m3fn", None, 1), "F8_E4M3FNUZ": ("float8_e4m3fnuz", None, 1), "F8_E5M2": ("float8_e5m2", None, 1), "F8_E5M2FNUZ": ("float8_e5m2fnuz", None, 1),
}


def load_safetensors(path: str | os.PathLike[str], device: str = "cpu", *, framework: Literal["torch", "numpy"] = "torch", require: Literal["direct"] | None = None) -> dict[str, Any]:
    """The tensors of a file, by name. `path` is local, or "nb://host:port/file" of a file server.

    All tensors share one allocation on `device`: it is freed when the last of them is gone. require="direct": NotDirect is raised
    if bytes for a GPU would be staged.
    """
    path = os.fspath(path)
    if path.startswith("nb://"):
        address, _, name = path.removeprefix("nb://").partition("/")
        with Files(address) as files:

            def remote(array: Any, offset: int) -> None:
                files.read(array, name, offset, require=require if not isinstance(array, bytearray) else None).wait()

            return _load(path, files.stat(name), remote, device, framework)

    def local(array: Any, offset: int) -> None:
        # The header is in host memory, which has no window.
        read_file(array, path, offset, require=require if not isinstance(array, bytearray) else None)

    return _load(path, _size_of(path), local, device, framework)


def _whole(number: Any) -> int:
    if type(number) is not int:
        raise TypeError(f"{number!r} is no number of items")
    return number


def _size_of(path: str) -> int:
    try:
        with open(path, "rb") as file:
            return file.seek(0, 2)
    except OSError as error:
        raise FileError(f"cannot open {path}: {error}") from None


def _load(path: str, size: int, read: Any, device: str, framework: str) -> dict[str, Any]:
    def wrong(what: str) -> FileError:
        return FileError(f"{path} is no safetensors file: {what}")

    if size < 8:
        raise wrong(f"it has {size} bytes")
    prefix = bytearray(8)
    read(prefix, 0)
    (length,) = struct.unpack("<Q", prefix)
    if length > min(size - 8, _MAX_HEADER):
        raise wrong(f"its header of {length} bytes is longer than the file or the limit of the format")
    header = bytearray(length)
    if length:
        read(header, 8)
    try:
        described = json.loads(header)
        tensors = [(name, _TYPES[item["dtype"]], tuple(map(_whole, item["shape"])), *map(_whole, item["data_offsets"])) for name, item in described.items() if name != "__metadata__"]
    except KeyError as error:
        raise wrong(f"its header has no {error}, or a type that is not known") from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise wrong(f"its header cannot be understood ({error})") from None
    total = size - 8 - length
    for name, (_, _, item), shape, begin, end in tensors:
        if not 0 <= begin <= end <= total or end - begin != math.prod(shape) * item or min(shape, default=0) < 0:
            raise wrong(f"tensor {name!r} of shape {shape} has bytes {begin} to {end} of {total}")
    at = 0
    for name, _, _, begin, end in sorted(tensors, key=lambda tensor: tensor[3:]):
        if begin != at:
            raise wrong(f"tensor {name!r} begins at byte {begin}, where {at} is expected: no gaps, no overlaps")
        at = end
    if at != total:
        raise wrong(f"its tensors have {at} bytes of {total}")
    return _tensors(tensors, total, lambda data: read(data, 8 + length) if total else None, device, framework)


def _tensors(tensors: list[Any], total: int, fill: Any, device: str, framework: str) -> dict[str, Any]:
    if framework == "numpy":
        import numpy

        if device != "cpu":
            raise ValueError(f"device={device!r}: numpy has host memory only")
        data = numpy.empty(total, "u1")
        fill(data)
        found = {}
        for name, (torch_name, numpy_name, _), shape, begin, end in tensors:
            if numpy_name is None:
                raise FileError(f"tensor {name!r} is {torch_name}, which numpy has not: load it with framework=\"torch\"")
            found[name] = numpy.frombuffer(data.data[begin:end], numpy_name).reshape(shape)
        return found
    import torch

    data = torch.empty(total, dtype=torch.uint8, device=device)
    fill(data)
    found = {}
    for name, (torch_name, _, item), shape, begin, end in tensors:
        part = data[begin:end]
        # A view of a type needs its alignment; the format does not promise one.
        if begin % item:
            part = part.clone()
        found[name] = part.view(getattr(torch, torch_name)).reshape(shape)
    return found
