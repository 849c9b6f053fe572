"""The rooms of each crate, lowest first: what `check-tree` holds the imports of its modules against.

A room is a module with everything below it, or several modules that belong together. A module may use its own room and lower ones. A
room that is not in the table is reported, and so is an import that points upward.
"""

import os
import re

# Crate: [(room, its modules)], lowest first. "" is the crate's root, which may use everything.
ROOMS = {
    "crates/protocol": [("time", {"timing", "rng"}), ("wire", {"wire"}), ("congestion", {"congestion"}), ("qp", {"qp"}), ("cm", {"cm"}), ("seal", {"seal"}), ("capture", {"pcap"}), ("simulator", {"sim"})],
    "crates/memory": [
        ("words", {"access_error", "barrier", "path", "signals", "probe", "shared_file"}), ("copies", {"copy"}), ("host memory", {"foreign", "window", "guard", "host_buffer", "file_io", "file_mapping", "shared_chunk", "unmap_watch"}),
        ("gpu", {"gpu"}),
    ],
    "crates/nic": [
        ("process", {"process"}), ("sync", {"sync"}), ("work", {"work", "tally"}), ("interfaces", {"interfaces", "allow"}), ("hard", {"hard"}), ("links", {"links"}),
        ("settings", {"soft::limits", "soft::config", "soft::error", "soft::port_speed"}), ("counters", {"soft::counters", "soft::crc"}),
        ("events", {"soft::events"}), ("gpu", {"soft::gpu"}), ("local", {"soft::local"}), ("engine", {"soft::engine"}),
        ("progress", {"soft::progress"}), ("lifecycle", {"soft::lifecycle"}), ("objects", {"soft::objects"}), ("cm", {"soft::cm"}), ("soft", {"soft"}), ("any", {"any"}),
    ],
    "crates/nobounce": [
        ("words", {"access", "health", "choose", "control", "peer_gone", "tickets", "shares"}), ("memory", {"gpu_access", "region"}), ("files", {"file"}),
        ("device", {"device"}), ("handshake", {"handshake", "wait"}), ("connection", {"connection", "connect", "lane", "path_mtu"}),
        ("messages", {"message", "rails"}), ("listener", {"listener"}), ("fuzzing", {"fuzzing"}),
    ],
    "crates/transfer": [("words", {"pieces", "frame", "error"}), ("parts", {"memory", "exports", "notification", "wire", "frame_lane"}), ("shared", {"transfer", "job", "message", "hook", "shared"}), ("service", {"announcements", "endings", "lanes", "link", "service", "greet"}), ("interface", {"connecting", "peer", "handler", "agent"}), ("fuzzing", {"fuzzing"}), ("tests", {"hostile"})],
    "crates/storage": [("words", {"request", "root", "error"}), ("requests", {"cache", "jobs", "short", "queue", "reader"}), ("ends", {"server", "client"}), ("fuzzing", {"fuzzing"}), ("tests", {"hostile"})],
    "crates/initiated": [("formats", {"descriptor", "device", "words"}), ("ring", {"ring"}), ("table", {"table"}), ("proxy", {"parts", "peer", "proxy", "thread"}), ("world", {"rendezvous", "options", "mesh", "join_error", "control_memory", "world"})],
    "crates/topology": [
        ("facts", {"cpu_list", "clean", "facts", "mad", "netlink", "sysfs", "machines"}), ("tree", {"adapters", "gpudirect", "methods", "usable", "tree", "analysis", "bandwidth", "iommu", "platform", "nearest"}),
    ],
    # The parts of a transfer, the estimate and its reports name each other's types.
    "crates/predict": [
        ("numbers", {"constants", "factor", "fitted", "interval_table", "least_squares"}),
        ("model", {"fabric", "slot", "kinds", "parts", "parts_error", "machine", "plausible", "route", "software", "soft", "model", "staging", "window", "cluster", "cluster_error", "measured", "calibration", "seen", "report", "upgrade", "plot", "plot_cluster", "basis", "interval"}),
        ("validation", {"published", "validation"}),
    ],
    "crates/diagnose": [
        ("findings", {"explain", "finding"}), ("names", {"names"}), ("verdicts", {"verdict", "ucx", "nccl", "storage_verdict"}), ("checks", {"checks", "container", "severity", "fold", "words", "lost", "diagnosis"}), ("reports", {"report", "storage_report", "draw", "log", "fuzzing"}),
    ],
    "crates/fabric": [
        ("numbers", {"units", "stats", "queue"}), ("control", {"control"}), ("config", {"config"}), ("shape", {"topology", "packet"}),
        ("parts", {"end", "links", "messages"}), ("network", {"network"}), ("traffic", {"workload"}), ("report", {"report"}),
    ],
    "crates/emulator": [("config", {"config"}), ("packet", {"packet"}), ("model", {"model"}), ("devices", {"namespace", "tun"}), ("emulator", {"emulator"})],
    "crates/verbs": [("layouts", {"address", "completion", "context", "cq_ex", "device", "domain", "event", "kernel", "memory", "port", "qp", "qp_ex", "srq", "work"})],
    # The driver's calls and its state know each other: one object, as in CUDA's own library.
    "crates/fake-cuda": [
        ("words", {"abi", "status", "backing", "space", "client"}),
        ("driver", {"call", "capture", "context", "copy", "device", "event", "export", "knobs", "lane", "malloc", "memory", "spoil", "stream", "vmm", "world"}),
        ("more calls", {"host", "ipc", "kernel", "pointer"}),
    ],
    "crates/cli": [("words", {"log", "size"}), ("local readers", {"live", "http"}), ("doctor", {"doctor"}), ("predict", {"predict"}), ("sim", {"sim"}), ("bench", {"bench"}), ("path", {"path"}), ("initiated", {"initiated"}), ("kv", {"kv"}), ("files", {"files"}), ("serve", {"serve"}), ("run", {"run"}), ("cdi", {"cdi"}), ("ui", {"ui"}), ("top", {"top"}), ("metrics", {"metrics"}), ("generate", {"generate"}), ("fuzzing", {"fuzzing"})],
    "kubernetes/device-plugin": [("words", {"names", "log", "testing"}), ("formats", {"messages", "socket"}), ("state", {"cdi", "devices"}), ("calls", {"service", "kubelet"}), ("resource", {"resource", "args"})],
    "python": [("words", {"failure", "log"}), ("objects", {"memory", "transfer"}), ("peers", {"peer", "connecting"}), ("files", {"files"}), ("agent", {"agent"})],
    "dropin/common": [("log", {"log"}), ("testing", {"testing"}), ("border", {"entry", "endings", "find_object", "notice", "reserve"}), ("view", {"view", "own_view", "shared_dir"})],
    "dropin/gdrapi": [("layouts", {"layout", "slab"}), ("pins", {"pin", "table"}), ("calls", {"calls"})],
    "dropin/cufile": [("layouts", {"abi"}), ("calls", {"batch", "calls", "memory", "parameters", "report", "stats", "stream", "table", "transfer"})],
    "dropin/gin": [("interface", {"abi", "error", "log", "layout", "nccl"}), ("ranks", {"group"}), ("contexts", {"context"}), ("calls", {"plugin"})],
    "dropin/vmm": [("interposed", {"driver", "lookup"})],
    "dropin/paths": [("view", {"view", "original", "copies"}), ("calls", {"calls", "dlopen"})],
    # Verbs objects hold each other by pointers that C programs follow in every direction.
    "dropin/ibverbs": [
        ("border", {"view", "device_log", "strings", "rates", "kernel", "sysfs", "unsupported"}),
        ("devices", {"live", "convert", "device_list", "system"}),
        ("objects", {"ah", "attributes", "channel", "context", "cq", "cq_ex", "dm", "domain", "mr", "multicast", "mw", "pd", "poll", "port", "post", "qp", "qp_ex", "srq", "xrc"}),
        ("calls", {"async_event", "import", "qp_modify", "report"}), ("exports", {"export", "private"}),
    ],
    "dropin/rdmacm": [
        ("border", {"address", "calls", "layout"}), ("devices", {"device", "channel"}), ("ids", {"id", "multicast", "qp", "event"}),
        ("calls", {"connect", "resolve", "endpoint"}),
    ],
}


