/* Mistakes that real programs make: each is refused, and what was right goes on working. */
#include "rig.h"

static struct side a, b;

static int post(struct ibv_qp *qp, enum ibv_wr_opcode opcode, struct ibv_sge *sges, int count, unsigned flags) {
    struct ibv_send_wr wr = {.wr_id = 5, .sg_list = sges, .num_sge = count, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED | flags}, *bad = NULL;
    wr.wr.rdma.remote_addr = (uintptr_t)b.memory;
    wr.wr.rdma.rkey = b.mr->rkey;
    int code = ibv_post_send(qp, &wr, &bad);
    CHECK(code ? bad == &wr : bad == NULL);
    return code;
}

static void still_works(void) {
    fill(&a, 0, 64, 3);
    struct ibv_sge sge = sge_of(&a, 0, 64);
    CHECK(!post(a.qp, IBV_WR_RDMA_WRITE, &sge, 1, 0));
    wait_good(a.cq, 5, IBV_WC_RDMA_WRITE);
    same(&a, 0, &b, 0, 64);
}

/* The new object must not be where the old one was: then destroying the old one again would destroy the new one. */
#define DESTROYED_TWICE(type, create, destroy)                                        \
    do {                                                                              \
        for (int round = 0; round < 100; round++) {                                   \
            type *old = create;                                                       \
            CHECK(old && !destroy(old));                                              \
            type *new = create;                                                       \
            CHECK(new && new != old && destroy(old) == EINVAL && !destroy(new));      \
        }                                                                             \
    } while (0)

static void destroyed_twice_around_a_new_one(void) {
    struct ibv_qp_init_attr init = qp_attributes(&a, IBV_QPT_RC);
    struct ibv_srq_init_attr srq_init = {.attr = {.max_wr = 4, .max_sge = 1}};
    struct ibv_ah_attr address = address_of(b.gid);
    DESTROYED_TWICE(struct ibv_qp, ibv_create_qp(a.pd, &init), ibv_destroy_qp);
    DESTROYED_TWICE(struct ibv_cq, ibv_create_cq(a.context, 4, NULL, NULL, 0), ibv_destroy_cq);
    DESTROYED_TWICE(struct ibv_srq, ibv_create_srq(a.pd, &srq_init), ibv_destroy_srq);
    DESTROYED_TWICE(struct ibv_ah, ibv_create_ah(a.pd, &address), ibv_destroy_ah);
    DESTROYED_TWICE(struct ibv_comp_channel, ibv_create_comp_channel(a.context), ibv_destroy_comp_channel);
    DESTROYED_TWICE(struct ibv_mr, ibv_reg_mr(a.pd, a.memory, 4096, 0), ibv_dereg_mr);
    DESTROYED_TWICE(struct ibv_pd, ibv_alloc_pd(a.context), ibv_dealloc_pd);

    /* Queue pairs that carry data go on doing so, though their predecessors are destroyed again and again. */
    struct side c = a, d = b;
    make_qp(&c, IBV_QPT_RC);
    make_qp(&d, IBV_QPT_RC);
    struct ibv_qp *old_c = c.qp, *old_d = d.qp;
    CHECK(!ibv_destroy_qp(old_c) && !ibv_destroy_qp(old_d));
    make_qp(&c, IBV_QPT_RC);
    make_qp(&d, IBV_QPT_RC);
    CHECK(ibv_destroy_qp(old_c) == EINVAL && ibv_destroy_qp(old_d) == EINVAL);
    connect_sides(&c, &d, IBV_QPT_RC);
    CHECK(ibv_destroy_qp(old_c) == EINVAL && ibv_destroy_qp(old_d) == EINVAL);
    fill(&c, 0, 64, 9);
    struct ibv_sge sge = sge_of(&c, 0, 64);
    CHECK(!post(c.qp, IBV_WR_RDMA_WRITE, &sge, 1, 0));
    wait_good(c.cq, 5, IBV_WC_RDMA_WRITE);
    same(&c, 0, &d, 0, 64);
    CHECK(!ibv_destroy_qp(c.qp) && !ibv_destroy_qp(d.qp));
}

