"""The crates in the binaries of a package: a software bill of materials (CycloneDX 1.5), and their licence texts.

Both depend on the sources and their arguments only, so that packages are reproducible.
"""

import datetime
import hashlib
import html
import json
import os
import re
import subprocess

LIBRARIES = ["ibverbs", "rdmacm", "gdrapi", "cufile", "paths", "vmm", "world", "gin", "stub-mlx5", "stub-efa"]
# What `make build` builds, and the compiled part of the wheel.
PACKAGES = ["nobounce-" + name for name in ("cli", *LIBRARIES, "python")]


def selection(*names):
    return [flag for name in names for flag in ("-p", f"nobounce-{name}")]


# Options of cargo for each build that goes into a package. `make image` builds its programs apart.
PACKAGED = [selection("cli", *LIBRARIES, "python")]
IN_WHEEL = [selection("cli", *(name for name in LIBRARIES if name not in ("world", "gin")), "python")]
IN_IMAGE = [selection(*LIBRARIES), [*selection("cli", "device-plugin"), "--no-default-features"]]
# Names of files with licence texts in the archives of crates.
LICENCE_FILES = ("licen", "copying", "copyright", "notice", "unlicense")


def cargo(root, *arguments):
    command = ["cargo", *arguments, "--locked", "--color", "never"]
    return subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True).stdout


def built_crates(root, target, edges, builds):
    """{(name, version)} of the packages and what they need. `cargo metadata` would add what only features of tests and other packages enable."""
    trees = [cargo(root, "tree", *build, "--edges", edges, "--target", target, "--prefix", "none", "--format", "{p}") for build in builds]
    words = (line.split() for tree in trees for line in tree.splitlines() if line)
    return {(name, version.removeprefix("v")) for name, version, *_ in words}


class Crates:
    """What `cargo metadata` says of the built crates, sorted by name and version."""

    def __init__(self, root, target, builds):
        metadata = json.loads(cargo(root, "metadata", "--format-version", "1", "--filter-platform", target))
        built = built_crates(root, target, "normal", builds)
        # Procedural macros, and what these need, run in the compiler only.
        self.linked = built_crates(root, target, "normal,no-proc-macro", builds)
        by_id = {crate["id"]: crate for crate in metadata["packages"] if (crate["name"], crate["version"]) in built}
        self.crates = sorted(by_id.values(), key=lambda crate: (crate["name"], crate["version"]))
        self.needs = {}
        for node in metadata["resolve"]["nodes"]:
            if node["id"] in by_id:
                normal = (d["pkg"] for d in node["deps"] if any(kind["kind"] is None for kind in d["dep_kinds"]))
                self.needs[purl(by_id[node["id"]])] = sorted(purl(by_id[other]) for other in normal if other in by_id)
        with open(os.path.join(root, "Cargo.lock"), encoding="utf-8") as file:
            # Not by tomllib, which Python 3.10 lacks.
            entries = re.findall(r'^name = "(.*)"\nversion = "(.*)"\n(?:source = ".*"\n)?checksum = "(.*)"', file.read(), re.M)
        self.checksums = {(name, version): checksum for name, version, checksum in entries}

    def is_linked(self, crate):
        return (crate["name"], crate["version"]) in self.linked


def purl(crate):
    return f"pkg:cargo/{crate['name']}@{crate['version']}"


def licence(crate):
    """An SPDX expression. Old manifests separate alternatives by a slash."""
    return crate["license"].replace("/", " OR ")


def component(crates, crate):
    entry = {
        "type": "library",
        "bom-ref": purl(crate),
        "name": crate["name"],
        "version": crate["version"],
        "scope": "required" if crates.is_linked(crate) else "excluded",
        "licenses": [{"expression": licence(crate)}],
        "purl": purl(crate),
    }
    if checksum := crates.checksums.get((crate["name"], crate["version"])):
        entry["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    if crate["repository"]:
        entry["externalReferences"] = [{"type": "vcs", "url": crate["repository"]}]
    return entry


def bill_of_materials(crates, version, licences, epoch):
    """The file as text. It has no serial number, which would be random."""
    whole = f"pkg:generic/nobounce@{version}"
    roots = sorted(purl(crate) for crate in crates.crates if crate["name"] in PACKAGES)
    timestamp = datetime.datetime.fromtimestamp(epoch, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    product = {"type": "application", "bom-ref": whole, "name": "nobounce", "version": version, "licenses": [{"expression": licences}], "purl": whole}
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"timestamp": timestamp, "component": product},
        "components": [component(crates, crate) for crate in crates.crates],
        "dependencies": [{"ref": whole, "dependsOn": roots}] + [{"ref": ref, "dependsOn": needs} for ref, needs in sorted(crates.needs.items())],
    }
    return json.dumps(bill, indent=2) + "\n"


