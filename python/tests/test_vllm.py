"""The connector against vLLM's own base class: scheduler and worker sides of two instances. Needs vllm."""
import os
import types

import nobounce
import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base")
torch = pytest.importorskip("torch")
vllm = pytest.importorskip("vllm")
from nobounce import vllm as connector  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402

BLOCKS, TOKENS, HEADS, DIM = 32, 16, 4, 8


class Instance:
    """A scheduler and the workers of one instance."""

    def __init__(self, monkeypatch, port, ranks, seed):
        self.schedulers, self.workers, self.caches = [], [], []
        config = types.SimpleNamespace(
            kv_transfer_config=types.SimpleNamespace(kv_connector_extra_config={"host": "127.0.0.1", "port": port}, is_kv_producer=True),
            parallel_config=types.SimpleNamespace(tensor_parallel_size=ranks), cache_config=types.SimpleNamespace(num_gpu_blocks=BLOCKS))
        self.scheduler = connector.Connector(config, KVConnectorRole.SCHEDULER, None)
        generator = torch.Generator().manual_seed(seed)
        for rank in range(ranks):
            monkeypatch.setattr("vllm.distributed.get_tensor_model_parallel_rank", lambda rank=rank: rank)
            worker = connector.Connector(config, KVConnectorRole.WORKER, None)
            self.caches.append({f"layer {layer}": torch.randn(2, BLOCKS, TOKENS, HEADS // ranks, DIM, generator=generator) for layer in range(3)})
            worker.register_kv_caches(self.caches[-1])
            self.workers.append(worker)

    def whole(self, blocks):
        """Blocks of all heads."""
        return [torch.cat([cache[name][:, blocks] for cache in self.caches], dim=3) for name in self.caches[0]]

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
            import time
            time.sleep(0.01)
        raise AssertionError(found)

    def close(self):
        for worker in self.workers:
            worker.shutdown()


def request(name, **parameters):
    return types.SimpleNamespace(request_id=name, kv_transfer_params=parameters, prompt_token_ids=list(range(40)))


def allocated(blocks):
    return types.SimpleNamespace(get_unhashed_block_ids=lambda: blocks)


@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_a_prompt_moves_between_instances(monkeypatch, ranks):
    port = 20000 + os.getpid() % 20000
    prefill, decode = Instance(monkeypatch, port, ranks[0], 1), Instance(monkeypatch, port + 8, ranks[1], 2)
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
        for mine, theirs in zip(decode.whole([7, 1, 30]), prefill.whole([5, 9, 2])):
            assert torch.equal(mine, theirs)
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
    assert nobounce.__version__
