"""The server of `nobounce ui` without a browser: the token, other hosts, requests that are not plain, silent connections."""
import json
import os
import random
import socket
import threading
import time
import unittest

from page_browser import BENCHES, LIMIT, Server, folder, output, until

API = ["/api/machine", "/api/predict", "/api/bench", "/api/bench/file?name=h200-bench.json", "/api/live", "/api/", "/api/none"]
# The server's own limits (crates/cli/src/http): seconds for a request.
PATIENCE = 10


def send(server, data, seconds=LIMIT):
    """The whole answer to some bytes; of a stream the first event."""
    answer = b""
    with socket.create_connection(("127.0.0.1", server.port), seconds) as connection:
        connection.sendall(data)
        while part := connection.recv(65536):
            answer += part
            if b"text/event-stream" in answer and b"\n\n" in answer.partition(b"\r\n\r\n")[2]:
                break
    return answer


class Refusals(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("--example", "dgx-h100", "--bench", BENCHES[0])
        cls.addClassCleanup(cls.server.close)

    def send(self, data, seconds=LIMIT):
        return send(self.server, data, seconds)

    def ask(self, path, token=None, host=None, method="GET", more=""):
        """(status, headers, body)"""
        host = f"127.0.0.1:{self.server.port}" if host is None else host
        allowed = f"Authorization: Bearer {token}\r\n" if token else ""
        head, _, body = self.send(f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{allowed}{more}\r\n".encode()).partition(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]), head.decode(), body

    def still_answers(self):
        self.assertEqual(self.ask("/api/machine", self.server.token)[0], 200)

    def test_token(self):
        token = self.server.token
        for path in API:
            joint = "&" if "?" in path else "?"
            for given in (None, "", "x", token[:-1], token + "0", "0" * len(token), token.upper() + " "):
                self.assertEqual(self.ask(path, given)[0], 401, f"{path} {given}")
            self.assertEqual(self.ask(f"{path}{joint}token={token[:-1]}")[0], 401, path)
            # The address with the token is for the stream of events only.
            wanted = 200 if path == "/api/live" else 401
            self.assertEqual(self.ask(f"{path}{joint}token={token}")[0], wanted, path)
        for path in API[:4]:
            status, head, body = self.ask(path, token)
            self.assertEqual(status, 200, path)
            self.assertIsInstance(json.loads(body), dict)
        for part in ("default-src 'none'", "frame-ancestors 'none'", "X-Content-Type-Options: nosniff", "Referrer-Policy: no-referrer", "Cache-Control: no-store"):
            self.assertIn(part, head)
        self.assertNotIn("Access-Control", head)
        for path in ("/", "/page.js", "/page.css"):
            status, _, body = self.ask(path)
            self.assertEqual(status, 200)
            self.assertNotIn(token.encode(), body)

    def test_other_hosts(self):
        port = self.server.port
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", f"127.0.0.1.evil.example:{port}", f"localhost.evil:{port}", f"[[::1]]:{port}", f"localhostx:{port}", "", f"0.0.0.0:{port}"):
            for path in ("/", "/page.js", "/api/machine"):
                self.assertEqual(self.ask(path, self.server.token, host)[0], 421, f"{host} {path}")
        for host in (f"localhost:{port}", f"LOCALHOST:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
            self.assertEqual(self.ask("/", host=host)[0], 200, host)

    def test_files_of_the_machine(self):
        token = self.server.token
        for path in ("/../../etc/passwd", "/..%2f..%2fetc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/page.js/../../etc/passwd", "/api/../../etc/passwd"):
            self.assertEqual(self.ask(path)[0], 401, path)
            status, _, body = self.ask(path, token)
            self.assertEqual(status, 404, path)
            self.assertNotIn(b"root:", body)
        for name in ("../../etc/passwd", "/etc/passwd", "..%2fh200-kv.json", "h200-kv.json", ""):
            self.assertEqual(self.ask(f"/api/bench/file?name={name}", token)[0], 404, name)
        for option in ("facts=/etc/passwd", "plot=/tmp/x", "calibrate=/etc/passwd", "against=/etc/passwd", "calibration=x", "save-calibration=/tmp/x", "unknown=1", "rails=--plot=/tmp/x"):
            status, _, body = self.ask(f"/api/predict?{option}", token)
            self.assertEqual((status, list(json.loads(body))), (200, ["error"]), option)
        self.assertEqual(self.ask("/api/machine?name=../x", token)[0], 404)

    def test_requests_that_are_not_plain(self):
        token = self.server.token
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE", "CONNECT"):
            self.assertEqual(self.ask("/api/machine", token, method=method)[0], 405, method)
        self.assertEqual(self.ask("/api/machine", token, more="".join(f"X-{n}: 1\r\n" for n in range(200)))[0], 400)
        host = f"Host: 127.0.0.1:{self.server.port}\r\n".encode()
        malformed = [b"\r\n\r\n", b"\0" * 64 + b"\r\n\r\n", b"GET\r\n\r\n", b"GET /\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET http://x/ HTTP/1.1\r\n" + host + b"\r\n",
                     b"GET / HTTP/1.1\r\nHost\r\n\r\n", b"GET /\xff\xfe HTTP/1.1\r\nA\x01: b\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\n"]
        for request in malformed:
            self.assertRegex(self.send(request), rb"^HTTP/1.1 4(00|05|21) ", request)
        for request in (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 1_000_000, b"x" * 20_000):
            self.assertRegex(self.send(request), rb"^HTTP/1.1 431 ")
            self.still_answers()
        # Other bytes; and peers that close in the middle.
        chance = random.Random(7)
        whole = f"GET /api/predict?size=8..1M HTTP/1.1\r\nHost: 127.0.0.1:{self.server.port}\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
        for _ in range(200):
            request = bytearray(whole)
            for _ in range(chance.randrange(1, 6)):
                request[chance.randrange(len(request))] = chance.randrange(256)
            with socket.create_connection(("127.0.0.1", self.server.port), LIMIT) as connection:
                connection.sendall(request[:chance.randrange(1, len(request))])
                if chance.random() < 0.5:
                    connection.shutdown(socket.SHUT_WR)
                    self.assertRegex(connection.makefile("rb").readline(), rb"^HTTP/1.1 (200|400|401|404|405|421) ")
        self.still_answers()

    def test_anonymous(self):
        """Neither the machine's file nor the programs that run are named."""
        place = folder()
        facts, bench = (os.path.join(place, f"rack7-{name}.json") for name in ("facts", "bench"))
        output("doctor", "--save", facts, "--example", "dgx-h100", codes=(0, 1))
        with open(BENCHES[0]) as file:
            measured = json.load(file)
        measured["command"] = "nobounce bench --peer 10.1.2.3"
        with open(bench, "w") as file:
            json.dump(measured, file)
        runtime = folder()
        os.mkdir(os.path.join(runtime, "nobounce"), 0o700)
        with open(os.path.join(runtime, "nobounce", "31337-0.json"), "w") as file:
            json.dump({"pid": 31337, "program": "secret_model", "device": "nb0", "address": "10.1.2.3", "peers": ["10.1.2.4"], "udp_reason": ["no answer of 10.1.2.4"]}, file)
        secrets = [place, "rack7", "10.1.2", "31337", "secret_model"]
        server = Server("--facts", facts, "--bench", bench, "--anonymous", XDG_RUNTIME_DIR=runtime)
        self.addCleanup(server.end)
        ask = lambda path: send(server, f"GET {path} HTTP/1.1\r\nHost: localhost:{server.port}\r\nAuthorization: Bearer {server.token}\r\n\r\n".encode()).decode()
        answers = [ask(path) for path in ("/api/machine", "/api/bench", "/api/bench/file?name=measurement+1", f"/api/live?token={server.token}")]
        answers.append(output("report", "--out", "-", "--facts", facts, "--bench", bench, "--anonymous", XDG_RUNTIME_DIR=runtime))
        for answer in answers:
            self.assertIn("200 OK", answer[:20] if answer.startswith("HTTP") else "200 OK")
            for secret in secrets:
                self.assertNotIn(secret, answer)
        self.assertIn("program 1", answers[3])

    def test_silent_connections(self):
        """Connections that say nothing, or a byte now and then, end after the server's time limit; others are answered soon after."""
        slow = socket.create_connection(("127.0.0.1", self.server.port), LIMIT)
        ended = []

        def drip():
            start = time.monotonic()
            try:
                for byte in f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{self.server.port}\r\n{'x' * 40}".encode():
                    slow.sendall(bytes([byte]))
                    slow.settimeout(0.4)
                    try:
                        if slow.recv(1000):
                            break
                    except TimeoutError:
                        pass
            except OSError:
                pass
            ended.append(time.monotonic() - start)

        dripping = threading.Thread(target=drip)
        dripping.start()
        start = time.monotonic()
        silent = [socket.create_connection(("127.0.0.1", self.server.port), LIMIT) for _ in range(100)]
        answered = []

        def tried():
            try:
                answered.append(self.ask("/api/machine", self.server.token)[0])
            except (OSError, IndexError):
                return False  # no place for another connection
            return True

        until(tried, "an answer", PATIENCE + LIMIT)
        took = time.monotonic() - start
        self.assertEqual(answered, [200])
        self.assertLess(took, PATIENCE + 4, "the server's time limit")
        dripping.join(LIMIT)
        self.assertLess(ended[0], PATIENCE + 4, "single bytes do not extend the time")
        start = time.monotonic()
        self.still_answers()
        self.assertLess(time.monotonic() - start, 2)
        for connection in [*silent, slow]:
            connection.close()
