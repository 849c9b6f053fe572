#!/usr/bin/env bash
# Debian's perftest on nb0: every operation and service, bandwidth and latency, all sizes, both directions, several queue pairs,
# events, inline data, lists, shared receive queues, IPv4 and IPv6 GIDs. This version of the tools offers no data validation;
# the bytes are checked by tests/ibverbs-utils.sh and by our own tests.
set -uo pipefail
. "$(dirname "$0")/programs.bash"
need ib_write_bw perftest
build

for kind in bw lat; do
    pair ib_write_$kind -F -a -n 100
    pair ib_read_$kind -F -a -n 100
    pair ib_send_$kind -F -a -n 100
    pair ib_atomic_$kind -F -n 1000
    pair ib_atomic_$kind -F -n 1000 -A CMP_AND_SWAP
    pair ib_write_$kind -F -c UC -s 4096 -n 1000
    pair ib_send_$kind -F -c UC -s 4096 -n 1000
    pair ib_send_$kind -F -c UD -s 2048 -n 1000
    pair ib_send_$kind -F -e -n 1000
    pair ib_send_$kind -F -c UD -e -s 1024 -n 1000
    pair ib_write_$kind -F -x 0 -I 64 -s 32 -n 1000
    pair ib_send_$kind -F -x 0 -I 64 -s 64 -n 1000
    pair ib_send_$kind -F --use-srq -n 1000
done
for operation in write read send; do
    pair ib_${operation}_bw -F -b -n 1000
    pair ib_${operation}_bw -F -q 8 -n 1000
    pair ib_${operation}_bw -F -e -n 1000
    pair ib_${operation}_bw -F -b -q 8 -m 1024 -n 1000
    pair ib_${operation}_bw -F -l 8 -n 1024
    pair ib_${operation}_bw -F -Q 16 -n 1000
done
pair ib_send_bw -F -q 8 --use-srq -n 1000
pair ib_write_bw -F -D 1

# The same over an IPv6 GID.
address=::1
pair ib_write_bw -F --ipv6 -n 1000
pair ib_send_lat -F --ipv6 -c UD -s 256 -n 1000

done_all
