"""Mooncake's store: a master, a process that lends its memory, and a client that puts and gets values of 1 KiB."""
import os
import subprocess
import sys
import time

from peer import group_options, measure, report, timed
from ports import free_port

VALUE, LENT, BUFFER = 1 << 10, 256 << 20, 64 << 20


def store(protocol, port, lent):
    from mooncake.store import MooncakeDistributedStore

    joined = MooncakeDistributedStore()
    device = "nb0" if protocol == "rdma" else ""
    code = joined.setup("127.0.0.1", "P2PHANDSHAKE", lent, BUFFER, protocol, device, f"127.0.0.1:{port}")
    if code != 0:
        sys.exit(f"setup: {code}")
    return joined


def exchange(args, port):
    client = store(args.protocol, port, 0)
    values = {f"k{at}": os.urandom(VALUE) for at in range(200)}
    times = [put(client, name, value) for name, value in values.items()]
    right = all(client.get(name) == value for name, value in values.items())
    report(times, operation="put", bytes=VALUE, right=right)
    measure(lambda: timed(lambda: client.get("k0")), args.seconds, operation="get", bytes=VALUE, right=right)
    client.close()


def put(client, name, value):
    begin = time.perf_counter()
    code = client.put(name, value)
    if code != 0:
        raise RuntimeError(f"put: {code}")
    return time.perf_counter() - begin


def main():
    parser = group_options("rdma")
    parser.add_argument("--lend", help="port of the master; for the process that lends its memory")
    args = parser.parse_args()
    if args.lend:
        lender = store(args.protocol, args.lend, LENT)
        print("ready", flush=True)
        sys.stdin.read()
        lender.close()
        return
    port = free_port()
    master = subprocess.Popen([os.path.join(os.path.dirname(sys.executable), "mooncake_master"), f"--rpc_port={port}"], stderr=subprocess.DEVNULL)
    lender = None
    try:
        time.sleep(1)
        lender = subprocess.Popen(
            [sys.executable, __file__, "--lend", str(port), "--protocol", args.protocol], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        while lender.stdout.readline().strip() not in (b"ready", b""):
            pass
        exchange(args, port)
    finally:
        if lender is not None:
            lender.stdin.close()
            lender.wait(20)
        master.terminate()
        master.wait(10)


main()
