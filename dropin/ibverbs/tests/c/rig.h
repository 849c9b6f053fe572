/* What the test programs share: a device, and two queue pairs of one process that talk to each other. */
#ifndef RIG_H
#define RIG_H
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                                        \
    do {                                                                                                        \
        if (!(condition)) {                                                                                     \
            fprintf(stderr, "%s:%d: %s (errno %d: %s)\n", __FILE__, __LINE__, #condition, errno, strerror(errno)); \
            exit(1);                                                                                            \
        }                                                                                                       \
    } while (0)

#define SIZE (1 << 20)
#define ALL_ACCESS (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)
#define QKEY 0x11111111

struct side {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_srq *srq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    char *memory;
    union ibv_gid gid;
};

static inline struct ibv_context *open_first(void) {
    int count = -1;
    struct ibv_device **list = ibv_get_device_list(&count);
    CHECK(list && count >= 1 && list[0] && !list[count]);
    struct ibv_context *context = ibv_open_device(list[0]);
    CHECK(context);
    ibv_free_device_list(list);
    return context;
}

static inline struct ibv_qp_init_attr qp_attributes(struct side *side, enum ibv_qp_type type) {
    struct ibv_qp_init_attr init = {.send_cq = side->cq, .recv_cq = side->cq, .srq = side->srq, .qp_type = type};
    init.cap.max_send_wr = init.cap.max_recv_wr = 64;
    init.cap.max_send_sge = init.cap.max_recv_sge = 4;
    init.cap.max_inline_data = 128;
    return init;
}

static inline void make_side(struct side *side, struct ibv_context *context) {
    memset(side, 0, sizeof *side);
    side->context = context;
    CHECK(!ibv_query_gid(context, 1, 0, &side->gid));
    CHECK((side->pd = ibv_alloc_pd(context)));
    CHECK((side->channel = ibv_create_comp_channel(context)));
    CHECK((side->cq = ibv_create_cq(context, 256, side, side->channel, 0)));
    CHECK(!posix_memalign((void **)&side->memory, 4096, SIZE));
    memset(side->memory, 0, SIZE);
    CHECK((side->mr = ibv_reg_mr(side->pd, side->memory, SIZE, ALL_ACCESS)));
}

static inline void to_init(struct ibv_qp *qp, enum ibv_qp_type type) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ALL_ACCESS, .qkey = QKEY};
    int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
    mask |= type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS;
    CHECK(!ibv_modify_qp(qp, &attr, mask));
    CHECK(qp->state == IBV_QPS_INIT);
}

static inline struct ibv_ah_attr address_of(union ibv_gid gid) {
    struct ibv_ah_attr address = {.is_global = 1, .port_num = 1};
    address.grh.dgid = gid;
    address.grh.hop_limit = 64;
    return address;
}

static inline void to_rts(struct ibv_qp *qp, enum ibv_qp_type type, union ibv_gid gid, uint32_t qpn) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = qpn,
                               .max_dest_rd_atomic = 4, .min_rnr_timer = 1};
    attr.ah_attr = address_of(gid);
    int mask = IBV_QP_STATE;
    if (type != IBV_QPT_UD)
        mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    if (type == IBV_QPT_RC)
        mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    CHECK(!ibv_modify_qp(qp, &attr, mask));
    struct ibv_qp_attr send = {.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 4};
    mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
    if (type == IBV_QPT_RC)
        mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
    CHECK(!ibv_modify_qp(qp, &send, mask));
    CHECK(qp->state == IBV_QPS_RTS);
}

static inline void make_qp(struct side *side, enum ibv_qp_type type) {
    struct ibv_qp_init_attr init = qp_attributes(side, type);
    CHECK((side->qp = ibv_create_qp(side->pd, &init)));
    to_init(side->qp, type);
}

static inline void connect_sides(struct side *a, struct side *b, enum ibv_qp_type type) {
    to_rts(a->qp, type, b->gid, b->qp->qp_num);
    to_rts(b->qp, type, a->gid, a->qp->qp_num);
}

static inline void make_pair(struct side *a, struct side *b, enum ibv_qp_type type) {
    struct ibv_context *context = open_first();
    make_side(a, context);
    make_side(b, context);
    make_qp(a, type);
    make_qp(b, type);
    connect_sides(a, b, type);
}

static inline void drop_side(struct side *side) {
    if (side->qp)
        CHECK(!ibv_destroy_qp(side->qp));
    if (side->srq)
        CHECK(!ibv_destroy_srq(side->srq));
    CHECK(!ibv_destroy_cq(side->cq));
    CHECK(!ibv_destroy_comp_channel(side->channel));
    CHECK(!ibv_dereg_mr(side->mr));
    CHECK(!ibv_dealloc_pd(side->pd));
    free(side->memory);
}

static inline void drop_pair(struct side *a, struct side *b) {
    drop_side(a);
    drop_side(b);
    CHECK(!ibv_close_device(a->context));
}

static inline struct ibv_sge sge_of(struct side *side, size_t offset, uint32_t length) {
    return (struct ibv_sge){.addr = (uintptr_t)side->memory + offset, .length = length, .lkey = side->mr->lkey};
}

/* Waits for one completion, ten seconds at most. */
static inline struct ibv_wc wait_wc(struct ibv_cq *cq) {
    struct ibv_wc wc;
    time_t end = time(NULL) + 10;
    for (;;) {
        int got = ibv_poll_cq(cq, 1, &wc);
        CHECK(got >= 0);
        if (got)
            return wc;
        CHECK(time(NULL) < end);
    }
}

static inline struct ibv_wc wait_good(struct ibv_cq *cq, uint64_t wr_id, enum ibv_wc_opcode opcode) {
    struct ibv_wc wc = wait_wc(cq);
    if (wc.status || wc.wr_id != wr_id || wc.opcode != opcode)
        fprintf(stderr, "status %s, wr_id %llu, opcode %d\n", ibv_wc_status_str(wc.status), (unsigned long long)wc.wr_id, wc.opcode);
    CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == wr_id && wc.opcode == opcode);
    return wc;
}

static inline void post_receive(struct side *side, uint64_t wr_id, size_t offset, uint32_t length) {
    struct ibv_sge sge = sge_of(side, offset, length);
    struct ibv_recv_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1}, *bad = NULL;
    CHECK(!(side->srq ? ibv_post_srq_recv(side->srq, &wr, &bad) : ibv_post_recv(side->qp, &wr, &bad)));
}

static inline void fill(struct side *side, size_t offset, size_t length, int seed) {
    for (size_t i = 0; i < length; i++)
        side->memory[offset + i] = (char)(i * 31 + seed);
}

static inline void same(struct side *a, size_t from, struct side *b, size_t to, size_t length) {
    CHECK(!memcmp(a->memory + from, b->memory + to, length));
}
#endif
