"""The cases: what runs between the guest's rxe0 and the host's nb0. Each pair runs twice, with the server on either side."""

import json
import os
import re
import time

import expected
from capture import Summary
from machine import ADDRESS, GUEST, HOST, Machine, other

CASES = []
MTUS = (256, 512, 1024, 2048, 4096)


class Case:
    """A name and what to do; `quick` ones are part of `make test`, `odd` ones show what a kernel does wrong and run only when named."""

    def __init__(self, name, about, quick, odd, work):
        self.name, self.about, self.quick, self.odd, self.work = name, about, quick, odd, work

    def is_chosen(self, quick, words):
        named = any(word in self.name for word in words)
        return named if self.odd or words else self.quick or not quick


def case(about, quick=False, odd=False):
    def add(work):
        CASES.append(Case(work.__name__.replace("_", "-"), about, quick, odd, work))
        return work

    return add


class Bench:
    """What a case has at hand: the machine, a place for results, and ways to run pairs both ways."""

    def __init__(self, machine, kernel, quick, results, programs, log):
        self.machine, self.kernel, self.quick, self.results, self.log = machine, kernel, quick, results, log
        # Programs of our own on the host; the guest has them by their names. Some are missing where they cannot be compiled.
        self.programs, self.peer = programs, programs["peer"]
        self.name = ""
        self.runs, self.failures, self.seen, self.cases = 0, [], [], []
        # Runs that were made again because the machine was too busy for their timers.
        self.starved = 0

    def fail(self, what, *outputs):
        self.failures.append((self.name, what))
        self.log(f"failed: {self.name}: {what}")
        for name, result in outputs:
            text = re.sub(r"^REPORT \[.*?^\]\n", "", result.output, flags=re.MULTILINE | re.DOTALL)
            lines = [line for line in text.splitlines() if line.strip()]
            tail = [line for line in lines[:-12] if line.startswith("FAILED")][:5] + lines[-12:]
            self.log("\n".join([f"  {name}: exit code {result.code}", *(f"    {line}" for line in tail)]))

    def both_ways(self, tool, words, family=4, options=(), seconds=60):
        """One of Debian's tools against itself. The last word of its client is the server's address."""
        gid = "-g" if tool.startswith("ibv_") else "-x"
        calm = not options and not self.machine.disturbed
        if tool.startswith("ib_"):
            # Where nothing is lost, an answer may take a second: the guest waits for a processor like everybody else.
            words += " -F -u 18" if calm else " -F"
        for server in (GUEST, HOST):
            command = f"{tool} {gid} {{gid}} -p {{port}} {words}"
            # The tools shake hands over IPv4 whatever the GID is: what is tested is the GID.
            address = ADDRESS[4][server]
            for _ in range(3):
                results = self.machine.pair(server, command, f"{command} {address}", seconds, family, options)
                if not (calm and was_starved(results)):
                    break
                self.starved += 1
                self.log(f"{tool}: half a second without an answer on a machine with too much to do; once more")
            self.check(f"{tool} {words}", server, results)

    def check(self, what, server, results):
        first, second = results
        self.runs += 1
        if first.code or second.code:
            self.fail(f"{what}, server in the {server}" if server == GUEST else f"{what}, server on the host", ("server", first), ("client", second))
            return False
        return True

    def peers(self, names, family=4, options=(), seconds=120, known=None):
        """Our own program for both sides, the requester on either; what was seen is compared with what is known. `known` is what a kernel
        that asks may fail with now and then (docs/reference/interop.md): then it is asked again, twice at most."""
        outputs = {}
        for server in (GUEST, HOST):
            programs = {GUEST: "peer", HOST: self.peer}
            client = f"{programs[other(server)]} -g {{gid}} -p {{port}} {ADDRESS[4][server]} {names}"
            requester = "rxe" if server == HOST else "nb"
            for _ in range(3):
                results = self.machine.pair(server, f"{programs[server]} -g {{gid}} -p {{port}}", client, seconds, family, options)
                text = results[1].output
                failed = re.findall(r"^FAILED (.*)$", text, re.MULTILINE)
                if not (known and requester == "rxe" and failed and all(re.search(known, line) for line in failed)):
                    break
                self.seen.append((self.name, requester, names, f"known: {failed[0]}"))
                self.log(f"{self.name}: known of this kernel, and once more: {failed[0]}")
            if self.check(f"peer {names}, requester {requester}", server, results) and re.search(r"^FAILED", text, re.MULTILINE):
                self.fail(f"peer {names}, requester {requester}", ("client", results[1]))
            for line in re.findall(r"^saw (.*)$", text, re.MULTILINE):
                self.compare(requester, line)
            outputs[requester] = text
            self.counters = counters(results[0].output + results[1].output) or {}
        return outputs

    def compare(self, requester, line):
        """One thing seen: fine if it is what the standard asks for, or a difference of this kernel's that is written down."""
        what, _, seen = line.partition(": ")
        self.seen.append((self.name, requester, what, seen))
        known = expected.of(requester, what, self.kernel)
        if known is None:
            self.fail(f"requester {requester}, {what}: nobody has written down what is to be seen; it was: {seen}")
        elif not re.search(known, seen):
            self.fail(f"requester {requester}, {what}: {seen}; expected: {known}")


