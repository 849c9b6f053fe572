// One device and its queue pair: what both roles do with verbs.
#include "peer.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static void die(const char *what) {
    printf("FAILED %s: %s\n", what, strerror(errno));
    exit(1);
}

double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

void open_side(struct side *side, int gid_index) {
    struct ibv_device **list = ibv_get_device_list(NULL);
    if (!list || !list[0]) die("there is no device");
    side->context = ibv_open_device(list[0]);
    if (!side->context) die("ibv_open_device");
    ibv_free_device_list(list);
    side->gid_index = gid_index;
    if (ibv_query_gid(side->context, 1, gid_index, &side->gid)) die("ibv_query_gid");
    side->domain = ibv_alloc_pd(side->context);
    side->queue = ibv_create_cq(side->context, 512, NULL, NULL, 0);
    if (!side->domain || !side->queue) die("ibv_alloc_pd, ibv_create_cq");
    side->buffer = mmap(NULL, BUFFER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (side->buffer == MAP_FAILED) die("mmap");
    fcntl(side->context->async_fd, F_SETFL, O_NONBLOCK);
}

int make_qp(struct side *side, const struct manner *manner, struct ends *mine) {
    if (side->qp && ibv_destroy_qp(side->qp)) die("ibv_destroy_qp");
    if (side->window && ibv_dealloc_mw(side->window)) die("ibv_dealloc_mw");
    if (side->region && ibv_dereg_mr(side->region)) die("ibv_dereg_mr");
    side->qp = NULL;
    side->window = NULL;
    // Completions of the queue pair before are nobody's any more.
    struct ibv_wc wc;
    while (ibv_poll_cq(side->queue, 1, &wc) > 0) {}
    side->region = ibv_reg_mr(side->domain, side->buffer, BUFFER, manner->access);
    if (!side->region) die("ibv_reg_mr");
    struct ibv_qp_init_attr init = {
        .send_cq = side->queue,
        .recv_cq = side->queue,
        .cap = {.max_send_wr = 128, .max_recv_wr = 128, .max_send_sge = 4, .max_recv_sge = 4},
        .qp_type = manner->type,
    };
    if (side->extended) {
        struct ibv_qp_init_attr_ex ex = {.send_cq = side->queue, .recv_cq = side->queue, .cap = init.cap, .qp_type = manner->type, .pd = side->domain};
        ex.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        ex.send_ops_flags = IBV_QP_EX_WITH_ATOMIC_WRITE | IBV_QP_EX_WITH_RDMA_WRITE | (has_flush(side) ? WITH_FLUSH : 0);
        side->qp = ibv_create_qp_ex(side->context, &ex);
    } else {
        side->qp = ibv_create_qp(side->domain, &init);
    }
    if (!side->qp) die("ibv_create_qp");
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY};
    // A queue pair allows what any region might; the region decides.
    attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC | (manner->access & ACCESS_FLUSH_GLOBAL);
    if (manner->type == IBV_QPT_UC) attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
    mask |= manner->type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS;
    if ((errno = ibv_modify_qp(side->qp, &attr, mask))) die("to INIT");
    *mine = (struct ends){side->qp->qp_num, manner->psn, side->region->rkey, (uintptr_t)side->buffer, side->gid};
    return 0;
}

int connect_qp(struct side *side, const struct manner *manner, const struct ends *mine, const struct ends *peer) {
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = manner->mtu,
        .dest_qp_num = peer->qpn,
        .rq_psn = peer->psn,
        .max_dest_rd_atomic = 16,
        .min_rnr_timer = manner->rnr_timer,
        .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = peer->gid, .sgid_index = side->gid_index, .hop_limit = 64}},
    };
    int mask = IBV_QP_STATE;
    if (manner->type != IBV_QPT_UD) mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    if (manner->type == IBV_QPT_RC) mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    if ((errno = ibv_modify_qp(side->qp, &attr, mask))) return errno;
    attr = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTS,
        .sq_psn = mine->psn,
        .timeout = manner->timeout,
        .retry_cnt = manner->retries,
        .rnr_retry = manner->rnr_retries,
        .max_rd_atomic = 16,
    };
    mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
    if (manner->type == IBV_QPT_RC) mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
    return errno = ibv_modify_qp(side->qp, &attr, mask);
}

int post_receive(struct side *side, uint32_t offset, uint32_t length) {
    struct ibv_sge sge = {(uintptr_t)side->buffer + offset, length, side->region->lkey};
    struct ibv_recv_wr wr = {.wr_id = 1000, .sg_list = &sge, .num_sge = 1}, *bad;
    return ibv_post_recv(side->qp, &wr, &bad);
}

int poll_one(struct side *side, struct ibv_wc *wc, int milliseconds) {
    double end = now() + milliseconds / 1e3;
    do {
        int got = ibv_poll_cq(side->queue, 1, wc);
        if (got) return got > 0;
    } while (now() < end);
    return 0;
}

const char *qp_state(struct side *side) {
    static const char *const names[] = {"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"};
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    if (ibv_query_qp(side->qp, &attr, IBV_QP_STATE, &init) || attr.qp_state > IBV_QPS_ERR) return "unknown";
    return names[attr.qp_state];
}

void events(struct side *side, char *text, size_t room) {
    struct ibv_async_event event;
    size_t used = 0;
    text[0] = 0;
    while (ibv_get_async_event(side->context, &event) == 0) {
        used += snprintf(text + used, used < room ? room - used : 0, "%s%s", used ? ", " : "", ibv_event_type_str(event.event_type));
        ibv_ack_async_event(&event);
    }
    if (!used) snprintf(text, room, "none");
}

int has_flush(struct side *side) {
    struct ibv_device_attr_ex attr;
    return !ibv_query_device_ex(side->context, NULL, &attr) && attr.device_cap_flags_ex >> 38 & 1 && !strncmp(side->context->device->name, "nb", 2);
}

uint32_t sum(const uint8_t *from, size_t length) {
    uint32_t hash = 2166136261u;
    for (size_t at = 0; at < length; at++) hash = (hash ^ from[at]) * 16777619u;
    return hash;
}

void fill(uint8_t *to, size_t length, uint32_t seed) {
    for (size_t at = 0; at < length; at++) {
        seed = seed * 1664525u + 1013904223u;
        to[at] = seed >> 24;
    }
}

const char *status_name(enum ibv_wc_status status) {
    static const char *const names[] = {
        "SUCCESS",      "LOC_LEN_ERR",  "LOC_QP_OP_ERR", "LOC_EEC_OP_ERR", "LOC_PROT_ERR",      "WR_FLUSH_ERR",  "MW_BIND_ERR",
        "BAD_RESP_ERR", "LOC_ACCESS_ERR", "REM_INV_REQ_ERR", "REM_ACCESS_ERR", "REM_OP_ERR", "RETRY_EXC_ERR", "RNR_RETRY_EXC_ERR",
    };
    return status < sizeof names / sizeof names[0] ? names[status] : "OTHER";
}
