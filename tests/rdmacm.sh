#!/usr/bin/env bash
# Programs that find each other by address and port, over our librdmacm (docs/reference/rdmacm.md): Debian's rdmacm-utils, perftest -R, UCX's
# rdmacm module, libfabric's verbs provider; and what a program meets at the edges (tests/cm). Against the kernel's own connection
# manager they run in tests/vm.
set -uo pipefail
. "$(dirname "$0")/programs.bash"
need rping rdmacm-utils
need ib_write_bw perftest
build

offers() { # offers PORT [PORT_SPACE]: whether a process listens there
    local name
    name=$(printf '@nobounce/service/%s/%x' "$address" $((${2:-0x0106} << 16 | $1)))
    grep -qE " $name\$" /proc/net/unix
}

together() { # together PORT SPACE SERVER... -- CLIENT...: a server and its client, with an address and a port of their own
    local port=$1 space=$2 server client code=0 what words=() look
    shift 2
    while [ "$1" != -- ]; do words+=("$1"); shift; done
    shift
    what="$* (server: ${words[0]})"
    : >"$folder/client"
    run "${words[@]}" >"$folder/server" 2>&1 &
    server=$!
    for ((look = 0; look < LOOKS; look++)); do
        if offers "$port" "$space" || ! kill -0 "$server" 2>/dev/null; then break; fi
        sleep 0.05
    done
    run "$@" >"$folder/client" 2>&1 || code=$?
    client=$code
    # The shell in between does not hand signals on; what it started does.
    if [ "$client" != 0 ] || [ -n "${endless:-}" ]; then pkill -P "$server" 2>/dev/null; fi
    code=0
    wait "$server" || code=$?
    if [ "$client" != 0 ] || { [ "$code" != 0 ] && [ -z "${endless:-}" ]; }; then
        fail "$what: exit codes $client (client) and $code (server)"
        return 1
    fi
    passed=$((passed + 1))
}

pings() { # pings OPTION...: rping with data check
    local port
    port=$(free_port)
    together "$port" 0x0106 rping -s -a "$address" -p "$port" -V "$@" -- rping -c -a "$address" -p "$port" -V "$@"
}

pings -C 50 -S 4096 && expect 'in: [1-9].* operations' "$folder/client" "rping: nothing went over nb0"
port=$(free_port)
together "$port" 0x0106 ucmatose -b "$address" -p "$port" -c 16 -C 10 -S 3000 -m -- ucmatose -s "$address" -p "$port" -c 16 -C 10 -S 3000 -m
together 7174 0x0111 udaddy -b "$address" -c 8 -C 10 -S 1000 -- udaddy -s "$address" -c 8 -C 10 -S 1000
port=$(free_port)
together "$port" 0x0106 rdma_server -s "$address" -p "$port" -- rdma_client -s "$address" -p "$port"

# 256 connections at once, and a thousand: this server goes on for ever.
for count in 256 1000; do
    port=$(free_port)
    endless=1 together "$port" 0x0106 cmtime -b "$address" -p "$port" -c $count -- cmtime -s "$address" -p "$port" -c $count
    expect '^connect +:' "$folder/client" "cmtime"
done

# A stopped process of the address does not keep the others from connecting.
port=$(free_port)
run rping -s -a "$address" -p "$port" >"$folder/stopped" 2>&1 &
holder=$!
for ((look = 0; look < LOOKS; look++)); do
    if offers "$port"; then break; fi
    sleep 0.05
done
# Not its launcher, which hands signals on.
stopped=$(pgrep -x -f "rping -s -a $address -p $port")
kill -STOP "$stopped"
SECONDS_EACH=20 pings -C 5 -S 64
kill -CONT "$stopped"
kill "$stopped"
wait "$holder"

for test in "ib_send_bw" "ib_write_bw -q 4" "ib_read_bw" "ib_atomic_bw" "ib_write_lat -C" "ib_send_lat -C -c UD -s 256" "ib_send_bw -z"; do
    port=$(free_port)
    together "$port" 0x0106 $test -R -F -n 50 -p "$port" -- $test -R -F -n 50 -p "$port" "$address"
done

# A tenth of all packets is lost, messages of the connection manager among them.
NOBOUNCE_FAULT=loss=0.1,seed=3 pings -C 10
(address=::1 && pings -C 10) || failed=1

# A port that nobody listens on, at an address where nobody is: refused, and soon.
SECONDS=0
if run rping -c -a 127.9.251.251 -p 9 -v >"$folder/client" 2>&1; then fail "rping to nobody succeeds"; fi
expect 'REJECTED, error 8' "$folder/client" "rping to nobody"
[ "$SECONDS" -lt 20 ] || fail "rping to nobody took $SECONDS s"

if cc -O1 -Wall -Wextra -o "$folder/behaviour" tests/cm/behaviour.c -lrdmacm -libverbs >"$folder/client" 2>&1; then
    run "$folder/behaviour" "$address" >"$folder/client" 2>&1 || fail "tests/cm/behaviour.c"
    expect '^all right$' "$folder/client" "tests/cm/behaviour.c"
    passed=$((passed + 1))
else
    tools/waive rdmacm-behaviour "tests/cm/behaviour.c cannot be compiled (apt-get install librdmacm-dev libibverbs-dev)" || failed=1
fi