def was_starved(results):
    """Whether a ping-pong, whose retries are over after half a second, has failed on a machine where others wait for processors, too."""
    busy = os.getloadavg()[0] > 2 * (os.cpu_count() or 1)
    return busy and any("transport retry counter exceeded" in result.output for result in results)


def counters(text):
    """What the host's device counted, where the program printed its report."""
    match = re.search(r"^REPORT (\[.*?^\])", text, re.MULTILINE | re.DOTALL)
    try:
        return json.loads(match.group(1))[0]["counters"] if match else None
    except (ValueError, LookupError):
        return None


def run(options, kernel, folder, scratch, results, nobounce, programs, log):
    """Boots one kernel and runs the chosen cases; returns how many things failed."""
    chosen = [case for case in CASES if case.is_chosen(options.quick, options.cases)]
    started = time.monotonic()
    total = Summary()
    machine = Machine(folder, scratch, nobounce, programs.values())
    bench = Bench(machine, kernel, options.quick, results, programs, log)
    try:
        machine.boot()
        log(f"Linux {machine.release}: ready after {time.monotonic() - started:.0f} s")
        for case in chosen:
            bench.name = case.name
            before, runs, begun = len(bench.failures), bench.runs, time.monotonic()
            path = os.path.join(scratch, case.name + ".pcap")
            machine.start_capture(path)
            try:
                case.work(bench)
            except (RuntimeError, OSError, KeyError, ValueError) as error:
                bench.fail(f"{type(error).__name__}: {error}")
            machine.stop_capture()
            summary = Summary().add(path)
            total.add(path)
            wrong = f"{summary.wrong[True]} packets of nb0's and {summary.wrong[False]} of rxe0's have a wrong ICRC"
            if case.name == "damage":
                bench.seen.append((case.name, "both", "on the cable", wrong))
            if (sum(summary.wrong.values()) != 0) != (case.name == "damage"):
                bench.fail(wrong)
            verdict = "fine" if len(bench.failures) == before else "FAILED"
            keep(path, os.path.join(results, case.name + ".pcap"), whole=verdict == "FAILED")
            count = f"{summary.right[True]} packets out, {summary.right[False]} in"
            bench.cases.append((case.name, bench.runs - runs, verdict, time.monotonic() - begun))
            log(f"{case.name}: {verdict}, {bench.runs - runs} runs, {count}, {time.monotonic() - begun:.0f} s")
            if machine.qemu.poll() is not None:
                bench.fail("the guest is gone: " + open(machine.console, errors="replace").read()[-1500:])
                break
    finally:
        machine.stop()
        text = open(machine.console, errors="replace").read()
        with open(os.path.join(results, "console"), "w") as out:
            out.write(text)
    for line in re.findall(r"^.*(?:BUG|Oops|WARNING: CPU|Call Trace|general protection).*$", text, re.MULTILINE)[:5]:
        bench.fail(f"the guest's kernel says: {line.strip()}")
    write_results(bench, machine, total, results)
    log(f"Linux {machine.release}: {bench.runs} runs, {len(bench.failures)} failures, {time.monotonic() - started:.0f} s; captures in {os.path.relpath(results)}")
    return len(bench.failures)


