#!/usr/bin/env bash
# nic/hard on our own libibverbs as if it were a hardware NIC's (docs/guide/hardware.md): two processes, every operation, bytes checked; one
# end in hardware's manner and the other the software NIC; GPU memory by every method, on the stand-in driver; and errors in sentences.
set -uo pipefail
. "$(dirname "$0")/programs.bash"
build
dropin=$(realpath "$target/debug/dropin/libibverbs.so.1")
export NOBOUNCE_ADDR=$address

says() { # says PATTERN EXIT-CODE VARIABLE=VALUE... -- ARGUMENT...: a bench that ends so and says that
    local pattern=$1 wanted=$2 code=0 variables=()
    shift 2
    while [ "$1" != -- ]; do variables+=("$1"); shift; done
    shift
    env ${variables[@]+"${variables[@]}"} timeout --kill-after=5 "$SECONDS_EACH" "$nobounce" bench "$@" >"$folder/client" 2>&1 || code=$?
    if [ "$code" != "$wanted" ]; then fail "bench $*: exit code $code"; return; fi
    expect "$pattern" "$folder/client" "bench $*"
    passed=$((passed + 1))
}

fine='^bytes verified'
few=(--iters 50 --size 8,4K,64K)
says "$fine" 0 NOBOUNCE_VERBS="$dropin" -- --device nb0 --op write,read,send --kind latency,bandwidth,bidirectional "${few[@]}"
says "$fine" 0 NOBOUNCE_VERBS="$dropin" -- --device nb0 --op atomic --kind latency,rate --iters 50
says "$fine" 0 NOBOUNCE_VERBS="$dropin" -- --device nb0 --op write --kind bandwidth --qps 8 --size 64K --iters 100
says 'device nb0 port 1: RoCE' 0 NOBOUNCE_VERBS="$dropin" -- --device nb0 --op write --kind latency --size 8 --iters 50
says 'used: an IPv4 address' 0 NOBOUNCE_VERBS="$dropin" -- --device nb0 --explain-device
says 'NOBOUNCE_DEVICE are not set' 0 -- --explain-device
# Rails: each by itself.
says '^used: nb1: set by --device' 0 -- --device nb0,nb1 --explain-device

# One end by nic/hard, the other the software NIC itself.
port=$(free_port)
"$nobounce" bench --listen "127.0.0.1:$port" >"$folder/server" 2>&1 &
server=$!
if wait_for "$port" "$server"; then
    says "$fine" 0 NOBOUNCE_VERBS="$dropin" -- --device nb0 --peer "127.0.0.1:$port" --op write,read,send --kind latency,bandwidth "${few[@]}"
else
    fail "the serving end does not listen"
fi
kill "$server"

# GPU memory, method by method.
gpu=(NOBOUNCE_VERBS="$dropin" NOBOUNCE_CUDA="$(realpath "$target/debug/libfake_cuda.so")")
on_gpu=(--device nb0 --memory gpu --kind latency --size 4K --iters 20)
says '^path of GPU memory: direct \(dma-buf\)$' 0 "${gpu[@]}" -- "${on_gpu[@]}" --op write,read
says '^path of GPU memory: direct \(peermem\)$' 0 "${gpu[@]}" NOBOUNCE_REFUSE=dma-buf -- "${on_gpu[@]}" --op write
says '^not used: dma-buf: ibv_reg_dmabuf_mr: ' 0 "${gpu[@]}" NOBOUNCE_REFUSE=dma-buf -- "${on_gpu[@]}" --op write
says '^path of GPU memory: staged \(dma-buf: .*; peermem: .*\)$' 0 "${gpu[@]}" NOBOUNCE_REFUSE=dma-buf,peermem -- "${on_gpu[@]}" --op send
says 'a direct path is required' 2 "${gpu[@]}" NOBOUNCE_REFUSE=dma-buf,peermem NOBOUNCE_REQUIRE=direct -- "${on_gpu[@]}" --op send
says '^  memory of GPU 0: direct \(dma-buf\)$' 0 "${gpu[@]}" -- --device nb0 --memory gpu --explain-device
says '^  not used: dma-buf: ibv_reg_dmabuf_mr: ' 0 "${gpu[@]}" NOBOUNCE_REFUSE=dma-buf -- --device nb0 --memory gpu --explain-device
says '^  memory of GPU 0: staged \(dma-buf: .*; peermem: ' 0 "${gpu[@]}" NOBOUNCE_REFUSE=dma-buf,peermem -- --device nb0 --memory gpu --explain-device