# Multicast: our own program, and Debian's, one sender and two receivers.
if cc -O1 -Wall -Wextra -o "$folder/multicast" tests/cm/multicast.c -lrdmacm -libverbs >"$folder/client" 2>&1; then
    run "$folder/multicast" "$address" 239.77.0.1 >"$folder/client" 2>&1 || fail "tests/cm/multicast.c"
    expect '^all right$' "$folder/client" "tests/cm/multicast.c"
    passed=$((passed + 1))
else
    tools/waive rdmacm-multicast "tests/cm/multicast.c cannot be compiled (apt-get install librdmacm-dev libibverbs-dev)" || failed=1
fi
receivers=()
for n in 1 2; do
    run mckey -m 239.77.0.2 -b "$address" -C 10 -S 1000 >"$folder/receiver$n" 2>&1 &
    receivers+=($!)
done
for ((look = 0; look < LOOKS; look++)); do
    [ "$(awk '/^[0-9]+\t/ { name = $2 } /02004DEF/ && name == "lo" { print $2 }' /proc/net/igmp)" = 2 ] && break
    sleep 0.05
done
run mckey -s -m 239.77.0.2 -b "$address" -C 10 -S 1000 >"$folder/client" 2>&1 || fail "mckey -s"
for n in 1 2; do
    wait "${receivers[n - 1]}" || fail "mckey, receiver $n"
    expect 'data transfers complete' "$folder/receiver$n" "mckey, receiver $n"
done
passed=$((passed + 1))

# A thousand connections one after the other, a tenth refused, all private data checked; then some on a bad network.
if cc -O1 -Wall -Wextra -o "$folder/often" tests/cm/often.c -lrdmacm -libverbs >"$folder/client" 2>&1; then
    port=$(free_port)
    together "$port" 0x0106 "$folder/often" "$address" "$port" -- "$folder/often" "$address" "$port" 1000
    expect '^1000 connections right$' "$folder/client" "tests/cm/often.c"
    port=$(free_port)
    NOBOUNCE_FAULT=loss=0.02,seed=3 together "$port" 0x0106 "$folder/often" "$address" "$port" -- "$folder/often" "$address" "$port" 50
else
    tools/waive rdmacm-often "tests/cm/often.c cannot be compiled (apt-get install librdmacm-dev libibverbs-dev)" || failed=1
fi

if cc -O1 -Wall -Wextra -o "$folder/listener" tests/cm/ucx-listener.c -lucp -lucs >"$folder/client" 2>&1; then
    export UCX_NET_DEVICES=nb0:1 UCX_TLS=rc_verbs,ud_verbs UCX_SOCKADDR_TLS_PRIORITY=rdmacm
    port=$(free_port)
    together "$port" 0x0106 "$folder/listener" "$address" "$port" -- "$folder/listener" "$address" "$port" 20
    expect '^20 rounds right$' "$folder/client" "UCX over rdmacm"
    unset UCX_NET_DEVICES UCX_TLS UCX_SOCKADDR_TLS_PRIORITY
else
    tools/waive rdmacm-ucx "tests/cm/ucx-listener.c cannot be compiled (apt-get install libucx-dev)" || failed=1
fi

# libfabric leaves the loopback interface out: a network of its own, with an address on another interface.
network=(unshare --net)
[ "$(id -u)" = 0 ] || network=(unshare --user --map-root-user --net)
make_network='ip link set lo up && ip link add nb type veth peer name nbpeer && ip link set nbpeer up && ip addr add 10.77.0.1/24 dev nb && ip link set nb up'
if ! command -v fi_pingpong >/dev/null; then
    tools/waive rdmacm-libfabric "fi_pingpong is not installed (apt-get install libfabric-bin)" || failed=1
elif ! "${network[@]}" sh -c "$make_network" >"$folder/client" 2>&1; then
    tools/waive rdmacm-libfabric "no network namespace with an interface can be made here: $(tail -n 1 "$folder/client")" || failed=1
else
    pingpong="timeout --kill-after=5 $SECONDS_EACH '$nobounce' run --addr 10.77.0.1 -- fi_pingpong -p verbs -e msg -c -I 20"
    export LOOKS
    export -f listening wait_for
    "${network[@]}" bash -c "$make_network && { $pingpong >'$folder/server' 2>&1 & wait_for 47592 \$!; $pingpong 10.77.0.1 >'$folder/client' 2>&1 && wait \$!; }" || fail "fi_pingpong"
    expect '^1m +20 +=20' "$folder/client" "fi_pingpong"
    expect 'in: [1-9].* MB' "$folder/client" "fi_pingpong: not over nb0"
    passed=$((passed + 1))
fi

# IPv6 multicast has no route on the loopback interface.
if [ -x "$folder/multicast" ] && "${network[@]}" sh -c "$make_network" >/dev/null 2>&1; then
    for group in ff0e::77:1 ff12::77:1; do
        multicast="timeout --kill-after=5 $SECONDS_EACH '$nobounce' run --addr fd77::1 -- '$folder/multicast' fd77::1 $group"
        "${network[@]}" bash -c "$make_network && ip addr add fd77::1/64 dev nb nodad && { $multicast >'$folder/client' 2>&1; }" || fail "multicast to $group"
        expect '^all right$' "$folder/client" "multicast to $group"
        passed=$((passed + 1))
    done
fi

done_all
