"""PyTorch's RPC over TensorPipe: a process calls a function of another, which returns the tensor that it got.

It names the transport: between processes of one machine TensorPipe takes its own shared memory.
"""
import os
import subprocess
import sys

from peer import group_options, measure, say, timed
from ports import free_port

SIZES = (1 << 20, 64 << 20)


def returned(tensor):
    return tensor


def main():
    parser = group_options("ibv")
    parser.add_argument("--callee", help="port of the caller; for the process that is called")
    args = parser.parse_args()
    port = args.callee or str(free_port())
    callee = None if args.callee else subprocess.Popen([sys.executable, __file__, "--callee", port, "--protocol", args.protocol])

    import torch
    from torch.distributed import rpc

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    transport = {"ibv": "ibv", "tcp": "uv"}[args.protocol]
    options = rpc.TensorPipeRpcBackendOptions(_transports=[transport], _channels=["basic"])
    rpc.init_rpc("callee" if args.callee else "caller", rank=1 if args.callee else 0, world_size=2, rpc_backend_options=options)
    for size in () if args.callee else SIZES:
        tensor = torch.arange(size // 8, dtype=torch.int64)

        def call():
            return rpc.rpc_sync("callee", returned, args=(tensor,))

        right = bool((call() == tensor).all())
        # Half a round trip: one of two directions.
        measure(lambda: timed(call) / 2, args.seconds, operation="call", bytes=size, right=right)
    rpc.shutdown()
    if callee is not None:
        say(callee=callee.wait(30))


if __name__ == "__main__":
    main()
