#!/usr/bin/env bash
# Debian's Open MPI over UCX on nb0: a program with 2 and 4 ranks that checks everything it receives (tests/mpi/exchange.c).
set -uo pipefail
. "$(dirname "$0")/programs.bash"
need mpirun openmpi-bin
need mpicc libopenmpi-dev
build

mpicc -O1 -o "$folder/exchange" tests/mpi/exchange.c || { echo "the MPI program could not be compiled"; exit 1; }

# Ranks on one machine would choose shared memory: UCX is told to use nb0 alone.
export UCX_NET_DEVICES=nb0:1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
for transport in rc_verbs,ud_verbs,self ud_verbs,self; do
    for ranks in 2 4; do
        UCX_TLS=$transport run mpirun --oversubscribe -n $ranks --mca pml ucx --mca osc ucx --mca btl ^openib "$folder/exchange" >"$folder/client" 2>&1 ||
            fail "$ranks ranks over $transport"
        expect "^$ranks ranks, 0 wrong" "$folder/client" "$ranks ranks over $transport"
        expect "devices opened; out: [1-9].* MB" "$folder/client" "$ranks ranks over $transport: not over nb0"
        passed=$((passed + 1))
    done
done
done_all
