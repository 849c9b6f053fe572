"""GDRCopy's interface on a GPU: our own C programs (`gpu-check --only gdrapi`) and GDRCopy's tests (`--only gdrcopy`), all on our libgdrapi."""

import os
import re
import subprocess

import bounded
from gpu_plan import Company

LIMIT = 20
LIVES = ("facts", "copies", "small", "overlap", "unmapped", "part", "misuse", "freed", "forked", "threads", "exits", "all")
# Name, company, program and arguments, what it must say, whether all it says is shown. Whoever looks at what the whole GPU has in use is alone.
CASES = (
    *((case, Company.ANY, ["lives", case], "", False) for case in LIVES),
    ("VMM, exportable", Company.ANY, ["vmm", "exportable"], "exportable: good", False),
    ("VMM, not exportable", Company.ANY, ["vmm", "private"], "^(refused|pinned): ", False),
    *((f"ends pinned: {way}", Company.ALONE, ["deaths", way], "^NVML: as before", False) for way in ("killed", "returns", "quits")),
    ("speed", Company.ALONE, ["speed"], "all bytes were right", True),
)
# A figure that was asked for and missed, in the best of several tries, fails its row.
NEVER = ("FAILED", "goal missed")

# Tests of gdrcopy_sanity that look into the library's own structures for the descriptor of gdrdrv, which there is not.
PRIVATE = "unix_sock_shared_fd"
# Their memory is made by cuMemCreate without a handle type: only a driver whose dma-bufs can be mapped (CUDA 13.3) gives a window onto it.
WITHOUT_HANDLE, REFUSED = "_vmmalloc", re.compile(r"the VMM memory at \S+ cannot be exported")


def tests_of(program, environment):
    """The names of gdrcopy_sanity's tests in two lists: on memory that can be reached, and on memory without a handle type."""
    listed = subprocess.run([program, "-l"], capture_output=True, text=True, timeout=LIMIT, env=os.environ | environment)
    tests = [test for test in re.findall(r"^\s+(\w+)$", listed.stdout, re.M) if PRIVATE not in test]
    return [[test for test in tests if test.endswith(WITHOUT_HANDLE) == is_without] for is_without in (False, True)]


def result_of(program, test, environment, out):
    """passed, waived (by itself), refused (with the documented reason), or FAILED."""
    _, said, _ = bounded.run([program, "-v", "-t", test], LIMIT, os.path.join(out, f"gdrcopy-{test}.txt"), environment)
    counts = re.search(r"Passed: (\d+), Failed: (\d+), Waived: (\d+)", said)
    word = ("passed", "FAILED", "waived")[counts.groups().index("1")] if counts and "1" in counts.groups() else "FAILED"
    return "refused" if word == "FAILED" and test.endswith(WITHOUT_HANDLE) and REFUSED.search(said) else word


def judge(results):
    """(whether all is well, lines to tell) of {test: result}."""
    found = {word: [test for test, result in results.items() if result == word] for word in ("passed", "waived", "refused", "FAILED")}
    told = [f"{len(found['passed'])} of {len(results)} passed"]
    if found["refused"]:
        told[0] += f", {len(found['refused'])} refused as documented: no window onto memory that was made without a handle type (docs/guide/gdrcopy.md)"
    told += [f"waived by themselves: {' '.join(found['waived'])}"] if found["waived"] else []
    told += [f"failed: {' '.join(found['FAILED'])}"] if found["FAILED"] else []
    return bool(results) and not found["FAILED"], told
