"""What a capture of the cable holds: whether every ICRC is right, computed here once more, and which packets went which way."""

import collections
import struct
import zlib

OPCODES = {
    0: "SEND first", 1: "SEND middle", 2: "SEND last", 3: "SEND last imm", 4: "SEND only", 5: "SEND only imm", 6: "WRITE first", 7: "WRITE middle",
    8: "WRITE last", 9: "WRITE last imm", 10: "WRITE only", 11: "WRITE only imm", 12: "READ request", 13: "READ response first",
    14: "READ response middle", 15: "READ response last", 16: "READ response only", 17: "ACK", 18: "ATOMIC ACK", 19: "CMP SWAP", 20: "FETCH ADD",
    22: "SEND last inv", 23: "SEND only inv", 28: "FLUSH", 29: "ATOMIC WRITE",
}  # fmt: skip
# Messages of the connection manager, by attribute.
MESSAGES = {0x10: "REQ", 0x11: "MRA", 0x12: "REJ", 0x13: "REP", 0x14: "RTU", 0x15: "DREQ", 0x16: "DREP", 0x17: "SIDR REQ", 0x18: "SIDR REP"}
SERVICES = {0: "RC", 1: "UC", 3: "UD"}
HOSTS = ("10.99.0.1", "fd99::1")


class Packet:
    """One RoCEv2 packet: when, from the host or not, BTH fields, the rest behind the BTH, and whether its ICRC is right."""

    def __init__(self, seconds, ip, datagram, from_host, right):
        self.seconds, self.from_host, self.right = seconds, from_host, right
        self.sport = struct.unpack_from("!H", datagram, 0)[0]
        opcode, _, _, qpn, psn = struct.unpack_from("!BBHII", datagram, 8)
        self.code, self.service = opcode & 31, opcode >> 5
        self.qpn, self.psn, self.ack_request = qpn & 0xFFFFFF, psn & 0xFFFFFF, psn >> 31
        self.rest = datagram[20:-4]
        self.ip, self.body = ip, datagram

    def syndrome(self):
        """The AETH's first byte, where there is one."""
        return self.rest[0] if self.rest and self.service == 0 and self.code in (13, 15, 16, 17, 18) else None

    def name(self):
        text = OPCODES.get(self.code, f"opcode {self.code}")
        if self.service == 3 and self.qpn == 1 and len(self.rest) == 264:
            # Behind the DETH of 8 bytes.
            text = MESSAGES.get(int.from_bytes(self.rest[24:26], "big"), "MAD")
        if self.syndrome() is None:
            return f"{SERVICES.get(self.service, self.service)} {text}"
        if self.code == 17 and self.syndrome() >> 5 == 1:
            text = f"RNR NAK, timer {self.syndrome() & 31}"
        elif self.code == 17 and self.syndrome() >> 5 == 3:
            codes = ("PSN sequence", "invalid request", "remote access", "remote operational")
            number = self.syndrome() & 31
            text = "NAK " + (codes[number] if number < len(codes) else str(number))
        return f"{SERVICES.get(self.service, self.service)} {text}"

    def line(self):
        """One line for people, as docs/reference/interop.md shows them."""
        way = "nb0 -> rxe0" if self.from_host else "rxe0 -> nb0"
        extra = f" msn {int.from_bytes(self.rest[1:4], 'big')}" if self.syndrome() is not None else ""
        return f"{self.seconds:10.6f}  {way}  QP {self.qpn:#08x} PSN {self.psn:#08x}{' A' if self.ack_request else '  '} {self.name()}{extra}, {len(self.rest)} bytes"


def invariant_crc(ip, body):
    """Over the pseudo header of ones, then IP, UDP and transport headers with what routers change replaced by ones."""
    ip, body = bytearray(ip), bytearray(body)
    if ip[0] >> 4 == 4:
        ip[1] = ip[8] = 0xFF
        ip[10:12] = b"\xff\xff"
    else:
        ip[0] |= 0x0F
        ip[1:4] = b"\xff\xff\xff"
        ip[7] = 0xFF
    body[6:8] = b"\xff\xff"
    body[12] = 0xFF
    return zlib.crc32(b"\xff" * 8 + ip + body)


def packets(path):
    """The RoCEv2 packets of a classic little-endian capture of Ethernet frames."""
    data = open(path, "rb").read()
    at, start = 24, None
    while at + 16 <= len(data):
        seconds, micros, length, _ = struct.unpack_from("<IIII", data, at)
        frame = data[at + 16 : at + 16 + length]
        at += 16 + length
        kind = frame[12:14]
        if kind == b"\x08\x00":
            size = (frame[14] & 15) * 4
            total = struct.unpack_from("!H", frame, 16)[0]
            ip, body = frame[14 : 14 + size], frame[14 + size : 14 + total]
            source = ".".join(str(byte) for byte in ip[12:16])
        elif kind == b"\x86\xdd":
            ip, body = frame[14:54], frame[54 : 54 + struct.unpack_from("!H", frame, 18)[0]]
            source = "fd99::1" if ip[8:24] == bytes.fromhex("fd99" + "0" * 27 + "1") else "other"
        else:
            continue
        if len(body) < 24 or body[2:4] != b"\x12\xb7":
            continue
        time = seconds + micros / 1e6
        start = time if start is None else start
        right = invariant_crc(ip, body[:-4]) == struct.unpack("<I", body[-4:])[0]
        yield Packet(time - start, ip, body, source in HOSTS, right)


class Summary:
    """Counts over one capture, or over several."""

    def __init__(self):
        self.right = collections.Counter()
        self.wrong = collections.Counter()
        self.kinds = {True: collections.Counter(), False: collections.Counter()}
        self.sizes = {True: set(), False: set()}

    def add(self, path):
        for packet in packets(path):
            (self.right if packet.right else self.wrong)[packet.from_host] += 1
            if packet.right:
                self.kinds[packet.from_host][packet.name()] += 1
        return self


def cut(path, first, last, to):
    """Writes the records `first` to `last` of a capture, counted from 1, to a file of its own."""
    data = open(path, "rb").read()
    at, number = 24, 0
    with open(to, "wb") as out:
        out.write(data[:24])
        while at + 16 <= len(data):
            number += 1
            end = at + 16 + struct.unpack_from("<I", data, at + 8)[0]
            if first <= number <= last:
                out.write(data[at:end])
            at = end


if __name__ == "__main__":
    # capture.py FILE prints a capture; capture.py FILE FIRST LAST TO cuts a piece out of it.
    import sys

    if len(sys.argv) == 5:
        cut(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        for number, packet in enumerate(packets(sys.argv[1]), 1):
            print(f"{number:6} " + packet.line() + ("" if packet.right else "  (wrong ICRC)"))
