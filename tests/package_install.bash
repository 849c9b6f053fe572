# For tests/package.sh: the Debian package through its life, in a root with the few programs that its scripts need.

root=$folder/root
cdi=$root/etc/cdi/nobounce.json
record=$root/var/lib/nobounce/cdi.sha256
# In a user namespace an ordinary user is root, too: chroot and files of root are possible.
as_root=()
[ "$(id -u)" = 0 ] || as_root=(unshare --map-root-user)

copy_in() { # copy_in PROGRAM: with its libraries
    local file
    for file in "$1" $(ldd "$1" | grep -o '/[^ ]*'); do
        mkdir -p "$root$(dirname "$file")"
        cp -Lu "$file" "$root$file"
    done
}

make_root() { # make_root LAYOUT
    local name
    mkdir -p "$root"/usr/{bin,sbin,lib,lib64} "$root"/{dev,etc,tmp} "$root"/var/lib/dpkg/{info,updates,triggers}
    for name in bin sbin lib lib64; do ln -s "usr/$name" "$root/$name"; done
    # Ubuntu 24.04 keeps these names of directories that were merged.
    [ "$1" != ubuntu-24.04 ] || mkdir "$root"/{bin,lib,sbin}.usr-is-merged
    for name in sh sha256sum mkdir rm rmdir grep; do copy_in "$(command -v "$name")"; done
    : >"$root/dev/null"
    # The libraries of the command, which is not there yet.
    copy_in "$(realpath "$nobounce")"
    rm "$root$(realpath "$nobounce")"
    (cd "$root" && rmdir -p --ignore-fail-on-non-empty "$(dirname "$(realpath "$nobounce")" | cut -c2-)")
    have_libc "$(getconf GNU_LIBC_VERSION | cut -d' ' -f2)"
}

have_libc() { # have_libc VERSION: what dpkg takes for installed
    local name version architecture
    architecture=$(dpkg --print-architecture)
    for entry in "libc6 $1" "libgcc-s1 12.2.0"; do
        read -r name version <<<"$entry"
        printf 'Package: %s\nStatus: install ok installed\nMaintainer: a <a@b>\nArchitecture: %s\nVersion: %s\nDescription: c\n\n' "$name" "$architecture" "$version"
        : >"$root/var/lib/dpkg/info/$name.list"
    done >"$root/var/lib/dpkg/status"
}

in_root() { # in_root COMMAND...
    env -i PATH=/usr/bin:/usr/sbin "${as_root[@]}" chroot "$root" "$@" >"$folder/client" 2>&1
}

package() { # package DPKG-OPTION...: as dpkg on that machine
    HOME=/nonexistent "${as_root[@]}" dpkg --root="$root" --log=/dev/null --force-unsafe-io "$@" >"$folder/client" 2>&1
}

with_version() { # with_version VERSION: the package with another number, its path in $made
    made=$folder/nobounce_$1.deb
    rm -rf "$folder/repack"
    dpkg-deb --raw-extract "$deb" "$folder/repack"
    sed -i "s/^Version: .*/Version: $1/" "$folder/repack/DEBIAN/control"
    dpkg-deb -Znone --root-owner-group --build "$folder/repack" "$made" >/dev/null
}

paths_of() { # all paths in the root but dpkg's own
    (cd "$root" && find . -path ./var/lib/dpkg -prune -o -print | sort)
}

gone() { # gone WHAT: the root is as it was
    [ "$(paths_of)" = "$before" ] || { diff <(echo "$before") <(paths_of) >"$folder/client"; fail "$1: something is left or missing"; }
}

intact() { # intact WHAT: the file of container engines is what was generated
    { [ -s "$cdi" ] && grep -q '"hostPath": "/usr/lib/nobounce"' "$cdi" && (cd "$root" && sed 's| /| |' "$record" | sha256sum --check --status); } || fail "$1: $cdi is not as generated"
}

