#!/usr/bin/env bash
# Debian's Open MPI over UCX on nb0: a program with 2 and 4 ranks that checks everything it receives (tests/mpi/exchange.c); and the programs for GPU memory
# (tests/gpu/mpi) on host memory, since what they notice does not depend on where it lies.
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

for program in values speed dies dies_inside; do
    mpicc -O2 -Wall -Werror -pthread -o "$folder/$program" "tests/gpu/mpi/$program.c" -I tests/mpi/standin -ldl || { echo "$program.c could not be compiled"; exit 1; }
done
mpicc -O2 -o "$folder/loses" tests/gpu/mpi/speed.c tests/mpi/loses.c -I tests/mpi/standin -ldl || { echo "loses.c could not be compiled"; exit 1; }
export UCX_TLS=rc_verbs,ud_verbs,self UCX_RNDV_THRESH=8192
ranks() { # ranks NUMBER PROGRAM OPTION...
    run mpirun --oversubscribe --bind-to none -n "$@" >"$folder/client" 2>&1
}
mpi=(--mca pml ucx --mca osc ucx --mca btl ^openib)
ranks 2 "${mpi[@]}" "$folder/values" || fail "values.c"
expect "every byte was right" "$folder/client" "values.c"
# Few turns: both ranks spin, and on a busy machine with few CPUs each turn takes a time slice or two.
ranks 2 "${mpi[@]}" "$folder/speed" up-to 65536 at-most 50 || fail "speed.c"
expect "bidirectional device 65536 .* moved 25165824 host 25" "$folder/client" "speed.c"
# One message of many, neither the first nor the last.
LOSES=4096 ranks 2 "${mpi[@]}" "$folder/loses" up-to 8192 at-most 50 && fail "speed.c did not notice a message that was lost"
expect "rank 1: byte [0-9]+ of 204800 is ee" "$folder/client" "speed.c, a message that was lost"
ranks 3 "${mpi[@]}" --mca odls_base_sigkill_timeout 3 "$folder/dies" 33554432 && fail "a rank that dies ended well"
expect "it dies with [0-9]+ of 33554432 bytes of a message in" "$folder/client" "a rank that dies"
for rank in 0 1; do expect "rank $rank: good: after the death" "$folder/client" "a rank that dies"; done
# One that has had children, and ends by exit() with a message under way: nothing but retries tells of it, if the other asks it for anything; mpirun does.
UCX_RC_TIMEOUT=100ms UCX_RC_RETRY_COUNT=3 ranks 2 "${mpi[@]}" --mca odls_base_sigkill_timeout 3 "$folder/dies" 33554432 exits && fail "a rank that exits without MPI_Finalize ended well"
expect "it exits with [0-9]+ of 33554432 bytes of a message in" "$folder/client" "a rank that exits without MPI_Finalize"
expect "rank 0: good: after the death" "$folder/client" "a rank that exits without MPI_Finalize"
# Its end takes a while on a busy machine: the other may have learnt of it by then, and have ended before it.
expect "exiting improperly|Exit code: +3" "$folder/client" "a rank that exits without MPI_Finalize"
# Inside a collective, and told of it within the adapter's retries; over UDP nothing else tells.
for link in shm udp; do
    NOBOUNCE_LINK=$link UCX_RC_TIMEOUT=100ms UCX_RC_RETRY_COUNT=3 ranks 2 "${mpi[@]}" --mca odls_base_sigkill_timeout 3 "$folder/dies_inside" gather 16777216 && fail "a rank that dies in a collective, $link, ended well"
    expect "it dies with [0-9]+ of 16777216 bytes of collective" "$folder/client" "a rank that dies in a collective, $link"
    expect "rank 0: good: after the death" "$folder/client" "a rank that dies in a collective, $link"
    expect "rank 0: good: nb0 reported the death as an error" "$folder/client" "a rank that dies in a collective, $link"
done
passed=$((passed + 7))
done_all
