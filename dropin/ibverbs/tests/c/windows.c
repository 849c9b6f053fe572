/* Memory windows of both kinds, bound by each of the calls there are. */
#include "rig.h"

enum { AT = 8192, ROOM = 4096 };

static struct ibv_mw_bind_info part_of(struct ibv_mr *mr) {
    return (struct ibv_mw_bind_info){.mr = mr, .addr = (uintptr_t)mr->addr + AT, .length = ROOM, .mw_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE};
}

/* A peer's WRITE of 100 bytes through a key. */
static enum ibv_wc_status writes(struct side *from, struct side *to, uint32_t rkey) {
    struct ibv_sge sge = sge_of(from, 0, 100);
    struct ibv_send_wr wr = {.wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED}, *bad;
    wr.wr.rdma.remote_addr = (uintptr_t)to->memory + AT;
    wr.wr.rdma.rkey = rkey;
    CHECK(!ibv_post_send(from->qp, &wr, &bad));
    return wait_wc(from->cq).status;
}

static void again(struct side *a, struct side *b) {
    CHECK(!ibv_destroy_qp(a->qp) && !ibv_destroy_qp(b->qp));
    make_qp(a, IBV_QPT_RC);
    make_qp(b, IBV_QPT_RC);
    connect_sides(a, b, IBV_QPT_RC);
}

static void second_kind(struct side *a, struct side *b, struct ibv_mr *mr) {
    struct ibv_mw *mw = ibv_alloc_mw(b->pd, IBV_MW_TYPE_2);
    CHECK(mw && mw->type == IBV_MW_TYPE_2 && mw->pd == b->pd && mw->context == b->context);
    uint32_t key = ibv_inc_rkey(mw->rkey);
    struct ibv_send_wr wr = {.wr_id = 5, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED}, *bad = NULL;
    wr.bind_mw.mw = mw;
    wr.bind_mw.rkey = key;
    wr.bind_mw.bind_info = part_of(mr);
    CHECK(!ibv_post_send(b->qp, &wr, &bad));
    wait_good(b->cq, 5, IBV_WC_BIND_MW);
    CHECK(ibv_dereg_mr(mr) == EBUSY);
    CHECK(writes(a, b, key) == IBV_WC_SUCCESS);
    same(a, 0, b, AT, 100);
    struct ibv_send_wr invalidate = {.wr_id = 6, .opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED, .invalidate_rkey = key};
    CHECK(!ibv_post_send(b->qp, &invalidate, &bad));
    wait_good(b->cq, 6, IBV_WC_LOCAL_INV);
    CHECK(writes(a, b, key) == IBV_WC_REM_ACCESS_ERR);
    again(a, b);
    /* A key of somebody else's window, and a window of the other kind, are seen when they are posted. */
    wr.bind_mw.rkey = key + 0x100;
    CHECK(ibv_post_send(b->qp, &wr, &bad) == EINVAL && bad == &wr);
    struct ibv_mw_bind by_call = {.wr_id = 7, .bind_info = part_of(mr)};
    CHECK(ibv_bind_mw(b->qp, mw, &by_call) == EINVAL);
    CHECK(ibv_dealloc_pd(b->pd) == EBUSY);
    CHECK(!ibv_dealloc_mw(mw));
    CHECK(ibv_dealloc_mw(mw) == EINVAL);
}

static void first_kind(struct side *a, struct side *b, struct ibv_mr *mr) {
    struct ibv_mw *mw = ibv_alloc_mw(b->pd, IBV_MW_TYPE_1);
    CHECK(mw);
    for (int turn = 0; turn < 300; turn++) {
        uint32_t before = mw->rkey;
        struct ibv_mw_bind bind = {.wr_id = 8, .send_flags = IBV_SEND_SIGNALED, .bind_info = part_of(mr)};
        CHECK(!ibv_bind_mw(b->qp, mw, &bind));
        wait_good(b->cq, 8, IBV_WC_BIND_MW);
        CHECK(mw->rkey != before && mw->rkey >> 8 == before >> 8);
        CHECK(writes(a, b, mw->rkey) == IBV_WC_SUCCESS);
    }
    CHECK(!ibv_dealloc_mw(mw));
    CHECK(writes(a, b, mw->rkey) == IBV_WC_REM_ACCESS_ERR);
    again(a, b);
}

static void call_by_call(struct side *a, struct side *b, struct ibv_mr *mr) {
    CHECK(!ibv_destroy_qp(b->qp));
    struct ibv_qp_init_attr plain = qp_attributes(b, IBV_QPT_RC);
    struct ibv_qp_init_attr_ex init = {.send_cq = plain.send_cq, .recv_cq = plain.recv_cq, .cap = plain.cap, .qp_type = IBV_QPT_RC, .pd = b->pd};
    init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    init.send_ops_flags = IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_LOCAL_INV;
    CHECK((b->qp = ibv_create_qp_ex(b->context, &init)));
    struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(b->qp);
    CHECK(!ibv_destroy_qp(a->qp));
    make_qp(a, IBV_QPT_RC);
    to_init(b->qp, IBV_QPT_RC);
    connect_sides(a, b, IBV_QPT_RC);
    struct ibv_mw *mw = ibv_alloc_mw(b->pd, IBV_MW_TYPE_2);
    CHECK(mw && ex);
    struct ibv_mw_bind_info part = part_of(mr);
    uint32_t keys[2] = {ibv_inc_rkey(mw->rkey), 0};
    keys[1] = ibv_inc_rkey(keys[0]);
    ibv_wr_start(ex);
    ex->wr_flags = IBV_SEND_SIGNALED;
    ex->wr_id = 1;
    ibv_wr_bind_mw(ex, mw, keys[0], &part);
    ex->wr_id = 2;
    ibv_wr_local_inv(ex, keys[0]);
    ex->wr_id = 3;
    ibv_wr_bind_mw(ex, mw, keys[1], &part);
    CHECK(!ibv_wr_complete(ex));
    wait_good(b->cq, 1, IBV_WC_BIND_MW);
    wait_good(b->cq, 2, IBV_WC_LOCAL_INV);
    wait_good(b->cq, 3, IBV_WC_BIND_MW);
    CHECK(writes(a, b, keys[1]) == IBV_WC_SUCCESS);
    CHECK(writes(a, b, keys[0]) == IBV_WC_REM_ACCESS_ERR);
    CHECK(!ibv_dealloc_mw(mw));
}

int main(void) {
    struct side a, b;
    make_pair(&a, &b, IBV_QPT_RC);
    struct ibv_device_attr attr;
    CHECK(!ibv_query_device(a.context, &attr));
    CHECK(attr.max_mw > 0 && attr.device_cap_flags & IBV_DEVICE_MEM_WINDOW && attr.device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B);
    struct ibv_mr *mr = ibv_reg_mr(b.pd, b.memory, SIZE, ALL_ACCESS | IBV_ACCESS_MW_BIND);
    CHECK(mr);
    fill(&a, 0, 100, 3);
    second_kind(&a, &b, mr);
    first_kind(&a, &b, mr);
    call_by_call(&a, &b, mr);
    CHECK(!ibv_dereg_mr(mr));
    drop_pair(&a, &b);
    return 0;
}
