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

# The exit code is that of the program, the far one starts first and ends with it.
path "" -- sh -c 'exit 7'
[ $? = 7 ] || fail "the exit code of the program"
marker=$folder/far.alive
path "" --far "touch $marker; sleep 3000; rm $marker" -- sh -c "sleep 0.2; ls $marker" || fail "a program at the far end"
for process in /proc/[0-9]*; do
    [ "$(tr '\0' ' ' <"$process/cmdline" 2>/dev/null)" != "sleep 3000 " ] || fail "the far program is still there: $process"
done
passed=$((passed + 2))

# A bad path shows in counters, not in the data; each end has nothing but the path.
bench() { # bench SETTINGS ARGUMENT...
    path "$1" --far "$nobounce bench --listen" -- "$nobounce" bench --peer 10.79.0.2 --quick --op write --kind bandwidth "${@:2}"
}
bench rate=400M,delay=200us,loss=1%,dup=0.1%,reorder=0.5%,seed=3 --size 64K || fail "nb0 on a bad path"
expect 'verified' "$folder/client" "nb0 on a bad path"
expect 'path out: .* [1-9][0-9]* lost, .*duplicated, .*reordered' "$folder/client" "what the path did"
passed=$((passed + 1))

# nb0 beside TCP: every kind of flow gets through, and what nb0 carried is compared.
timeout --kill-after=5 120 "$nobounce" bench --quick --path delay=100us,loss=1% --json "$folder/report" >"$folder/client" 2>&1 ||
    fail "the comparison"
expect '^ +1500 +100 +1 % +[0-9.]+ +nb0 +[0-9.]*[1-9]' "$folder/client" "nb0 in the comparison"
expect '^ +1500 +100 +1 % +[0-9.]+ +cubic +[0-9.]*[1-9]' "$folder/client" "TCP in the comparison"
expect '"schema": "nobounce-path/1"' "$folder/report" "the report as JSON"
passed=$((passed + 1))

# After Ctrl-C, too, nothing is left.
marker=$folder/interrupted
(exec timeout --foreground -s INT 1 "$nobounce" path "" --far "sleep 3001; true" -- sh -c "touch $marker; exec sleep 3002") >/dev/null 2>&1
sleep 0.3
for process in /proc/[0-9]*; do
    case "$(tr '\0' ' ' <"$process/cmdline" 2>/dev/null)" in
    "sleep 3001 " | "sleep 3002 ") fail "left behind: $process" ;;
    esac
done
[ -e "$marker" ] || fail "the interrupted program did not start"
passed=$((passed + 1))

done_all
