"""Every tab and every control of `nobounce ui`, with a known machine, a machine of 8 GPUs and 16 NICs, and measurements."""
import json
import os

from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from page_browser import BENCHES, ROOT, TABS, Page, Server, changed, folder, four_nodes, sixteen


class Served(Page):
    """A page of a server; `arguments` are those of the command."""

    arguments = ()

    @classmethod
    def setUpClass(cls):
        cls.server = Server(*cls.arguments, XDG_RUNTIME_DIR=folder())
        cls.addClassCleanup(cls.server.close)
        super().setUpClass()

    def origins(self):
        return (self.server.origin + "/",)

    def url(self, tab):
        return f"{self.server.origin}/?token={self.server.token}#{tab}"

    def choose(self, css, value):
        Select(self.one(css)).select_by_value(value)

    def slide(self, css, value):
        self.js("const n = document.querySelector(arguments[0]); n.value = arguments[1]; n.dispatchEvent(new Event('input', {bubbles: true}))", css, value)

    def changes(self, css, act, what):
        """What an action does to a text."""
        before = self.text(css)
        act()
        self.until(lambda: self.text(css) != before, what)


class Example(Served):
    arguments = ("--example", "dgx-h100", *(part for path in BENCHES for part in ("--bench", path)))

    def test_first_paint(self):
        times = []
        for _ in range(3):  # others may keep the machine busy
            self.open()
            times.append(self.until(lambda: self.js("return performance.getEntriesByName('first-contentful-paint').map(e => e.startTime)"), "painted")[0])
        self.assertLess(min(times), 1000, "milliseconds")

    def test_token(self):
        self.open()
        self.assertNotIn(self.server.token, self.js("return location.href"))
        self.driver.refresh()
        self.until(lambda: self.all(".box"), "the token is kept for this tab")
        self.js("sessionStorage.clear()")
        self.driver.get("about:blank")
        self.driver.get(self.server.origin + "/")
        self.until(lambda: self.all("#panel-machine .error"), "the reason")
        self.assertIn("token", self.text("#panel-machine .error"))
        self.tab("live")
        self.until(lambda: "refused" in self.text(".live-state"), "the live view says so, too")
        self.driver.get_log("browser")  # the browser names the status 401 itself

    def test_many_tabs(self):
        """More than the six connections that a browser opens to a server."""
        first = self.driver.current_window_handle
        self.open("live")
        for _ in range(7):
            self.driver.switch_to.new_window("tab")
            self.open("live")
            self.until(lambda: "one update per second" in self.text(".live-state"), "events")
        for handle in self.driver.window_handles:
            if handle != first:
                self.driver.switch_to.window(handle)
                self.driver.close()
        self.driver.switch_to.window(first)
        before = self.js("return performance.now()")
        self.until(lambda: "one update per second" in self.text(".live-state") and self.js("return performance.now()") > before + 500, "events again")

    def test_machine_choice(self):
        self.open()
        names = [one.get_attribute("value") for one in Select(self.one("#machine-choice")).options]
        self.assertEqual(names[0], "this")
        self.assertGreater(len(names), 10)
        for name in names[1:]:
            self.js("document.querySelector('.facts-line').dataset.old = 1")
            self.choose("#machine-choice", name)
            self.until(lambda: self.all(".facts-line:not([data-old])"), name)
            self.assertFalse(self.all("#panel-machine .error"), name)
            self.assertTrue(self.all(".tree-svg .box"), name)
            self.no_overflow(name)
        # A tab that was opened before follows.
        self.tab("expect")
        self.filled("expect")
        before = self.text(".results .answer")
        self.choose("#machine-choice", "dual-socket")
        self.until(lambda: "A100" in self.text(".results .answer") != before, "the calculator follows")
        self.assertEqual(self.one(".controls select[name=machine]").get_attribute("value"), "dual-socket")
        self.tab("machine")
        self.choose("#machine-choice", "container")
        self.until(lambda: "8 staged" in self.text(".facts-line"), "the container's pairs")
        self.assertIn("--device /dev/infiniband", self.text(".panel"))

    def test_expect(self):
        self.open("expect")
        self.filled("expect")
        self.assertEqual(len(self.all("#panel-expect .chart-svg")), 2)
        self.assertTrue(self.all(".band.k-direct") and self.all(".band.k-staged"))
        answer = ".results .answer"
        self.one(".more summary").click()
        # Reads of a GPU through a Zen are not predicted, whatever the other parts are.
        parts = {"link": "ib:xdr", "nic-slot": "gen4x8", "gpu-slot": "gen3x16", "distance": "NODE", "mtu": "1024", "max-payload": "128", "max-read-request": "512",
                 "software": "mpi", "op": "read", "platform": "zen", "memory": "host"}
        for name, value in parts.items():
            self.changes(answer, lambda: self.choose(f'.controls select[name="{name}"]', value), name)
            self.assertFalse(self.one("#panel-expect .error").is_displayed(), name)
        self.changes(answer, lambda: next(one for one in self.all(".controls button") if one.text == "Reset parts").click(), "reset")
        for name, value in (("rails", 4), ("sharers", 2), ("hops", 5)):
            self.changes(answer, lambda: self.slide(f".controls input[name={name}]", value), name)
        self.changes("#panel-expect .tiles", lambda: self.slide("#size", 2), "size")
        self.assertIn("32 B", self.text("#panel-expect .tiles"))
        self.one(".controls input[name=strict-order]").click()
        self.until(lambda: "strict ordering" in self.text(answer), "strict ordering")
        chart = self.one("#panel-expect .chart-svg")
        self.changes("#panel-expect .readout", lambda: ActionChains(self.driver).move_to_element(chart).perform(), "the pointer reads a value")
        self.changes("#panel-expect .readout", lambda: chart.send_keys(Keys.ARROW_LEFT), "so does the keyboard")
        self.one("#panel-expect .chart .data summary").click()
        self.assertGreater(len(self.all("#panel-expect .chart tbody tr")), 20)
        self.choose(".controls select[name=machine]", "dual-socket")
        self.until(lambda: "A100" in self.text(answer), "another machine")
        self.choose(".controls select[name=distance]", "PHB")
        self.choose(".controls select[name=platform]", "xeon-old")
        self.until(lambda: self.one("#panel-expect .error").is_displayed(), "why parts do not go together")
        self.assertIn("Xeon", self.text("#panel-expect .error"))

    def test_cluster(self):
        self.open("expect")
        self.filled("expect")
        tiles = ".cluster .tiles"

        def put(name, value):
            field = self.one(f'.cluster input[name="{name}"]')
            field.clear()
            field.send_keys(str(value))

        self.assertEqual(self.one(".cluster input[name=bytes]").get_attribute("placeholder"), "13.04", "GiB of 7e9 parameters, 2 B each")
        steps = []
        for parameters, width in ((7, "2"), (14, "2"), (7, "4")):
            put("parameters", parameters)
            self.choose(".cluster select[name=width]", width)
            self.until(lambda: self.one(".cluster input[name=bytes]").get_attribute("placeholder") == ("13.04" if len(steps) == 0 else "26.08"), "bytes of the model")
            if steps:
                self.until(lambda: self.text(tiles) != steps[0], "the larger model")
            steps.append(self.text(tiles))
        self.assertEqual(steps[1], steps[2], "twice the parameters, or twice the bytes for each")
        for name, value in (("nodes", 32), ("gpus-per-node", 4), ("nics-per-node", 4), ("bytes", 3), ("compute", 100), ("price", 9.5)):
            self.changes(tiles, lambda: put(name, value), name)
        before = self.text(tiles)
        put("parameters", 70)
        self.changes(tiles, lambda: put("nodes", 64), "another request")
        self.changes(tiles, lambda: put("nodes", 32), "and back")
        self.assertEqual(self.text(tiles), before, "bytes that are given override the model")
        self.changes(tiles, lambda: self.choose(".cluster select[name=pattern]", "all-to-all"), "collective")
        self.changes(tiles, lambda: self.slide(".cluster input[name=overlap]", 80), "overlap")
        self.changes(tiles, lambda: self.choose(".cluster select[name=unit]", "M"), "unit")
        self.assertEqual(len(self.all(".impact tbody tr")), 6)
        self.assertFalse(self.one(".cluster .error").is_displayed())

    def test_measured(self):
        self.open("measured")
        self.until(lambda: len(self.all("#panel-measured .chart-svg")) == 2, "two charts")
        lines = lambda: len(self.all("#panel-measured .plot .line:not(.dot)"))
        chosen = lambda name, value: self.choose(f"#panel-measured select[name={name}]", value)
        self.assertGreater(lines(), 10)
        self.assertTrue(self.all(".band.k-predicted"))
        for what, act in (("prediction", lambda: self.one("input[name=predict]").click()), ("link", lambda: chosen("link", "udp")), ("memory", lambda: chosen("memory", "gpu"))):
            before = lines()
            act()
            self.until(lambda: 0 < lines() < before, what)
        chosen("band", "bidirectional")
        self.until(lambda: "both directions" in self.text("#panel-measured .charts"), "both directions")
        chosen("op", "read")
        self.until(lambda: "READ" in self.text("#panel-measured .charts"), "READ")
        chosen("band", "bandwidth")
        for number in (1, 2):
            self.all(".file input")[number].click()
            self.until(lambda: len(self.all(".file input:checked")) == number + 1, "one more file")
        self.until(lambda: "h200-kv.json:" in self.text("#panel-measured .charts"), "the files overlaid")
        with open(BENCHES[0]) as file:
            measured = file.read()
        place = folder()
        for name, text in (("mine.json", measured), ("other.json", '{"a": 1}')):
            with open(os.path.join(place, name), "w") as file:
                file.write(text)
            self.one("#bench-file").send_keys(os.path.join(place, name))
            if name == "mine.json":
                self.until(lambda: name in self.text(".file-list"), "an opened file")
        self.until(lambda: "other.json is not a file of nobounce bench" in self.text("#panel-measured .error"), "the reason")
        self.js("""const data = new DataTransfer(); data.items.add(new File([arguments[0]], 'dropped.json'));
            document.querySelector('.drop').dispatchEvent(new DragEvent('drop', {dataTransfer: data, bubbles: true}))""", measured)
        self.until(lambda: "dropped.json" in self.text(".file-list"), "a dropped file")
        self.js("[...document.querySelectorAll('#panel-measured > .results > details > summary')].forEach(x => x.click())")
        self.assertIn("nobounce bench --memory gpu", self.text("#panel-measured"))
        # Fields that are missing, and another file of a name that is there.
        del (lacking := json.loads(measured))["machine"]
        for content, shown in ((json.dumps(lacking), "mine.json (2)"), ('{"schema": "nobounce-kv/1"}', None)):
            with open(os.path.join(place, "mine.json"), "w") as file:
                file.write(content)
            self.one("#bench-file").send_keys(os.path.join(place, "mine.json"))
            if shown:
                self.until(lambda: shown in self.text(".file-list"), "both files")
                self.assertFalse(self.one("#panel-measured .error").is_displayed())
        self.until(lambda: "mine.json is damaged" in self.text("#panel-measured .error"), "the reason")

    def test_widths_and_colours(self):
        colour = "return getComputedStyle(document.body).backgroundColor"
        colours = {}
        for width in (1440, 390):
            for scheme in ("light", "dark"):
                self.size(width)
                self.scheme(scheme)
                self.open()
                colours[scheme] = self.js(colour)
                for name in TABS:
                    self.filled(name)
                    self.no_overflow(f"{name}, {width} px, {scheme}")
                    self.shoot(f"{name}-{width}-{scheme}")
        self.assertNotEqual(colours["light"], colours["dark"])
        self.scheme("light")
        found = []
        for _ in range(3):  # light, dark, and as the system has it
            self.one("#theme").click()
            found.append(self.js(colour))
        self.assertEqual(found, [colours["light"], colours["dark"], colours["light"]])