# What the drop-in itself counted says the same: as tools/gpu-check demands it on a real GPU.
counts() { # counts direct|staged VARIABLE=VALUE... -- ARGUMENT...
    local way=$1
    local reports=$folder/counted-$way
    shift
    rm -rf "$reports"
    mkdir "$reports"
    says "^path of GPU memory: $way" 0 "${gpu[@]}" NOBOUNCE_REPORT="$reports" "$@" --json "$reports.json"
    # The proof of a way moves 12800 bytes at each end, into memory that has no window of the drop-in's here: the stand-in cannot export a page twice.
    if python3 tools/hard_runs.py "$reports" "$reports.json" "$way" 25600 >"$folder/counted" 2>&1; then
        passed=$((passed + 1))
    else
        fail "what the drop-in counted: $(cat "$folder/counted")"
    fi
}
every=(--device nb0 --memory gpu --kind latency,bandwidth --size 8,64K --iters 20)
counts direct -- "${every[@]}" --op write,read,send
counts direct NOBOUNCE_REFUSE=dma-buf -- "${every[@]}" --op write,read,send
counts staged NOBOUNCE_REFUSE=dma-buf,peermem -- "${every[@]}" --op send

# Several devices are rails: one transfer is split over them, in both manners, of host memory and the GPU's.
two=(NOBOUNCE_ADDR="$address,127.9.251.1")
rails=(--device nb0,nb1 --size 64K,1M --iters 10)
says "$fine" 0 "${two[@]}" -- "${rails[@]}"
says '^2 rails, each message split .*: nb0 at .*, nb1 at ' 0 "${two[@]}" NOBOUNCE_VERBS="$dropin" -- "${rails[@]}"
says '^path of GPU memory: direct \(dma-buf\)$' 0 "${two[@]}" "${gpu[@]}" -- --device nb0,nb1 --size 64K --iters 5 --memory gpu
says 'rails carry|several devices together carry' 2 "${two[@]}" -- "${rails[@]}" --op send
says 'NOBOUNCE_ADDR has 1 addresses' 2 -- "${rails[@]}"
port=$(free_port)
"$nobounce" bench --listen "127.0.0.1:$port" >"$folder/server" 2>&1 &
server=$!
if wait_for "$port" "$server"; then
    says '2 rails requested, this end has 1' 2 "${two[@]}" -- --peer "127.0.0.1:$port" "${rails[@]}"
else
    fail "the serving end does not listen"
fi
kill "$server"

# Which one, where the choice is left to us.
says '^used: nb0: the first device of the libibverbs' 0 NOBOUNCE_VERBS="$dropin" -- --device auto --explain-device
says '^device auto is nb0: no RDMA adapter found' 0 -- --device auto --op write --kind latency --size 8 --iters 50
says '^  nb0: .*; port 1: active, RoCE' 0 NOBOUNCE_VERBS="$dropin" -- --explain-device
says "$fine" 0 NOBOUNCE_VERBS="$dropin" NOBOUNCE_DEVICE=auto -- --op write --kind latency --size 8 --iters 50

# What cannot be is said.
says 'there is no RDMA device mlx5_9; there are: nb0' 2 NOBOUNCE_VERBS="$dropin" -- --device mlx5_9
says 'is no absolute path' 2 NOBOUNCE_VERBS=libibverbs.so.1 -- --device nb0
says 'has no function ibv_get_device_list' 2 NOBOUNCE_VERBS="$(realpath "$target/debug/dropin/libgdrapi.so.2")" -- --device nb0
says 'index 7 was asked for' 2 NOBOUNCE_VERBS="$dropin" NOBOUNCE_GID_INDEX=7 -- --device nb0
says "apply to the software NIC only; nb0 is hardware" 2 NOBOUNCE_VERBS="$dropin" -- --device nb0 --loss 0.01

done_all