def modules_of(names, source):
    """{module path: file} of a crate."""
    found = {}
    for name in names:
        if not name.startswith(source + "/") or not name.endswith(".rs"):
            continue
        module = name[len(source) + 1:-3].removesuffix("/mod").replace("/", "::")
        # A package with a library and a program is shown by its library, which comes first.
        if module in ("lib", "main", "mod"):
            found.setdefault("", name)
        else:
            found[module] = name
    return found


TESTS = re.compile(r"^( *)#\[cfg\((?:all\()?test\b[^\]]*\]\n(?: *#\[.*\]\n)* *mod \w+ \{\n.*?^\1\}$", re.S | re.M)
PATH = re.compile(r"\b(crate|self|super(?:::super)*)((?:::\w+)*)(?:::\{((?:[^{}]|\{[^{}]*\})*)\})?")


EXPORT = re.compile(r"^pub use ((?:\w+::)+)(?:\{([^}]*)\}|(\w+));", re.M)


def exports_of(text, modules):
    """{name: module} of what the root exports of its modules."""
    found = {}
    for path, group, name in EXPORT.findall(text):
        parts = path.strip(":").split("::")
        for exported in [one.strip() for one in group.split(",")] if group else [name]:
            for length in range(len(parts), 0, -1):
                if "::".join(parts[:length]) in modules:
                    found[exported] = "::".join(parts[:length])
                    break
    return found


