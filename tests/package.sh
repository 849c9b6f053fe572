#!/usr/bin/env bash
# tools/package on the debug build: contents and modes, the SBOM, the archive in another folder, equal bytes of two runs; the Debian package
# installed, upgraded, removed and purged in a root of its own, in which its scripts run.
set -uo pipefail
. "$(dirname "$0")/programs.bash"
need dpkg dpkg
need dpkg-deb dpkg
need readelf binutils
build

version=$(sed -n '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"/\1/p' Cargo.toml)
out=$folder/first

make_packages() { # make_packages FOLDER
    tools/package --fast "$target/debug" "$1" >"$folder/client" 2>&1 || { fail "tools/package"; done_all; }
}

check_bytes() {
    make_packages "$out"
    # Neither the mask of the user nor locale and time zone show.
    (umask 077 && LC_ALL=C.UTF-8 TZ=Asia/Tokyo make_packages "$folder/second") || exit 1
    diff -r "$out" "$folder/second" >"$folder/client" || fail "two runs differ"
    (cd "$out" && sha256sum --check --quiet SHA256SUMS) >"$folder/client" 2>&1 || fail "SHA256SUMS"
    rm -r "$folder/second"
    deb=$(echo "$out"/nobounce_*.deb)
    tarball=$(echo "$out/nobounce-$version-"*-linux.tar.gz)
    passed=$((passed + 1))
}

