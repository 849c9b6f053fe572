/* Threads that post and poll on shared objects, and make and destroy their own, all at once. */
#include "rig.h"

#define THREADS 4
#define ROUNDS 300

static struct side a, b;
static int done[THREADS];
static pthread_mutex_t count = PTHREAD_MUTEX_INITIALIZER;

/* One queue pair for all: each thread writes its own words; whoever polls counts for whoever posted. */
static void *share(void *argument) {
    int me = (int)(intptr_t)argument;
    for (int i = 0; i < ROUNDS; i++) {
        struct ibv_sge sge = sge_of(&a, me * 64, 8);
        *(uint64_t *)(a.memory + me * 64) = i + 1;
        struct ibv_send_wr wr = {.wr_id = me, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED}, *bad;
        wr.wr.rdma.remote_addr = (uintptr_t)b.memory + me * 64;
        wr.wr.rdma.rkey = b.mr->rkey;
        CHECK(!ibv_post_send(a.qp, &wr, &bad));
        for (;;) {
            pthread_mutex_lock(&count);
            int so_far = done[me];
            pthread_mutex_unlock(&count);
            if (so_far > i)
                break;
            struct ibv_wc wc;
            int got = ibv_poll_cq(a.cq, 1, &wc);
            CHECK(got >= 0);
            if (got) {
                CHECK(wc.status == IBV_WC_SUCCESS);
                pthread_mutex_lock(&count);
                done[wc.wr_id]++;
                pthread_mutex_unlock(&count);
            }
        }
        CHECK(*(volatile uint64_t *)(b.memory + me * 64) == (uint64_t)i + 1);
    }
    return NULL;
}

static void *make_and_drop(void *argument) {
    for (int i = 0; i < 50; i++) {
        struct side own;
        make_side(&own, a.context);
        make_qp(&own, i % 2 ? IBV_QPT_RC : IBV_QPT_UD);
        drop_side(&own);
    }
    return argument;
}

int main(void) {
    make_pair(&a, &b, IBV_QPT_RC);
    pthread_t threads[THREADS + 2];
    for (int i = 0; i < THREADS + 2; i++)
        CHECK(!pthread_create(&threads[i], NULL, i < THREADS ? share : make_and_drop, (void *)(intptr_t)i));
    for (int i = 0; i < THREADS + 2; i++)
        CHECK(!pthread_join(threads[i], NULL));
    drop_pair(&a, &b);
    return 0;
}