class Rounding(Page):
    def url(self, tab):
        return "about:blank"

    def origins(self):
        return ()

    def test_sizes_are_rounded_as_by_the_command(self):
        """The unit tests of the command read the same file."""
        with open(os.path.join(ROOT, "crates", "cli", "src", "ui", "page", "util.js")) as file:
            script = file.read().replace("export ", "")
        with open(os.path.join(ROOT, "tests", "decimal-sizes.json")) as file:
            cases = json.load(file)
        self.driver.get("about:blank")
        shown = self.js("const bytes = new Function(arguments[0] + '; return bytes')(); return arguments[1].map(bytes)", script, [one for one, _ in cases])
        self.assertEqual([one.replace("\u00a0", " ") for one in shown], [text for _, text in cases])


# The lines of a path: not one may leave the direction of an axis, or cross a box that is no part of the path.
CROSSED = """const boxes = [...document.querySelectorAll('.tree-svg .box')].map(b => ({ id: b.dataset.id, on: b.classList.contains('on-path'), r: b.querySelector('rect').getBBox() }));
    const wrong = [];
    for (const path of document.querySelectorAll('.path-layer .bytes')) {
        const n = path.getTotalLength();
        for (let at = 0; at <= n; at += 2) {
            const p = path.getPointAtLength(at), q = path.getPointAtLength(Math.min(n, at + 12));
            for (const { id, on, r } of boxes) if (!on && p.x > r.x + 1 && p.x < r.x + r.width - 1 && p.y > r.y + 1 && p.y < r.y + r.height - 1) wrong.push(`over ${id}`);
            if (Math.abs(p.x - q.x) > 8 && Math.abs(p.y - q.y) > 8) wrong.push(`slanting at ${p.x} ${p.y}`);
        }
    }
    return [...new Set(wrong)]"""


