"""Two processes of one client, joined by lines of JSON."""
import json
import os
import select
import signal
import subprocess
import time


class Peer:
    """A process whose stdin and stdout carry one JSON object a line."""

    def __init__(self, command, environment, log):
        self.log = open(log, "wb")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, env=environment, start_new_session=True)
        self.rest = b""

    def tell(self, **what):
        self.process.stdin.write(json.dumps(what).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self, limit):
        """The next object; None at the end of the output."""
        end = time.monotonic() + limit
        while True:
            line, found, rest = self.rest.partition(b"\n")
            if found:
                self.rest = rest
                if line.startswith(b"{"):
                    return json.loads(line)
                continue
            if not select.select([self.process.stdout], [], [], max(0, end - time.monotonic()))[0]:
                raise TimeoutError(f"no answer within {limit} s")
            more = os.read(self.process.stdout.fileno(), 1 << 16)
            if not more:
                return None
            self.rest += more

    def pids(self, name):
        """Processes of this peer whose command line has `name` in it, without the launcher."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    words = file.read().split(b"\0")
                if os.getsid(int(pid)) == self.process.pid and words[0].endswith(b"python3") and any(name in word for word in words):
                    found.append(int(pid))
            except OSError:
                pass
        return found

    def end(self):
        """Ends everything the peer has started."""
        for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGCONT, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                break
            if number == signal.SIGTERM:
                try:
                    self.process.wait(3)
                except subprocess.TimeoutExpired:
                    pass
        for stream in (self.process.stdin, self.process.stdout):
            try:
                stream.close()
            except OSError:
                pass
        self.process.wait()
        self.log.close()
