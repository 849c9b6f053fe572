# For the scripts that run other people's programs (source it): builds what is needed once, runs servers with their clients.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
PATH=$PATH:/usr/sbin:/sbin
target=${CARGO_TARGET_DIR:-target}
folder=$(mktemp -d) || exit 2
failed=0
# Every script has a loopback address of its own, so that traffic of others does not mix with it.
address=127.9.$((RANDOM % 250 + 1)).$((RANDOM % 250 + 1))

finish() {
    local jobs
    jobs=$(jobs -p)
    [ -z "$jobs" ] || kill $jobs 2>/dev/null
    wait 2>/dev/null
    rm -rf "$folder"
}
trap finish EXIT

need() { # need COMMAND PACKAGE: waives the script where the program is missing
    command -v "$1" >/dev/null && return
    echo "$1 is not installed (apt-get install $2)"
    exit 77
}

# Naming one test (a small one, of the stubs) makes cargo choose the features as it does for all tests: what these have built is taken as it
# is. Packages named one by one would get other features, and most of it would be built again.
build() {
    if ! cargo build --locked --quiet --workspace --lib --bins --test names >"$folder/build" 2>&1 ||
        ! tools/dropin "$target/debug" "$target/debug/dropin"; then
        cat "$folder/build"
        echo "the command or the drop-in libraries could not be built"
        exit 1
    fi
    nobounce=$(realpath "$target/debug/nobounce")
}

# What stands before every program; scripts add options or a changed user.
run=()
SECONDS_EACH=${SECONDS_EACH:-120}

run() { # run PROGRAM...: under nobounce, bounded in time
    timeout --kill-after=5 "$SECONDS_EACH" ${run[@]+"${run[@]}"} "$nobounce" run --addr "$address" ${options[@]+"${options[@]}"} -- "$@"
}
options=()

free_port() { # below the ports that the kernel gives to clients
    local port
    while port=$((RANDOM % 20000 + 10000)) && listening "$port"; do :; done
    echo "$port"
}

listening() { # listening PORT
    local hex
    hex=$(printf ':%04X ' "$1")
    cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | awk -v port="$hex" 'index($2 " ", port) && $4 == "0A" { found = 1 } END { exit !found }'
}

# How often a server is looked for, twenty times a second: for half a minute, since a busy machine may let it wait for seconds.
LOOKS=600

wait_for() { # wait_for PORT PROCESS: until somebody listens there, or the process is gone
    local look
    for ((look = 0; look < LOOKS; look++)); do
        listening "$1" && return 0
        kill -0 "$2" 2>/dev/null || return 1
        sleep 0.05
    done
    return 1
}

fail() {
    echo "failed: $1"
    [ ! -s "$folder/server" ] || sed 's/^/    server: /' "$folder/server" | tail -n 15
    [ ! -s "$folder/client" ] || sed 's/^/    client: /' "$folder/client" | tail -n 15
    failed=1
}

pair() { # pair PROGRAM OPTION...: a server and its client, which gets the host as its last argument; outputs in $folder
    local port server client code=0 what="$*"
    port=$(free_port)
    : >"$folder/client"
    run "$@" -p "$port" >"$folder/server" 2>&1 &
    server=$!
    wait_for "$port" "$server" || { kill "$server" 2>/dev/null; wait "$server"; fail "$what: the server does not listen"; return 1; }
    run "$@" -p "$port" "${host:-localhost}" >"$folder/client" 2>&1 || code=$?
    client=$code
    [ "$client" = 0 ] || kill "$server" 2>/dev/null
    code=0
    wait "$server" || code=$?
    if [ "$client" != 0 ] || [ "$code" != 0 ]; then
        fail "$what: exit codes $client (client) and $code (server)"
        return 1
    fi
    passed=$((passed + 1))
}
passed=0

expect() { # expect PATTERN FILE WHAT
    grep -Eq "$1" "$2" || fail "$3: no line matches '$1'"
}

done_all() {
    echo "$passed runs fine"
    exit "$failed"
}
