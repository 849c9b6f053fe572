"""The connector against vLLM's own base class, or a stand-in of it: scheduler and worker sides of two instances."""
import importlib
import os
import sys
import time
import types

import pytest

numpy = pytest.importorskip("numpy")
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


class StandIn:
    """What the connector takes from the base class of vLLM 0.32."""

    def __init__(self, vllm_config, role, kv_cache_config=None):
        self._vllm_config, self._metadata = vllm_config, None

    def bind_connector_metadata(self, metadata):
        self._metadata = metadata

    def clear_connector_metadata(self):
        self._metadata = None

    def _get_connector_metadata(self):
        return self._metadata


def base():
    try:
        return importlib.import_module(BASE)
    except ImportError:
        parts = BASE.split(".")
        for count in range(1, len(parts) + 1):
            sys.modules[".".join(parts[:count])] = types.ModuleType(parts[count - 1])
        sys.modules["vllm.distributed"].get_tensor_model_parallel_rank = lambda: 0
        module = sys.modules[BASE]
        module.KVConnectorBase_V1, module.KVConnectorMetadata = StandIn, type("KVConnectorMetadata", (), {})
        module.KVConnectorRole = types.SimpleNamespace(SCHEDULER=0, WORKER=1)
        return module


KVConnectorRole = base().KVConnectorRole
from nobounce import vllm as connector  # noqa: E402

BLOCKS, TOKENS, HEADS, DIM = 32, 16, 4, 8


