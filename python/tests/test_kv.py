"""Paged caches: equal ones, other numbers of blocks, split heads, both layouts."""
import nobounce
import pytest
from nobounce import kv

numpy = pytest.importorskip("numpy")


def arrays(layers, shape, seed):
    rng = numpy.random.default_rng(seed)
    return [rng.integers(0, 1 << 15, shape, dtype=numpy.int16) for _ in range(layers)]


@pytest.mark.parametrize("is_read", [False, True])
def test_blocks_of_equal_caches(pair, is_read):
    here, there = arrays(3, (2, 16, 8, 4, 5), 1), arrays(3, (2, 32, 8, 4, 5), 2)
    kv.Cache(pair.target, there, block_axis=1, head_axis=3).export("cache")
    cache = kv.Cache(pair.initiator, here, block_axis=1, head_axis=3)
    remote = kv.RemoteCache(pair.peer, "cache")
    assert remote.geometry.blocks == 32
    blocks, theirs = numpy.array([3, 4, 0]), numpy.array([31, 7, 8])
    expected = [array.copy() for array in (here if is_read else there)]
    for layer in range(3):
        if is_read:
            expected[layer][:, blocks] = there[layer][:, theirs]
        else:
            expected[layer][:, theirs] = here[layer][:, blocks]
    move = cache.read if is_read else cache.write
    assert move(remote, blocks, theirs, tag=b"t").wait(10) == 3 * 2 * 3 * 8 * 4 * 5 * 2
    for layer in range(3):
        assert (expected[layer] == (here if is_read else there)[layer]).all()
    assert pair.target.notification(10).outcome == "complete"


@pytest.mark.parametrize("axes, shape", [((1, 3), lambda heads: (2, 8, 4, heads, 6)), ((0, 1), lambda heads: (8, heads, 4, 6))])
def test_heads_that_are_split(pair, axes, shape):
    whole = arrays(2, shape(8), 1)
    cache = kv.Cache(pair.initiator, whole, block_axis=axes[0], head_axis=axes[1])
    halves = [arrays(2, shape(4), 2), arrays(2, shape(4), 3)]
    for rank, half in enumerate(halves):
        kv.Cache(pair.target, half, block_axis=axes[0], head_axis=axes[1], first_head=4 * rank).export(f"rank {rank}")
        cache.write(kv.RemoteCache(pair.peer, f"rank {rank}"), range(8), list(reversed(range(8)))).wait(10)
        for layer in range(2):
            expected = numpy.flip(whole[layer], axes[0]).take(range(4 * rank, 4 * rank + 4), axes[1])
            assert (half[layer] == expected).all()


def test_one_array_of_all_layers_and_a_range_of_layers(pair):
    here, there = arrays(1, (4, 8, 2, 2, 3), 1)[0], arrays(1, (4, 8, 2, 2, 3), 2)[0]
    kv.Cache(pair.target, there, block_axis=1, head_axis=3).export("one")
    kv.Cache(pair.initiator, here, block_axis=1, head_axis=3).write(kv.RemoteCache(pair.peer, "one"), [1], [2]).wait(10)
    assert (there[:, 2] == here[:, 1]).all()
    layers, others = arrays(4, (8, 2, 2, 3), 3), arrays(4, (8, 2, 2, 3), 4)
    before = [array.copy() for array in others]
    kv.Cache(pair.target, others, block_axis=0, head_axis=2).export("many")
    cache, remote = kv.Cache(pair.initiator, layers, block_axis=0, head_axis=2), kv.RemoteCache(pair.peer, "many")
    announcement = pair.peer.announce(b"layer by layer")
    for layer in (0, 2):
        cache.write(remote, [0], [0], layers=range(layer, layer + 1), announcement=announcement)
    announcement.complete()
    assert pair.target.notification(10).nbytes == 2 * 2 * 2 * 3 * 2
    for layer in range(4):
        assert (others[layer][0] == (layers if layer in (0, 2) else before)[layer][0]).all()


def test_caches_that_do_not_fit(pair):
    kv.Cache(pair.target, arrays(2, (8, 4, 2, 6), 1), block_axis=0, head_axis=2, first_head=2).export("cache")
    remote = kv.RemoteCache(pair.peer, "cache")
    for layers, shape, words in ((3, (8, 4, 2, 6), "different models"), (2, (8, 4, 2, 7), "different models"), (2, (8, 4, 2, 6), "no head")):
        cache = kv.Cache(pair.initiator, arrays(layers, shape, 2), block_axis=0, head_axis=2)
        with pytest.raises(nobounce.ListError, match=words):
            cache.write(remote, [0], [0])
    with pytest.raises(nobounce.ListError, match="blocks before heads"):
        kv.Cache(pair.initiator, arrays(1, (8, 4), 1), block_axis=1, head_axis=0)
