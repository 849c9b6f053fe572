"""The tab Live while programs run: rates, the totals at the end, a killed process, staged bytes."""
import json
import os
import re
import signal

from page_browser import NOBOUNCE, STAND_IN, Page, Process, Server, Traffic, folder, moved, needs, output


class Live(Page):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        needs("ib_write_bw", "perftest")

    def setUp(self):
        super().setUp()
        self.runtime = folder()
        self.server = Server("--example", "dgx-h100", XDG_RUNTIME_DIR=self.runtime)
        self.addCleanup(self.server.end)
        self.open("live")
        self.until(lambda: "one update per second" in self.text(".live-state"), "connected")
        self.assertIn("No device is open", self.text("#panel-live"))

    def origins(self):
        return (self.server.origin + "/",)

    def url(self, tab):
        return f"{self.server.origin}/?token={self.server.token}#{tab}"

    def traffic(self, *options):
        pair = Traffic(self.runtime, *options)
        self.addCleanup(pair.end)
        return pair

    def cards(self):
        """[{state, title, text, now, rows}] of the devices, read in one call, since the page redraws every second."""
        found = self.js("""return [...document.querySelectorAll('.device')].map(card => ({
            id: card.dataset.id, state: [...card.classList].find(c => c.startsWith('st-')).slice(3), title: card.querySelector('h3').innerText, text: card.innerText,
            now: card.querySelector('.spark-now b')?.innerText, rows: [...card.querySelectorAll('.paths tbody tr')].map(r => [...r.children].map(c => c.innerText)) }))""")
        return json.loads(re.sub(r"\\u00a0|\\u202f", " ", json.dumps(found)))

    def both(self, state):
        return self.until(lambda: len(found := [one for one in self.cards() if one["state"] == state]) == 2 and found, f"two devices are {state}")

    def test_traffic(self):
        pair = self.traffic("-D", "6")
        self.both("live")
        moving = lambda: all(not one["now"].startswith("0 ") for one in self.cards())
        self.until(moving, "rates of both")
        for one in self.cards():
            self.assertEqual(one["title"], "ib_write_bw")
            self.assertIn("no loss, no errors", one["text"])
        self.assertIn("2 live, 0 ended", self.text(".sums"))
        self.assertRegex(self.text(".sums"), r"Shared memory\s+out [1-9]", "the link's rate")
        self.until(lambda: len(self.all(".sparkline .spark.total")) == 2, "histories")
        self.assertFalse(self.one(".staged-alert").is_displayed())
        self.assertFalse(self.one("#badge-live").is_displayed())
        for width in (390, 1440):
            self.size(width)
            self.no_overflow(f"live, {width} px")
            self.shoot(f"live-traffic-{width}")
        # Details stay open while the page redraws; a pause stops that.
        self.one(".device summary").click()
        before = self.text(".sums")
        self.until(lambda: self.text(".sums") != before, "the next event")
        self.assertIsNotNone(self.one(".device details").get_attribute("open"))
        pause = self.one("#panel-live button[aria-pressed]")
        pause.click()
        before = self.text(".devices")
        self.until(lambda: self.text(".live-state") == "Paused", "paused")
        self.assertEqual(self.text(".devices"), before)
        lines = pair.lines()
        self.assertEqual(self.text(".devices"), before, "still paused")
        pause.click()
        self.both("ended")
        totals = {one["id"].split("-")[0]: one["rows"] for one in self.cards()}
        self.assertEqual(len(totals), 2)
        # Columns: path, out and in per second, out and in, operations.
        shown = sorted((rows[0][0], rows[0][3], rows[0][4], int(rows[0][5].replace(" ", ""))) for rows in totals.values())
        wanted = [moved(line) for line in lines.values()]
        self.assertEqual(shown, sorted(("cpu", one["out"][0], one["in"][0], one["out"][1] + one["in"][1]) for one in wanted), lines)
        self.shoot("live-ended-1440")
        self.one("#panel-live input[name=ended]").click()
        self.until(lambda: not self.all(".device"), "ended devices are hidden")

    def plant(self, name, **fields):
        """The report of a device that ended."""
        place = os.path.join(self.runtime, "nobounce")
        os.makedirs(place, 0o700, exist_ok=True)
        with open(os.path.join(place, name), "w") as file:
            json.dump({"pid": int(name.split("-")[0]), "program": "planted", "device": "nb0", "address": "127.0.0.1", **fields}, file)

    def card(self, number):
        return self.until(lambda: next((one["text"] for one in self.cards() if one["id"] == f"{number}-0"), None), f"device {number}")

    def test_reasons(self):
        self.plant("1-0.json", link={"udp_rx_lost_queue_full": 4, "handover_lost": 1, "fault_lost": 100}, progress="caller")
        text = self.card(1)
        self.assertIn("5 lost", text)
        self.assertNotIn("no loss", text)
        self.assertRegex(self.text(".sums"), r"Lost packets\s+5\b")
        self.one(".device summary").click()
        self.until(lambda: "caller mode" in self.text(".device"), "why no CPU time is counted")
        self.plant("2-0.json", errors={"RetryExceeded": 3, "RemoteAccess": 0}, udp_reason=["the peer allows no shared memory"], progress="thread")
        text = self.card(2)
        self.assertIn("3 x RetryExceeded: the peer did not answer, after all retries", text)
        self.assertNotIn("RemoteAccess", text)
        self.assertIn("UDP on this machine: the peer allows no shared memory", text)
        self.assertIn("no loss, no errors", self.plant("3-0.json", link={"fault_lost": 9}, errors={"RemoteAccess": 0}) or self.card(3))
        self.shoot("live-reasons-1440")

    def test_announcements(self):
        """Screen readers repeat a text that is set again."""
        self.js("""window.set = 0; const node = document.querySelector('.live-state');
            new MutationObserver(list => { window.set += list.length; }).observe(node, { childList: true, characterData: true, subtree: true })""")
        self.plant("1-0.json")
        self.card(1)
        self.plant("2-0.json")
        self.card(2)
        self.assertEqual(self.js("return window.set"), 0)

    def test_a_folder_that_others_can_read(self):
        os.mkdir(os.path.join(self.runtime, "nobounce"))
        os.chmod(os.path.join(self.runtime, "nobounce"), 0o755)
        self.until(lambda: "is open to other users (mode 755)" in self.text("#panel-live"), "the reason")

    def test_killed(self):
        pair = self.traffic("-D", "30")
        live = self.both("live")
        self.until(lambda: all(not one["now"].startswith("0 ") for one in self.cards()), "traffic")
        for one in live:
            os.kill(int(one["id"].split("-")[0]), signal.SIGKILL)
        cards = self.both("killed")
        for one in cards:
            path, _, _, out, inward, _ = one["rows"][0]
            self.assertEqual((path, [out, inward].count("0 B")), ("cpu", 1), "the last totals")
        self.assertIn("0 live, 0 ended, 2 killed", self.text(".sums"))
        for process in (pair.client, pair.server):
            code, text = process.ended()
            self.assertEqual(code, 128 + signal.SIGKILL, text)
        self.shoot("live-killed-1440")

    def test_staged(self):
        """GPU memory of the stand-in driver without a window: every byte rests in host buffers."""
        variables = {"NOBOUNCE_CUDA": STAND_IN, "NOBOUNCE_WINDOW": "off", "NOBOUNCE_LINK": "udp"}
        bench = Process(NOBOUNCE, "bench", "--memory", "gpu", "--op", "write", "--size", "64K", "--quick", XDG_RUNTIME_DIR=self.runtime, **variables)
        self.addCleanup(bench.end)
        self.until(lambda: self.one(".staged-alert").is_displayed(), "the warning")
        self.until(lambda: " now" in self.text(".staged-alert") and "none now" not in self.text(".staged-alert"), "while bytes move")
        self.assertIsNone(bench.child.poll())
        self.assertIn("Reason: the window is switched off (NOBOUNCE_WINDOW=off", self.text(".staged-alert"))
        self.assertTrue(self.all(".device.has-staged .staged-line"))
        self.assertTrue(self.all(".sums .staged-row"))
        self.shoot("live-staged-1440")
        self.size(390)
        self.no_overflow("staged, 390 px")
        self.shoot("live-staged-390")
        for name in ("machine", "findings", "expect", "measured"):
            self.tab(name)
            self.assertTrue(self.one("#badge-live").is_displayed(), f"seen from {name}")
        table = output("top", "--once", XDG_RUNTIME_DIR=self.runtime)
        self.assertIn("staged: nobounce (", table)

    def test_server_ends(self):
        self.server.end()
        self.until(lambda: "Connection lost" in self.text(".live-state"), "the page says that the server is gone")
        self.driver.get("about:blank")
        self.driver.get_log("browser")  # the browser names the refused connections itself
