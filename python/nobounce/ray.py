"""A tensor transport for Ray: tensors of an actor are read by the actor that needs them, from its memory into new tensors.

    import nobounce.ray
    nobounce.ray.register()                       # before a class names it

    @ray.remote
    class Actor:
        @ray.method(tensor_transport="nobounce")
        def make(self): ...

Ray calls the interface alpha; tried with Ray 2.60. Without NOBOUNCE_ADDR, actors of one machine reach each other.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from typing import Any

from ray.experimental import register_tensor_transport
from ray.experimental.rdt.tensor_transport_manager import CommunicatorMetadata, TensorTransportManager, TensorTransportMetadata

from ._agent import Agent, Peer, Transfer
from .errors import Cancelled

NAME = "NOBOUNCE"
#: Seconds for one object.
TIMEOUT = 300.0
#: Objects that were aborted before they began, and objects that ended.
MAX_REMEMBERED = 4096


@dataclass
class Metadata(TensorTransportMetadata):  # type: ignore[misc]
    """What the reader needs: the agent of the source, and its regions of this object."""

    agent: bytes = b""
    source: tuple[str, int] = ("", 0)
    names: tuple[str, ...] = ()


class Transport(TensorTransportManager):  # type: ignore[misc]
    """One agent for each process, opened at its first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: Agent | None = None
        self._peers: dict[tuple[str, int], Peer] = {}
        self._running: dict[str, list[Transfer]] = {}
        #: Objects whose transfer was aborted before it began, since when; and those that ended.
        self._aborted: dict[str, float] = {}
        self._ended: dict[str, None] = {}

    @property
    def _agent(self) -> Agent:
        with self._lock:
            if self._opened is None:
                host = "0.0.0.0" if "NOBOUNCE_ADDR" in os.environ else "127.0.0.1"
                self._opened = Agent(f"ray-{socket.gethostname()}-{uuid.uuid4()}", listen=f"{host}:0")
            return self._opened

    def tensor_transport_backend(self) -> str:
        return NAME

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        def opens(_: object) -> bool:
            import nobounce
            return bool(nobounce.__version__)

        import ray
        return bool(ray.get(actor.__ray_call__.options(concurrency_group="_ray_system").remote(opens)))

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> Metadata:
        agent, shapes, device, names = self._agent, [], None, []
        _, before = agent.metadata_since(0)
        for at, tensor in enumerate(rdt_object):
            if device is not None and tensor.device.type != device:
                raise ValueError("all tensors of an object must be on one type of device")
            device = tensor.device.type
            shapes.append((tensor.shape, tensor.dtype))
            if tensor.numel() > 0:
                names.append(f"{obj_id}/{at}")
                agent.export(names[-1], tensor.contiguous() if not tensor.is_contiguous() else tensor)
            else:
                names.append("")
        if device == "cuda":
            # Readers come without the streams of this process.
            import torch
            torch.cuda.synchronize()
        new, _ = agent.metadata_since(before)
        return Metadata(tensor_meta=shapes, tensor_device=device, agent=new, source=(agent.name, agent.generation), names=tuple(names))

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> CommunicatorMetadata:
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self, obj_id: str, tensor_transport_metadata: Metadata, communicator_metadata: CommunicatorMetadata, target_buffers: list[Any] | None = None,
    ) -> list[Any]:
        import torch
        metadata = tensor_transport_metadata
        tensors = target_buffers or [torch.empty(shape, dtype=dtype, device=metadata.tensor_device) for shape, dtype in metadata.tensor_meta]
        if metadata.tensor_device == "cuda":
            torch.cuda.synchronize()
        peer = self._peer(metadata)
        regions = [(tensor, peer.region(name, TIMEOUT)) for name, tensor in zip(metadata.names, tensors) if name]
        with self._lock:
            self._ended.pop(obj_id, None)
            since = self._aborted.pop(obj_id, None)
            if since is not None and time.monotonic() < since + TIMEOUT:
                raise Cancelled(f"the transfer of {obj_id} was aborted")
            transfers = self._running[obj_id] = [peer.read(tensor, region) for tensor, region in regions]
        try:
            for transfer in transfers:
                transfer.wait(TIMEOUT)
        finally:
            with self._lock:
                self._running.pop(obj_id, None)
                self._aborted.pop(obj_id, None)
                _remember(self._ended, obj_id, None)
        return tensors

    def _peer(self, metadata: Metadata) -> Peer:
        agent = self._agent
        with self._lock:
            known = self._peers.get(metadata.source)
            if known is None or known.gone is not None:
                known = self._peers[metadata.source] = agent.connect(metadata.agent)
            else:
                known.add_metadata(metadata.agent)
            return known

    def send_multiple_tensors(self, tensors: list[Any], tensor_transport_metadata: Metadata, communicator_metadata: CommunicatorMetadata) -> None:
        raise NotImplementedError("readers read by themselves")

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Metadata, tensors: list[Any]) -> None:
        for name in tensor_transport_meta.names:
            self._agent.withdraw(name)

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        with self._lock:
            running = self._running.get(obj_id)
            # A late one must not end a later transfer of the object.
            if running is None and obj_id not in self._ended:
                _remember(self._aborted, obj_id, time.monotonic())
            for transfer in running or ():
                transfer.cancel()


def _remember(objects: dict[str, Any], obj_id: str, value: Any) -> None:
    objects[obj_id] = value
    while len(objects) > MAX_REMEMBERED:
        del objects[next(iter(objects))]


def register() -> None:
    """Makes the transport known to Ray, as "nobounce"."""
    import torch
    register_tensor_transport(NAME, ["cuda", "cpu"], Transport, torch.Tensor)
