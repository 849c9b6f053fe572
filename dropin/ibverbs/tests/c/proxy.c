/* What NVSHMEM's IBRC transport does with an adapter, on host memory, between two processes and of each with itself: a thread that posts for a kernel
   and polls one queue for all its queue pairs; puts with a word behind them (by fetch-and-add, by an inline WRITE, by a message that the other's thread
   carries out), atomics that are messages and are answered by WRITEs with immediate, gets. A second thread is the kernel: it only looks at memory.

       proxy ROUNDS */
#include "rig.h"
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#define DATA 20000
#define DEPTH 64      /* receives in the shared queue, and requests in each send queue */
#define BURST 200

enum { SET, ADD, FETCH_ADD, SWAP, DONE }; /* what a message asks for; the answer to the first two */
struct message {
    uint32_t what, key;
    uint64_t at, value, answer_at, turn;
};
struct answer {
    uint64_t value, turn;
};
/* What a peer may write to, and what it may read. */
struct heap {
    char data[2][DATA];     /* by sender */
    char source[DATA], fetched[DATA];
    volatile uint64_t added[2], put[2], sent[2], met[2], own[2], counter;
    volatile struct answer answers[2];
};
struct name {
    union ibv_gid gid;
    uint32_t qpn[2], key;
    uint64_t heap;
    volatile int ready;
};

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *sends, *receives;
static struct ibv_srq *srq;
static struct ibv_qp *qps[2]; /* to each process, this one as well */
static struct ibv_mr *heap_mr, *pool_mr, *dummy_mr;
static struct heap *heap;
static struct message pool[DEPTH];
static uint64_t dummy, posted[2], completed[2], issued, acked, turns[2];
static struct name *names;
static int me;
static int rounds;

static char value(int from, int round, size_t i) { return (char)(from * 101 + round * 7 + (int)i * 13); }

static void receive(struct message *into) {
    struct ibv_sge sge = {.addr = (uintptr_t)into, .length = sizeof *into, .lkey = pool_mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = (uintptr_t)into, .sg_list = &sge, .num_sge = 1}, *bad;
    CHECK(!ibv_post_srq_recv(srq, &wr, &bad));
}

static void post(int to, enum ibv_wr_opcode opcode, const void *from, uint32_t length, uint32_t lkey, uint64_t at, uint32_t rkey, uint64_t add, int flags);

/* Carries out what another process asks of this one's memory, as IBRC does through a mapping of GPU memory. */
static void carry_out(int from, const struct message *asked) {
    volatile uint64_t *word = (volatile uint64_t *)(uintptr_t)asked->at;
    uint64_t old = *word;
    *word = asked->what == ADD || asked->what == FETCH_ADD ? old + asked->value : asked->value;
    if (asked->what == FETCH_ADD || asked->what == SWAP) {
        struct answer answer = {old, asked->turn};
        post(from, IBV_WR_RDMA_WRITE_WITH_IMM, &answer, sizeof answer, 0, asked->answer_at, asked->key, DONE, IBV_SEND_INLINE);
    } else {
        struct message done = {.what = DONE};
        post(from, IBV_WR_SEND, &done, sizeof done, 0, 0, 0, 0, IBV_SEND_INLINE);
    }
}

static int of(uint32_t qpn) {
    CHECK(qps[0]->qp_num == qpn || qps[1]->qp_num == qpn);
    return qps[1]->qp_num == qpn;
}

static void progress_sends(void) {
    struct ibv_wc wc;
    int got = ibv_poll_cq(sends, 1, &wc);
    CHECK(got >= 0);
    if (!got)
        return;
    if (wc.status)
        fprintf(stderr, "process %d: %s\n", me, ibv_wc_status_str(wc.status));
    CHECK(wc.status == IBV_WC_SUCCESS);
    completed[of(wc.qp_num)]++;
}

static void progress(void) {
    progress_sends();
    struct ibv_wc wc;
    int got = ibv_poll_cq(receives, 1, &wc);
    CHECK(got >= 0);
    if (!got)
        return;
    CHECK(wc.status == IBV_WC_SUCCESS);
    struct message *asked = (struct message *)(uintptr_t)wc.wr_id, copy = *asked;
    if (wc.wc_flags & IBV_WC_WITH_IMM) {
        CHECK(wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM && wc.imm_data == DONE);
        acked++;
        receive(asked);
        return;
    }
    CHECK(wc.opcode == IBV_WC_RECV && wc.byte_len == sizeof *asked);
    receive(asked);
    if (copy.what == DONE)
        acked++;
    else
        carry_out(of(wc.qp_num), &copy);
}

