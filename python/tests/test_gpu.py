"""Memory of a GPU: torch, cupy and jax in place, streams, paths. Needs a GPU and torch."""
import os
import time

import nobounce
import pytest
from nobounce import kv

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
PAGE = 65536


@pytest.fixture
def pair(monkeypatch):
    monkeypatch.setenv("NOBOUNCE_ADDR", f"127.{140 + os.getpid() % 50}.9.{int(time.monotonic() * 100) % 250 + 1}")
    with nobounce.Agent("target", listen="127.0.0.1:0", require="direct") as target, nobounce.Agent("initiator", require="direct") as initiator:
        yield target, initiator, initiator.connect(target.address)


def filled(pages, seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(0, 256, (pages, PAGE), dtype=torch.uint8, device="cuda", generator=generator)


def test_pages_of_tensors(pair):
    target, initiator, peer = pair
    there, here = torch.zeros(256, PAGE, dtype=torch.uint8, device="cuda"), filled(256, 1)
    torch.cuda.synchronize()
    memory = target.export("kv", there)
    assert memory.is_gpu and "direct" in memory.paths, memory.paths
    order = torch.randperm(256)
    peer.write_pages(here, range(256), peer.region("kv"), order, PAGE, tag=b"t").wait(20)
    assert target.notification(20).check().nbytes == 256 * PAGE
    # Launched after the notification: no synchronisation is needed.
    assert torch.equal(there[order.cuda()], here)
    back = torch.zeros_like(here)
    torch.cuda.synchronize()
    peer.read_pages(back, range(256), peer.region("kv"), order, PAGE).wait(20)
    assert torch.equal(back, here)
    paths = initiator.stats()["paths"]
    assert "staged" not in paths["out"] and "staged" not in paths["in"], paths


def test_a_transfer_begins_behind_the_stream(pair):
    target, _, peer = pair
    there, here = torch.zeros(16, PAGE, dtype=torch.uint8, device="cuda"), torch.zeros(16, PAGE, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    target.export("kv", there)
    remote, stream = peer.region("kv"), torch.cuda.Stream()
    for value in range(1, 6):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # about a tenth of a second
            here.fill_(value)
        began = time.monotonic()
        transfer = peer.write(here, remote, tag=b"behind", after=stream)
        assert time.monotonic() - began < 0.05, "the call does not wait"
        transfer.wait(20)
        assert target.notification(20).outcome == "complete"
        assert bool((there == value).all()), value


def test_other_libraries(pair):
    target, initiator, peer = pair
    memory = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    target.export("kv", memory)
    remote, tried = peer.region("kv"), []
    try:
        import cupy
        array = cupy.arange(1 << 18, dtype=cupy.uint32)
        cupy.cuda.Device().synchronize()
        peer.write(array, remote, after=cupy.cuda.Stream.null).wait(20)
        assert torch.equal(memory.view(torch.int32).cpu(), torch.arange(1 << 18, dtype=torch.int32))
        with pytest.raises(nobounce.ListError, match="not contiguous"):
            initiator.register(array.reshape(512, 512)[:, ::2])
        tried.append("cupy")
    except ImportError:
        pass
    try:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        import jax
        array = jax.numpy.arange(1 << 18, dtype=jax.numpy.int32)[::-1].copy()
        array.block_until_ready()
        peer.write(array, remote).wait(20)
        assert torch.equal(memory.view(torch.int32).cpu(), torch.arange((1 << 18) - 1, -1, -1, dtype=torch.int32))
        tried.append(f"jax on {array.device}")
    except ImportError:
        pass
    print("tried:", *tried)
    with pytest.raises(nobounce.ListError, match="not contiguous"):
        initiator.register(torch.zeros(8, 8, device="cuda").t())
    assert not initiator.register(torch.zeros(8)).is_gpu


def test_paged_caches_with_split_heads(pair):
    target, initiator, peer = pair
    whole = [torch.randn(2, 32, 16, 8, 64, device="cuda").half() for _ in range(4)]
    half = [torch.zeros(2, 48, 16, 4, 64, device="cuda").half() for _ in range(4)]
    torch.cuda.synchronize()
    kv.Cache(target, half, block_axis=1, head_axis=3, first_head=4).export("half")
    blocks, theirs = [1, 5, 30, 31], [47, 0, 9, 8]
    kv.Cache(initiator, whole, block_axis=1, head_axis=3).write(kv.RemoteCache(peer, "half"), blocks, theirs, tag=b"t").wait(20)
    target.notification(20).check()
    for layer in range(4):
        assert torch.equal(half[layer][:, theirs], whole[layer][:, blocks][:, :, :, 4:])


def test_registering_again_is_quick(pair):
    _, initiator, _ = pair
    base = torch.zeros(2 << 30, dtype=torch.uint8, device="cuda")
    held = initiator.register(base)
    began = time.monotonic()
    views = [initiator.register(base[at << 17:(at + 1) << 17]) for at in range(10_000)]
    print(f"10,000 views of 2 GiB: {1e3 * (time.monotonic() - began):.1f} ms")
    assert all(view.nbytes == 1 << 17 for view in views) and held.nbytes == 2 << 30
    del held, views
    times = []
    for _ in range(20):
        began = time.monotonic()
        memory = initiator.register(base)
        times.append(time.monotonic() - began)
        del memory
    print(f"registering 2 GiB again: {1e3 * sorted(times)[10]:.2f} ms")