def keep(path, to, whole):
    """Keeps a capture for whoever wants to look: where nothing failed, the first few megabytes tell enough."""
    with open(path, "rb") as data, open(to, "wb") as out:
        out.write(data.read((256 if whole else 8) << 20))


def write_results(bench, machine, total, results):
    """What was seen, for docs/reference/interop.md."""
    with open(os.path.join(results, "seen.txt"), "w") as out:
        out.write(f"Linux {machine.release}\n")
        for name, runs, verdict, seconds in bench.cases:
            out.write(f"{name}: {runs} runs, {verdict}, {seconds:.0f} s\n")
        out.write(f"{bench.starved} runs were made again because the machine was too busy\n")
        for name, requester, what, seen in bench.seen:
            out.write(f"{name} | requester {requester} | {what} | {seen}\n")
        for from_host, name in ((True, "nb0"), (False, "rxe0")):
            out.write(f"from {name}: {total.right[from_host]} right, {total.wrong[from_host]} wrong ICRCs\n")
            for kind, count in sorted(total.kinds[from_host].items()):
                out.write(f"  {kind}: {count}\n")


# The cases, in the order in which they run.


@case("ibverbs-utils: all services, data checked", quick=True)
def pingpong(bench):
    bench.both_ways("ibv_rc_pingpong", "-c -n 100")
    bench.both_ways("ibv_uc_pingpong", "-c -n 50")
    bench.both_ways("ibv_ud_pingpong", "-c -n 50 -s 1024")
    if not bench.quick:
        bench.both_ways("ibv_srq_pingpong", "-c -n 100 -q 4")
        bench.both_ways("ibv_rc_pingpong", "-c -e -n 50 -s 65536 -m 1024")
        bench.both_ways("ibv_uc_pingpong", "-c -e -n 50 -s 8192 -m 1024")
        bench.both_ways("ibv_ud_pingpong", "-c -e -n 50 -s 2048")


@case("RC at every path MTU: SEND, WRITE, READ, immediate data, lengths around packets, sequence numbers that wrap; data checked", quick=True)
def data(bench):
    bench.peers("rc-short" if bench.quick else "rc")


@case("atomics, many requests at once, RNR, UD: data checked", quick=True)
def operations(bench):
    bench.peers("atomics crowd fences rnr ud")


@case("atomic writes, and FLUSH from nb0: values checked", quick=True)
def words(bench):
    if bench.kernel == "oldest":
        return  # Linux 6.1 has neither
    bench.peers("words")


@case("UC at every path MTU", quick=False)
def unreliable(bench):
    bench.peers("uc")


@case("messages of 1 MiB in 4096 packets over the wrap of the sequence numbers")
def wrap(bench):
    bench.peers("wrap")


@case("what each side reports when requests are wrong: keys, bounds, rights, lengths, nobody there", quick=True)
def errors(bench):
    bench.peers("errors")


@case("SEND with invalidate and memory windows, bound with the right to local writes, too")
def invalidate(bench):
    bench.peers("invalidate")


@case("each side was told another path MTU")
def mtu_mismatch(bench):
    bench.peers("mtu-mismatch")


@case("the same over IPv6 GIDs", quick=False)
def ipv6(bench):
    bench.peers("rc-short uc ud atomics crowd rnr", family=6)
    bench.both_ways("ibv_rc_pingpong", "-c -n 50", family=6)
    bench.both_ways("ib_write_bw", "-n 20 -s 65536", family=6)
    bench.both_ways("ib_read_bw", "-n 20 -s 65536", family=6)
    bench.both_ways("ib_send_lat", "-n 20 -s 100", family=6)
    bench.both_ways("ib_atomic_bw", "-n 20", family=6)