class FourNodes(Served):
    @classmethod
    def setUpClass(cls):
        cls.arguments = ("--facts", changed("dgx-h100", four_nodes))
        super().setUpClass()

    def test_paths_between_nodes(self):
        for width in (1440, 390):
            self.size(width)
            self.open()
            self.assertEqual(len(self.all(".numa")), 4)
            self.assertEqual(len(self.all(".tree-svg .socket")), 6, "each node is linked to each")
            for gpu, nic in ((0, 2), (0, 5), (0, 7), (7, 0), (3, 6)):
                Select(self.one("#pick-gpu")).select_by_index(gpu)
                Select(self.one("#pick-nic")).select_by_index(nic)
                self.assertTrue(self.all(".path-layer .bytes"))
                self.assertEqual(self.js(CROSSED), [], f"GPU {gpu}, adapter {nic}, {width} px")
            Select(self.one("#pick-gpu")).select_by_index(0)
            Select(self.one("#pick-nic")).select_by_index(5)
            self.shoot(f"four-nodes-{width}")


def without_links(facts):
    facts["gpus"][3]["nvlinks"] = 0


def bridged(facts):
    for one in facts["gpus"]:
        one.update(name="NVIDIA H100 PCIe", nvlinks=18)


class Nvlink(Page):
    def origins(self):
        return tuple(one.origin + "/" for one in self.servers)

    def url(self, tab):
        return f"{self.servers[-1].origin}/?token={self.servers[-1].token}#{tab}"

    def test_only_known_links_are_drawn(self):
        self.servers = []
        for change, bars, lines in ((without_links, 2, 8), (bridged, 0, 0)):
            self.servers.append(Server("--facts", changed("dgx-h100", change), XDG_RUNTIME_DIR=folder()))
            self.addCleanup(self.servers[-1].end)
            self.open()
            # One line for each GPU with links, and one between the NUMA nodes.
            self.assertEqual((len(self.all(".nvbar")), len(self.all(".tree-svg polyline.nvlink"))), (bars, lines), change.__name__)
            self.assertEqual("which GPUs it joins is unknown" in self.text(".key"), not bars)


