#!/usr/bin/env bash
# Programs and nb0 through an emulated network path; no process stays. Waived without /dev/net/tun or namespaces.
set -uo pipefail
. "$(dirname "$0")/programs.bash"
need timeout coreutils
build

path() { # path SETTINGS ARGUMENT...: outputs in $folder/client
    timeout --kill-after=5 60 "$nobounce" path "$@" >"$folder/client" 2>&1
}

if ! path "" -- true; then
    tail -n 1 "$folder/client"
    exit 77
fi

# A program with a child that listens, which has that number in its command line; and whether one is left.
listens() { # listens NUMBER
    echo "python3 -c 'import socket, time; s = socket.create_server((\"\", 9)); time.sleep($1)'; true"
}
left_behind() { # left_behind TEXT
    local process
    for process in /proc/[0-9]*; do
        [ "${process#/proc/}" = $$ ] || ! grep -qs -- "$1" "$process/cmdline" || fail "left behind: $(tr '\0' ' ' <"$process/cmdline")"
    done
}

# The exit code is that of the program; the far one listens before, and ends with it.
path "" -- sh -c 'exit 7'
[ $? = 7 ] || fail "the exit code of the program"
path "" --far "$(listens 3000)" -- python3 -c 'import socket; socket.create_connection(("10.79.0.2", 9))' || fail "a program at the far end"
left_behind 'time.sleep(3000)'
passed=$((passed + 2))

# A bad path shows in counters, not in the data; each end has nothing but the path.
bench() { # bench SETTINGS ARGUMENT...
    path "$1" --far "$nobounce bench --listen" -- "$nobounce" bench --peer 10.79.0.2 --quick --op write --kind bandwidth "${@:2}"
}
bench rate=400M,delay=200us,loss=1%,dup=0.1%,reorder=0.5%,seed=3 --size 64K || fail "nb0 on a bad path"
expect 'verified' "$folder/client" "nb0 on a bad path"
expect 'path out: .* [1-9][0-9]* lost, .*duplicated, .*reordered' "$folder/client" "what the path did"
passed=$((passed + 1))

# The MTU of the device, and a smaller one inside the path, with and without ICMP: connections take what the path carries.
connects_with() { # connects_with MTU SETTINGS
    rm -f "$folder/report"
    path "$2" --far "$nobounce bench --listen" -- "$nobounce" bench --peer 10.79.0.2 --quick --op write --kind bandwidth --size 64K \
        --json "$folder/report" || fail "a connection on a path with $2"
    expect "\"mtu\": ?$1," "$folder/report" "the path MTU with $2"
    expect 'verified' "$folder/client" "a path with $2"
    passed=$((passed + 1))
}
connects_with 1024 mtu=1500
connects_with 4096 mtu=9000
connects_with 1024 mtu=9000,path-mtu=1400
NOBOUNCE_LOG=warn connects_with 1024 mtu=9000,path-mtu=1400,icmp=no
expect 'the path does not carry a path MTU of 4096, but 1024: [1-9][0-9]* longer packets' "$folder/client" "what the log says of a black hole"
connects_with 2048 mtu=9000,path-mtu=3000,icmp=no,loss=2%,delay=300us,seed=5
connects_with 4096 mtu=9000,loss=5%,delay=300us,seed=6

# nb0 beside TCP: every kind of flow gets through, and what nb0 carried is compared.
timeout --kill-after=5 120 "$nobounce" bench --quick --path delay=100us,loss=1% --json "$folder/report" >"$folder/client" 2>&1 ||
    fail "the comparison"
expect '^ +1500 +100 +1 % +[0-9.]+ +nb0 +[0-9.]*[1-9]' "$folder/client" "nb0 in the comparison"
expect '^ +1500 +100 +1 % +[0-9.]+ +cubic +[0-9.]*[1-9]' "$folder/client" "TCP in the comparison"
expect '"schema": "nobounce-path/1"' "$folder/report" "the report as JSON"
passed=$((passed + 1))

# After Ctrl-C, too, nothing is left.
marker=$folder/interrupted
timeout --foreground -s INT 2 "$nobounce" path "" --far "$(listens 3001)" -- sh -c "touch $marker; exec sleep 3002.5" >"$folder/client" 2>&1
sleep 0.5
left_behind 'time.sleep(3001)'
left_behind '3002.5'
[ -e "$marker" ] || fail "the interrupted program did not start"
passed=$((passed + 1))

done_all
