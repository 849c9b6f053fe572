/* XRC: a connection from one side to the shared receive queues of the other, by both interfaces for requests. */
#include "rig.h"

static struct side a, b;

static struct ibv_xrcd *open_domain(int fd, int flags) {
    return ibv_open_xrcd(b.context, &(struct ibv_xrcd_init_attr){.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = fd, .oflags = flags});
}

static struct ibv_srq *make_srq(struct ibv_xrcd *xrcd, struct ibv_cq *cq) {
    struct ibv_srq_init_attr_ex init = {.attr = {.max_wr = 8, .max_sge = 1}, .srq_type = IBV_SRQT_XRC, .pd = b.pd, .xrcd = xrcd, .cq = cq};
    init.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
    return ibv_create_srq_ex(b.context, &init);
}

static void connect_one(struct ibv_qp *qp, int is_target, union ibv_gid gid, uint32_t qpn) {
    to_init(qp, IBV_QPT_RC);
    struct ibv_qp_attr rtr = {.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = qpn, .max_dest_rd_atomic = 4, .min_rnr_timer = 1};
    rtr.ah_attr = address_of(gid);
    int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    CHECK(!ibv_modify_qp(qp, &rtr, mask | (is_target ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0)));
    struct ibv_qp_attr rts = {.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 4};
    mask = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_SQ_PSN;
    CHECK(!ibv_modify_qp(qp, &rts, mask | (is_target ? 0 : IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC)));
}

int main(void) {
    struct ibv_context *context = open_first();
    make_side(&a, context);
    make_side(&b, context);
    /* A file names a domain; without one it is new. */
    FILE *file = tmpfile();
    CHECK(file && !open_domain(fileno(file), 0) && errno == EAGAIN);
    struct ibv_xrcd *xrcd = open_domain(fileno(file), O_CREAT), *same = open_domain(fileno(file), 0);
    CHECK(xrcd && same && xrcd->context == context);
    CHECK(!open_domain(fileno(file), O_CREAT | O_EXCL) && errno == EINVAL);
    struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
    struct ibv_srq *srq = make_srq(same, cq);
    uint32_t number;
    CHECK(cq && srq && !ibv_get_srq_num(srq, &number) && number);
    CHECK(ibv_destroy_cq(cq) == EBUSY && ibv_close_xrcd(same) == EBUSY);

    struct ibv_qp_init_attr_ex init = {.qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD, .xrcd = xrcd};
    struct ibv_qp *target = ibv_create_qp_ex(context, &init);
    CHECK(target && target->qp_type == IBV_QPT_XRC_RECV);
    init = (struct ibv_qp_init_attr_ex){.qp_type = IBV_QPT_XRC_SEND, .send_cq = a.cq, .pd = a.pd, .cap = {.max_send_wr = 8, .max_send_sge = 1},
                                        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, .send_ops_flags = IBV_QP_EX_WITH_SEND};
    struct ibv_qp *sender = ibv_create_qp_ex(context, &init);
    CHECK(sender);
    /* Opened again by its number, in its domain only; the queue pair lives until the last object is destroyed. */
    int context_of_program;
    struct ibv_qp_open_attr open = {.comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE | IBV_QP_OPEN_ATTR_CONTEXT,
                                    .qp_num = target->qp_num, .xrcd = same, .qp_context = &context_of_program, .qp_type = IBV_QPT_XRC_RECV};
    struct ibv_qp *created = target, *opened = ibv_open_qp(context, &open);
    CHECK(opened && opened != target && opened->qp_num == target->qp_num && opened->qp_context == &context_of_program);
    struct ibv_xrcd *other = open_domain(-1, O_CREAT);
    open.xrcd = other;
    CHECK(!ibv_open_qp(context, &open) && errno == EINVAL && !ibv_close_xrcd(other));
    open.xrcd = same;
    open.qp_num = sender->qp_num;
    CHECK(!ibv_open_qp(context, &open) && errno == EINVAL);
    open.comp_mask = IBV_QP_OPEN_ATTR_NUM;
    CHECK(!ibv_open_qp(context, &open) && errno == EINVAL);
    open.comp_mask = 16;
    CHECK(!ibv_open_qp(context, &open) && errno == EOPNOTSUPP);
    CHECK(!ibv_destroy_qp(created) && ibv_destroy_qp(created) == EINVAL && ibv_close_xrcd(same) == EBUSY);
    target = opened;
    connect_one(target, 1, a.gid, sender->qp_num);
    connect_one(sender, 0, b.gid, target->qp_num);

    b.srq = srq;
    fill(&a, 0, 5000, 3);
    for (uint64_t turn = 0; turn < 4; turn++) {
        memset(b.memory, 0, 5000);
        post_receive(&b, turn, 0, 5000);
        if (turn % 2) {
            struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(sender);
            ibv_wr_start(ex);
            ex->wr_id = 7;
            ex->wr_flags = IBV_SEND_SIGNALED;
            ibv_wr_send(ex);
            ibv_wr_set_xrc_srqn(ex, number);
            ibv_wr_set_sge(ex, a.mr->lkey, (uintptr_t)a.memory, 5000);
            CHECK(!ibv_wr_complete(ex));
        } else {
            struct ibv_sge sge = sge_of(&a, 0, 5000);
            struct ibv_send_wr wr = {.wr_id = 7, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED}, *bad;
            wr.qp_type.xrc.remote_srqn = number;
            CHECK(!ibv_post_send(sender, &wr, &bad));
        }
        wait_good(a.cq, 7, IBV_WC_SEND);
        struct ibv_wc wc = wait_good(cq, turn, IBV_WC_RECV);
        CHECK(wc.byte_len == 5000 && wc.qp_num == target->qp_num);
        CHECK(!memcmp(a.memory, b.memory, 5000));
    }
    CHECK(!ibv_destroy_qp(sender) && !ibv_destroy_qp(target) && !ibv_destroy_srq(srq));
    b.srq = NULL;
    CHECK(!ibv_destroy_cq(cq) && !ibv_close_xrcd(same) && !ibv_close_xrcd(xrcd) && ibv_close_xrcd(xrcd) == EINVAL);
    drop_pair(&a, &b);
    fclose(file);
    return 0;
}
