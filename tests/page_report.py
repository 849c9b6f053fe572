"""`nobounce report`: one file that shows all tabs without a server."""
import os
import subprocess

from selenium.webdriver.support.ui import Select

from page_browser import BENCHES, NOBOUNCE, TABS, Page, folder, output, sixteen

MOST_BYTES = 1_000_000


class Report(Page):
    def setUp(self):
        super().setUp()
        self.path = os.path.join(folder(), "report.html")

    def origins(self):
        return (f"file://{self.path}",)

    def url(self, tab):
        return f"file://{self.path}#{tab}"

    def write(self, *arguments):
        # An empty runtime directory: traffic of others on this machine is no part of the report.
        output("report", "--out", self.path, *arguments, XDG_RUNTIME_DIR=folder())
        self.assertLess(os.path.getsize(self.path), MOST_BYTES)

    def test_report(self):
        self.write("--example", "dgx-h100", "--bench", BENCHES[0])
        for width in (1440, 390):
            self.size(width)
            self.open()
            for name in TABS:
                self.filled(name)
                self.no_overflow(f"{name}, {width} px")
                self.shoot(f"report-{name}-{width}")
        self.size(1440)
        self.open()
        self.assertEqual(len(self.all(".box.b-gpu")), 8)
        self.filled("expect")
        for name, value in (("distance", "SYS"), ("rails", "2"), ("link", "rocev2:100")):
            before = self.text(".answer")
            Select(self.one(f".controls select[name={name}]")).select_by_value(value)
            self.until(lambda: self.text(".answer") != before, name)
        self.assertTrue(self.one(".controls select[name=mtu]").get_attribute("disabled"))
        self.assertIn("run nobounce ui", self.text("#panel-expect"))
        before = self.text(".cluster .tiles")
        price = self.one(".cluster input[name=price]")
        price.clear()
        price.send_keys("7")
        self.assertNotEqual(self.text(".cluster .tiles"), before)
        self.tab("live")
        self.assertIn("when the report was made", self.text("#panel-live"))
        self.assertIn("No device was open", self.text("#panel-live"))

    def test_names_stay_text(self):
        self.write("--facts", sixteen())
        self.open()
        self.assertIn("<img src=x", self.text(".facts-line"))
        self.assertFalse(self.all("main img"))
        self.assertEqual(len(self.all(".box.b-nic")), 16)

    def test_this_machine(self):
        """Whatever it has. The page says so where there is no GPU, and has no curves without files."""
        self.write("--no-probe")
        self.size(390)
        self.open()
        for name in TABS:
            self.tab(name)
            self.no_overflow(name)
            self.assertTrue(self.text(f"#panel-{name}").strip(), name)

    def test_files_that_are_no_measurements(self):
        place = folder()
        for name, text in (("text.json", "no JSON"), ("other.json", "{}")):
            with open(os.path.join(place, name), "w") as file:
                file.write(text)
        for name in ("text.json", "other.json", "missing.json"):
            ran = subprocess.run([NOBOUNCE, "report", "--out", self.path, "--bench", os.path.join(place, name)], capture_output=True, text=True, timeout=60)
            self.assertNotEqual(ran.returncode, 0, name)
            self.assertIn(name, ran.stderr)
        self.assertFalse(os.path.exists(self.path))
