"""What the drop-in itself counted under a bench of nic/hard: gpu-check and tests/hardware.sh hold the bench's word against it.

    hard_runs.py REPORTS RESULTS direct|staged [BYTES]     exit code 1, and a sentence, where they do not agree

REPORTS is the folder that NOBOUNCE_REPORT named, RESULTS what `bench --json` wrote; so many BYTES may be staged though memory is direct (none)."""

import glob
import json
import os
import struct
import sys

# Ways of GPU memory in reports of a device; the others are the host's (cpu) and staged.
DIRECT = ("window", "copy-engine")


# Each of the two places in the file of what a device did so far (docs/reference/json.md): a number, a length, a text.
PLACE = 16 << 10


def last_snapshot(path):
    """What a device did until shortly before its process was ended; nothing where it never said."""
    try:
        with open(path, "rb") as file:
            places = file.read(PLACE), file.read(PLACE)
        number, length, text = max((*struct.unpack_from("=QQ", place), place[16:]) for place in places if len(place) >= 16)
        return json.loads(text[:length]) if number else None
    except (OSError, ValueError):
        return None


def counted(folder):
    """Bytes by direction and way, of all devices; how many left no report, but what they did until shortly before; and how many left nothing."""
    reports = []
    for path in glob.glob(os.path.join(folder, "*.json")):
        with open(path) as file:
            reports.append(json.load(file))
    ended = [last_snapshot(path.removesuffix("open") + "live") for path in glob.glob(os.path.join(folder, "*.open"))]
    known = [snapshot for snapshot in ended if snapshot]
    moved = {}
    for report in reports + known:
        for direction in ("in", "out"):
            for way, tally in report.get(direction, {}).items():
                moved[direction, way] = moved.get((direction, way), 0) + tally["bytes"]
    return moved, len(known), len(ended) - len(known)


def measured(results):
    """The operations on GPU memory that the bench measured, and how many bytes they moved at least, by what it says of its path."""
    with open(results) as file:
        rows = [row for row in json.load(file)["results"] if row["memory"] != "host" and row["kind"] != "gpu-visible"]
    rows = {way: [row for row in rows if row["path"].startswith(way)] for way in ("direct", "staged")}
    return {way: ({row["op"] for row in some}, sum(row["size"] * row["iters"] for row in some), some) for way, some in rows.items()}


def judge(folder, results, way, may_stage=0):
    """(what is wrong or nothing, what is to be told)"""
    moved, ended, silent = counted(folder)
    operations, least, rows = measured(results)[way]
    sums = {(direction, kind): sum(moved.get((direction, name), 0) for name in names)
            for direction in ("in", "out") for kind, names in (("direct", DIRECT), ("staged", ("staged",)), ("host", ("cpu",)))}
    told = ["counted by the drop-in: " + ", ".join(f"{direction} {kind} {count}" for (direction, kind), count in sums.items())
            + f"; {', '.join(sorted(operations)) or 'nothing'} moved {least} bytes {way} at least" + (f" ({ended} of the devices counted until shortly before its process was ended)" if ended else "")]
    staged_by_us = sum(row["counted"][end][direction]["staged"]["bytes"] for row in rows if row.get("counted") for end in ("here", "there") for direction in ("inbound", "outbound"))
    if silent:
        wrong = f"{silent} devices of the drop-in left no report"
    elif not least:
        wrong = f"nothing was measured {way}"
    elif max(sums["in", "staged"], sums["out", "staged"]) > may_stage:
        wrong = "the drop-in staged GPU memory that was registered with it"
    elif way == "direct" and min(sums["in", "direct"], sums["out", "direct"]) < least:
        wrong = "less went directly than was measured"
    elif way == "staged" and (staged_by_us < least or min(sums["in", "host"], sums["out", "host"]) < least):
        wrong = f"nic/hard staged {staged_by_us} bytes, less than were measured"
    else:
        wrong = ""
    return wrong, told


if __name__ == "__main__":
    wrong, told = judge(*sys.argv[1:4], *map(int, sys.argv[4:]))
    print(*told, *([wrong] if wrong else []), sep="\n")
    sys.exit(1 if wrong else 0)