# The standard library's crates for other systems.
NOT_LINUX = ("dlmalloc", "fortanix", "hermit", "moto", "r-efi", "vex", "wasi", "windows", "wit-bindgen")
# Where systems keep the licence of their C library.
LGPL = ("/usr/share/common-licenses/LGPL-2.1", "/usr/share/licenses/glibc/COPYING.LIB", "/usr/share/licenses/spdx/LGPL-2.1-or-later.txt")


def plain(text):
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def licence_files(crate):
    folder = os.path.dirname(crate["manifest_path"])
    names = sorted(name for name in os.listdir(folder) if name.lower().startswith(LICENCE_FILES))
    return [path for path in (os.path.join(folder, name) for name in names) if os.path.isfile(path)]


def of_crates(crates):
    """(title, name of the file, text) of each licence file of the linked crates of others."""
    for crate in (crate for crate in crates.crates if crate["source"] and crates.is_linked(crate)):
        # A few archives lack the file, which their repository has for several crates.
        siblings = (other for other in crates.crates if crate["repository"] and (other["repository"], other["license"]) == (crate["repository"], crate["license"]))
        found = next((files for files in map(licence_files, [crate, *siblings]) if files), None)
        if found is None:
            raise SystemExit(f"sbom: {crate['name']} {crate['version']} has no file with its licence")
        for path in found:
            with open(path, encoding="utf-8", errors="replace") as file:
                yield f"{crate['name']} {crate['version']} ({licence(crate)})", os.path.basename(path), plain(file.read())


def of_standard_library(root):
    """The same of Rust's standard library and its crates, from the page of the toolchain."""
    def rustc(*words):
        return subprocess.run(["rustc", *words], cwd=root, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()

    title = f"Rust standard library {rustc('--version').split()[1]} (MIT OR Apache-2.0)"
    with open(os.path.join(root, "LICENSE-APACHE"), encoding="utf-8") as file:
        yield title, "LICENSE-APACHE", plain(file.read())
    folder = os.path.join(rustc("--print", "sysroot"), "share", "doc", "rust")
    page = os.path.join(folder, "COPYRIGHT-library.html")
    if not os.path.exists(page):
        return  # toolchains of distributions
    with open(os.path.join(folder, "licenses", "Unicode-3.0.txt"), encoding="utf-8") as file:
        yield title, "Unicode-3.0.txt (tables of characters)", plain(file.read())
    with open(page, encoding="utf-8") as file:
        _, *parts = file.read().split("<h3>")
    for part in parts:
        name, version = re.match(r"\W*([\w-]+?)-(\d[^<\s]*)", part).groups()
        if name.startswith(NOT_LINUX):
            continue
        expression = re.search(r"License:(?:</[^>]*>)?\s*([^<]+)", part)[1].strip()
        for file_name, text in re.findall(r"<summary>(?:<[^>]*>)*([^<]+)(?:<[^>]*>|\s)*<pre>(.*?)</pre>", part, re.S):
            yield f"{name} {version} ({expression}), in Rust's standard library", file_name.strip(), plain(html.unescape(text))


def of_c_library():
    """The same of a C library that is linked into programs: they are static."""
    found = next((path for path in LGPL if os.path.exists(path)), None)
    if found is None:
        raise SystemExit(f"sbom: static programs contain glibc, and its licence is in none of {', '.join(LGPL)}")
    with open(found, encoding="utf-8") as file:
        yield "GNU C Library (LGPL-2.1-or-later), in the static programs", "LGPL-2.1", plain(file.read())


def licence_texts(root, crates, is_static=False):
    """The licences of the code of others in the binaries, which have to carry them.

    A text that several share occurs once.
    """
    texts, users, titles = {}, {}, []
    for title, name, text in [*of_crates(crates), *of_standard_library(root), *(of_c_library() if is_static else ())]:
        key = hashlib.sha256(text.encode()).hexdigest()
        texts[key] = text
        users.setdefault(key, []).append(f"{title}, {name}")
        if title not in titles:
            titles.append(title)
    parts = ["The binaries of nobounce contain code of the projects below, under these licences. Their texts follow.\n\n" + "\n".join(titles) + "\n"]
    for key, text in sorted(texts.items(), key=lambda item: users[item[0]]):
        parts.append("=" * 80 + "\n" + "\n".join(users[key]) + "\n" + "-" * 80 + "\n" + text + "\n")
    return "\n".join(parts)
