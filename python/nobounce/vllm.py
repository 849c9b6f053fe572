"""A KV connector for vLLM: decode workers read the blocks of a prompt from the caches of prefill workers.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "Connector", "kv_connector_module_path": "nobounce.vllm",
        "kv_role": "kv_both", "kv_connector_extra_config": {"host": "10.0.0.7", "port": 9400}}'

`host` is the address that other workers reach (with NOBOUNCE_ADDR=eth0), `port` that of the first worker; worker n of a tensor
parallel group listens at port + n. A proxy runs each prompt on a prefill instance with kv_transfer_params
{"do_remote_decode": true} and max_tokens 1, and hands the kv_transfer_params of the answer to a decode instance, as for
vLLM's NixlConnector. The degrees of tensor parallelism may differ. A prefill instance that is gone makes the decode instance
compute the blocks, where kv_load_failure_policy is "recompute".

Blocks of a finished prompt are leased to readers for LEASE seconds. A prefill worker publishes which leases have ended before
vLLM may use their blocks again. A decode worker reads the blocks, then that word: what was overwritten meanwhile has failed.

One group of full-attention layers is supported. vLLM calls the interface experimental; written for 0.32.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

from . import kv
from ._agent import Agent, Transfer
from ._heads import Split
from ._leases import SLOTS, Lease, Leases, microseconds
from .errors import Error, Timeout

_log = logging.getLogger(__name__)
NAME = "vllm"
#: Seconds that blocks of a finished prompt wait for a reader that never comes.
LEASE = 120.0
TIMEOUT = 10.0


@dataclass
class Load:
    """Blocks of one request to be read."""

    request: str
    lease: Lease
    host: str
    port: int
    ranks: int
    blocks: list[int]
    their_blocks: list[int]


@dataclass
class Work(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to the workers: what to read, and which finished prompts wait for readers."""

    loads: list[Load] = field(default_factory=list)
    leases: dict[str, Lease] = field(default_factory=dict)


