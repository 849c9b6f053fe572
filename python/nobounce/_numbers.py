"""Lists of numbers as 64-bit words, without a loop for numpy arrays."""

from __future__ import annotations

import array
from collections.abc import Iterable, Sequence
from typing import Any

from .errors import ListError


def words(numbers: Any) -> tuple[tuple[int, int], object]:
    """((address, count), what holds them)."""
    if hasattr(numbers, "__array_interface__"):
        return _of_numpy(numbers)
    if hasattr(numbers, "tolist"):  # a tensor
        numbers = numbers.tolist()
    try:
        held = array.array("Q", numbers)
    except (OverflowError, TypeError) as error:
        raise ListError(f"page numbers and offsets are whole numbers from 0 on: {error}") from None
    return held.buffer_info(), held


def check_words(*numbers: int | None) -> None:
    """Sizes, strides, offsets and repetitions; None is a default."""
    for number in numbers:
        if number is not None and not 0 <= number < 1 << 64:
            raise ListError(f"{number}: sizes, strides, offsets and repetitions are whole numbers from 0 to 2**64 - 1")


def _of_numpy(numbers: Any) -> tuple[tuple[int, int], object]:
    described = numbers.__array_interface__
    if described["typestr"][1] not in "iu":
        raise ListError(f"an index array of type {described['typestr']}: expected integers")
    if described["typestr"] not in ("<i8", "<u8") or described.get("strides") is not None or described["data"][0] % 8:
        numbers = numbers.astype("<i8", order="C", casting="same_kind" if described["typestr"][1] == "i" else "unsafe")
        described = numbers.__array_interface__
    count = 1
    for size in described["shape"]:
        count *= size
    # Negative numbers become large ones, which are not inside any memory.
    return (described["data"][0], count), numbers


def flattened(pieces: Any) -> tuple[tuple[int, int], object]:
    """(local, remote, bytes) of each piece, one after the other."""
    if hasattr(pieces, "__array_interface__"):
        shape = pieces.__array_interface__["shape"]
        if len(shape) != 2 or shape[1] != 3:
            raise ListError(f"an array of shape {shape}: expected one row of (local offset, remote offset, bytes) for each piece")
        return words(pieces)
    flat = [number for piece in _triples(pieces) for number in piece]
    return words(flat)


def _triples(pieces: Iterable[Sequence[int]]) -> Iterable[Sequence[int]]:
    for piece in pieces:
        if len(piece) != 3:
            raise ListError(f"a piece of {len(piece)} numbers: expected (local offset, remote offset, bytes)")
        yield piece
