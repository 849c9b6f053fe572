"""Paged KV caches: block tables in, pages out, also between caches with different heads.

A cache is one array for each layer (or one array of all layers), contiguous, with a dimension for blocks and one for heads:
(2, blocks, tokens, heads, dim), (blocks, heads, tokens, dim), (layers, 2, blocks, tokens, heads, dim), ...

    cache = kv.Cache(agent, layers, block_axis=1, head_axis=3)
    cache.export("kv")                                              # on the decoding side

    remote = kv.RemoteCache(peer, "kv")                             # on the prefilling side
    cache.write(remote, blocks, their_blocks, tag=b"request 1").wait(5)
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ._addresses import bytes_of
from ._agent import Agent, Announcement, Memory, Peer, Remote, Transfer
from .errors import ListError

_GEOMETRY = "geometry"
_MAX_GEOMETRY = 4096
_MAX_LAYERS = 4096


@dataclass(frozen=True)
class Geometry:
    """How blocks and heads lie in the array of each layer."""

    layers: int
    #: Repetitions outside of the blocks (keys and values, or layers), blocks, rows of heads in a block, heads, bytes of a head in a row.
    outer: int
    blocks: int
    rows: int
    heads: int
    head_bytes: int
    #: The first head of this cache among all heads of the model.
    first_head: int = 0

    @property
    def row_bytes(self) -> int:
        return self.heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of one layer."""
        return self.outer * self.blocks * self.block_bytes

    @staticmethod
    def of(layers: int, shape: Sequence[int], itemsize: int, block_axis: int, head_axis: int, first_head: int = 0) -> "Geometry":
        """The geometry of contiguous arrays of this shape."""
        if not 0 <= block_axis < head_axis < len(shape):
            raise ListError(f"block axis {block_axis} and head axis {head_axis} of shape {tuple(shape)}: expected blocks before heads")
        return Geometry(
            layers, math.prod(shape[:block_axis]), shape[block_axis], math.prod(shape[block_axis + 1:head_axis]), shape[head_axis],
            math.prod(shape[head_axis + 1:]) * itemsize, first_head)


class RemoteCache:
    """A cache that a peer exports."""

    def __init__(self, peer: Peer, name: str, timeout: float | None = 10.0) -> None:
        described = peer.region(f"{name}/{_GEOMETRY}", timeout)
        if described.nbytes > _MAX_GEOMETRY:
            raise ListError(f"peer {peer.name} describes cache {name!r} in {described.nbytes} bytes: that is no cache of nobounce.kv")
        text = bytearray(described.nbytes)
        peer.read(text, described).wait(timeout)
        self.peer, self.name = peer, name
        try:
            self.geometry = Geometry(**json.loads(text))
        except (TypeError, ValueError):
            raise ListError(f"peer {peer.name} describes cache {name!r} in another way: use the same nobounce") from None
        if not 0 < self.geometry.layers <= _MAX_LAYERS:
            raise ListError(f"a cache of {self.geometry.layers} layers")
        self.regions: list[Remote] = [peer.region(f"{name}/{layer}", timeout) for layer in range(self.geometry.layers)]


class Cache:
    """A paged cache of this process.

    first_head: the first head that it holds, where the heads of a model are split over several caches.
    """

    def __init__(self, agent: Agent, layers: Any, *, block_axis: int, head_axis: int, first_head: int = 0) -> None:
        self.arrays: list[Any] = list(layers) if isinstance(layers, (list, tuple)) else [layers]
        shape = tuple(self.arrays[0].shape)
        nbytes = bytes_of(self.arrays[0]).nbytes
        if any(tuple(array.shape) != shape or bytes_of(array).nbytes != nbytes for array in self.arrays):
            raise ListError("the arrays of all layers must be alike")
        self.agent = agent
        self.geometry = Geometry.of(len(self.arrays), shape, nbytes // math.prod(shape), block_axis, head_axis, first_head)
        self.memory: list[Memory] = [agent.register(array) for array in self.arrays]
        self._described = bytearray(json.dumps(asdict(self.geometry)).encode())

    def export(self, name: str) -> None:
        """Lets peers write and read its blocks, by this name."""
        for layer, memory in enumerate(self.memory):
            self.agent.export(f"{name}/{layer}", memory)
        self.agent.export(f"{name}/{_GEOMETRY}", self._described)

    def write(self, remote: RemoteCache, blocks: Any, their_blocks: Any, **options: Any) -> Transfer:
        """Writes blocks of all layers to blocks of the peer's cache: the heads that both of them hold.

        Options: layers, a range [all]; tag, announcement, after, as for `Peer.write_pages`.
        """
        return self._move(remote, blocks, their_blocks, is_read=False, **options)

    def read(self, remote: RemoteCache, blocks: Any, their_blocks: Any, **options: Any) -> Transfer:
        """Reads blocks of the peer's cache into blocks of this one; options as for `write`."""
        return self._move(remote, blocks, their_blocks, is_read=True, **options)

    def _move(
        self, remote: RemoteCache, blocks: Any, their_blocks: Any, *, is_read: bool, layers: range | None = None,
        tag: bytes | None = None, announcement: Announcement | None = None, after: Any = None,
    ) -> Transfer:
        here, there = self.geometry, remote.geometry
        if (here.layers, here.outer, here.rows, here.head_bytes) != (there.layers, there.outer, there.rows, there.head_bytes):
            raise ListError(f"caches of different models or layouts: {here} here, {there} at peer {remote.peer.name}")
        first = max(here.first_head, there.first_head)
        count = min(here.first_head + here.heads, there.first_head + there.heads) - first
        if count <= 0:
            raise ListError(f"no head is in both caches: {here} here, {there} at peer {remote.peer.name}")
        chosen = range(here.layers) if layers is None else layers
        move = remote.peer.read_pages if is_read else remote.peer.write_pages
        return move(
            [self.memory[layer] for layer in chosen], blocks, [remote.regions[layer] for layer in chosen], their_blocks, count * here.head_bytes,
            local_stride=here.block_bytes, remote_stride=there.block_bytes,
            local_offset=(first - here.first_head) * here.head_bytes, remote_offset=(first - there.first_head) * there.head_bytes,
            repeats=[
                (here.outer, here.blocks * here.block_bytes, there.blocks * there.block_bytes),
                (here.rows, here.row_bytes, there.row_bytes),
            ],
            tag=tag, announcement=announcement, after=after)