static void post(int to, enum ibv_wr_opcode opcode, const void *from, uint32_t length, uint32_t lkey, uint64_t at, uint32_t rkey, uint64_t add, int flags) {
    while (posted[to] - completed[to] >= DEPTH)
        progress_sends();
    struct ibv_sge sge = {.addr = (uintptr_t)from, .length = length, .lkey = lkey};
    struct ibv_send_wr wr = {.wr_id = 7, .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED | flags}, *bad;
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        wr.wr.atomic.remote_addr = at;
        wr.wr.atomic.rkey = rkey;
        wr.wr.atomic.compare_add = add;
    } else {
        wr.wr.rdma.remote_addr = at;
        wr.wr.rdma.rkey = rkey;
        wr.imm_data = (uint32_t)add;
    }
    posted[to]++;
    CHECK(!ibv_post_send(qps[to], &wr, &bad));
}

static uint64_t there(int to, const volatile void *here) { return names[to].heap + (uint64_t)((const volatile char *)here - (const volatile char *)heap); }

static void put(int to, const volatile void *where, const void *from, uint32_t length) {
    post(to, IBV_WR_RDMA_WRITE, from, length, heap_mr->lkey, there(to, where), names[to].key, 0, 0);
}

static void put_word(int to, const volatile uint64_t *where, uint64_t word) {
    post(to, IBV_WR_RDMA_WRITE, &word, sizeof word, 0, there(to, where), names[to].key, 0, IBV_SEND_INLINE);
}

/* Room at the target is kept as IBRC keeps it: no more messages under way than its shared queue has receives for every queue pair. */
static void ask(int to, int what, const volatile uint64_t *where, uint64_t word) {
    while (issued - acked > DEPTH / 4)
        progress();
    struct message message = {.what = (uint32_t)what, .key = heap_mr->rkey, .at = there(to, where), .value = word,
                              .answer_at = (uintptr_t)&heap->answers[to], .turn = ++turns[to]};
    issued++;
    post(to, IBV_WR_SEND, &message, sizeof message, 0, 0, 0, 0, IBV_SEND_INLINE);
}

static uint64_t fetch(int to, int what, const volatile uint64_t *where, uint64_t word) {
    ask(to, what, where, word);
    while (heap->answers[to].turn != turns[to])
        progress();
    return heap->answers[to].value;
}

static void quiet(void) {
    while (posted[0] != completed[0] || posted[1] != completed[1] || issued != acked)
        progress();
}

static void meet(int round) {
    put_word(1 - me, &heap->met[me], (uint64_t)round);
    while (heap->met[1 - me] < (uint64_t)round)
        progress();
}

/* The kernel: sees the word of a round, and then all that was put before it, without any call. */
static volatile int seen[2];
static void *look(void *unused) {
    for (int round = 1; round <= rounds; round++)
        for (int from = 0; from < 2; from++) {
            volatile uint64_t *word = round % 3 == 0 ? &heap->added[from] : round % 3 == 1 ? &heap->put[from] : &heap->sent[from];
            uint64_t wanted = round % 3 == 0 ? (uint64_t)round / 3 : (uint64_t)round;
            while (*word < wanted)
                sched_yield();
            __sync_synchronize();
            for (size_t i = 0; i < DATA; i++)
                if (((volatile char *)heap->data[from])[i] != value(from, round, i)) {
                    fprintf(stderr, "process %d: round %d: byte %zu of what process %d put was not there when its word was\n", me, round, i, from);
                    exit(1);
                }
            seen[from] = round;
        }
    return unused;
}