def imports_of(text, module, modules, exports=None):
    """The modules that a file names, by `use` or in the midst of code. Its tests may name everything."""
    text = TESTS.sub("", text)
    text = re.sub(r"//.*", "", text)
    here = module.split("::") if module else []
    found = set()
    for start, path, group in PATH.findall(text):
        if start == "crate":
            base = []
        elif start == "self":
            base = here
        else:
            base = here[:max(0, len(here) - start.count("super"))]
        base = base + [part for part in path.split("::") if part]
        # What stands in braces inside braces belongs to a module that is named before it.
        tails = [tail.strip().split("::") for tail in re.sub(r"\{[^{}]*\}", "", group).split(",")] if group else [[]]
        for tail in tails:
            full = base + [part.split(" ")[0] for part in tail if part]
            if start == "crate" and full and exports and full[0] in exports and full[0] not in modules:
                full = exports[full[0]].split("::")
            for length in range(len(full), 0, -1):
                named = "::".join(full[:length])
                if named in modules:
                    found.add(named)
                    break
    return found - {module}


def room_of(module, rooms):
    """(place, name) of the room that a module belongs to, or None."""
    parts = module.split("::")
    for length in range(len(parts), 0, -1):
        prefix = "::".join(parts[:length])
        for place, (name, members) in enumerate(rooms):
            if prefix in members:
                return place, name
    return None


def upward(modules, imports, rooms):
    """What is wrong with the imports of a crate: [text]."""
    problems = []
    for module in sorted(modules):
        if not module or module.endswith("tests") or "::tests::" in module:
            continue
        mine = room_of(module, rooms)
        if mine is None:
            problems.append(f"{modules[module]}: belongs to no room; add it to tools/rooms.py")
            continue
        for other in sorted(imports[module]):
            theirs = room_of(other, rooms)
            if theirs and theirs[0] > mine[0]:
                problems.append(f"{modules[module]}: room {mine[1]} imports {other} of room {theirs[1]}, which is above it")
    return problems