@case("perftest: bandwidth and latency of every operation over RC")
def perftest(bench):
    for operation in ("send", "write", "read"):
        for size in (2, 4096, 65536, 1048576):
            count = 5 if size > 65536 else 20
            bench.both_ways(f"ib_{operation}_bw", f"-n {count} -s {size}")
            bench.both_ways(f"ib_{operation}_lat", f"-C -n {count} -s {size}")
        bench.both_ways(f"ib_{operation}_bw", "-n 5 -s 8388608", seconds=180)
    for kind in ("bw", "lat -C"):
        tool, _, more = kind.partition(" ")
        bench.both_ways(f"ib_atomic_{tool}", f"{more} -n 30")
        bench.both_ways(f"ib_atomic_{tool}", f"{more} -n 30 -A CMP_AND_SWAP")


@case("perftest's own check of WRITE and READ data, where a perftest that has it is given (NOBOUNCE_PERFTEST, a folder)")
def perftest_validation(bench):
    folder = os.environ.get("NOBOUNCE_PERFTEST")
    tools = ("ib_write_bw", "ib_read_bw")
    if not folder or not all(os.path.exists(os.path.join(folder, tool)) for tool in tools):
        return bench.log("left out: NOBOUNCE_PERFTEST names no folder with a perftest of 26.04 or later (docs/reference/interop.md)")
    bench.machine.install([(f"validating/{tool}", os.path.join(folder, tool)) for tool in tools])
    for tool in tools:
        for words in ("-s 65536 -n 96", "-s 1048576 -n 32", "-s 4096 -n 96 -q 2", "-s 16384 -n 64 -b", "-s 8192 -n 64 -R", *(f"-s 20000 -n 64 -m {mtu}" for mtu in (256, 1024, 4096))):
            validate(bench, folder, f"{tool} {words}")
        validate(bench, folder, f"{tool} -s 8192 -n 64", family=6)


def validate(bench, folder, words, family=4):
    """One of perftest's tools, which says of the data that came whether it is what was sent."""
    places = {GUEST: "/opt/validating", HOST: folder}
    for server in (GUEST, HOST):
        command = f"{words} --data_validation -t 32 -u 19 -F -x {{gid}} -p {{port}}"
        # The checking threads take all of the two emulated processors: answers may take long (-u).
        address = ADDRESS[4][server]
        results = bench.machine.pair(server, f"{places[server]}/{command}", f"{places[other(server)]}/{command} {address}", 120, family, listens="-R" not in words)
        if bench.check(words, server, results):
            passed = re.findall(r"^VALIDATION: PASSED.* (\d+) bytes", results[0].output + results[1].output, re.MULTILINE)
            if len(passed) < (2 if " -b" in words else 1) or "0" in passed:
                bench.fail(f"{words}: nothing says that data were checked and right", ("server", results[0]), ("client", results[1]))


@case("perftest: UC, UD, events, several queue pairs, both directions at once, inline data, shared receive queue, MTUs")
def perftest_more(bench):
    bench.both_ways("ib_write_bw", "-c UC -n 20 -s 4096")
    bench.both_ways("ib_send_bw", "-c UC -n 20 -s 4096")
    bench.both_ways("ib_send_lat", "-C -c UC -n 20 -s 4096")
    bench.both_ways("ib_send_bw", "-c UD -n 20 -s 1024")
    bench.both_ways("ib_send_lat", "-C -c UD -n 20 -s 1024")
    bench.both_ways("ib_send_bw", "-e -n 20 -s 10000")
    bench.both_ways("ib_read_bw", "-e -n 20 -s 10000")
    bench.both_ways("ib_send_bw", "--use-srq -n 20 -s 1000 -q 2")
    bench.both_ways("ib_write_lat", "-C -I 32 -s 32 -n 20")
    bench.both_ways("ib_send_lat", "-C -I 32 -s 32 -n 20")
    for operation in ("send", "write", "read"):
        bench.both_ways(f"ib_{operation}_bw", "-b -n 20 -s 16384")
        bench.both_ways(f"ib_{operation}_bw", "-q 4 -n 20 -s 16384")
        for mtu in MTUS:
            bench.both_ways(f"ib_{operation}_bw", f"-m {mtu} -n 10 -s 20000")


