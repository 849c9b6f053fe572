#!/usr/bin/env bash
# As user 65534 without any capability: devices, traffic, UCX, Open MPI. Waived where we are neither root nor such a user already.
set -uo pipefail
# In a network of its own: users exclude each other from the port, and root may have devices meanwhile.
if [ "$(id -u)" = 0 ] && [ -z "${IS_OWN_NETWORK:-}" ] && unshare --net true 2>/dev/null; then
    IS_OWN_NETWORK=1 exec unshare --net sh -c 'ip link set lo up && exec "$0" "$@"' "$0" "$@"
fi
. "$(dirname "$0")/programs.bash"
need ib_write_bw perftest
need ucx_perftest ucx-utils
need mpirun openmpi-bin
need mpicc libopenmpi-dev
need setpriv util-linux
[ "$(id -u)" = 0 ] || { echo "only root can become another user here; as an ordinary user the other scripts show the same"; exit 77; }
build

# That user may not be let into the folder of the sources: the command is installed elsewhere for it.
chmod 755 "$folder"
mkdir -p "$folder/bin" "$folder/tmp"
cp "$nobounce" "$folder/bin/nobounce"
tools/dropin "$target/debug" "$folder/lib/nobounce"
chown 65534:65534 "$folder/tmp"
nobounce=$folder/bin/nobounce
run=(setpriv --reuid=65534 --regid=65534 --clear-groups --bounding-set=-all --inh-caps=-all --no-new-privs env "TMPDIR=$folder/tmp" HOME=/nonexistent)

run grep -E '^(Uid|CapEff|CapBnd|NoNewPrivs)' /proc/self/status >"$folder/client" 2>&1
expect 'CapEff:[[:space:]]*0000000000000000' "$folder/client" "no capabilities"
expect 'Uid:[[:space:]]*65534' "$folder/client" "an ordinary user"
pair ib_write_bw -F -n 500
pair ib_send_bw -F -e -n 500
UCX_NET_DEVICES=nb0:1 UCX_TLS=rc_verbs,ud_verbs pair ucx_perftest -n 100 -w 5 -t tag_bw -s 100000
expect '[1-9][0-9]* operations' "$folder/client" "ucx_perftest: nothing went over nb0"
mpicc -O1 -o "$folder/bin/exchange" tests/mpi/exchange.c || { echo "the MPI program could not be compiled"; exit 1; }
UCX_NET_DEVICES=nb0:1 UCX_TLS=rc_verbs,ud_verbs,self run mpirun --oversubscribe -n 2 --mca pml ucx --mca osc ucx --mca btl ^openib "$folder/bin/exchange" >"$folder/client" 2>&1 ||
    fail "Open MPI"
expect "^2 ranks, 0 wrong" "$folder/client" "Open MPI"
expect "devices opened; out: [1-9].* MB" "$folder/client" "Open MPI: not over nb0"
passed=$((passed + 1))
[ -z "$(ls "$folder/tmp")" ] || fail "something was left behind: $(ls "$folder/tmp")"

done_all
