#!/usr/bin/env bash
# Where user namespaces are forbidden (max_user_namespaces=0, as in many containers) and no mount is possible: everything works
# the same, for nothing of the kind is used. The limit is set inside a user namespace of the test's own.
set -uo pipefail
. "$(dirname "$0")/programs.bash"
need ib_write_bw perftest
need ucx_perftest ucx-utils
need unshare util-linux
need setpriv util-linux
build

# Inside, the limit of that namespace is 0, for this user and everybody below.
forbid='echo 0 >/proc/sys/user/max_user_namespaces && exec "$@"'
run=(unshare --user --map-root-user --kill-child sh -c "$forbid" forbid)
if ! "${run[@]}" true 2>"$folder/client"; then
    echo "user namespaces cannot be made here, so they cannot be forbidden in one: $(tail -n 1 "$folder/client")"
    exit 77
fi
if "${run[@]}" unshare --user true 2>/dev/null; then fail "user namespaces are still allowed"; fi

pair ib_write_bw -F -n 500
UCX_NET_DEVICES=nb0:1 UCX_TLS=rc_verbs,ud_verbs pair ucx_perftest -n 100 -w 5 -t tag_bw -s 100000
expect '[1-9][0-9]* operations' "$folder/client" "ucx_perftest: nothing went over nb0"

# --mounts needs one, unless the user may mount: it says so, and that it is not needed otherwise.
run+=(setpriv --bounding-set=-all)
options=(--mounts)
run true >"$folder/client" 2>&1
code=$?
[ $code = 2 ] || fail "--mounts without namespaces: exit code $code"
expect 'do not need --mounts' "$folder/client" "--mounts without namespaces"

done_all