class Connector(KVConnectorBase_V1):  # type: ignore[misc]
    """Both sides of the connector; vLLM makes one in the scheduler and one in each worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._host, self._port = extra.get("host", "127.0.0.1"), int(extra.get("port", 9400))
        self._ranks = vllm_config.parallel_config.tensor_parallel_size
        self._scheduled = Work()
        self._leases, self._number = 0, 0
        self._worker = None if role == KVConnectorRole.SCHEDULER else Worker(self._host, self._port, self._ranks)

    # The scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        parameters = request.kv_transfer_params or {}
        if parameters.get("do_remote_prefill"):
            if parameters["remote_lease"][2] <= time.time():
                _log.warning("request %s: the lease of its blocks at the prefill instance has ended; they are computed here", request.request_id)
                parameters["do_remote_prefill"] = False
                return 0, False
            count = len(request.prompt_token_ids) - num_computed_tokens
            if count > 0:
                return count, True
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        parameters = request.kv_transfer_params or {}
        if not parameters.get("do_remote_prefill"):
            return
        # One transfer for each request. An empty one still notifies the prefill worker, which frees its blocks.
        parameters["do_remote_prefill"] = False
        mine = blocks.get_unhashed_block_ids() if num_external_tokens > 0 else []
        theirs = list(parameters["remote_block_ids"])
        self._scheduled.loads.append(Load(
            request.request_id, Lease(*parameters["remote_lease"]), parameters["remote_host"], parameters["remote_port"], parameters["remote_ranks"],
            mine, theirs[len(theirs) - len(mine):]))

    def build_connector_meta(self, scheduler_output: Any) -> Work:
        scheduled, self._scheduled = self._scheduled, Work()
        return scheduled

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        parameters = request.kv_transfer_params or {}
        if not parameters.get("do_remote_decode") or not block_ids:
            return False, None
        self._number = max(self._number + 1, microseconds())
        lease = Lease(self._number, self._leases % SLOTS, time.time() + LEASE)
        self._leases += 1
        self._scheduled.leases[request.request_id] = lease
        return True, {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": block_ids, "remote_lease": [lease.number, lease.slot, lease.until],
            "remote_host": self._host, "remote_port": self._port, "remote_ranks": self._ranks}

    # A worker.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        assert self._worker is not None
        self._worker.register(kv_caches, self._vllm_config)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.begin(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Requests wait in the scheduler until their blocks are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Readers read by themselves."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        assert self._worker is not None
        return self._worker.finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._worker is not None
        return self._worker.take_failed()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.agent.close()


@dataclass
class Loading:
    """A load in progress: transfers of blocks, then of the words that tell whether the lease has ended."""

    load: Load
    transfers: list[Transfer] = field(default_factory=list)
    #: The workers that the blocks come from, and what they say about the lease.
    sources: list[kv.RemoteCache] = field(default_factory=list)
    ended: list[bytearray] = field(default_factory=list)
    error: Error | None = None


class Worker:
    """The caches of one worker, loads in progress, and prompts that wait for readers."""

    def __init__(self, host: str, port: int, ranks: int) -> None:
        from vllm.distributed import get_tensor_model_parallel_rank
        self.rank: int = get_tensor_model_parallel_rank()
        self._ranks = ranks
        self.agent = Agent(f"vllm-{host}-{port + self.rank}", listen=f"{host}:{port + self.rank}")
        self._cache: kv.Cache | None = None
        self._split = Split(ranks, ranks)
        self._remotes: dict[tuple[str, int], kv.RemoteCache] = {}
        self._loading: dict[str, Loading] = {}
        self._leases = Leases()
        self._failed: set[int] = set()

    def register(self, caches: dict[str, Any], config: Any) -> None:
        layers = list(caches.values())
        block_axis, head_axis = axes(layers[0].shape, config.cache_config.num_gpu_blocks)
        self._split = Split(config.model_config.get_total_num_kv_heads(), self._ranks)
        if layers[0].shape[head_axis] != self._split.count:
            raise Error(f"KV cache of shape {tuple(layers[0].shape)}: expected {self._split.count} heads of {self._split.total} for each of {self._ranks} workers")
        self._cache = kv.Cache(self.agent, layers, block_axis=block_axis, head_axis=head_axis, first_head=self._split.first(self.rank))
        self.agent.export(f"{NAME}/leases", self._leases.table())
        self._cache.export(NAME)

    def begin(self, work: Work) -> None:
        self._leases.add(work.leases)
        for load in work.loads:
            loading = self._loading[load.request] = Loading(load)
            try:
                self._read(loading)
            except Error as error:
                # Submitted ones still write to the blocks: they are reported when all have ended.
                loading.error = error
                for transfer in loading.transfers:
                    transfer.cancel()

    def _read(self, loading: Loading) -> None:
        assert self._cache is not None
        load, there = loading.load, Split(self._split.total, loading.load.ranks)
        if not load.blocks:
            return
        if load.lease.until <= time.time():
            raise Timeout("the lease of its blocks at the prefill instance has ended")
        for rank in self._split.sources(there, self.rank):
            remote = self._remote(load.host, load.port + rank)
            heads = range(remote.geometry.first_head, remote.geometry.first_head + remote.geometry.heads)
            if heads != there.heads(rank):
                raise Error(f"worker {rank} at {load.host} holds heads {heads}, expected {there.heads(rank)}: use the same model and version on both sides")
            loading.sources.append(remote)
            loading.transfers.append(self._cache.read(remote, load.blocks, load.their_blocks))

    def _remote(self, host: str, port: int) -> kv.RemoteCache:
        known = self._remotes.get((host, port))
        if known is None or known.peer.gone is not None:
            known = self._remotes[host, port] = kv.RemoteCache(self.agent.connect(f"{host}:{port}", TIMEOUT), NAME, TIMEOUT)
        return known

    def finished(self) -> tuple[set[str] | None, set[str] | None]:
        received = {request for request, loading in list(self._loading.items()) if self._advance(loading)}
        for request in received:
            del self._loading[request]
        while (note := self.agent.notification(0)) is not None:
            self._leases.note(note)
        # Failed ones are reported as received, too; take_failed has their blocks.
        return self._leases.take_ended() or None, received or None

    def _advance(self, loading: Loading) -> bool:
        """Whether it has ended: no transfer of it reaches the blocks any more."""
        if not all(transfer.done() for transfer in loading.transfers):
            return False
        load = loading.load
        try:
            if loading.error is not None:
                raise loading.error
            for transfer in loading.transfers:
                transfer.wait(0)
            if len(loading.ended) < len(loading.sources):
                self._ask(loading)
                return False
            if any(int.from_bytes(word, sys.byteorder) >= load.lease.number for word in loading.ended):
                raise Error("the lease of its blocks at the prefill instance ended before they were read")
            self._notify(load)
        except Error as error:
            _log.warning("request %s: %s", load.request, error)
            self._failed.update(load.blocks)
        return True

    def _ask(self, loading: Loading) -> None:
        """Reads which leases have ended, now that the blocks are here."""
        loading.transfers, loading.ended = [], [bytearray(8) for _ in loading.sources]
        for remote, word in zip(loading.sources, loading.ended):
            table = remote.peer.region(f"{NAME}/leases", 0)
            loading.transfers.append(remote.peer.read(word, table, loading.load.lease.slot * 8))

    def _notify(self, load: Load) -> None:
        """Lets the prefill workers free the blocks. Those that cannot be reached free them when the lease ends."""
        for rank, readers in enumerate(self._split.readers(Split(self._split.total, load.ranks))):
            if self.rank in readers:
                try:
                    self._remote(load.host, load.port + rank).peer.announce(f"{len(readers)} {load.lease.number}".encode()).complete()
                except Error as error:
                    _log.warning("request %s: worker %s of %s is not notified: %s", load.request, rank, load.host, error)

    def take_failed(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed


def axes(shape: tuple[int, ...], blocks: int) -> tuple[int, int]:
    """The dimensions of blocks and heads: (2, blocks, tokens, heads, dim) or (blocks, 2, tokens, heads, dim)."""
    if len(shape) != 5 or blocks not in shape[:2]:
        raise Error(f"KV cache of shape {tuple(shape)} with {blocks} blocks: only full attention with keys and values in one array is supported")
    return (1 if shape[1] == blocks and shape[0] == 2 else 0), 3
