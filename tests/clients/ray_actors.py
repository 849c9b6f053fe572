"""Ray: tensors go from one actor to another by the transport `nixl`; over TCP by UCX's."""
from peer import group_options, measure, timed

SIZE = 64 << 20


def main():
    import ray
    import torch

    args = group_options().parse_args()  # UCX_TLS sets the protocol
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)

    @ray.remote(num_cpus=1)
    class Actor:
        @ray.method(tensor_transport="nixl")
        def make(self, seed):
            return torch.arange(SIZE // 8, dtype=torch.int64) + seed

        def is_right(self, tensor, seed):
            return bool((tensor == torch.arange(SIZE // 8, dtype=torch.int64) + seed).all())

    one, other = Actor.remote(), Actor.remote()

    def move(seed=1):
        return ray.get(other.is_right.remote(one.make.remote(seed), seed), timeout=60)

    right = all(move(seed) for seed in range(3))
    # With the time to make and to compare the tensor.
    measure(lambda: timed(move), args.seconds, operation="actor to actor", bytes=SIZE, right=right)
    ray.shutdown()


main()
