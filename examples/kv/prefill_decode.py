#!/usr/bin/env python3
"""Disaggregated inference in two processes: prefill computes the KV cache of a prompt, nobounce moves its pages, decode goes on.

    examples/kv/prefill_decode.py                   direct and TCP transfer, compared with one process (numpy)
    examples/kv/prefill_decode.py --model cuda      on a GPU with the transformers package: direct, staged and TCP
    examples/kv/prefill_decode.py --ranks 2         the decoding side has its heads in two caches
    examples/kv/prefill_decode.py --kill            the prefilling process is killed halfway: decode computes the prompt itself

Tokens and logits must be bit-equal to those of one process. Prints the time to the first token.
SPDX-License-Identifier: MIT OR Apache-2.0
"""
import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time

import nobounce
from model import chosen
from nobounce import kv

BLOCKS, BLOCK_TOKENS = 256, 16
PROMPT = [(7 * at * at + 3) % 512 for at in range(1000)]
MORE = 16
LIMIT = 120


def tables():
    """Block numbers of the prompt, other ones at the two ends."""
    count = -(-len(PROMPT) // BLOCK_TOKENS)
    return [(37 * at + 5) % BLOCKS for at in range(count)], [(101 * at + 11) % BLOCKS for at in range(count)]


def generate(model, logits, past, count=MORE):
    """(tokens, bits of all logits, time of the first token)."""
    tokens, bits, first = [], [], None
    for _ in range(count):
        tokens.append(model.best(logits))
        bits.append(model.bits(logits))
        first = first or time.monotonic()
        logits, past = model.forward(tokens[-1:], past)
    return tokens, bits, first


def alone(model):
    """One process: the reference."""
    logits, past = model.forward(PROMPT[:-1], None)
    logits, past = model.forward(PROMPT[-1:], past)
    return generate(model, logits, past)


def prefill(options, model):
    blocks, theirs = tables()
    _, warm = model.forward(PROMPT[:16], None)
    layers = [model.empty(model.shape(BLOCKS, BLOCK_TOKENS)) for _ in warm]
    send = over_tcp(options, model, layers) if options.kind == "tcp" else over_agents(options, model, layers)
    input()  # until the request comes
    send.begin()
    _, past = model.forward(PROMPT[:-1], None)
    for layer, (keys, values) in enumerate(past):
        model.put(layers[layer], blocks, keys, values)
        send.layer(layer, blocks, theirs)
        if options.kill and layer == len(layers) // 2:
            os.kill(os.getpid(), signal.SIGKILL)
    send.end()


class over_agents:
    def __init__(self, options, model, layers):
        self.model, self.layers = model, layers
        self.agent = nobounce.Agent("prefill")
        self.cache = kv.Cache(self.agent, layers, block_axis=1, head_axis=3)
        self.peer = self.agent.connect(options.address)
        self.remotes = [kv.RemoteCache(self.peer, f"rank {rank}") for rank in range(options.ranks)]

    def begin(self):
        # From here on the other side hears of the end, whatever happens.
        self.announcements = [self.peer.announce(f"rank {rank}".encode()) for rank in range(len(self.remotes))]

    def layer(self, layer, blocks, theirs):
        for remote, announcement in zip(self.remotes, self.announcements):
            after = self.model.stream()
            self.cache.write(remote, blocks, theirs, layers=range(layer, layer + 1), announcement=announcement, after=after)

    def end(self):
        for announcement in self.announcements:
            announcement.complete()
        while self.peer.gone is None:
            time.sleep(0.01)


class over_tcp:
    def __init__(self, options, model, layers):
        self.model, self.layers = model, layers
        host, port = options.address.split(":")
        self.stream = socket.create_connection((host, int(port)))

    def begin(self):
        pass

    def layer(self, layer, blocks, theirs):
        self.stream.sendall(self.model.to_host(self.model.packed(self.layers[layer][:, blocks])))

    def end(self):
        self.stream.close()


def decode(options, model):
    _, theirs = tables()
    logits, warm = model.forward(PROMPT[:16], None)
    model.forward([1], warm)
    heads = model.shape(1, 1)[3] // options.ranks
    ranks = [[model.empty(model.shape(BLOCKS, BLOCK_TOKENS, heads)) for _ in warm] for _ in range(options.ranks)]
    arrive = by_tcp if options.kind == "tcp" else by_agents
    waiting = arrive(options, model, ranks)
    try:
        waiting(theirs)
        past = [model.get(model.concatenate([rank[layer] for rank in ranks]), theirs, len(PROMPT) - 1) for layer in range(len(warm))]
    except nobounce.PeerGone as error:
        print(f"decode: {error}; computing the prompt here", file=sys.stderr)
        _, past = model.forward(PROMPT[:-1], None)
    logits, past = model.forward(PROMPT[-1:], past)
    tokens, bits, first = generate(model, logits, past)
    print(json.dumps({"tokens": tokens, "bits": bits, "first": first, "paths": waiting.paths if hasattr(waiting, "paths") else {}}), flush=True)


def by_agents(options, model, ranks):
    agent = nobounce.Agent("decode", listen="127.0.0.1:0")
    for rank, layers in enumerate(ranks):
        first = rank * model.shape(1, 1)[3] // options.ranks
        kv.Cache(agent, layers, block_axis=1, head_axis=3, first_head=first).export(f"rank {rank}")
    print(agent.address, flush=True)

    def wait(_):
        for _ in ranks:
            note = agent.notification(LIMIT)
            if note is None:
                raise TimeoutError("no notification")
            note.check()
        wait.paths = agent.stats()["paths"]
    return wait


def by_tcp(options, model, ranks):
    server = socket.create_server(("127.0.0.1", 0))
    print("127.0.0.1:%d" % server.getsockname()[1], flush=True)
    stream, _ = server.accept()

    def wait(theirs):
        for layer in ranks[0]:
            part = model.packed(layer[:, theirs])
            data = bytearray(len(model.to_host(part)))
            view = memoryview(data)
            while view:
                received = stream.recv_into(view)
                if received == 0:
                    raise nobounce.PeerGone("the TCP stream ended")
                view = view[received:]
            model.from_host(part, data)
            layer[:, theirs] = part
    return wait


def start(role, kind, options, *more):
    environment = dict(os.environ)
    if kind == "staged":
        environment["NOBOUNCE_WINDOW"] = "off"
    command = [sys.executable, os.path.abspath(__file__), "--role", role, "--kind", kind, "--model", options.model, "--ranks", str(options.ranks), *more]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def request(kind, options):
    """What decode has found, with the seconds to the first token."""
    decoding = start("decode", kind, options)
    prefilling = None
    try:
        prefilling = start("prefill", kind, options, "--address", decoding.stdout.readline().strip(), *(["--kill"] if options.kill else []))
        time.sleep(options.pause)  # both have their models loaded and warm
        began = time.monotonic()
        prefilling.stdin.write("\n")
        prefilling.stdin.flush()
        found = json.loads(decoding.stdout.readline())
        found["seconds"] = found["first"] - began
        return found
    finally:
        for process in (decoding, prefilling):
            if process is not None:
                process.kill()
                process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("numpy", "cuda"), default="numpy")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4), default=1, help="caches of the decoding side, each with its share of the heads")
    parser.add_argument("--kill", action="store_true", help="kill the prefilling process halfway")
    parser.add_argument("--kind", action="append", choices=("direct", "staged", "tcp"), help="only this kind of transfer")
    parser.add_argument("--pause", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--role", choices=("prefill", "decode"), help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        options.kind = options.kind[0]
        return {"prefill": prefill, "decode": decode}[options.role](options, chosen(options.model))
    options.pause = options.pause or (20.0 if options.model == "cuda" else 1.5)
    kinds = options.kind or ["direct", *(["staged"] if options.model == "cuda" else []), *(["tcp"] if options.ranks == 1 and not options.kill else [])]
    tokens, bits, _ = alone(chosen(options.model))
    wrong = 0
    for kind in kinds:
        found = request(kind, options)
        same = (found["tokens"], found["bits"]) == (tokens, bits)
        wrong += not same
        paths = "; ".join(f"{direction} {path} {used['bytes'] / 1e6:.1f} MB" for direction, by_path in found["paths"].items() for path, used in by_path.items())
        print(f"{kind:7} first token after {1e3 * found['seconds']:7.1f} ms, {MORE} tokens and logits {'bit-equal to' if same else 'DIFFERENT from'} one process" + (f" ({paths})" if paths else ""))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
