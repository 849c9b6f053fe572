#!/usr/bin/env bash
# Debian's perftest on nb0: every operation and service, bandwidth and latency, all sizes, both directions, several queue pairs,
# events, inline data, lists, shared receive queues, IPv4 and IPv6 GIDs. This version of the tools offers no data validation;
# the bytes are checked by tests/ibverbs-utils.sh and by our own tests.
set -uo pipefail
. "$(dirname "$0")/programs.bash"
need ib_write_bw perftest
build

# Few iterations: this is about what works, not how fast. Latency tools spin on both sides: on a busy machine with few CPUs each
# turn takes a time slice or two. The tools take no less than five.
few=5
# Nothing is repeated in UC and UD, and ib_send_bw waits for ever for what is lost: no more messages than a socket's buffer holds.
datagrams=40
for kind in bw lat; do
    if [ $kind = bw ]; then some=200; else some=50; fi
    pair ib_write_$kind -F -a -n $few
    pair ib_read_$kind -F -a -n $few
    pair ib_send_$kind -F -a -n $few
    pair ib_atomic_$kind -F -n $some
    pair ib_atomic_$kind -F -n $some -A CMP_AND_SWAP
    pair ib_write_$kind -F -c UC -s 4096 -n $some
    pair ib_send_$kind -F -c UC -s 4096 -n $datagrams
    pair ib_send_$kind -F -c UD -s 2048 -n $datagrams
    pair ib_send_$kind -F -e -n $some
    pair ib_send_$kind -F -c UD -e -s 1024 -n $datagrams
    pair ib_write_$kind -F -x 0 -I 64 -s 32 -n $some
    pair ib_send_$kind -F -x 0 -I 64 -s 64 -n $some
    pair ib_send_$kind -F --use-srq -n $some
done
some=100
for operation in write read send; do
    pair ib_${operation}_bw -F -b -n $some
    pair ib_${operation}_bw -F -q 8 -n $some
    pair ib_${operation}_bw -F -b -q 8 -m 1024 -n $some
    pair ib_${operation}_bw -F -l 8 -n 128
    pair ib_${operation}_bw -F -Q 16 -n $some
done
pair ib_send_bw -F -q 8 --use-srq -n $some
pair ib_write_bw -F -D 1

# The same over an IPv6 GID.
address=::1
pair ib_write_bw -F --ipv6 -n $some
pair ib_send_lat -F --ipv6 -c UD -s 256 -n $datagrams

done_all
