#!/usr/bin/env bash
# Debian's perftest on nb0: every operation and service, bandwidth (all sizes) and latency, both directions, several queue pairs,
# events, inline data, lists, shared receive queues, IPv4 and IPv6 GIDs. This version of the tools offers no data validation;
# the bytes are checked by tests/ibverbs-utils.sh and by our own tests.
set -uo pipefail
. "$(dirname "$0")/programs.bash"
need ib_write_bw perftest
build

# Few iterations: this is about what works, not how fast. Latency tools spin on both sides: on a busy machine with few CPUs each
# turn takes a time slice or two. The tools take no less than five.
few=5
# Nothing is repeated in UC and UD, and ib_send_bw waits for ever for what is lost. So many are more than a socket's buffer holds, which must not
# matter, and no more than the 512 receives that the tool posts: what comes without one is lost, as on any device.
datagrams=500
# All 23 sizes. For every line of figures the tools measure the CPU's clock, a quarter of a second at a time: the latency tools twice, or once
# if they may count in cycles (-C).
for operation in write read send; do
    pair ib_${operation}_bw -F -a -n $few
    pair ib_${operation}_lat -F -C -a -n $few
done
for kind in bw lat; do
    if [ $kind = bw ]; then some=200 flags=-F; else some=50 flags='-F -C' datagrams=40; fi
    pair ib_atomic_$kind $flags -n $some
    pair ib_atomic_$kind $flags -n $some -A CMP_AND_SWAP
    pair ib_write_$kind $flags -c UC -s 4096 -n $some
    pair ib_send_$kind $flags -c UC -s 4096 -n $datagrams
    pair ib_send_$kind $flags -c UD -s 2048 -n $datagrams
    pair ib_send_$kind $flags -e -n $some
    pair ib_send_$kind $flags -c UD -e -s 1024 -n $datagrams
    pair ib_write_$kind $flags -x 0 -I 64 -s 32 -n $some
    pair ib_send_$kind $flags -x 0 -I 64 -s 64 -n $some
    pair ib_send_$kind $flags --use-srq -n $some
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
pair ib_atomic_bw -F -b -q 8 -n $some
pair ib_write_bw -F -c UC -a -n $few
pair ib_send_bw -F -c UD -b -s 1024 -n $some
pair ib_read_bw -F -e -n $some
pair ib_atomic_bw -F -e -n $some
pair ib_write_bw -F -D 1

# The same over an IPv6 GID.
address=::1
pair ib_write_bw -F --ipv6 -n $some
pair ib_read_bw -F --ipv6 -n $some
pair ib_atomic_bw -F --ipv6 -n $some
pair ib_send_bw -F --ipv6 -c UC -n $some
pair ib_send_lat -F --ipv6 -c UD -s 256 -n $datagrams

done_all
