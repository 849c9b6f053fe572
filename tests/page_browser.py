"""What the tests of the page share: processes of nobounce, traffic, and a browser."""
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

from selenium import webdriver
from selenium.common.exceptions import JavascriptException, StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from from_pip import ROOT

NOBOUNCE = os.environ["PAGE_NOBOUNCE"]
# The stand-in driver, which cargo builds beside the command.
STAND_IN = os.path.join(os.path.dirname(NOBOUNCE), "libfake_cuda.so")
BENCHES = [os.path.join(ROOT, "docs", "measurements", f"h200-{name}.json") for name in ("bench", "gpu-initiated", "kv")]
TABS = ["machine", "findings", "expect", "measured", "live"]
# Seconds that a busy machine may need for anything.
LIMIT = 30


def needs(program, package):
    """Waives a test where the program is missing; a failure where REQUIRE names it."""
    if shutil.which(program):
        return
    reason = f"{program} is not installed (apt-get install {package})"
    if subprocess.run([os.path.join(ROOT, "tools", "waive"), f"page-{package}", reason]).returncode != 0:
        raise AssertionError(reason)
    raise unittest.SkipTest(reason)


def folder():
    """A private folder; all are removed at the end of the tests."""
    return tempfile.mkdtemp()


def output(*arguments, given=None, codes=(0,), **variables):
    """What the command prints."""
    ran = subprocess.run([NOBOUNCE, *arguments], input=given, capture_output=True, text=True, timeout=2 * LIMIT, env={**os.environ, **variables})
    assert ran.returncode in codes, f"{arguments}: {ran.returncode}: {ran.stderr}"
    return ran.stdout