class Sixteen(Served):
    @classmethod
    def setUpClass(cls):
        cls.arguments = ("--facts", sixteen())
        super().setUpClass()

    def test_machine(self):
        self.open()
        for kind, count in (("box.b-gpu", 8), ("box.b-nic", 16), ("box.b-switch", 8), ("nvbar", 2), ("numa", 2)):
            self.assertEqual(len(self.all("." + kind)), count, kind)
        outside = """return [...document.querySelectorAll('.tree-svg .box text')].filter(t => {
            const r = t.parentNode.querySelector('rect'); if (!r || t.classList.contains('speed')) return false;
            const b = t.getBBox(), q = r.getBBox(); return b.x + b.width > q.x + q.width + 1; }).length"""
        self.assertEqual(self.js(outside), 0, "text stays inside its box")
        self.assertIn("<img src=x", self.text(".facts-line"), "names stay text")
        self.assertFalse(self.all("main img"))
        self.one('.box.b-gpu[data-id="0000:15:00.0"]').click()
        self.until(lambda: self.one(".card").is_displayed(), "the card")
        self.assertIn("BAR1", self.text(".card"))
        self.one('.box.b-nic[data-id="0000:14:00.0"]').click()
        self.assertIn("Direct", self.text(".verdict .badge"))
        self.assertEqual(len(self.all(".path-layer .bytes.p-direct")), 1)
        Select(self.one("#pick-nic")).select_by_visible_text("mlx5_13")
        self.assertIn("Staged", self.text(".verdict .badge"))
        self.assertEqual(len(self.all(".path-layer .bytes.p-staged")), 2, "two legs through host memory")
        self.assertTrue(self.all(".box.b-memory.on-path"))
        self.assertIn("no link", self.text(".panel"))
        Select(self.one("#pick-gpu")).select_by_index(5)
        Select(self.one("#pick-nic")).select_by_visible_text("mlx5_5 (best for this GPU)")
        self.assertIn("ACS", self.text(".panel"))
        self.assertTrue(self.all(".panel .copy"))
        self.assertTrue(self.all(".box.b-cpu.on-path"), "ACS redirects to the processor")
        self.one(".matrix tbody tr:nth-child(1) td:nth-of-type(5) button").click()
        self.assertIn("SYS", self.text(".verdict"))
        self.assertEqual(len(self.all(".box.b-cpu.on-path")), 2)
        ActionChains(self.driver).move_to_element(self.one(".box.b-switch")).perform()
        self.until(lambda: "PCIe" in self.text(".card"), "the card of a switch")
        for motion, name in (("reduce", "none"), ("no-preference", "flow")):
            self.scheme("light", motion)
            self.assertEqual(self.js("return getComputedStyle(document.querySelector('.flow')).animationName"), name)

    def test_findings(self):
        self.open("findings")
        self.filled("findings")
        self.assertGreaterEqual(len(self.all(".finding")), 6)
        self.assertIn("sudo setpci", self.text(".findings"))
        wanted = len([one for one in self.all(".finding") if "f-error" in one.get_attribute("class") or "f-warning" in one.get_attribute("class")])
        self.assertEqual(self.text("#badge-findings"), str(wanted))
        permissions = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"], "origin": self.server.origin}
        self.driver.execute_cdp_cmd("Browser.grantPermissions", permissions)
        for number, button in enumerate(self.all(".finding .copy")):
            button.click()
            self.until(lambda: button.text == "Copied", "copied")
            copied = self.driver.execute_async_script("const done = arguments[0]; navigator.clipboard.readText().then(done, e => done(String(e)))")
            self.assertEqual(copied, self.js("return document.querySelectorAll('.finding .command code')[arguments[0]].textContent", number))
        self.js("scrollTo(0, 0)")
        for box in self.all("#panel-findings .filters input"):
            before = len(self.all(".finding"))
            box.click()
            self.assertLess(len(self.all(".finding")), before)
        self.assertEqual(len(self.all(".finding")), 0)

    def test_keyboard(self):
        self.open()
        active = lambda: self.driver.switch_to.active_element
        self.one("#tab-machine").send_keys(Keys.ARROW_RIGHT)
        self.assertEqual((self.js("return location.hash"), active().get_attribute("id")), ("#findings", "tab-findings"))
        for key, tab in ((Keys.END, "#live"), (Keys.ARROW_RIGHT, "#machine"), (Keys.ARROW_LEFT, "#live"), (Keys.HOME, "#machine")):
            active().send_keys(key)
            self.assertEqual(self.js("return location.hash"), tab)
        self.assertEqual([one.get_attribute("tabindex") for one in self.all("[role=tab]")].count("0"), 1)
        self.js("arguments[0].focus()", self.one('.box[tabindex="0"]'))
        self.assertTrue(self.one(".card").is_displayed())
        for _ in range(60):
            ActionChains(self.driver).send_keys(Keys.ARROW_RIGHT).perform()
            if self.js("return document.activeElement.dataset.id") == "0000:31:00.0":
                break
        active().send_keys(Keys.ENTER)
        self.assertIn("GPU 1", self.js("const s = document.querySelector('#pick-gpu'); return s.options[s.selectedIndex].text"))
        active().send_keys(Keys.ESCAPE)
        self.assertFalse(self.one(".card").is_displayed())
        for name in TABS:
            self.tab(name)
        unnamed = """return [...document.querySelectorAll('button, select, input, [role=button], [role=img], [role=tabpanel], [role=region]')].filter(n =>
            !(n.getAttribute('aria-label') || n.getAttribute('aria-labelledby') || n.textContent.trim() && n.tagName === 'BUTTON' || n.labels && n.labels.length)).map(n => n.outerHTML.slice(0, 90))"""
        self.assertEqual(self.js(unnamed), [], "controls without a name")

    def test_narrow(self):
        self.size(390)
        self.open()
        for name in ("machine", "findings", "expect"):
            self.filled(name)
            self.no_overflow(name)
            self.shoot(f"sixteen-{name}-390")
        self.size(1440)
        for name in ("machine", "findings"):
            self.filled(name)
            self.shoot(f"sixteen-{name}-1440")