int main(void) {
    make_pair(&a, &b, IBV_QPT_RC);
    struct ibv_sge sges[8];
    for (int i = 0; i < 8; i++)
        sges[i] = sge_of(&a, i * 8, 8);

    /* Destroying what is in use. */
    CHECK(ibv_destroy_cq(a.cq) == EBUSY && ibv_dealloc_pd(a.pd) == EBUSY && ibv_destroy_comp_channel(a.channel) == EBUSY);

    /* Queues and channels of another device. */
    struct ibv_context *other = open_first();
    struct ibv_pd *other_pd = ibv_alloc_pd(other);
    struct ibv_comp_channel *other_channel = ibv_create_comp_channel(other);
    struct ibv_cq *other_cq = ibv_create_cq(other, 4, NULL, other_channel, 0);
    struct ibv_srq_init_attr shared = {.attr = {.max_wr = 4, .max_sge = 1}};
    struct ibv_srq *srq = ibv_create_srq(other_pd, &shared);
    CHECK(other_pd && other_channel && other_cq && srq);
    struct ibv_qp_init_attr mixed = {.send_cq = other_cq, .recv_cq = a.cq, .qp_type = IBV_QPT_RC, .cap = {4, 4, 1, 1, 0}};
    CHECK(!ibv_create_qp(a.pd, &mixed) && errno == EINVAL);
    mixed.send_cq = a.cq, mixed.srq = srq;
    CHECK(!ibv_create_qp(a.pd, &mixed) && errno == EINVAL);
    CHECK(!ibv_create_cq(a.cq->context, 4, NULL, other_channel, 0) && errno == EINVAL);
    CHECK(!ibv_destroy_srq(srq) && !ibv_destroy_cq(other_cq) && !ibv_destroy_comp_channel(other_channel));
    CHECK(!ibv_dealloc_pd(other_pd) && !ibv_close_device(other));

    /* Lists longer than the queue pair was made for, too much inline data, an unknown or impossible operation. */
    CHECK(post(a.qp, IBV_WR_RDMA_WRITE, sges, 5, 0) == EINVAL);
    CHECK(post(a.qp, IBV_WR_RDMA_WRITE, sges, -1, 0) == EINVAL);
    struct ibv_sge large = sge_of(&a, 0, 129);
    CHECK(post(a.qp, IBV_WR_RDMA_WRITE, &large, 1, IBV_SEND_INLINE) == EINVAL);
    CHECK(post(a.qp, IBV_WR_RDMA_READ, sges, 1, IBV_SEND_INLINE) == EINVAL);
    CHECK(post(a.qp, IBV_WR_BIND_MW, sges, 1, 0) == EINVAL);
    CHECK(post(a.qp, IBV_WR_TSO, sges, 1, 0) == EOPNOTSUPP);
    CHECK(post(a.qp, 77, sges, 1, 0) == EOPNOTSUPP);
    CHECK(post(a.qp, IBV_WR_SEND, sges, 1, IBV_SEND_IP_CSUM) == EINVAL); /* no device says that it can */
    struct ibv_recv_wr receive = {.sg_list = sges, .num_sge = 5}, *bad_receive;
    CHECK(ibv_post_recv(a.qp, &receive, &bad_receive) == EINVAL && bad_receive == &receive);
    struct ibv_recv_wr nowhere = {.sg_list = NULL, .num_sge = 1};
    CHECK(ibv_post_recv(a.qp, &nowhere, &bad_receive) == EINVAL && bad_receive == &nowhere); /* a list that is not there */

    /* A list whose second request is wrong: the first is posted, the second named. */
    struct ibv_send_wr second = {.wr_id = 7, .opcode = 77}, first = {.wr_id = 6, .next = &second, .sg_list = sges, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED}, *bad;
    first.wr.rdma.remote_addr = (uintptr_t)b.memory;
    first.wr.rdma.rkey = b.mr->rkey;
    CHECK(ibv_post_send(a.qp, &first, &bad) == EOPNOTSUPP && bad == &second);
    wait_good(a.cq, 6, IBV_WC_RDMA_WRITE);
    still_works();

    /* A full queue. */
    int taken = 0;
    struct ibv_sge much = sge_of(&a, 0, SIZE);
    while (taken < 1000 && !post(a.qp, IBV_WR_RDMA_WRITE, &much, 1, 0))
        taken++;
    CHECK(taken >= 64 && taken < 1000 && errno == ENOMEM);
    while (taken--)
        wait_good(a.cq, 5, IBV_WC_RDMA_WRITE);

    /* States and transitions. */
    struct ibv_qp_init_attr init = qp_attributes(&a, IBV_QPT_RC);
    struct ibv_qp *fresh = ibv_create_qp(a.pd, &init);
    CHECK(fresh && post(fresh, IBV_WR_SEND, sges, 1, 0) == EINVAL);
    CHECK(ibv_post_recv(fresh, &(struct ibv_recv_wr){0}, &bad_receive) == EINVAL);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTS};
    CHECK(ibv_modify_qp(fresh, &attr, IBV_QP_STATE) == EINVAL && fresh->state == IBV_QPS_RESET);
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = 2;
    CHECK(ibv_modify_qp(fresh, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == EINVAL);
    CHECK(ibv_modify_qp(fresh, &attr, IBV_QP_ALT_PATH) == EINVAL);
    to_init(fresh, IBV_QPT_RC);
    CHECK(post(fresh, IBV_WR_SEND, sges, 1, 0) == EINVAL);
    struct ibv_qp_attr rtr = {.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = 5, .max_dest_rd_atomic = 1, .min_rnr_timer = 1};
    int rtr_mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    rtr.ah_attr.port_num = 1;
    CHECK(ibv_modify_qp(fresh, &rtr, rtr_mask) == EINVAL); /* no GID */
    rtr.ah_attr = address_of(b.gid);
    rtr.ah_attr.grh.sgid_index = 4;
    CHECK(ibv_modify_qp(fresh, &rtr, rtr_mask) == EINVAL);
    rtr.ah_attr.grh.sgid_index = 0;
    rtr.path_mtu = 9;
    CHECK(ibv_modify_qp(fresh, &rtr, rtr_mask) == EINVAL);

    /* Destroyed twice: refused, and nothing else is harmed. */
    CHECK(!ibv_destroy_qp(fresh) && ibv_destroy_qp(fresh) == EINVAL && ibv_destroy_qp(fresh) == EINVAL);
    struct ibv_mr *mr = ibv_reg_mr(a.pd, a.memory, 4096, 0);
    CHECK(mr && !ibv_dereg_mr(mr) && ibv_dereg_mr(mr) == EINVAL);
    struct ibv_cq *cq = ibv_create_cq(a.context, 4, NULL, NULL, 0);
    CHECK(cq && !ibv_destroy_cq(cq) && ibv_destroy_cq(cq) == EINVAL);
    struct ibv_pd *pd = ibv_alloc_pd(a.context);
    CHECK(pd && !ibv_dealloc_pd(pd) && ibv_dealloc_pd(pd) == EINVAL);
    CHECK(ibv_destroy_cq(NULL) == EINVAL && !ibv_alloc_pd(NULL) && errno == EINVAL && ibv_close_device(NULL) == EINVAL);
    destroyed_twice_around_a_new_one();
    /* An object of one kind in place of another. */
    CHECK(ibv_destroy_qp((struct ibv_qp *)a.pd) == EINVAL && ibv_dealloc_pd((struct ibv_pd *)a.qp) == EINVAL);
    still_works();

    /* Rights that contradict each other, limits. */
    CHECK(!ibv_reg_mr(a.pd, a.memory, 4096, IBV_ACCESS_REMOTE_WRITE) && errno == EINVAL);
    CHECK(!ibv_reg_mr(a.pd, NULL, 4096, IBV_ACCESS_LOCAL_WRITE) && errno == EFAULT);
    struct ibv_device_attr device;
    CHECK(!ibv_query_device(a.context, &device));
    CHECK(!ibv_create_cq(a.context, device.max_cqe + 1, NULL, NULL, 0) && errno == EINVAL);
    CHECK(!ibv_create_cq(a.context, 0, NULL, NULL, 0) && errno == EINVAL);
    CHECK(!ibv_create_cq(a.context, 4, NULL, NULL, 1) && errno == EINVAL);
    init.cap.max_send_wr = device.max_qp_wr + 1;
    CHECK(!ibv_create_qp(a.pd, &init) && errno == EINVAL);
    init = qp_attributes(&a, IBV_QPT_RC);
    init.cap.max_inline_data = 1 << 20;
    CHECK(!ibv_create_qp(a.pd, &init) && errno == EINVAL);
    init = qp_attributes(&a, IBV_QPT_RAW_PACKET);
    CHECK(!ibv_create_qp(a.pd, &init) && errno == EOPNOTSUPP);
    init = qp_attributes(&a, IBV_QPT_RC);
    init.send_cq = NULL;
    CHECK(!ibv_create_qp(a.pd, &init) && errno == EINVAL);
    CHECK(ibv_attach_mcast(a.qp, &a.gid, 0) == EINVAL && ibv_detach_mcast(a.qp, &a.gid, 0) == EINVAL); /* not a UD queue pair */

    /* The way back to a sender, without the header that names it. */
    struct ibv_wc plain = {0};
    struct ibv_ah_attr back;
    CHECK(ibv_init_ah_from_wc(a.context, 1, &plain, NULL, &back) == -1 && errno == EINVAL);
    CHECK(!ibv_create_ah_from_wc(a.pd, &plain, NULL, 1) && errno == EINVAL);

    /* A completion queue that is too small: polling it ends in an error, and an event says so. */
    struct side c;
    make_side(&c, a.context);
    CHECK(!ibv_destroy_cq(c.cq) && (c.cq = ibv_create_cq(a.context, 1, NULL, NULL, 0)));
    CHECK(c.cq->cqe >= 1); /* what was granted, which may be more than was asked for */
    make_qp(&c, IBV_QPT_RC);
    to_rts(c.qp, IBV_QPT_RC, c.gid, c.qp->qp_num); /* with itself */
    struct ibv_sge own = sge_of(&c, 0, 8);
    struct ibv_send_wr write = {.wr_id = 1, .sg_list = &own, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED};
    write.wr.rdma.remote_addr = (uintptr_t)c.memory + 64;
    write.wr.rdma.rkey = c.mr->rkey;
    for (int i = 0; i <= c.cq->cqe; i++) {
        int posted;
        while ((posted = ibv_post_send(c.qp, &write, &bad)) == ENOMEM)
            usleep(100); /* room in the send queue comes with acknowledgements, polled or not */
        CHECK(!posted);
    }
    struct ibv_async_event event;
    do {
        CHECK(!ibv_get_async_event(a.context, &event));
        ibv_ack_async_event(&event);
    } while (event.event_type != IBV_EVENT_CQ_ERR);
    CHECK(event.element.cq == c.cq);
    struct ibv_wc wc[4];
    int polled = 0, got;
    while ((got = ibv_poll_cq(c.cq, 4, wc)) > 0)
        polled += got;
    CHECK(got == -1 && polled == c.cq->cqe);
    drop_side(&c);

    still_works();
    struct ibv_context *context = a.context;
    drop_pair(&a, &b);
    CHECK(ibv_close_device(context) == EINVAL);
    return 0;
}