# Crates with so many modules show their rooms on their front page.
PICTURED_FROM = 4


def missing_on_front(page, tops, rooms):
    """What the doc comment of a crate's root lacks: a picture, a table, rooms of which neither names any module: [text]."""
    if len(tops) < PICTURED_FROM:
        return []
    front = [line[3:].strip() for line in page.splitlines() if line.startswith("//!")]
    problems = [] if "```text" in front else ["no picture of its rooms (a block of ```text)"]
    if not any(re.fullmatch(r"\|(?:-+\|)+", line) for line in front):
        problems.append("no table of its rooms")
    words = set(re.findall(r"\w+", " ".join(front)))
    for name, members in rooms:
        if name not in ("tests", "fuzzing") and not words & {name, *(member.split("::")[-1] for member in members)}:
            problems.append(f"the room {name} ({', '.join(sorted(members))}) is neither in its picture nor in its table")
    return problems


def check(names, text_of):
    """Problems of all crates."""
    problems = []
    for manifest in names:
        if not re.fullmatch(r"(?:(?:crates|dropin|kubernetes)/.+|python)/Cargo\.toml", manifest):
            continue
        crate = os.path.dirname(manifest)
        modules = modules_of(names, f"{crate}/src")
        if len(modules) < 3:
            continue
        if crate not in ROOMS:
            problems.append(f"{crate}: has no rooms in tools/rooms.py")
            continue
        root = modules.get("")
        exports = exports_of(text_of(root) or "", modules) if root else {}
        imports = {module: imports_of(text_of(name) or "", module, modules, exports) for module, name in modules.items()}
        problems += upward(modules, imports, ROOMS[crate])
        tops = {module for module in modules if module and "::" not in module and not module.endswith("tests")}
        problems += [f"{root}: {lack}" for lack in missing_on_front(text_of(root) or "", tops, ROOMS[crate])] if root else []
    return problems


def self_test(expect):
    modules = {name: f"src/{name}.rs" for name in ("", "low", "low::part", "high", "lost")}
    rooms = [("low", {"low"}), ("high", {"high"})]
    texts = {
        "": "use crate::high::X;",
        "low": "use crate::low::part::Y;\n#[cfg(test)]\nmod tests {\n    use crate::high::X;\n}\nuse crate::lost::Z;\n",
        "low::part": "fn f() { crate::high::g() }\n// crate::lost\n",
        "high": "use crate::{low, low::part};\nuse super::low::Z;",
        "lost": "",
    }
    imports = {module: imports_of(text, module, modules) for module, text in texts.items()}
    expect(imports["high"], {"low", "low::part"}, "imports in braces and through super")
    expect(imports["low"], {"low::part", "lost"}, "imports of tests do not count, those behind them do")
    expect(imports["low::part"], {"high"}, "comments do not count")
    exports = exports_of("pub use high::{X, Other};\npub use low::part::Y;\n", modules)
    expect(imports_of("use crate::{X, Y};", "lost", modules, exports), {"high", "low::part"}, "imports of what the root exports")
    expect(upward(modules, imports, rooms), [
        "src/lost.rs: belongs to no room; add it to tools/rooms.py",
        "src/low::part.rs: room low imports high of room high, which is above it",
    ], "a module without a room and an upward import")
    page = "//! One.\n//! ```text\n//! high  low\n//! ```\n//! | room | what |\n//! |---|---|\n"
    tops = {"low", "high", "lost", "found"}
    expect(missing_on_front(page, tops, rooms), [], "a front page with both")
    expect(missing_on_front("//! Low.\n", {"low"}, rooms), [], "a front page of few modules")
    expect(missing_on_front("//! low\nmod high;\n", tops, rooms), [
        "no picture of its rooms (a block of ```text)", "no table of its rooms",
        "the room high (high) is neither in its picture nor in its table",
    ], "a front page without a picture")
