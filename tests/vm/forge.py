"""Messages of the connection manager that nobody has sent: recorded ones come again, as they were and damaged, in the name of either side,
while a connection stands. It must go on, and new ones must be possible."""

import random
import socket
import struct
import time

from capture import invariant_crc, packets
from machine import ADDRESS, GUEST, HOST, other

# For each message that was recorded: how often it comes again as it was, with some bytes changed, and cut off.
AGAIN, CHANGED, SHORT = 5, 40, 3
GSI = 1
CHANGEABLE = [*range(32), *range(40, 256)]


def run(bench, offered):
    machine = bench.machine
    chance = random.Random(7)
    # Without a check where packets come from, the host takes from itself what bears the guest's address.
    for name in ("all", "lo", "tap0"):
        with open(f"/proc/sys/net/ipv4/conf/{name}/rp_filter", "w") as out:
            out.write("0")
    for side in (GUEST, HOST):
        ping(bench, offered, side, 2)
    old = recorded(machine.capture_path)
    for side in (GUEST, HOST):
        before = answers(machine.capture_path)
        machine.port += 1
        words = f"-a {ADDRESS[4][side]} -p {machine.port} -V -C 600 -S 2000"
        server = machine.begin(side, f"rping -s {words}", 90)
        offered(machine, side, machine.port, server)
        heard = machine.received()
        client = machine.begin(other(side), f"rping -c {words}", 90)
        while machine.received() < heard + 100 and not client.ended():
            time.sleep(0.02)
        sent = 0
        while not client.ended() and sent < 2 * len(old) * (AGAIN + CHANGED + SHORT):
            # Also those of the connection that stands, as they were: its beginning comes again.
            sent += forge(old, chance) + send(recorded(machine.capture_path))
        early = client.ended()
        bench.check(f"rping under {sent} forged messages", side, (server.wait(), client.wait()))
        if early:
            bench.log(f"forged messages: rping was over after {sent} of them")
        if answers(machine.capture_path) < before + len(old):
            bench.fail("nb0 has answered none of the forged messages: they have not arrived")
    for side in (GUEST, HOST):
        ping(bench, offered, side, 5)


def ping(bench, offered, side, count):
    machine = bench.machine
    machine.port += 1
    words = f"-a {ADDRESS[4][side]} -p {machine.port} -V -C {count}"
    server = machine.begin(side, f"rping -s {words}", 60)
    offered(machine, side, machine.port, server)
    client = machine.begin(other(side), f"rping -c {words}", 60).wait()
    if client.code:
        machine.stop_side(side)
    bench.check(f"rping -C {count}", side, (server.wait(), client))


def recorded(path):
    """The messages on the cable so far, as pairs of IP header and datagram, but for those that end a connection: of one that stands they
    would be right, whoever sent them."""
    found = [(packet.ip, packet.body) for packet in packets(path) if packet.qpn == GSI and packet.ip[0] >> 4 == 4]
    return [(ip, body) for ip, body in found if "DREQ" not in name(body)]


def name(body):
    return {0x15: "DREQ", 0x16: "DREP"}.get(int.from_bytes(body[8 + 12 + 8 + 16 :][:2], "big"), "")


def answers(path):
    """How many messages nb0 has sent."""
    return sum(packet.from_host and packet.qpn == GSI for packet in packets(path))


def forge(messages, chance):
    """Sends every message again, in several ways; returns how many were sent."""
    batch = []
    for ip, body in messages:
        batch += [(ip, body)] * AGAIN
        for _ in range(CHANGED):
            changed = bytearray(body)
            for _ in range(chance.randint(1, 8)):
                # Behind UDP's header, the BTH and the DETH: bytes of the message, but for the service that a request is for. One that
                # hits a program's port is a request like any other, and rping takes whatever comes.
                changed[28 + chance.choice(CHANGEABLE)] = chance.randrange(256)
            batch.append((ip, bytes(changed)))
        batch += [(ip, body[: chance.randrange(24, len(body)) & ~3]) for _ in range(SHORT)]
    chance.shuffle(batch)
    return send(batch)


def send(batch):
    """Sends datagrams with their own IP headers, sealed as their senders would."""
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as out:
        for number, (ip, body) in enumerate(batch):
            header, datagram = bytearray(ip), bytearray(body)
            # The kernel would choose an identification in place of 0, and the ICRC covers it.
            struct.pack_into("!HH", header, 2, len(ip) + len(body), number % 0xFFFF + 1)
            struct.pack_into("!HH", datagram, 4, len(body), 0)
            datagram[-4:] = struct.pack("<I", invariant_crc(header, datagram[:-4]))
            out.sendto(bytes(header + datagram), (socket.inet_ntoa(bytes(ip[16:20])), 0))
    return len(batch)
