"""The crates in the binaries of a package: a software bill of materials (CycloneDX 1.5), and their licence texts.

Both depend on the sources and their arguments only, so that packages are reproducible.
"""

import datetime
import hashlib
import json
import os
import re
import subprocess

# What `make build` builds, and the compiled part of the wheel.
PACKAGES = ["nobounce-" + name for name in ("cli", "ibverbs", "rdmacm", "gdrapi", "cufile", "paths", "vmm", "world", "gin", "stub-mlx5", "stub-efa", "python")]
# Names of files with licence texts in the archives of crates.
LICENCE_FILES = ("licen", "copying", "copyright", "notice", "unlicense")


def cargo(root, *arguments):
    command = ["cargo", *arguments, "--locked", "--color", "never"]
    return subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True).stdout


def built_crates(root, target, edges):
    """{(name, version)} of the packages and what they need. `cargo metadata` would add what only features of tests and other packages enable."""
    packages = [flag for name in PACKAGES for flag in ("-p", name)]
    tree = cargo(root, "tree", *packages, "--edges", edges, "--target", target, "--prefix", "none", "--format", "{p}")
    words = (line.split() for line in tree.splitlines() if line)
    return {(name, version.removeprefix("v")) for name, version, *_ in words}


class Crates:
    """What `cargo metadata` says of the built crates, sorted by name and version."""

    def __init__(self, root, target):
        metadata = json.loads(cargo(root, "metadata", "--format-version", "1", "--filter-platform", target))
        built = built_crates(root, target, "normal")
        # Procedural macros, and what these need, run in the compiler only.
        self.linked = built_crates(root, target, "normal,no-proc-macro")
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


def licence_texts(crates):
    """The licences of linked crates of others, which their binary form must carry. A text that several crates share occurs once."""
    texts, users = {}, {}
    for crate in (crate for crate in crates.crates if crate["source"] and crates.is_linked(crate)):
        folder = os.path.dirname(crate["manifest_path"])
        names = sorted(name for name in os.listdir(folder) if name.lower().startswith(LICENCE_FILES) and os.path.isfile(os.path.join(folder, name)))
        if not names:
            raise SystemExit(f"sbom: {crate['name']} {crate['version']} has no file with its licence")
        for name in names:
            with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
                text = "\n".join(line.rstrip() for line in file.read().strip().splitlines())
            key = hashlib.sha256(text.encode()).hexdigest()
            texts[key] = text
            users.setdefault(key, []).append(f"{crate['name']} {crate['version']} ({licence(crate)}), {name}")
    parts = ["The binaries of nobounce contain code of the crates below, under these licences.\n"]
    for key, text in sorted(texts.items(), key=lambda item: users[item[0]]):
        parts.append("=" * 80 + "\n" + "\n".join(users[key]) + "\n" + "-" * 80 + "\n" + text + "\n")
    return "\n".join(parts)