static void set_up(void) {
    struct ibv_device_attr limits;
    context = open_first();
    CHECK(!ibv_query_device(context, &limits));
    CHECK((pd = ibv_alloc_pd(context)));
    CHECK((sends = ibv_create_cq(context, limits.max_cqe, NULL, NULL, 0)) && (receives = ibv_create_cq(context, DEPTH, NULL, NULL, 0)));
    struct ibv_srq_init_attr queue = {.attr = {.max_wr = DEPTH, .max_sge = 1}};
    CHECK((srq = ibv_create_srq(pd, &queue)));
    CHECK(!posix_memalign((void **)&heap, 4096, sizeof *heap));
    memset(heap, 0, sizeof *heap);
    CHECK((heap_mr = ibv_reg_mr(pd, heap, sizeof *heap, ALL_ACCESS)));
    CHECK((pool_mr = ibv_reg_mr(pd, pool, sizeof pool, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ)));
    CHECK((dummy_mr = ibv_reg_mr(pd, &dummy, sizeof dummy, ALL_ACCESS)));
    for (int i = 0; i < DEPTH; i++)
        receive(&pool[i]);
    struct name *mine = &names[me];
    CHECK(!ibv_query_gid(context, 1, 0, &mine->gid));
    for (int to = 0; to < 2; to++) {
        struct ibv_qp_init_attr init = {.send_cq = sends, .recv_cq = receives, .srq = srq, .qp_type = IBV_QPT_RC,
                                        .cap = {.max_send_wr = DEPTH, .max_send_sge = 1, .max_inline_data = 128}};
        CHECK((qps[to] = ibv_create_qp(pd, &init)));
        to_init(qps[to], IBV_QPT_RC);
        mine->qpn[to] = qps[to]->qp_num;
    }
    mine->key = heap_mr->rkey;
    mine->heap = (uintptr_t)heap;
    __sync_synchronize();
    mine->ready = 1;
    while (!names[1 - me].ready)
        usleep(1000);
    for (int to = 0; to < 2; to++) {
        struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_4096, .dest_qp_num = names[to].qpn[me], .min_rnr_timer = 12,
                                   .max_dest_rd_atomic = (uint8_t)limits.max_qp_rd_atom, .ah_attr = address_of(names[to].gid)};
        attr.ah_attr.grh.hop_limit = 255;
        CHECK(!ibv_modify_qp(qps[to], &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MIN_RNR_TIMER | IBV_QP_MAX_DEST_RD_ATOMIC));
        struct ibv_qp_attr send = {.qp_state = IBV_QPS_RTS, .timeout = 20, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = (uint8_t)limits.max_qp_rd_atom};
        CHECK(!ibv_modify_qp(qps[to], &send, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC));
    }
    mine->ready = 2;
    while (names[1 - me].ready < 2)
        usleep(1000);
}

static void work(void) {
    pthread_t kernel;
    CHECK(!pthread_create(&kernel, NULL, look, NULL));
    for (int round = 1; round <= rounds; round++) {
        for (size_t i = 0; i < DATA; i++)
            heap->source[i] = value(me, round, i);
        for (int to = 0; to < 2; to++) {
            put(to, heap->data[me], heap->source, DATA);
            if (round % 3 == 0)
                post(to, IBV_WR_ATOMIC_FETCH_AND_ADD, &dummy, sizeof dummy, dummy_mr->lkey, there(to, &heap->added[me]), names[to].key, 1, 0);
            else if (round % 3 == 1)
                put_word(to, &heap->put[me], (uint64_t)round);
            else
                ask(to, SET, &heap->sent[me], (uint64_t)round);
        }
        while (seen[0] < round || seen[1] < round)
            progress();
        for (int to = 0; to < 2; to++) {
            /* A word there that only this process changes. */
            CHECK(fetch(to, SWAP, &heap->own[me], 1000) == 2 * (uint64_t)(round - 1));
            CHECK(fetch(to, SWAP, &heap->own[me], 2 * (uint64_t)round - 5) == 1000);
            CHECK(fetch(to, FETCH_ADD, &heap->own[me], 5) == 2 * (uint64_t)round - 5);
            post(to, IBV_WR_RDMA_READ, heap->fetched, DATA, heap_mr->lkey, there(to, heap->source), names[to].key, 0, 0);
            quiet();
            for (size_t i = 0; i < DATA; i++)
                CHECK(heap->fetched[i] == value(to, round, i));
        }
        fetch(0, FETCH_ADD, &heap->counter, 3);
        quiet();
        meet(round);
    }
    CHECK(!pthread_join(kernel, NULL));
    for (int i = 0; i < BURST; i++)
        ask(0, ADD, &heap->counter, 1);
    quiet();
    meet(rounds + 1);
    if (me == 0)
        CHECK(heap->counter == 2 * (3 * (uint64_t)rounds + BURST));
}

int main(int argc, char **argv) {
    rounds = argc > 1 ? atoi(argv[1]) : 300;
    names = mmap(NULL, 2 * sizeof *names, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(names != MAP_FAILED);
    pid_t child = fork();
    CHECK(child >= 0);
    me = child == 0;
    /* Neither waits for one that failed. */
    alarm(50);
    CHECK(child || !prctl(PR_SET_PDEATHSIG, SIGKILL));
    set_up();
    work();
    meet(rounds + 2);
    quiet();
    int status = 0;
    if (child)
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    printf("process %d: %d rounds were right\n", me, rounds);
    return 0;
}
