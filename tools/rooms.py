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
        ("settings", {"soft::limits", "soft::config", "soft::error", "soft::port_speed", "soft::qp_index"}), ("counters", {"soft::counters", "soft::crc"}),
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
    "crates/predict": [
        ("numbers", {"constants", "factor", "fitted", "interval_table", "least_squares"}),
        ("model", {"fabric", "slot", "kinds", "parts", "parts_error", "machine", "rails", "plausible", "route", "software", "soft", "model", "staging", "window", "cluster", "cluster_error", "measured", "calibration", "seen", "report", "upgrade", "plot", "plot_cluster", "basis", "interval"}),
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

# Cycles of imports within a room, with the reason why each is one: crate: [(modules, reason)]. A module and the parts below it are one
# thing cut into files, as the queue pair of `protocol::qp` is: `impl Qp` in `selective.rs` and `congestion.rs`, types by `pub use`.
CYCLES = {
    "crates/protocol": [
        ({"sim::fuzzing", "sim::management"}, "both fuzzers take their decisions from one reader of bytes, and one starts the other"),
    ],
    "crates/memory": [
        ({"gpu::ending", "gpu::region", "gpu::watch"}, "a registration enters the lists of what watches its memory, and those end it"),
    ],
    "crates/nic": [
        (
            {"links::batch", "links::packet_writer", "links::ring_packets", "links::rings::leases", "links::rings::peer_ring", "links::rings::ring", "links::wire_packets"},
            "one writer with two destinations: a batch is filled through it, and rings lend the slots that it fills",
        ),
        ({"hard::cq", "hard::device", "hard::gid_table", "hard::gpu", "hard::list", "hard::memory", "hard::proof", "hard::qp"}, "the device makes its objects and they hold it; a proof of a GPU path makes queue pairs of its own"),
        ({"links::udp::socket", "links::udp::steering"}, "a socket filters the probes that steering sends through it"),
        ({"soft::config", "soft::port_speed"}, "one option and the error of all"),
        ({"soft::gpu::copier", "soft::gpu::copiers"}, "one thread of copies and the set of them"),
        ({"soft::gpu::staging", "soft::gpu::step", "soft::gpu::target"}, "a step of a staged transfer changes a target, and a target starts steps"),
        ({"soft::engine::memory_windows", "soft::engine::queue_pair", "soft::engine::region"}, "windows belong to regions and to queue pairs, which bind and check them"),
        ({"soft::engine::host", "soft::engine::queue_pair::posted", "soft::engine::srqs", "soft::engine::submission"}, "posted requests: the rings they are submitted by, and the queues they are taken from"),
        ({"soft::progress::set", "soft::progress::watch"}, "a watch drives the set of engines that has it"),
        ({"soft::objects::cq", "soft::objects::device", "soft::objects::qp", "soft::objects::srq", "soft::objects::xrc"}, "the device makes its objects, and they hold it"),
    ],
    "crates/nobounce": [
        ({"connect", "connection", "lane", "path_mtu"}, "one connection: how it is made, its lanes, and the MTU that they agree on"),
    ],
    "crates/transfer": [
        ({"hook", "job", "message", "shared", "transfer"}, "the state that the application's threads and the agent's thread share holds transfers, which hold it"),
    ],
    "crates/topology": [({"gpudirect", "methods"}, "whether a GPU's class supports a method, and what answer that gives")],
    "crates/predict": [
        (
            {"basis", "calibration", "fabric", "machine", "measured", "model", "parts", "parts_error", "plausible", "route", "seen", "slot", "soft", "software"},
            "the parts of a transfer, the estimate and its reports name each other's types",
        ),
    ],
    "crates/diagnose": [
        ({"nccl", "ucx", "verdict"}, "a verdict holds what each library uses, which is said in the verdict's words"),
        ({"checks::port", "checks::width"}, "the width of a link is a check of its port"),
        ({"log::causes", "log::known", "log::messages"}, "the table of messages names functions for causes, which are of the table's types"),
    ],
    "crates/fake-cuda": [
        ({"abi", "status"}, "CUDA's answers and their numbers"),
        (
            {"call", "capture", "context", "copy", "device", "event", "export", "knobs", "lane", "malloc", "memory", "spoil", "stream", "vmm", "world"},
            "the driver's calls and its state know each other: one object, as in CUDA's own library",
        ),
    ],
    "crates/cli": [
        ({"doctor::gpu_peers", "doctor::nvml"}, "NVML's library asks for peers by the table of the functions that NVML has"),
        ({"path::flow", "path::flow_nb0", "path::flow_tcp"}, "a flow has two transports, which share its options and figures"),
    ],
    "dropin/common": [({"entry", "reserve"}, "each call at the boundary checks the reserve, which answers with an errno")],
    "dropin/cufile": [
        ({"calls", "memory", "parameters", "report", "stats", "transfer"}, "the exported functions share one table of parameters and counters, which are exported functions, too"),
    ],
    "dropin/vmm": [({"driver", "lookup"}, "a looked-up name leads to our function, and that one looks up the real one")],
    "dropin/paths": [({"copies", "view"}, "paths below the view are what tells of copies of rdma-core")],
    "dropin/ibverbs": [
        (
            {"ah", "attributes", "channel", "context", "cq", "cq_ex", "dm", "domain", "mr", "mw", "pd", "poll", "port", "post", "qp", "qp_ex", "srq", "xrc"},
            "verbs objects hold each other by pointers, which C programs follow in every direction",
        ),
    ],
    "dropin/rdmacm": [
        ({"event", "id", "multicast", "qp"}, "an identifier has a queue pair, groups and events, and each of those names its identifier: C structures with pointers both ways"),
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


REEXPORT = re.compile(r"^pub(?:\([^)]*\))? use (?:self::)?((?:\w+::)+)(?:\{([^}]*)\}|(\w+));", re.M)


def reexports_of(text, module, modules):
    """{name: module} of what a module exports of the modules below it."""
    found = {}
    for path, group, name in REEXPORT.findall(text):
        parts = module.split("::") + path.strip(":").split("::")
        for exported in [one.strip().split(" as ")[-1] for one in group.split(",") if one.strip()] if group else [name]:
            for length in range(len(parts), len(module.split("::")), -1):
                if "::".join(parts[:length]) in modules:
                    found[exported] = "::".join(parts[:length])
                    break
    return found


def imports_behind(text, module, modules, reexports):
    """As [`imports_of`], but each name counts for the module that defines it, not for the one that exports it on."""
    text = re.sub(r"//.*", "", TESTS.sub("", text))
    here = module.split("::")
    found = set()
    for start, path, group in PATH.findall(text):
        base = [] if start == "crate" else here if start == "self" else here[:max(0, len(here) - start.count("super"))]
        base = base + [part for part in path.split("::") if part]
        for tail in [tail.strip().split("::") for tail in re.sub(r"\{[^{}]*\}", "", group).split(",")] if group else [[]]:
            full = base + [part.split(" ")[0] for part in tail if part]
            for length in range(len(full), 0, -1):
                named = "::".join(full[:length])
                if named in modules:
                    found.add(reexports.get(named, {}).get(full[length], named) if length < len(full) else named)
                    break
    return found - {module}


def is_part(module, other):
    """Whether one of the two lies below the other: then both are one thing."""
    return (module + "::").startswith(other + "::") or (other + "::").startswith(module + "::")


def cycles(imports):
    """Sets of modules that import each other in a ring (Tarjan), in a fixed order."""
    number, low, stack, rings = {}, {}, [], []

    def visit(module):
        number[module] = low[module] = len(number)
        stack.append(module)
        for other in sorted(imports[module]):
            if other not in imports or is_part(module, other):
                continue
            if other not in number:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == number[module]:
            ring = set(stack[stack.index(module):])
            del stack[stack.index(module):]
            if len(ring) > 1:
                rings.append(ring)

    for module in sorted(imports):
        if module not in number:
            visit(module)
    return sorted(rings, key=sorted)


def without_reason(rings, reasons):
    """What is wrong with the cycles of a crate: [text]."""
    problems = [
        f"{', '.join(sorted(ring))} import each other; move what the lower one needs, or give the reason in tools/rooms.py"
        for ring in rings if not any(ring <= modules for modules, _ in reasons)
    ]
    problems += [
        f"{', '.join(sorted(modules))} no longer import each other: strike them out of tools/rooms.py"
        for modules, _ in reasons if not any(ring <= modules for ring in rings)
    ]
    return problems


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
        plain = {module: name for module, name in modules.items() if module and not module.endswith("tests") and "::tests::" not in module}
        texts = {module: text_of(name) or "" for module, name in plain.items()}
        reexports = {module: reexports_of(text, module, plain) for module, text in texts.items()}
        rings = cycles({module: imports_behind(text, module, plain, reexports) for module, text in texts.items()})
        problems += [f"{crate}: {wrong}" for wrong in without_reason(rings, CYCLES.get(crate, []))]
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
    parts = {name: name for name in ("one", "one::inner", "two", "three")}
    behind = {"one": reexports_of("pub use inner::{Inner, Other as Renamed};\n", "one", parts)}
    expect(behind, {"one": {"Inner": "one::inner", "Renamed": "one::inner"}}, "what a module exports on")
    expect(imports_behind("use crate::one::{Inner, Own};", "two", parts, behind), {"one", "one::inner"}, "a name behind an export")
    ring = {"one": {"two", "one::inner"}, "one::inner": {"one"}, "two": {"three"}, "three": {"one"}}
    expect(cycles(ring), [{"one", "two", "three"}], "a ring of three; a part does not count")
    expect(cycles({"one": {"two"}, "two": set(), "three": {"one", "two"}}), [], "no ring")
    expect(without_reason([{"one", "two"}], [({"one", "two", "three"}, "why")]), [], "a ring with a reason")
    expect(len(without_reason([{"one", "two"}], [({"two", "three"}, "why")])), 2, "a ring without a reason, and a reason without a ring")