class Instance:
    """A scheduler and the workers of one instance."""

    def __init__(self, monkeypatch, port, ranks, seed, heads=HEADS):
        self.workers, self.caches, self.heads = [], [], heads
        config = types.SimpleNamespace(
            kv_transfer_config=types.SimpleNamespace(kv_connector_extra_config={"host": "127.0.0.1", "port": port}, is_kv_producer=True),
            parallel_config=types.SimpleNamespace(tensor_parallel_size=ranks), cache_config=types.SimpleNamespace(num_gpu_blocks=BLOCKS),
            model_config=types.SimpleNamespace(get_total_num_kv_heads=lambda: heads))
        self.scheduler = connector.Connector(config, KVConnectorRole.SCHEDULER, None)
        rng = numpy.random.default_rng(seed)
        whole = [rng.random((2, BLOCKS, TOKENS, heads, DIM), numpy.float32) for layer in range(3)]
        each = max(1, heads // ranks)
        for rank in range(ranks):
            monkeypatch.setattr(sys.modules["vllm.distributed"], "get_tensor_model_parallel_rank", lambda rank=rank: rank)
            worker = connector.Connector(config, KVConnectorRole.WORKER, None)
            first = rank * heads // ranks
            self.caches.append({f"layer {layer}": array[:, :, :, first:first + each].copy() for layer, array in enumerate(whole)})
            worker.register_kv_caches(self.caches[-1])
            self.workers.append(worker)

    def holds(self, other, blocks, their_blocks):
        """Whether every worker has these blocks of its heads, as the other instance has them."""
        ranks, others = len(self.caches), len(other.caches)
        for name in self.caches[0]:
            # Of replicas, the last one: all are alike.
            theirs = {rank * self.heads // others + head: cache[name][:, their_blocks, :, head] for rank, cache in enumerate(other.caches) for head in range(cache[name].shape[3])}
            for rank, cache in enumerate(self.caches):
                for head in range(cache[name].shape[3]):
                    if not (cache[name][:, blocks, :, head] == theirs[rank * self.heads // ranks + head]).all():
                        return False
        return True

    def step(self):
        work = self.scheduler.build_connector_meta(None)
        for worker in self.workers:
            worker.bind_connector_metadata(work)
            worker.start_load_kv(None)
            worker.clear_connector_metadata()

    def finished(self, which):
        """Requests that all workers have finished sending (0) or receiving (1)."""
        found = [set() for _ in self.workers]
        for _ in range(1000):
            for worker, mine in zip(self.workers, found):
                mine |= worker.get_finished(set())[which] or set()
            if all(found):
                return set.intersection(*found)
            time.sleep(0.01)
        raise AssertionError(found)

    def close(self):
        for worker in self.workers:
            worker.shutdown()


def request(name, **parameters):
    return types.SimpleNamespace(request_id=name, kv_transfer_params=parameters, prompt_token_ids=list(range(40)))


def allocated(blocks):
    return types.SimpleNamespace(get_unhashed_block_ids=lambda: blocks)


@pytest.mark.parametrize("ranks, heads", [((1, 1), 4), ((1, 2), 4), ((2, 1), 4), ((2, 2), 4), ((4, 2), 2), ((2, 4), 2), ((4, 1), 2), ((1, 4), 1)])
def test_a_prompt_moves_between_instances(monkeypatch, ranks, heads):
    port = 20000 + os.getpid() % 20000
    prefill, decode = Instance(monkeypatch, port, ranks[0], 1, heads), Instance(monkeypatch, port + 8, ranks[1], 2, heads)
    try:
        first = request("p-1", do_remote_decode=True)
        assert prefill.scheduler.get_num_new_matched_tokens(first, 0) == (0, False)
        delayed, parameters = prefill.scheduler.request_finished(first, [5, 9, 2])
        assert delayed
        prefill.step()
        second = request("d-1", **parameters)
        assert decode.scheduler.get_num_new_matched_tokens(second, 0) == (40, True)
        decode.scheduler.update_state_after_alloc(second, allocated([7, 1, 30]), 40)
        assert decode.scheduler.get_num_new_matched_tokens(second, 0) == (0, False), "once"
        decode.step()
        assert decode.finished(1) == {"d-1"}
        assert decode.holds(prefill, [7, 1, 30], [5, 9, 2])
        assert prefill.finished(0) == {"p-1"}, "the blocks of the prompt are free"
        assert decode.workers[0].get_block_ids_with_load_errors() == set()
    finally:
        prefill.close()
        decode.close()


def test_a_prefill_instance_that_is_gone(monkeypatch):
    port = 20000 + os.getpid() % 20000 + 16
    prefill, decode = Instance(monkeypatch, port, 1, 1), Instance(monkeypatch, port + 8, 1, 2)
    _, parameters = prefill.scheduler.request_finished(request("p-2", do_remote_decode=True), [5, 9, 2])
    prefill.close()
    try:
        decode.scheduler.update_state_after_alloc(request("d-2", **parameters), allocated([7, 1, 30]), 40)
        decode.step()
        assert decode.finished(1) == {"d-2"}
        assert decode.workers[0].get_block_ids_with_load_errors() == {7, 1, 30}, "vLLM computes them"
    finally:
        decode.close()


def leased_prompt(prefill, name):
    delayed, parameters = prefill.scheduler.request_finished(request(name, do_remote_decode=True), [5, 9, 2])
    assert delayed
    prefill.step()
    return parameters


def test_blocks_whose_lease_ends_while_they_are_read_have_failed(monkeypatch):
    port = 20000 + os.getpid() % 20000 + 32
    prefill, decode = Instance(monkeypatch, port, 1, 1), Instance(monkeypatch, port + 8, 1, 2)
    try:
        parameters = leased_prompt(prefill, "p-3")
        decode.scheduler.update_state_after_alloc(request("d-3", **parameters), allocated([7, 1, 30]), 40)
        decode.step()
        # vLLM uses the blocks again from here on.
        monkeypatch.setattr(time, "time", lambda real=time.time: real() + 1000)
        assert prefill.workers[0].get_finished(set())[0] == {"p-3"}
        assert decode.finished(1) == {"d-3"}
        assert decode.workers[0].get_block_ids_with_load_errors() == {7, 1, 30}
        # And a reader that comes later does not begin.
        late = request("d-4", **{**parameters, "do_remote_prefill": True})
        assert decode.scheduler.get_num_new_matched_tokens(late, 0) == (0, False)
    finally:
        prefill.close()
        decode.close()


def test_a_load_that_fails_halfway_is_reported_when_its_transfers_have_ended(monkeypatch):
    port = 20000 + os.getpid() % 20000 + 48
    prefill, decode = Instance(monkeypatch, port, 2, 1), Instance(monkeypatch, port + 8, 1, 2)
    try:
        parameters = leased_prompt(prefill, "p-5")
        prefill.workers[1].shutdown()
        reads = []

        class Slow:
            """A READ that has not ended."""

            is_done, is_cancelled = False, False

            def done(self):
                return self.is_done

            def cancel(self):
                self.is_cancelled = True

        def read(*arguments):
            reads.append(Slow())
            return reads[-1]

        worker = decode.workers[0]
        monkeypatch.setattr(worker._worker._cache, "read", read)
        monkeypatch.setattr(connector, "TIMEOUT", 1.0)
        decode.scheduler.update_state_after_alloc(request("d-5", **parameters), allocated([7, 1, 30]), 40)
        decode.step()
        assert len(reads) == 1 and reads[0].is_cancelled, "the first worker's; the second one is gone"
        assert worker.get_finished(set())[1] is None and worker.get_block_ids_with_load_errors() == set()
        reads[0].is_done = True
        assert worker.get_finished(set())[1] == {"d-5"}
        assert worker.get_block_ids_with_load_errors() == {7, 1, 30}
    finally:
        prefill.close()
        decode.close()