@case("2 % of the packets lost, from nb0 and from rxe0", quick=False)
def loss(bench):
    options = ("--fault", "loss=0.02,seed=7")
    bench.machine.disturb("loss 2%")
    try:
        bench.peers("rc-lossy atomics crowd rnr", options=options)
        # Not the ping-pongs: their ends leave without a word, and whose last acknowledgement is lost then repeats for ever.
        bench.both_ways("ib_write_bw", "-n 20 -s 65536", options=options, seconds=120)
        bench.both_ways("ib_read_bw", "-n 20 -s 65536", options=options, seconds=120)
        bench.both_ways("ib_send_bw", "-n 20 -s 65536", options=options, seconds=120)
        bench.both_ways("ib_atomic_bw", "-n 50", options=options, seconds=120)
    finally:
        bench.machine.disturb(None)


@case("nb0's packets are repeated and out of order")
def disorder_out(bench):
    options = ("--fault", "dup=0.05,reorder=0.05,seed=7")
    bench.peers("rc-lossy atomics crowd crowd crowd", options=options, known=r"^many at once: WR_FLUSH_ERR for request")
    bench.both_ways("ib_write_bw", "-n 20 -s 65536", options=options, seconds=120)
    bench.both_ways("ib_read_bw", "-n 20 -s 65536", options=options, seconds=120)


@case("rxe0's packets are repeated and out of order")
def disorder_in(bench):
    bench.machine.disturb("delay 2ms reorder 90% duplicate 5%")
    try:
        bench.peers("rc-lossy atomics crowd crowd crowd")
        bench.both_ways("ib_write_bw", "-n 20 -s 65536", seconds=120)
        bench.both_ways("ib_read_bw", "-n 20 -s 65536", seconds=120)
    finally:
        bench.machine.disturb(None)


@case("damaged packets: rxe0 must drop nb0's, nb0 must drop rxe0's, data stay right")
def damage(bench):
    bench.machine.disturb("corrupt 3%")
    try:
        bench.peers("rc-lossy atomics", options=("--fault", "corrupt=0.03,seed=7"))
        dropped = bench.counters.get("icrc_errors", 0)
        bench.seen.append((bench.name, "both", "damaged packets dropped by nb0", str(dropped)))
        if not dropped:
            bench.fail("nb0 has found no wrong ICRC although packets were damaged")
    finally:
        bench.machine.disturb(None)


@case("the kernel's queue pair stops for ever: requests with fences, answers out of order", odd=True)
def kernel_fences(bench):
    bench.both_ways("ibv_rc_pingpong", "-c -n 20")
    program = f"{bench.peer} -g {{gid}} -p {{port}}"
    options = ("--fault", "reorder=0.1,seed=7")
    first, second = bench.machine.pair(HOST, program, f"peer -g {{gid}} -p {{port}} {ADDRESS[4][HOST]} fences fences fences", 100, options=options)
    bench.log("\n".join(line for line in second.output.splitlines() if line.startswith(("ok", "FAILED"))))


@case("the kernel does not answer the repetition of a READ of no bytes", odd=True)
def kernel_empty_reads(bench):
    bench.machine.disturb("loss 20%")
    try:
        program = f"{bench.peer} -g {{gid}} -p {{port}} {ADDRESS[4][GUEST]} empty-reads"
        first, second = bench.machine.pair(GUEST, "peer -g {gid} -p {port}", program, 100)
        bench.log("\n".join(line for line in second.output.splitlines() if line.startswith(("saw", "FAILED"))))
    finally:
        bench.machine.disturb(None)


