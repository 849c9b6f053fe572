#!/usr/bin/env bash
# Several programs at once on one address; a bad network; client and server in one process.
set -uo pipefail
. "$(dirname "$0")/programs.bash"
need ib_write_bw perftest
need ibv_rc_pingpong ibverbs-utils
need ucx_perftest ucx-utils
build

# Four pairs of different programs at once, all on one address.
commands=("ibv_rc_pingpong -g 0 -c -e -n 500" "ib_send_bw -F -e -n 500" "ib_read_bw -F -q 4 -n 200" "ibv_ud_pingpong -g 0 -c -e -n 100")
servers=() clients=() ports=()
for at in "${!commands[@]}"; do
    ports[at]=$(free_port)
    run ${commands[at]} -p "${ports[at]}" >"$folder/server.$at" 2>&1 &
    servers[at]=$!
done
for at in "${!commands[@]}"; do
    wait_for "${ports[at]}" "${servers[at]}" || fail "${commands[at]}: the server does not listen"
    run ${commands[at]} -p "${ports[at]}" localhost >"$folder/client.$at" 2>&1 &
    clients[at]=$!
done
for at in "${!commands[@]}"; do
    if wait "${clients[at]}" && wait "${servers[at]}"; then
        passed=$((passed + 1))
    else
        cp "$folder/server.$at" "$folder/server"
        cp "$folder/client.$at" "$folder/client"
        fail "beside three others: ${commands[at]}"
    fi
done

# One packet in a hundred is lost, on the way there and back: reliable connections do not show it.
options=(--fault loss=0.01,seed=7)
# (The pingpongs of ibverbs-utils exit without agreeing on the end: where the last acknowledgement is lost, the other end rightly fails.)
pair ib_write_bw -F -n 500
expect '[1-9][0-9]* retransmission' "$folder/client" "ib_write_bw with losses: nothing was sent again"
pair ib_read_bw -F -n 200
pair ib_send_bw -F -e -n 200
pair ib_atomic_bw -F -n 1000
expect '[1-9][0-9]* retransmission' "$folder/client" "ib_atomic_bw with losses: nothing was sent again"
UCX_NET_DEVICES=nb0:1 UCX_TLS=rc_verbs,ud_verbs pair ucx_perftest -n 100 -w 5 -t tag_bw -s 100000
options=()

# Both ends in one process, by one thread: the loop-back mode of UCX's tool sends to itself.
UCX_NET_DEVICES=nb0:1 UCX_TLS=rc_verbs,ud_verbs run ucx_perftest -l -n 200 -w 10 -t tag_bw -s 100000 >"$folder/client" 2>&1 ||
    fail "client and server in one process"
expect 'out: [1-9].* in [1-9][0-9]* operations' "$folder/client" "client and server in one process: nothing went over nb0"
passed=$((passed + 1))

# A program that is killed in the midst of its work: what it did until shortly before is counted. How long it takes until it works depends on the
# machine, and on what else that does.
for seconds in 3 9 27; do
    port=$(free_port)
    run ib_write_bw -F -D $((2 * seconds)) -p "$port" >"$folder/server" 2>&1 &
    server=$!
    wait_for "$port" "$server" || fail "a killed client: the server does not listen"
    run timeout -s KILL $seconds ib_write_bw -F -D $((2 * seconds)) -p "$port" "$address" >"$folder/client" 2>&1
    wait "$server"
    grep -Eq 'out: [1-9].* in [1-9][0-9]* operations' "$folder/client" && break
done
expect '1 of them with counters from shortly before\); out: [1-9].* in [1-9][0-9]* operations' "$folder/client" "a killed client"
passed=$((passed + 1))

done_all
