"""Cases of a machine that has an RDMA adapter of its own: the guest's rxe0, beside nb0, under `nobounce run` in the guest."""

import os
import re
import subprocess

from cases import case

# The port of RoCE is the kernel's where rxe0 is: nb0 lives in a network of its own there, whose programs see rxe0 all the same.
AWAY = "unshare -n sh -c 'ip link set lo up; {}'"


def listens(port):
    """Waits, in the guest's shell, until somebody listens on a port."""
    return f'for i in $(seq 400); do grep -qi ":{port:04x} 0*:0000 0A" /proc/net/tcp /proc/net/tcp6 && break; usleep 50000; done'


def install(bench):
    """The command and the drop-in libraries, in the guest, without what only debuggers read."""
    machine = bench.machine
    folder = os.path.join(machine.scratch, "stripped")
    os.makedirs(os.path.join(folder, "dropin"), exist_ok=True)
    libraries = os.path.join(os.path.dirname(machine.nobounce), "dropin")
    files = [("nobounce", machine.nobounce)]
    files += [("dropin/" + name, os.path.join(libraries, name)) for name in sorted(os.listdir(libraries))]
    for name, path in files:
        subprocess.run(["strip", "-o", os.path.join(folder, name), os.path.realpath(path)], check=True, timeout=60)
    machine.install([(name, os.path.join(folder, name)) for name, _ in files])


def expect(bench, what, command, *patterns, seconds=60):
    """Runs a command in the guest, which must succeed and print what fits every pattern."""
    done = bench.machine.guest(command, seconds)
    bench.runs += 1
    missing = [pattern for pattern in patterns if not re.search(pattern, done.output, re.MULTILINE)]
    if done.code or missing:
        bench.fail(f"{what}: {'it does not say ' + repr(missing[0]) if missing else 'it fails'}", ("guest", done))
    return done.output


@case("a machine with an adapter of its own: nb0 and rxe0 in one program, both used; fork, and what else is asked of the system's library")
def adapters(bench):
    install(bench)
    gid = bench.machine.gid("guest")
    both = r"^\s*nb0\s[^$]*^\s*rxe0\s"
    expect(bench, "ibv_devices", AWAY.format("nobounce run -- ibv_devices"), both)
    expect(bench, "ibv_devinfo", AWAY.format("nobounce run -- ibv_devinfo"), "hca_id:\\s*nb0", "hca_id:\\s*rxe0", "PORT_ACTIVE")
    for device, index in (("nb0", 0), ("rxe0", gid)):
        for tool in ("ibv_rc_pingpong -c -n 50", "ibv_ud_pingpong -c -n 50 -s 512", "ibv_srq_pingpong -c -n 50", "ibv_rc_pingpong -c -e -n 50"):
            one = f"nobounce run -- {tool} -d {device} -g {index} -p 18600"
            line = r"^nobounce: .*out: [1-9]" if device == "nb0" else r"^nobounce: no process opened"
            words = AWAY.format(f"{one} >/tmp/server 2>&1 & {listens(18600)}; {one} 127.0.0.1; code=$?; wait; cat /tmp/server; exit $code")
            expect(bench, f"{tool} on {device}", words, r"bytes in .* seconds", line)
    expect(bench, "perftest on rxe0", AWAY.format(
        f"nobounce run -- ib_write_bw -F -n 20 -d rxe0 -x {gid} -p 18601 >/tmp/server 2>&1 & {listens(18601)}; nobounce run -- ib_write_bw -F -n 20 -d rxe0 -x {gid} -p 18601 127.0.0.1"), "^ 65536 ")
    # Where the kernel has the port, nb0 says who it is.
    done = bench.machine.guest("nobounce run -- ibv_rc_pingpong -d nb0 -g 0", 30)
    bench.seen.append((bench.name, "host", "nb0 where rxe0 has the port", done.output.strip()[-300:]))
    bench.runs += 1
    if done.code == 0 or not re.search("4791", done.output):
        bench.fail("nb0 where rxe0 has the port", ("guest", done))
    # Plain programs go on as before.
    expect(bench, "ibv_devices without us", "ibv_devices", r"^\s*rxe0\s")
