#!/usr/bin/env bash
# Containers with the software NIC, by the file of `nobounce cdi generate`: other people's programs in images without any file of ours.
set -uo pipefail
. "$(dirname "$0")/programs.bash"
need podman podman
need runc runc
need unshare util-linux
need ip iproute2
[ "$(id -u)" = 0 ] || { echo "network namespaces and /etc/cdi need root"; exit 77; }
build

# An end by SIGTERM, as timeout sends it, leaves no container, no network namespace and no file.
check_interruption() {
    local process child
    mkdir "$folder/tmp"
    # The process of unshare becomes that of python3.
    TMPDIR=$folder/tmp unshare -m python3 tests/containers.py "$nobounce" Containers.test_killed >"$folder/server" 2>&1 &
    process=$!
    for ((look = 0; look < 600; look++)); do
        child=$(pgrep -f "podman.*--name nobounce-test-$process-" | head -n 1)
        [ -z "$child" ] || break
        sleep 0.05
    done
    [ -n "$child" ] || fail "interruption: no container was started"
    sleep 0.5
    kill -TERM "$process"
    wait "$process"
    [ -z "$(ls -A "$folder/tmp")" ] || { ls -R "$folder/tmp" | head -n 20 >"$folder/client"; fail "interruption: files are left"; }
    ! ls /run/netns 2>/dev/null | grep "nobounce-test-$process-" || fail "interruption: a network namespace is left"
    ! pgrep -f "nobounce-test-$process" >"$folder/client" || fail "interruption: processes are left"
    passed=$((passed + 1))
}
check_interruption

# A mount namespace: the files in /etc/cdi are seen by these containers only.
CARGO_TARGET_DIR=$(realpath "$target") timeout --kill-after=30 400 unshare -m python3 tests/containers.py "$nobounce"
[ "$?" = 0 ] || failed=1
done_all
