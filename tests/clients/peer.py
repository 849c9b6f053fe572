"""What the scripts of all clients share: options, lines for tests/clients/run, measurements."""
import argparse
import json
import os
import time

# Of nb0, where there is one.
ADDRESS = os.environ.get("NOBOUNCE_ADDR", "127.0.0.1")


def say(**what):
    print(json.dumps(what), flush=True)


def group_options(default_protocol=None):
    """For a client that starts its processes itself: a parser, to which it may add."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--protocol", default=default_protocol)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement")
    return parser


def options(default_protocol=None):
    """For one of two ends."""
    parser = group_options(default_protocol)
    parser.add_argument("role", choices=["target", "initiator"])
    parser.add_argument("--bytes", type=int, default=64 << 20)
    parser.add_argument("--counts", type=lambda text: [int(part) for part in text.split(",")], default=[1, 256, 4096])
    parser.add_argument("--until-error", type=float, default=0, help="transfer until it fails, at most so long")
    parser.add_argument("--gpu", action="store_true")
    return parser.parse_args()


def timed(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure(move, seconds, **what):
    """Repeats `move`, which returns seconds, for so long, and says how fast it was. `what` has the bytes of one."""
    times, end = [], time.monotonic() + seconds
    while len(times) < 3 or time.monotonic() < end and len(times) < 200:
        times.append(move())
    report(times, **what)


def report(times, **what):
    """Says the median and the best of so many seconds. `what` has the bytes of one."""
    times = sorted(times)
    median = times[len(times) // 2]
    say(gb_s=what["bytes"] / median / 1e9, best_gb_s=what["bytes"] / times[0] / 1e9, us=median * 1e6, **what)


def until_error(move, seconds):
    """Moves until that fails, for at most so long, and says what was reported. The other end is killed or stopped meanwhile."""
    begin = time.monotonic()
    try:
        while time.monotonic() - begin < seconds:
            move()
        error = None
    except TimeoutError:
        error = None
    except Exception as reported:  # each client has its own classes
        error = f"{type(reported).__name__}: {reported}"
    say(error=error, after_s=time.monotonic() - begin)