@case("long messages and events on a busy machine, where the kernel repeats what has arrived, and stopped for ever before", odd=True)
def kernel_repetitions(bench):
    for _ in range(20):
        bench.both_ways("ibv_rc_pingpong", "-c -e -n 50 -s 65536 -m 1024")


@case("whether the kernel leaves a long READ unanswered, and what it counted then", odd=True)
def kernel_long_reads(bench):
    counters = "cd /sys/class/infiniband/rxe0/ports/1/hw_counters && grep . rcvd_pkts sent_pkts duplicate_request out_of_seq_request completer_retry_err send_err"
    program = f"{bench.peer} -g {{gid}} -p {{port}} {ADDRESS[4][GUEST]} long-reads"
    before = bench.machine.guest(counters, 10).output
    first, second = bench.machine.pair(GUEST, "peer -g {gid} -p {port}", program, 150)
    bench.log("\n".join(line for line in second.output.splitlines() if line.startswith(("saw", "FAILED"))))
    bench.log("before: " + before.replace("\n", ", "))
    bench.log("after: " + bench.machine.guest(counters, 10).output.replace("\n", ", "))


@case("rdma link del in the guest while the host writes")
def link_del(bench):
    machine = bench.machine
    stream, server = start_stream(bench)
    if stream:
        removal = machine.begin(GUEST, "rdma link del rxe0", 60)
        for _ in range(100):
            if stream.ended():
                break
            time.sleep(0.1)
        # Linux 6.1 lets the device go only with its last user: the command waits, and so does the end of the stream.
        bench.compare("nb", f"rdma link del: {'ends the traffic' if stream.ended() else 'waits for the users of the device'}")
        machine.stop_side(GUEST)
        server.wait()
        finish_stream(bench, stream)
        done = removal.wait()
        if done.code:
            bench.fail(f"rdma link del: {done.output}")
    machine.gids.clear()
    done = machine.guest("rdma link show rxe0/1 || rdma link add rxe0 type rxe netdev eth0", 30)
    if done.code:
        bench.fail(f"the guest's device does not come back: {done.output}")
    else:
        bench.both_ways("ibv_rc_pingpong", "-c -n 20")


@case("the host's program is killed while the guest writes")
def host_killed(bench):
    stream, _ = start_stream(bench, HOST)
    bench.machine.stop_side(HOST)
    if stream:
        finish_stream(bench, stream, "rxe")
    bench.both_ways("ibv_rc_pingpong", "-c -n 20")


@case("the guest is killed while the host writes; it comes back, and all works again")
def guest_killed(bench):
    machine = bench.machine
    stream, _ = start_stream(bench)
    machine.kill()
    if stream:
        finish_stream(bench, stream)
    machine.stop_capture()
    machine.reboot()
    bench.both_ways("ibv_rc_pingpong", "-c -n 20")


def start_stream(bench, to=GUEST):
    """One side writes to the other without end; returns the two commands once it is under way."""
    machine = bench.machine
    programs = {GUEST: "peer", HOST: bench.peer}
    machine.port += 1
    server = machine.begin(to, f"{programs[to]} -g {machine.gid(to)} -p {machine.port}", 90)
    if not machine.wait_listening(to, machine.port, server):
        bench.fail("the server does not listen")
        return None, None
    before = machine.received()
    client = other(to)
    stream = machine.begin(client, f"{programs[client]} -g {machine.gid(client)} -p {machine.port} {ADDRESS[4][to]} stream", 90)
    for _ in range(200):
        if machine.received() > before + 100 or stream.ended():
            break
        time.sleep(0.05)
    return stream, server


def finish_stream(bench, stream, requester="nb"):
    done = stream.wait()
    bench.runs += 1
    lines = re.findall(r"^saw (.*)$", done.output, re.MULTILINE)
    if done.code or not lines:
        bench.fail("the stream did not end as it should", ("requester", done))
    for line in lines:
        bench.compare(requester, f"{bench.name}, " + line)
