#!/usr/bin/env bash
# Debian's UCX on nb0: ucx_info lists the device with both transports, ucx_perftest runs over rc_verbs and ud_verbs, from the transport
# layer (UCT) and from the protocols above it (UCP).
set -uo pipefail
. "$(dirname "$0")/programs.bash"
need ucx_perftest ucx-utils
build

run ucx_info -d >"$folder/client" 2>&1 || fail "ucx_info -d"
for transport in rc_verbs ud_verbs; do
    grep -A1 "Transport: $transport" "$folder/client" | grep -q 'Device: nb0:1' || fail "ucx_info -d: no $transport on nb0"
done
if grep -E 'ERROR|WARN' "$folder/client"; then fail "ucx_info -d complains"; fi
passed=1

test() { # test OPTION...: few rounds, for both ends spin
    pair ucx_perftest -n 200 -w 10 "$@" || return
    # A transport that is not taken would still pass, over something else.
    expect '[1-9][0-9]* operations' "$folder/client" "ucx_perftest $*: nothing went over nb0"
}

for transport in rc_verbs ud_verbs; do
    test -d nb0:1 -x $transport -t am_lat -s 8
    test -d nb0:1 -x $transport -t am_bw -s 2048 -D bcopy
    test -d nb0:1 -x $transport -t am_bw -s 2048 -D zcopy
done
test -d nb0:1 -x rc_verbs -t put_lat -s 8
test -d nb0:1 -x rc_verbs -t put_bw -s 65536 -D zcopy
test -d nb0:1 -x rc_verbs -t get -s 65536 -D zcopy
test -d nb0:1 -x rc_verbs -t fadd -s 8
test -d nb0:1 -x rc_verbs -t cswap -s 8

export UCX_NET_DEVICES=nb0:1
for transport in rc_verbs,ud_verbs ud_verbs; do
    export UCX_TLS=$transport
    test -t tag_lat -s 8
    test -t tag_bw -s 100000
    test -t tag_sync_bw -s 4096
    test -t ucp_am_bw -s 30000
    test -t stream_bw -s 4096
    test -t ucp_put_bw -s 1000000 -n 50
    test -t ucp_get -s 1000000 -n 50
    test -t ucp_fadd -s 8
done

done_all
