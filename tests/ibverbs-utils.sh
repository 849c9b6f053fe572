#!/usr/bin/env bash
# Debian's ibverbs-utils on nb0: the device is listed and described; ping-pongs of all services, by polling and by events, with
# checked payload where the tool offers it.
set -uo pipefail
. "$(dirname "$0")/programs.bash"
need ibv_devinfo ibverbs-utils
build

run ibv_devices >"$folder/client" 2>&1 || fail "ibv_devices"
expect '^ *nb0[[:space:]]+[0-9a-f]{16}$' "$folder/client" "ibv_devices"
run ibv_devinfo -v >"$folder/client" 2>&1 || fail "ibv_devinfo -v"
for pattern in 'hca_id:.*nb0' 'PORT_ACTIVE' 'link_layer:.*Ethernet' 'GID\[ *0\].*RoCE v2' 'max_srq: *[1-9]' 'active_mtu:.*4096'; do
    expect "${pattern// \*/[[:space:]]*}" "$folder/client" "ibv_devinfo -v"
done
passed=2

pair ibv_rc_pingpong -g 0 -c
pair ibv_rc_pingpong -g 0 -c -e
pair ibv_rc_pingpong -g 0 -c -s 1048576 -n 50
pair ibv_rc_pingpong -g 0 -c -s 100000 -m 1024 -n 200 -e
pair ibv_rc_pingpong -g 0 -c -N
pair ibv_uc_pingpong -g 0 -c
pair ibv_uc_pingpong -g 0 -c -e -s 100000 -n 200
pair ibv_ud_pingpong -g 0 -c
pair ibv_ud_pingpong -g 0 -c -e -s 2048
pair ibv_srq_pingpong -g 0 -c
pair ibv_srq_pingpong -g 0 -c -e -q 8 -s 100000 -n 400

# XRC is not offered: the tool must say so and end.
if run ibv_xsrq_pingpong -g 0 -p "$(free_port)" >"$folder/client" 2>&1; then fail "ibv_xsrq_pingpong should not work"; fi

done_all
