"""A KV connector for vLLM: decode workers read the blocks of a prompt from the caches of prefill workers.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "Connector", "kv_connector_module_path": "nobounce.vllm",
        "kv_role": "kv_both", "kv_connector_extra_config": {"host": "10.0.0.7", "port": 9400}}'

`host` is the address that other workers reach (with NOBOUNCE_ADDR=eth0), `port` that of the first worker; worker n of a tensor
parallel group listens at port + n. A proxy runs each prompt on a prefill instance with kv_transfer_params
{"do_remote_decode": true} and max_tokens 1, and hands the kv_transfer_params of the answer to a decode instance, as for
vLLM's NixlConnector. The degrees of tensor parallelism may differ. A prefill instance that is gone makes the decode instance
compute the blocks, where kv_load_failure_policy is "recompute".

One group of full-attention layers is supported. vLLM calls the interface experimental; written for 0.32.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

from . import kv
from ._agent import Agent, Transfer
from .errors import Error

_log = logging.getLogger(__name__)
NAME = "vllm"
#: Seconds that blocks of a finished prompt wait for a reader that never comes.
LEASE = 120.0
TIMEOUT = 10.0


@dataclass
class Load:
    """Blocks of one request to be read."""

    request: str
    #: The name of the request at the prefilling side.
    their_request: str
    host: str
    port: int
    ranks: int
    blocks: list[int]
    their_blocks: list[int]


@dataclass
class Work(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to the workers: what to read, and which finished prompts wait for readers until when."""

    loads: list[Load] = field(default_factory=list)
    leases: dict[str, float] = field(default_factory=dict)


class Connector(KVConnectorBase_V1):  # type: ignore[misc]
    """Both sides of the connector; vLLM makes one in the scheduler and one in each worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._host, self._port = extra.get("host", "127.0.0.1"), int(extra.get("port", 9400))
        self._ranks = vllm_config.parallel_config.tensor_parallel_size
        self._scheduled = Work()
        self._worker = None if role == KVConnectorRole.SCHEDULER else Worker(self._host, self._port, self._ranks)

    # The scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
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
            request.request_id, parameters["remote_request_id"], parameters["remote_host"], parameters["remote_port"], parameters["remote_ranks"], mine, theirs[len(theirs) - len(mine):]))

    def build_connector_meta(self, scheduler_output: Any) -> Work:
        scheduled, self._scheduled = self._scheduled, Work()
        return scheduled

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        parameters = request.kv_transfer_params or {}
        if not parameters.get("do_remote_decode") or not block_ids:
            return False, None
        self._scheduled.leases[request.request_id] = time.monotonic() + LEASE
        return True, {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": block_ids, "remote_request_id": request.request_id,
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


class Worker:
    """The caches of one worker, transfers in flight, and prompts that wait for readers."""

    def __init__(self, host: str, port: int, ranks: int) -> None:
        from vllm.distributed import get_tensor_model_parallel_rank
        self.rank: int = get_tensor_model_parallel_rank()
        self._ranks = ranks
        self.agent = Agent(f"vllm-{host}-{port + self.rank}", listen=f"{host}:{port + self.rank}")
        self._cache: kv.Cache | None = None
        self._remotes: dict[tuple[str, int], kv.RemoteCache] = {}
        self._loading: dict[str, tuple[Load, list[Transfer]]] = {}
        self._leases: dict[str, float] = {}
        #: Prompts that some of their readers have read.
        self._readers: dict[str, int] = {}
        self._failed: set[int] = set()

    def register(self, caches: dict[str, Any], config: Any) -> None:
        layers = list(caches.values())
        block_axis, head_axis = axes(layers[0].shape, config.cache_config.num_gpu_blocks)
        heads = layers[0].shape[head_axis]
        self._cache = kv.Cache(self.agent, layers, block_axis=block_axis, head_axis=head_axis, first_head=self.rank * heads)
        self._cache.export(NAME)

    def begin(self, work: Work) -> None:
        self._leases.update(work.leases)
        for load in work.loads:
            try:
                transfers = self._read(load)
            except Error as error:
                self._fail(load, error)
                transfers = []
            self._loading[load.request] = (load, transfers)

    def _read(self, load: Load) -> list[Transfer]:
        assert self._cache is not None
        mine, transfers = self._cache.geometry, []
        for rank in range(load.ranks):
            remote = self._remote(load.host, load.port + rank)
            theirs = remote.geometry

            def is_shared(first_head: int) -> bool:
                return theirs.first_head < first_head + mine.heads and first_head < theirs.first_head + theirs.heads

            if is_shared(mine.first_head):
                readers = sum(is_shared(reader * mine.heads) for reader in range(self._ranks))
                transfers.append(self._cache.read(remote, load.blocks, load.their_blocks, tag=f"{readers} {load.their_request}".encode()))
        return transfers

    def _remote(self, host: str, port: int) -> kv.RemoteCache:
        known = self._remotes.get((host, port))
        if known is None or known.peer.gone is not None:
            known = self._remotes[host, port] = kv.RemoteCache(self.agent.connect(f"{host}:{port}", TIMEOUT), NAME, TIMEOUT)
        return known

    def _fail(self, load: Load, error: Error) -> None:
        _log.warning("request %s: %s", load.request, error)
        self._failed.update(load.blocks)

    def finished(self) -> tuple[set[str] | None, set[str] | None]:
        received = set()
        for request, (load, transfers) in list(self._loading.items()):
            if all(transfer.done() for transfer in transfers):
                del self._loading[request]
                received.add(request)
                for transfer in transfers:
                    try:
                        transfer.wait(0)
                    except Error as error:
                        self._fail(load, error)
        # Failed ones are reported as received, too; take_failed has their blocks.
        return self._sent() or None, received or None

    def _sent(self) -> set[str]:
        """Prompts that have been read, or whose time is over."""
        while (note := self.agent.notification(0)) is not None:
            readers, request = note.tag.decode().split(" ", 1)
            self._readers[request] = self._readers.get(request, 0) + 1
            # A reader that failed may try again: the blocks wait for the end of their lease.
            if note.outcome == "complete" and self._readers[request] >= int(readers):
                self._leases[request] = 0.0
        now = time.monotonic()
        sent = {request for request, until in self._leases.items() if until <= now}
        for request in sent:
            del self._leases[request]
            self._readers.pop(request, None)
        return sent

    def take_failed(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed


def axes(shape: tuple[int, ...], blocks: int) -> tuple[int, int]:
    """The dimensions of blocks and heads: (2, blocks, tokens, heads, dim) or (blocks, 2, tokens, heads, dim)."""
    if len(shape) != 5 or blocks not in shape[:2]:
        raise Error(f"KV cache of shape {tuple(shape)} with {blocks} blocks: only full attention with keys and values in one array is supported")
    return (1 if shape[1] == blocks and shape[0] == 2 else 0), 3