def until(check, what="", seconds=LIMIT):
    """Waits for a result that is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := check():
            return found
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds} s: {what}")


def listening(port):
    for name in ("tcp", "tcp6"):
        with open(f"/proc/net/{name}") as file:
            if any(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in file):
                return True
    return False


class Process:
    """A process with a group of its own, and its output in files."""

    def __init__(self, *command, **variables):
        # Appended to: the child shares the position at which this end reads.
        self.out, self.err = (tempfile.TemporaryFile("a+") for _ in range(2))
        self.child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.out, stderr=self.err, env={**os.environ, **variables}, start_new_session=True)

    @staticmethod
    def text(file):
        file.seek(0)
        return file.read()

    def line(self, file):
        """The first line, once it is there."""
        until(lambda: "\n" in self.text(file) or self.child.poll() is not None, "a line")
        return self.text(file).partition("\n")[0]

    def ended(self):
        """Waits for the end. Returns the exit code and all output."""
        code = self.child.wait(2 * LIMIT)
        return code, self.text(self.out) + self.text(self.err)

    def end(self):
        """Ends the group: first the children, so that the process can reap them."""
        if self.child.poll() is None:
            with open(f"/proc/{self.child.pid}/task/{self.child.pid}/children") as file:
                children = file.read().split()
            for one in children:
                os.kill(int(one), signal.SIGKILL)
            try:
                self.child.wait(LIMIT if children else 0)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self.child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.child.wait(LIMIT)
        self.out.close()
        self.err.close()


class Server(Process):
    """`nobounce ui`."""

    def __init__(self, *arguments, **variables):
        super().__init__(NOBOUNCE, "ui", *arguments, **variables)
        line = self.line(self.out)
        found = re.fullmatch(r"(http://127\.0\.0\.1:(\d+))/\?token=([0-9a-f]{32})", line)
        assert found, f"one line with the address: {line!r} {self.text(self.err)}"
        self.origin, self.port, self.token = found[1], int(found[2]), found[3]

    def close(self):
        """Ends it as Ctrl-C does."""
        os.kill(self.child.pid, signal.SIGINT)
        code, _ = self.ended()
        assert code == -signal.SIGINT, code
        assert self.text(self.out).count("\n") == 1, "the address is all that stdout gets"
        self.end()


class Traffic:
    """ib_write_bw between two processes under `nobounce run`."""

    def __init__(self, runtime, *options):
        # An address of its own, so that other tests do not mix with it.
        self.address = f"127.9.{random.randint(1, 250)}.{random.randint(1, 250)}"
        port = random.randint(10000, 30000)
        command = [NOBOUNCE, "run", "--addr", self.address, "--", "ib_write_bw", "-F", "-p", str(port), *options]
        self.server = Process(*command, XDG_RUNTIME_DIR=runtime)
        until(lambda: listening(port), "the server listens")
        self.client = Process(*command, "localhost", XDG_RUNTIME_DIR=runtime)

    def lines(self):
        """The last lines of both, after their end: {"server": ..., "client": ...}."""
        found = {}
        for name in ("client", "server"):
            code, text = getattr(self, name).ended()
            assert code == 0, text
            found[name] = text.strip().splitlines()[-1]
        return found

    def end(self):
        self.client.end()
        self.server.end()


def moved(line):
    """{"out": (size, operations), "in": ...} of the last line of `nobounce run` where all bytes took the path cpu."""
    found = {}
    for side in ("out", "in"):
        part = re.search(side + r": (?:nothing|(?P<size>[\d.]+ \w+) cpu in (?P<count>\d+) operations)", line)
        assert part, line
        found[side] = (part["size"] or "0 B", int(part["count"] or 0))
    return found


def sixteen():
    """Facts of a machine with 8 GPUs and 16 NICs, and with faults: ACS, a degraded slot, a port that is down, a name that is HTML."""
    facts = json.loads(output("doctor", "--save", "-", "--example", "dgx-h100", codes=(0, 1)))
    pci = {one["address"]: one for one in facts["pci"]}
    copy = lambda value: json.loads(json.dumps(value))
    for number, old in enumerate(facts["nics"][:8]):
        slot = pci[old["address"]]
        port, device, nic = copy(pci[slot["parent"]]), copy(slot), copy(old)
        port["address"] = slot["parent"][:-4] + "03.0"
        device["address"] = f"{slot['address'][:5]}{int(slot['address'][5:7], 16) + 3:02x}:00.0"
        device["parent"] = port["address"]
        nic.update(name=f"mlx5_{8 + number}", address=device["address"], uverbs=f"uverbs{8 + number}")
        facts["pci"] += [port, device]
        facts["nics"].append(nic)
        facts["devices"].append({"path": f"/dev/infiniband/uverbs{8 + number}", "open": {"ok": True}})
    pci = {one["address"]: one for one in facts["pci"]}
    pci[facts["nics"][2]["address"]]["link"]["width"] = 8
    facts["nics"][13]["ports"][0].update(state="DOWN", physical_state="Polling")
    for one in facts["pci"]:
        if one.get("parent", "").startswith("0000:9d") or one["address"].startswith("0000:9e"):
            one.setdefault("config", {}).setdefault("acs", {})["control"] = "0x001d"
    for number in (4, 12):
        pci[facts["nics"][number]["address"]].setdefault("config", {})["relaxed_ordering"] = False
    facts["environment"] = {"NCCL_NET_GDR_LEVEL": "LOC"}
    facts["machine"]["product"] = "</script><img src=x onerror=alert(1)>"
    path = os.path.join(folder(), "facts.json")
    with open(path, "w") as file:
        json.dump(facts, file)
    return path


def changed(name, change):
    """A file with the facts of a known machine after a change."""
    facts = json.loads(output("doctor", "--save", "-", "--example", name, codes=(0, 1)))
    change(facts)
    path = os.path.join(folder(), "facts.json")
    with open(path, "w") as file:
        json.dump(facts, file)
    return path


def four_nodes(facts):
    """dgx-h100 with two NUMA nodes for each processor: devices move in the order of their buses."""
    nodes = facts["machine"]["numa"]
    facts["machine"]["numa"] = [{**node, "id": 2 * old + half} for old, node in enumerate(nodes) for half in (0, 1)]
    roots = sorted({one["root"] for one in facts["pci"]})
    for one in facts["pci"]:
        one["numa_node"] = roots.index(one["root"]) * 4 // len(roots)


def chromium():
    options = webdriver.ChromeOptions()
    for one in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--no-first-run", "--hide-scrollbars"):
        options.add_argument(one)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


class Page(unittest.TestCase):
    """A browser at a page. Every test ends with a look at the console and at the requests."""

    driver = None

    @classmethod
    def setUpClass(cls):
        cls.driver = chromium()
        cls.addClassCleanup(cls.driver.quit)

    def setUp(self):
        # Without motion, which a browser without a GPU draws slowly.
        self.scheme("light")
        self.size(1440)

    def tearDown(self):
        wrong = [one["message"] for one in self.driver.get_log("browser") if one["level"] in ("SEVERE", "WARNING")]
        self.assertEqual(wrong, [], "console")
        self.assertEqual(self.requests_elsewhere(), [])

    def requests_elsewhere(self):
        messages = [json.loads(one["message"])["message"] for one in self.driver.get_log("performance")]
        asked = [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith((*self.origins(), "about:", "data:"))]

    def origins(self):
        """Addresses that may be asked."""
        raise NotImplementedError

    def url(self, tab):
        raise NotImplementedError

    def open(self, tab="machine"):
        self.driver.get("about:blank")
        self.driver.get(self.url(tab))
        self.until(lambda: self.all(".box") or self.all(".panel"), "the machine")

    def size(self, width, height=900):
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500})

    def scheme(self, name, motion="reduce"):
        features = [{"name": "prefers-color-scheme", "value": name}, {"name": "prefers-reduced-motion", "value": motion}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def until(self, check, what="", seconds=LIMIT):
        ignored = [StaleElementReferenceException, JavascriptException]
        return WebDriverWait(self.driver, seconds, poll_frequency=0.1, ignored_exceptions=ignored).until(lambda _: check(), what)

    def all(self, css):
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def one(self, css):
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def js(self, code, *arguments):
        return self.driver.execute_script(code, *arguments)

    def text(self, css):
        """In one call, since the page may redraw. No-break spaces become spaces."""
        return re.sub("[\u00a0\u202f]", " ", self.js("return document.querySelector(arguments[0]).innerText", css))

    def tab(self, name):
        self.js("document.getElementById(`tab-${arguments[0]}`).click()", name)
        self.until(lambda: self.one(f"#panel-{name}").is_displayed(), name)

    def filled(self, name):
        """Opens a tab, and waits until all of it is there."""
        self.tab(name)
        ready = {"machine": ".tree-svg .box", "findings": ".finding, #panel-findings .empty", "expect": "#panel-expect .chart-svg", "measured": "#panel-measured .chart-svg", "live": ".sums table"}
        self.until(lambda: self.all(ready[name]), f"{name} is filled")
        if name == "expect":
            self.until(lambda: self.all(".impact tbody tr"), "the cluster")

    def no_overflow(self, what):
        page, window = self.js("return [document.documentElement.scrollWidth, innerWidth]")
        self.assertLessEqual(page, window, f"{what}: horizontal scrolling")

    def shoot(self, name):
        """A screenshot of the whole page, where PAGE_SHOTS asks for it."""
        if target := os.environ.get("PAGE_SHOTS"):
            width, height = self.js("return [innerWidth, Math.min(4000, document.documentElement.scrollHeight)]")
            self.size(width, height)
            time.sleep(0.3)
            self.driver.save_screenshot(os.path.join(target, f"{name}.png"))
            self.size(width)
