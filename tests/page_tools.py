"""`nobounce metrics` and `nobounce top` while programs run."""
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
import time
import unittest
import urllib.request

import pyte

from page_browser import LIMIT, NOBOUNCE, ROOT, Process, Traffic, folder, moved, needs, output, until

COLUMNS, LINES = 140, 24


def samples(text):
    """{(name, sorted labels): value} of Prometheus' text format."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, labels, value = re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line).groups()
            found[name, tuple(sorted(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels)))] = float(value)
    return found


def value(found, name, **labels):
    """The one sample that has these labels."""
    values = [number for (known, has), number in found.items() if known == name and set(labels.items()) <= set(has)]
    assert len(values) == 1, f"{name} {labels}: {values}"
    return values[0]


class Terminal:
    """`nobounce top` in a terminal of its own."""

    def __init__(self, runtime):
        self.ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self.before = termios.tcgetattr(self.theirs)
        self.screen, self.raw = pyte.Screen(COLUMNS, LINES), b""
        self.stream = pyte.ByteStream(self.screen)
        variables = {**os.environ, "XDG_RUNTIME_DIR": runtime, "TERM": "xterm"}
        self.child = subprocess.Popen([NOBOUNCE, "top"], stdin=self.theirs, stdout=self.theirs, stderr=self.theirs, env=variables, start_new_session=True)
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self):
        try:
            while part := os.read(self.ours, 65536):
                self.raw += part
                self.stream.feed(part)
        except OSError:
            pass  # the other end is closed

    def text(self):
        return "\n".join(self.screen.display)

    def type(self, keys):
        os.write(self.ours, keys.encode())

    def shows(self, pattern, what=""):
        return until(lambda: re.search(pattern, self.text()), f"{what or pattern}\n{self.text()}")

    def ended(self):
        code = self.child.wait(LIMIT)
        after = termios.tcgetattr(self.theirs)
        self.close()
        return code, after

    def close(self):
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait(LIMIT)
        if self.theirs is not None:
            os.close(self.theirs)
            self.theirs = None
            self.reader.join(LIMIT)
            os.close(self.ours)


class Tools(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        needs("ib_write_bw", "perftest")
        cls.runtime = folder()
        first = Traffic(cls.runtime, "-n", "100")
        cls.addClassCleanup(first.end)
        cls.ended = [moved(line) for line in first.lines().values()]
        cls.traffic = Traffic(cls.runtime, "-D", "60")
        cls.addClassCleanup(cls.traffic.end)
        until(lambda: sum(one["out_bytes_per_s"] for one in cls.top()) > 0, "traffic")

    @classmethod
    def top(cls):
        """The devices of `nobounce top --once --json`."""
        found = json.loads(output("top", "--once", "--json", XDG_RUNTIME_DIR=cls.runtime))
        assert found["schema"] == "nobounce-top/1"
        return found["devices"]

    def metrics(self, *arguments):
        return output("metrics", *arguments, XDG_RUNTIME_DIR=self.runtime)

    def test_top_once(self):
        found = self.top()
        self.assertEqual(sorted(one["state"] for one in found), ["ended", "ended", "live", "live"])
        bytes_of = lambda one, side: sum(path["bytes"] for path in one[side].values())
        operations = lambda one, side: sum(path["operations"] for path in one[side].values())
        shown = sorted((operations(one, "out"), operations(one, "in")) for one in found if one["state"] == "ended")
        self.assertEqual(shown, sorted((one["out"][1], one["in"][1]) for one in self.ended))
        metrics = samples(self.metrics())
        for one in found:
            for side in ("in", "out"):
                counted = sum(number for (name, labels), number in metrics.items() if name == "nobounce_bytes_total" and {("id", one["id"]), ("direction", side)} <= set(labels))
                self.assertTrue(counted == bytes_of(one, side) if one["state"] == "ended" else counted >= bytes_of(one, side), f"{one['id']} {side}")
        live = [one for one in found if one["state"] == "live"]
        self.assertGreater(max(one["in_bytes_per_s"] for one in live), 0)
        # The time of opening stays.
        opened = {one["id"]: one["since"] for one in live}
        self.assertEqual({one["id"]: one["since"] for one in self.top() if one["state"] == "live"}, opened)
        table = output("top", "--once", XDG_RUNTIME_DIR=self.runtime)
        self.assertRegex(table, r"^PID +PROGRAM +DEV +STATE +OUT/s +IN/s +OUT +IN +PATHS +RETR +LOST +ERR +CPU\n")
        self.assertEqual(table.count("ib_write_bw"), 4)
        without = subprocess.run([NOBOUNCE, "top"], capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL)
        self.assertNotEqual(without.returncode, 0)
        self.assertIn("--once", without.stderr)

    def test_metrics_by_promtool(self):
        needs("promtool", "prometheus")
        for arguments in ((), ("--node-names",)):
            text = self.metrics(*arguments)
            checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=LIMIT)
            self.assertEqual((checked.returncode, checked.stdout + checked.stderr), (0, ""))

    def test_the_alert_of_the_guide(self):
        """It sees staged bytes of a job that goes on, and of one that ended between two scrapes."""
        needs("promtool", "prometheus")
        with open(os.path.join(ROOT, "docs", "guide", "watch.md")) as file:
            alert = re.search(r"```promql\n(.*?)```", file.read(), re.S)[1]
        series = lambda program, path, values: {"series": f'nobounce_bytes_total{{program="{program}",path="{path}"}}', "values": values}
        staged = lambda time, *programs: {"expr": f"count by (program) ({alert}) * 0 + 1", "eval_time": time, "exp_samples": [{"labels": f'{{program="{one}"}}', "value": 1} for one in programs]}
        test = {"evaluation_interval": "1m", "tests": [{"interval": "1m", "input_series": [
            series("long", "staged", "0x9 0+100x9 900x60"), series("short", "staged", "_x9 5x10 _x60"), series("direct", "window", "0+9x80"), series("direct", "staged", "0x80")],
            "promql_expr_test": [staged("8m"), staged("12m", "long", "short"), staged("18m", "long"), staged("40m")]}]}
        path = os.path.join(folder(), "test.json")  # JSON is YAML
        with open(path, "w") as file:
            json.dump(test, file)
        checked = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, timeout=LIMIT)
        self.assertEqual(checked.returncode, 0, checked.stdout + checked.stderr)

    def test_metrics(self):
        found = samples(self.metrics("--node-names"))
        identity = {"device": "nb0", "address": self.traffic.address, "program": "ib_write_bw"}
        ids = {dict(labels)["id"] for (name, labels), number in found.items() if name == "nobounce_device_up" and number == 1 and set(identity.items()) <= set(labels)}
        self.assertEqual(len(ids), 2)
        total = sum(number for (name, labels), number in found.items() if name == "nobounce_bytes_total" and ("direction", "out") in labels)
        port = lambda found, name: value(found, f"node_infiniband_{name}", device="nb0", port="1")
        self.assertEqual(port(found, "port_data_transmitted_bytes_total"), total)
        self.assertEqual([port(found, name) for name in ("state_id", "physical_state_id", "rate_bytes_per_second")], [4, 5, 100e9 / 8])
        # Of paths and statuses that have not occurred, too: a rate does not see a first event otherwise.
        for one in ids:
            self.assertEqual(len([1 for name, labels in found if name == "nobounce_bytes_total" and ("id", one) in labels]), 12)
            self.assertEqual(value(found, "nobounce_errors_total", id=one, status="RemoteAccess"), 0)
        place = folder()

        def grown():
            """A device publishes its counters four times a second."""
            self.assertEqual(self.metrics("--textfile", place), "")
            self.assertEqual(os.listdir(place), ["nobounce.prom"])
            with open(os.path.join(place, "nobounce.prom")) as file:
                later = samples(file.read())
            gains = [later[key] - number for key, number in found.items() if key[0] == "nobounce_bytes_total"]
            self.assertGreaterEqual(min(gains), 0)
            return max(gains) > 0

        until(grown, "counters grow")

    def test_sums_of_a_name_do_not_fall(self):
        """Devices come and go; `nb0` of --node-names only rises."""
        runtime = folder()
        sent = lambda: value(samples(output("metrics", "--node-names", XDG_RUNTIME_DIR=runtime)), "node_infiniband_port_packets_transmitted_total", device="nb0", port="1")
        pair = Traffic(runtime, "-n", "100")
        self.addCleanup(pair.end)
        pair.lines()
        before = sent()
        self.assertGreater(before, 0)
        place = os.path.join(runtime, "nobounce")
        for name in os.listdir(place):
            if name.endswith(".json"):
                os.remove(os.path.join(place, name))  # as after ten minutes
        self.assertEqual(sent(), before)
        again = Traffic(runtime, "-n", "100")
        self.addCleanup(again.end)
        again.lines()
        self.assertGreater(sent(), before)

    def test_a_folder_that_others_can_read(self):
        runtime = folder()
        os.mkdir(os.path.join(runtime, "nobounce"), 0o755)
        reason = "is open to other users (mode 755)"
        self.assertIn(reason, output("top", "--once", XDG_RUNTIME_DIR=runtime))
        told = subprocess.run([NOBOUNCE, "metrics"], capture_output=True, text=True, timeout=LIMIT, env={**os.environ, "XDG_RUNTIME_DIR": runtime})
        self.assertEqual((told.returncode, told.stdout), (0, ""))
        self.assertIn(reason, told.stderr)

    def test_metrics_server(self):
        server = Process(NOBOUNCE, "metrics", "--listen", "127.0.0.1:0", XDG_RUNTIME_DIR=self.runtime)
        self.addCleanup(server.end)
        address = re.search(r"http://127\.0\.0\.1:\d+/metrics", server.line(server.err))[0]

        def scrape(accept):
            with urllib.request.urlopen(urllib.request.Request(address, headers={"Accept": accept}), timeout=LIMIT) as answer:
                return answer.headers["Content-Type"], answer.read().decode()

        kind, text = scrape("*/*")
        self.assertEqual(kind, "text/plain; version=0.0.4; charset=utf-8")
        self.assertIn("# TYPE nobounce_bytes_total counter\n", text)
        kind, text = scrape("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1")
        self.assertTrue(kind.startswith("application/openmetrics-text"), kind)
        self.assertIn("# TYPE nobounce_bytes counter\n", text)
        self.assertIn("\nnobounce_bytes_created{", text)
        self.assertTrue(text.endswith("# EOF\n"))
        self.assertGreater(max(number for (name, _), number in samples(text).items() if name == "nobounce_bytes_total"), 0)
        for path, status in (("/none", 404), ("/../etc/passwd", 404)):
            with self.assertRaises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(address.replace("/metrics", path), timeout=LIMIT)
            self.assertEqual(refused.exception.code, status)
            refused.exception.close()
        os.kill(server.child.pid, signal.SIGINT)
        self.assertEqual(server.ended()[0], -signal.SIGINT)

    def test_top_in_a_terminal(self):
        terminal = Terminal(self.runtime)
        self.addCleanup(terminal.close)
        terminal.shows(r"nobounce: 2 live, out [1-9].*sorted by rate")
        rows = lambda: [line for line in terminal.text().splitlines() if "ib_write_bw" in line]
        self.assertEqual(len(rows()), 2)
        for name in ("total", "staged bytes", "program", "rate"):
            terminal.type("s")
            terminal.shows(f"sorted by {name} ")
        terminal.type("e")
        until(lambda: len(rows()) == 4, "ended devices")
        self.assertEqual(sum(" ended " in line for line in rows()), 2)
        terminal.type("e")
        until(lambda: len(rows()) == 2, "only live ones")
        terminal.type("/none\r")
        terminal.shows("filter: none")
        until(lambda: not rows(), "filtered")
        terminal.type("/WRITE\r")
        until(lambda: len(rows()) == 2, "case does not matter")
        terminal.type("/\x1b")
        until(lambda: "filter" not in terminal.text(), "without a filter")
        terminal.type(" ")
        terminal.shows("; frozen")
        time.sleep(0.3)
        before = rows()
        time.sleep(2.2)
        self.assertEqual(rows(), before, "frozen")
        terminal.type(" ")
        until(lambda: "frozen" not in terminal.text() and rows() != before, "goes on")
        terminal.type("q")
        code, after = terminal.ended()
        self.assertEqual(code, 0)
        self.assertEqual(after, terminal.before, "the terminal is as it was")
        self.assertIn(b"\x1b[?1049l", terminal.raw, "the other screen is left")
        self.assertGreater(terminal.raw.rfind(b"\x1b[?25h"), terminal.raw.rfind(b"\x1b[?25l"), "the cursor is visible")

    def test_top_ends_by_control_c(self):
        terminal = Terminal(self.runtime)
        self.addCleanup(terminal.close)
        terminal.shows("nobounce: ")
        terminal.type("\x03")
        code, after = terminal.ended()
        self.assertEqual((code, after), (0, terminal.before))

    def test_top_restores_the_terminal_at_sigterm(self):
        terminal = Terminal(self.runtime)
        self.addCleanup(terminal.close)
        terminal.shows("nobounce: ")
        terminal.child.terminate()
        code, after = terminal.ended()
        self.assertEqual((code, after), (0, terminal.before))