check_install() {
    package --install "$deb" || fail "install"
    intact "install"
    in_root /usr/bin/nobounce --version || fail "installed: --version"
    expect "^nobounce $version" "$folder/client" "installed: --version"
    in_root /usr/bin/nobounce cdi check || fail "installed: cdi check"
    package --verify nobounce && [ ! -s "$folder/client" ] || fail "installed: files are not those of the package"
    passed=$((passed + 1))
}

check_upgrades() {
    # A file that an earlier version generated, with other content.
    echo '{}' >"$cdi"
    echo "$(sha256sum <"$cdi" | cut -d' ' -f1)  /etc/cdi/nobounce.json" >"$record"
    with_version "$version+1"
    package --install "$made" || fail "upgrade"
    intact "upgrade"
    # Changed by the administrator.
    echo '{ "changed": 1 }' >"$cdi"
    with_version "$version+2"
    package --install "$made" || fail "upgrade with a changed file"
    expect changed "$cdi" "upgrade with a changed file"
    expect 'stays as the administrator left it' "$folder/client" "upgrade with a changed file"
    package --remove nobounce || fail "removal with a changed file"
    expect changed "$cdi" "removal with a changed file"
    [ ! -e "$root/usr/bin/nobounce" ] || fail "removal: the command is still there"
    package --install "$made" || fail "installation after removal"
    expect changed "$cdi" "installation after removal"
    # Deleted by the administrator.
    rm "$cdi"
    with_version "$version+3"
    package --install "$made" || fail "upgrade with a deleted file"
    [ ! -e "$cdi" ] || fail "upgrade: the deleted file is there again"
    echo changed >"$cdi"
    package --purge nobounce || fail "purge"
    gone "purge"
    passed=$((passed + 1))
}

check_removal() {
    package --install "$deb" || fail "second installation"
    intact "second installation"
    package --remove nobounce || fail "removal"
    gone "removal"
    package --purge nobounce || fail "purge after removal"
    gone "purge after removal"
    # A file of another installation, which was generated over that of the package.
    package --install "$deb" || fail "third installation"
    sed -i 's|/usr/lib/nobounce"|/opt/nobounce/lib/nobounce"|' "$cdi"
    package --purge nobounce || fail "purge with the file of another installation"
    expect '"hostPath": "/opt/nobounce/lib/nobounce"' "$cdi" "purge with the file of another installation"
    rm -r "$root/etc/cdi"
    gone "purge with the file of another installation"
    # The scripts run the command of the package, and no other one that PATH finds first.
    mkdir -p "$root/usr/local/bin"
    printf '#!/bin/sh\necho other >/etc/other\n' >"$root/usr/local/bin/nobounce"
    chmod +x "$root/usr/local/bin/nobounce"
    PATH=/usr/local/bin:$PATH package --install "$deb" || fail "installation beside another command"
    intact "installation beside another command"
    [ ! -e "$root/etc/other" ] || fail "the scripts ran another command"
    package --purge nobounce || fail "purge beside another command"
    rm -r "$root/usr/local"
    gone "purge beside another command"
    # A file that was there before the package.
    mkdir "$root/etc/cdi"
    echo mine >"$cdi"
    before=$(paths_of)
    package --install "$deb" && package --purge nobounce || fail "installation beside an own file"
    gone "purge beside an own file"
    expect mine "$cdi" "installation beside an own file"
    have_libc 2.17
    ! package --install "$deb" || fail "an old libc6 is accepted"
    expect 'depends on libc6 \(>= ' "$folder/client" "an old libc6"
    passed=$((passed + 1))
}

for layout in debian-12 ubuntu-24.04; do
    make_root "$layout"
    if "${as_root[@]}" chroot "$root" sh -c : 2>"$folder/client"; then
        before=$(paths_of)
        check_install
        check_upgrades
        check_removal
    else
        tools/waive package-install "chroot is not permitted here: $(tail -n 1 "$folder/client")" || failed=1
        break
    fi
    rm -rf "$root"
done
