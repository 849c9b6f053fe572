#!/usr/bin/env bash
# tshark reads a capture of our own traffic: every packet is RoCEv2 to it, every opcode of the three services is there, and
# nothing is malformed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

if ! command -v tshark >/dev/null; then
    echo "tshark is not installed (apt-get install tshark)"
    exit 77
fi

folder=$(mktemp -d) || exit 2
trap 'rm -rf "$folder"' EXIT

if ! NOBOUNCE_TEST_CAPTURES=$folder cargo test --locked --quiet --workspace --test nic capture >"$folder/log" 2>&1; then
    cat "$folder/log"
    echo "the captures could not be made"
    exit 1
fi

# SEND, WRITE, READ, their answers, acknowledgements and atomics (0 to 20), SEND with invalidate (22, 23), FLUSH and ATOMIC WRITE (28, 29); SEND and WRITE of unreliable
# connections (32 to 43); datagrams (100, 101).
wanted=$(printf '%s ' {0..20} 22 23 28 29 {32..43} 100 101)
failed=0
for name in v4 v6; do
    file=$folder/$name.pcap
    # One line for each frame: protocol, opcode, and the fourth field only where tshark calls it malformed. What a SEND carries is
    # not ours to judge: tshark 4.0 tries it as RPC over RDMA, and calls it malformed when there are too few bytes for that.
    if ! lines=$(tshark -n -r "$file" --disable-protocol rpcordma -T fields -E separator=' ' -E occurrence=f \
        -e _ws.col.Protocol -e infiniband.bth.opcode -e udp.length -e _ws.malformed 2>"$folder/err"); then
        cat "$folder/err"
        echo "$name: tshark cannot read the capture"
        exit 1
    fi
    frames=$(grep -c . <<<"$lines")
    others=$(grep -vc '^RRoCE ' <<<"$lines")
    # Markers of our own (240, 241) are there or not, as it happens.
    found=$(awk '$2 != 240 && $2 != 241 { print $2 }' <<<"$lines" | sort -nu | tr '\n' ' ')
    bad=$(awk 'NF > 3' <<<"$lines")
    [ "$others" = 0 ] || { echo "$name: $others of $frames frames are not RoCEv2 to tshark"; failed=1; }
    [ "$found" = "$wanted" ] || { echo "$name: tshark finds the opcodes $found, not $wanted"; failed=1; }
    [ -z "$bad" ] || { echo "$name: malformed to tshark:"; echo "$bad"; failed=1; }
    echo "$name: $frames frames, opcodes $found"
done
exit "$failed"