# An index that does not answer costs the wheel only, and one of an earlier run does not stay.
check_without_pypi() {
    local there=$folder/without-pypi
    mkdir "$there"
    echo old >"$there/nobounce-0.0.0-py3-none-any.whl"
    (cd "$there" && sha256sum -- *.whl >SHA256SUMS)
    # Nothing listens there.
    ! env -u PIP_EXTRA_INDEX_URL NO_INSTALL= CARGO_TARGET_DIR="$folder/no-tools" PIP_INDEX_URL=http://127.0.0.1:9/simple PIP_RETRIES=0 PIP_CONFIG_FILE=/dev/null \
        tools/package --fast --wheel "$target/debug" "$there" >"$folder/client" 2>&1 || fail "without PyPI: success"
    [ "$(tail -n 1 "$folder/client")" = "package: failed, for the reasons above: the wheel" ] || fail "without PyPI: another message"
    expect 'cannot be installed from PyPI' "$folder/client" "without PyPI"
    (cd "$there" && sha256sum --check SHA256SUMS) >"$folder/client" 2>&1 || fail "without PyPI: SHA256SUMS"
    [ "$(grep -cE '\.(deb|tar\.gz|cdx\.json): OK$' "$folder/client")" = 3 ] || fail "without PyPI: packages are missing"
    ! ls "$there"/*.whl 2>/dev/null || fail "without PyPI: there is a wheel"
    rm -rf "$there" "$folder/no-tools"
    passed=$((passed + 1))
}

# Containers load all of them: common images have glibc 2.34, and small ones no libgcc_s.so.1.
check_floor() { # check_floor FOLDER
    local library newest count=0
    for library in "$1"/*.so*; do
        [ ! -L "$library" ] || continue
        count=$((count + 1))
        readelf --wide --dynamic --version-info "$library" >"$folder/client"
        newest=$(grep -o 'GLIBC_2\.[0-9]*' "$folder/client" | sort -uV | tail -n 1)
        [ "$(printf '%s\nGLIBC_2.34\n' "$newest" | sort -V | tail -n 1)" = GLIBC_2.34 ] || fail "$library needs $newest, containers have GLIBC_2.34"
        ! grep 'NEEDED.*libgcc_s' "$folder/client" || fail "$library needs libgcc_s.so.1"
    done
    [ "$count" = 9 ] || fail "$1 has $count libraries"
}

check_contents() {
    local wanted
    dpkg-deb --field "$deb" >"$folder/client"
    expect "^Version: $version\$" "$folder/client" "control"
    expect '^Depends: libc6 \(>= 2\.[0-9]+(\.[0-9]+)?\)' "$folder/client" "control"
    expect '^Maintainer: .* <.*@.*>$' "$folder/client" "control"
    expect '^Installed-Size: [1-9][0-9]+$' "$folder/client" "control"
    dpkg-deb --contents "$deb" >"$folder/client"
    for wanted in '-rwxr-xr-x .* ./usr/bin/nobounce' '-rw-r--r-- .* ./usr/lib/nobounce/libibverbs.so.1' '-rw-r--r-- .* ./usr/lib/nobounce/libnobounce-paths.so' \
        'lrwxrwxrwx .* ./usr/lib/nobounce/libibverbs.so -> libibverbs.so.1' '-rw-r--r-- .* ./usr/include/nobounce.h' '-rw-r--r-- .* ./usr/share/man/man1/nobounce-run.1.gz' \
        '-rw-r--r-- .* ./usr/share/bash-completion/completions/nobounce' '-rw-r--r-- .* ./usr/share/zsh/vendor-completions/_nobounce' \
        '-rw-r--r-- .* ./usr/share/fish/vendor_completions.d/nobounce.fish' '-rw-r--r-- .* ./usr/share/doc/nobounce/copyright' \
        '-rw-r--r-- .* ./usr/share/doc/nobounce/changelog.gz' '-rw-r--r-- .* ./usr/share/doc/nobounce/docs/guide/run.md'; do
        expect "^$wanted\$" "$folder/client" "contents"
    done
    # Debian and Ubuntu have /bin and /lib as links: a file below them would hide or replace these.
    ! grep -Ev ' root/root .* \./(usr/.*)?$' "$folder/client" || fail "contents: another owner, or not below /usr"
    dpkg-deb --fsys-tarfile "$deb" | tar -xC "$folder" ./usr/bin/nobounce ./usr/lib/nobounce ./usr/share/man/man1/nobounce-run.1.gz ./usr/share/doc/nobounce/THIRD-PARTY.txt.gz
    ! readelf --wide --sections "$folder/usr/bin/nobounce" | grep -E '\.(symtab|debug_info)' || fail "the command is not stripped"
    check_floor "$folder/usr/lib/nobounce"
    zcat "$folder/usr/share/man/man1/nobounce-run.1.gz" >"$folder/client"
    expect '^\.TH nobounce-run 1' "$folder/client" "man page"
    zcat "$folder/usr/share/doc/nobounce/THIRD-PARTY.txt.gz" >"$folder/client"
    expect '^serde 1\.[0-9.]+ \(MIT OR Apache-2.0\), LICENSE-' "$folder/client" "licences of crates"
    mv "$folder/client" "$folder/licences"
    rm -r "$folder/usr"
    passed=$((passed + 1))
}

# By cargo's own list of what `make build` links.
check_licences() {
    local crate packages
    packages=$(make --no-print-directory --eval='print-packages:; @echo $(PACKAGES)' print-packages)
    cargo tree --locked $packages --edges normal,no-proc-macro --prefix none --format '{p}' >"$folder/client" || fail "cargo tree"
    awk '$1 != "" && $1 !~ /^nobounce/ { sub("^v", "", $2); print $1 " " $2 " (" }' "$folder/client" | sort -u >"$folder/crates"
    [ "$(wc -l <"$folder/crates")" -gt 50 ] || fail "licences: cargo tree lists few crates"
    while read -r crate; do
        grep -qF "$crate" "$folder/licences" || fail "licences: ${crate% (} is not named"
    done <"$folder/crates"
    expect '^Rust standard library 1\.' "$folder/licences" "licences"
    passed=$((passed + 1))
}

check_sbom() {
    : >"$folder/server"
    python3 - "$out/nobounce-$version.cdx.json" >"$folder/client" 2>&1 <<'PY' || fail "SBOM"
import json, re, sys

bill = json.load(open(sys.argv[1]))
assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
parts = {part["name"]: part for part in bill["components"]}
assert {"nobounce-cli", "nobounce-ibverbs", "nobounce-protocol", "libc", "clap", "serde", "crc32fast", "pyo3"} <= parts.keys()
assert not {"proptest", "insta", "loom", "nobounce-fake-cuda"} & parts.keys(), "crates that are not in the binaries"
assert parts["serde"]["scope"] == "required" and parts["serde_derive"]["scope"] == "excluded"
for part in bill["components"]:
    assert part["purl"] == f"pkg:cargo/{part['name']}@{part['version']}" == part["bom-ref"]
    assert part["licenses"][0]["expression"], part
    if not part["name"].startswith("nobounce"):
        assert re.fullmatch("[0-9a-f]{64}", part["hashes"][0]["content"]), part
refs = [part["bom-ref"] for part in bill["components"]]
assert len(refs) == len(set(refs))
named = {ref for entry in bill["dependencies"] for ref in [entry["ref"], *entry["dependsOn"]]}
assert named == {*refs, bill["metadata"]["component"]["bom-ref"]}
PY
    passed=$((passed + 1))
}

check_archive() {
    local there=$folder/elsewhere
    mkdir "$there"
    tar -xzf "$tarball" -C "$there"
    there=$there/nobounce-$version
    "$there/bin/nobounce" --version >"$folder/client" 2>&1
    expect "^nobounce $version( \(.*\))?\$" "$folder/client" "archive: --version"
    "$there/bin/nobounce" run --addr "$address" -- sh -c 'echo "$LD_PRELOAD"' >"$folder/client" 2>&1 || fail "archive: run"
    expect "$there/lib/nobounce/libibverbs.so.1" "$folder/client" "archive: run"
    "$there/bin/nobounce" cdi generate >"$folder/client" 2>&1 || fail "archive: cdi generate"
    expect "\"hostPath\": \"$there/lib/nobounce\"" "$folder/client" "archive: cdi generate"
    if command -v ibv_devices >/dev/null; then
        nobounce=$there/bin/nobounce run ibv_devices >"$folder/client" 2>&1 || fail "archive: ibv_devices"
        expect '\bnb0\b' "$folder/client" "archive: ibv_devices"
    fi
    [ -s "$there/share/doc/nobounce/LICENSE-APACHE" ] || fail "archive: LICENSE-APACHE"
    zcat "$there/share/doc/nobounce/THIRD-PARTY.txt.gz" | cmp - "$folder/licences" || fail "archive: other licences than in the Debian package"
    passed=$((passed + 1))
}

check_bytes
check_without_pypi
check_contents
check_licences
check_sbom
check_archive
. tests/package_install.bash
done_all
