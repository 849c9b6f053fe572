/* Every kind of transfer, by every interface. */
#include <arpa/inet.h>

#include "rig.h"

static struct side a, b;

static void post_with(int expected, enum ibv_wr_opcode opcode, uint64_t wr_id, struct ibv_sge *sges, int count,
                      unsigned flags, uint64_t remote, uint64_t compare, uint64_t swap) {
    struct ibv_send_wr wr = {.wr_id = wr_id, .sg_list = sges, .num_sge = count, .opcode = opcode,
                             .send_flags = IBV_SEND_SIGNALED | flags, .imm_data = htonl(0xcafe1234)},
                       *bad = NULL;
    if (opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        wr.wr.atomic.remote_addr = remote;
        wr.wr.atomic.rkey = b.mr->rkey;
        wr.wr.atomic.compare_add = compare;
        wr.wr.atomic.swap = swap;
    } else {
        wr.wr.rdma.remote_addr = remote;
        wr.wr.rdma.rkey = b.mr->rkey;
    }
    CHECK(ibv_post_send(a.qp, &wr, &bad) == expected);
    CHECK(expected ? bad == &wr : bad == NULL);
}

static void post(enum ibv_wr_opcode opcode, uint64_t wr_id, struct ibv_sge *sges, int count, unsigned flags, size_t offset) {
    post_with(0, opcode, wr_id, sges, count, flags, (uintptr_t)b.memory + offset, 0, 0);
}

static void writes_and_sends(uint32_t length) {
    fill(&a, 0, length, 1);
    struct ibv_sge two[2] = {sge_of(&a, 0, length / 2), sge_of(&a, length / 2, length - length / 2)};
    post_receive(&b, 7, 400000, 300000);
    post(IBV_WR_SEND, 1, two, 2, 0, 0);
    wait_good(a.cq, 1, IBV_WC_SEND);
    CHECK(wait_good(b.cq, 7, IBV_WC_RECV).byte_len == length);
    same(&a, 0, &b, 400000, length);

    fill(&a, 0, length, 2);
    post_receive(&b, 8, 400000, 300000);
    post(IBV_WR_SEND_WITH_IMM, 2, two, 2, IBV_SEND_SOLICITED, 0);
    wait_good(a.cq, 2, IBV_WC_SEND);
    struct ibv_wc wc = wait_good(b.cq, 8, IBV_WC_RECV);
    CHECK(wc.wc_flags == IBV_WC_WITH_IMM && ntohl(wc.imm_data) == 0xcafe1234 && wc.qp_num == b.qp->qp_num);

    fill(&a, 0, length, 3);
    post(IBV_WR_RDMA_WRITE, 3, two, 2, 0, 100);
    wait_good(a.cq, 3, IBV_WC_RDMA_WRITE);
    post_receive(&b, 9, 0, 0);
    post(IBV_WR_RDMA_WRITE_WITH_IMM, 4, two, 1, 0, 200000);
    wait_good(a.cq, 4, IBV_WC_RDMA_WRITE);
    wc = wait_good(b.cq, 9, IBV_WC_RECV_RDMA_WITH_IMM);
    CHECK(wc.byte_len == length / 2 && ntohl(wc.imm_data) == 0xcafe1234);
    same(&a, 0, &b, 100, length);
    same(&a, 0, &b, 200000, length / 2);

    /* Inline data need not be registered, and may lie in several places. */
    char text[] = "inline without a key";
    struct ibv_sge pieces[2] = {{.addr = (uintptr_t)text, .length = 7}, {.addr = (uintptr_t)text + 7, .length = sizeof text - 7}};
    post(IBV_WR_RDMA_WRITE, 5, pieces, 2, IBV_SEND_INLINE, 300000);
    memset(text, 'x', sizeof text);
    wait_good(a.cq, 5, IBV_WC_RDMA_WRITE);
    if (a.qp->qp_type == IBV_QPT_UC) {
        /* Nobody says when it arrived: a message after it does. */
        post_receive(&b, 10, 0, 0);
        post(IBV_WR_SEND, 6, NULL, 0, 0, 0);
        wait_good(a.cq, 6, IBV_WC_SEND);
        wait_good(b.cq, 10, IBV_WC_RECV);
    }
    CHECK(!strcmp(b.memory + 300000, "inline without a key"));
}

static void rc(void) {
    make_pair(&a, &b, IBV_QPT_RC);
    writes_and_sends(10);
    writes_and_sends(100001);
    fill(&b, 0, 50000, 9);
    struct ibv_sge sge = sge_of(&a, 0, 50000);
    post(IBV_WR_RDMA_READ, 1, &sge, 1, 0, 0);
    CHECK(wait_good(a.cq, 1, IBV_WC_RDMA_READ).byte_len == 50000);
    same(&a, 0, &b, 0, 50000);
    uint64_t *word = (uint64_t *)(b.memory + 64), *old = (uint64_t *)a.memory;
    *word = 41;
    sge = sge_of(&a, 0, 8);
    post_with(0, IBV_WR_ATOMIC_FETCH_AND_ADD, 2, &sge, 1, 0, (uintptr_t)word, 1, 0);
    wait_good(a.cq, 2, IBV_WC_FETCH_ADD);
    CHECK(*old == 41 && *word == 42);
    post_with(0, IBV_WR_ATOMIC_CMP_AND_SWP, 3, &sge, 1, 0, (uintptr_t)word, 42, 77);
    wait_good(a.cq, 3, IBV_WC_COMP_SWAP);
    CHECK(*old == 42 && *word == 77);
    /* The send queue drains, says so, and goes on. */
    struct ibv_qp_attr sqd = {.qp_state = IBV_QPS_SQD, .en_sqd_async_notify = 1}, now;
    struct ibv_qp_init_attr made;
    struct ibv_async_event drained;
    CHECK(!ibv_modify_qp(a.qp, &sqd, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY));
    do {
        CHECK(!ibv_get_async_event(a.context, &drained));
        ibv_ack_async_event(&drained);
    } while (drained.event_type != IBV_EVENT_SQ_DRAINED);
    CHECK(drained.element.qp == a.qp && !ibv_query_qp(a.qp, &now, IBV_QP_STATE, &made));
    CHECK(now.qp_state == IBV_QPS_SQD && !now.sq_draining);
    sqd.qp_state = IBV_QPS_RTS;
    CHECK(!ibv_modify_qp(a.qp, &sqd, IBV_QP_STATE));
    /* What the peer does not allow. */
    post(IBV_WR_RDMA_WRITE, 4, &sge, 1, 0, SIZE);
    CHECK(wait_wc(a.cq).status == IBV_WC_REM_ACCESS_ERR);
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    CHECK(!ibv_query_qp(a.qp, &attr, IBV_QP_STATE, &init) && attr.qp_state == IBV_QPS_ERR && a.qp->state == IBV_QPS_ERR);
    CHECK(init.qp_type == IBV_QPT_RC && init.cap.max_inline_data == 128 && init.send_cq == a.cq);
    /* The peer's events: communication established, and the access error. */
    struct ibv_async_event event;
    int seen = 0;
    while (!(seen & 2)) {
        CHECK(!ibv_get_async_event(b.context, &event));
        CHECK(event.event_type == IBV_EVENT_COMM_EST || event.element.qp == b.qp);
        seen |= event.event_type == IBV_EVENT_QP_ACCESS_ERR ? 2 : 1;
        ibv_ack_async_event(&event);
    }
    drop_pair(&a, &b);
}

static void uc(void) {
    make_pair(&a, &b, IBV_QPT_UC);
    writes_and_sends(10);
    writes_and_sends(30001);
    struct ibv_sge sge = sge_of(&a, 0, 8);
    post_with(EINVAL, IBV_WR_RDMA_READ, 1, &sge, 1, 0, (uintptr_t)b.memory, 0, 0);
    drop_pair(&a, &b);
}

static void ud(void) {
    make_pair(&a, &b, IBV_QPT_UD);
    struct ibv_ah_attr address = address_of(b.gid);
    struct ibv_ah *ah = ibv_create_ah(a.pd, &address);
    CHECK(ah);
    fill(&a, 0, 1000, 5);
    struct ibv_sge sge = sge_of(&a, 0, 1000);
    struct ibv_send_wr wr = {.wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_IMM,
                             .send_flags = IBV_SEND_SIGNALED, .imm_data = htonl(5)},
                       *bad;
    wr.wr.ud.ah = ah;
    wr.wr.ud.remote_qpn = b.qp->qp_num;
    wr.wr.ud.remote_qkey = QKEY;
    post_receive(&b, 2, 0, 4096);
    CHECK(!ibv_post_send(a.qp, &wr, &bad));
    wait_good(a.cq, 1, IBV_WC_SEND);
    struct ibv_wc wc = wait_good(b.cq, 2, IBV_WC_RECV);
    CHECK(wc.byte_len == 1040 && wc.src_qp == a.qp->qp_num && wc.wc_flags == (IBV_WC_GRH | IBV_WC_WITH_IMM));
    same(&a, 0, &b, 40, 1000);
    /* And back to whoever sent it. */
    struct ibv_ah *back = ibv_create_ah_from_wc(b.pd, &wc, (struct ibv_grh *)b.memory, 1);
    CHECK(back);
    struct ibv_ah_attr found;
    CHECK(!ibv_init_ah_from_wc(b.context, 1, &wc, (struct ibv_grh *)b.memory, &found));
    CHECK(!memcmp(&found.grh.dgid, &a.gid, 16) && found.is_global == 1);
    struct ibv_sge answer = sge_of(&b, 40, 1000);
    struct ibv_send_wr reply = {.wr_id = 3, .sg_list = &answer, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED};
    reply.wr.ud.ah = back;
    reply.wr.ud.remote_qpn = wc.src_qp;
    reply.wr.ud.remote_qkey = QKEY;
    post_receive(&a, 4, 8192, 4096);
    CHECK(!ibv_post_send(b.qp, &reply, &bad));
    wait_good(b.cq, 3, IBV_WC_SEND);
    CHECK(wait_good(a.cq, 4, IBV_WC_RECV).byte_len == 1040);
    same(&a, 0, &a, 8232, 1000);
    /* A wrong key, no handle, and too many bytes. */
    wr.wr.ud.ah = NULL;
    CHECK(ibv_post_send(a.qp, &wr, &bad) == EINVAL && bad == &wr);
    wr.wr.ud.ah = ah;
    sge.length = 5000;
    CHECK(ibv_post_send(a.qp, &wr, &bad) == EINVAL);
    CHECK(ibv_dealloc_pd(a.pd) == EBUSY);
    CHECK(!ibv_destroy_ah(ah) && !ibv_destroy_ah(back));
    drop_pair(&a, &b);
}

static void srq(void) {
    struct ibv_context *context = open_first();
    make_side(&a, context);
    make_side(&b, context);
    struct ibv_srq_init_attr init = {.srq_context = &b, .attr = {.max_wr = 16, .max_sge = 2}};
    CHECK((b.srq = ibv_create_srq(b.pd, &init)));
    make_qp(&a, IBV_QPT_RC);
    make_qp(&b, IBV_QPT_RC);
    connect_sides(&a, &b, IBV_QPT_RC);
    for (int i = 0; i < 4; i++)
        post_receive(&b, i, i * 1000, 1000);
    struct ibv_recv_wr wr = {0}, *bad;
    CHECK(ibv_post_recv(b.qp, &wr, &bad) == EINVAL && bad == &wr);
    struct ibv_srq_attr attr = {.srq_limit = 3};
    CHECK(!ibv_modify_srq(b.srq, &attr, IBV_SRQ_LIMIT));
    CHECK(!ibv_query_srq(b.srq, &attr) && attr.srq_limit == 3 && attr.max_wr == 16 && attr.max_sge == 2);
    attr.max_wr = 3; /* it holds four */
    CHECK(ibv_modify_srq(b.srq, &attr, IBV_SRQ_MAX_WR) == EINVAL);
    attr.max_wr = 4;
    CHECK(!ibv_modify_srq(b.srq, &attr, IBV_SRQ_MAX_WR));
    CHECK(!ibv_query_srq(b.srq, &attr) && attr.max_wr == 4 && attr.srq_limit == 3);
    CHECK(ibv_post_srq_recv(b.srq, &wr, &bad) == ENOMEM && bad == &wr);
    struct ibv_sge sge = sge_of(&a, 0, 500);
    for (int i = 0; i < 2; i++) {
        post(IBV_WR_SEND, 10 + i, &sge, 1, 0, 0);
        wait_good(a.cq, 10 + i, IBV_WC_SEND);
        wait_good(b.cq, i, IBV_WC_RECV);
    }
    struct ibv_async_event event;
    do {
        CHECK(!ibv_get_async_event(context, &event));
        ibv_ack_async_event(&event);
    } while (event.event_type != IBV_EVENT_SRQ_LIMIT_REACHED);
    CHECK(event.element.srq == b.srq);
    CHECK(ibv_destroy_srq(b.srq) == EBUSY);
    drop_pair(&a, &b);
}

static void extended(void) {
    struct ibv_context *context = open_first();
    make_side(&a, context);
    make_side(&b, context);
    struct ibv_cq_init_attr_ex cq_init = {.cqe = 64, .wc_flags = IBV_WC_STANDARD_FLAGS};
    struct ibv_cq_ex *cq = ibv_create_cq_ex(context, &cq_init);
    CHECK(cq);
    cq_init.wc_flags |= IBV_WC_EX_WITH_CVLAN;
    CHECK(!ibv_create_cq_ex(context, &cq_init) && errno == EOPNOTSUPP);
    struct ibv_qp_init_attr_ex init = {.send_cq = ibv_cq_ex_to_cq(cq), .recv_cq = ibv_cq_ex_to_cq(cq), .qp_type = IBV_QPT_RC,
                                       .cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 2, .max_recv_sge = 2, .max_inline_data = 64},
                                       .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, .pd = a.pd,
                                       .send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_ATOMIC_WRITE | IBV_QP_EX_WITH_TSO};
    CHECK(!ibv_create_qp_ex(context, &init) && errno == EOPNOTSUPP);
    init.send_ops_flags &= ~IBV_QP_EX_WITH_TSO;
    CHECK((a.qp = ibv_create_qp_ex(context, &init)));
    struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(a.qp);
    CHECK(ex);
    to_init(a.qp, IBV_QPT_RC);
    make_qp(&b, IBV_QPT_RC);
    CHECK(!ibv_qp_to_qp_ex(b.qp));
    connect_sides(&a, &b, IBV_QPT_RC);
    fill(&a, 0, 3000, 4);
    post_receive(&b, 9, 10000, 1000);
    char text[] = "in the request";
    ibv_wr_start(ex);
    ex->wr_id = 1;
    ex->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_rdma_write(ex, b.mr->rkey, (uintptr_t)b.memory);
    struct ibv_sge two[2] = {sge_of(&a, 0, 1000), sge_of(&a, 1000, 2000)};
    ibv_wr_set_sge_list(ex, 2, two);
    ex->wr_id = 2;
    ibv_wr_rdma_write(ex, b.mr->rkey, (uintptr_t)b.memory + 5000);
    ibv_wr_set_inline_data(ex, text, sizeof text);
    ex->wr_id = 3;
    ibv_wr_send_imm(ex, htonl(99));
    ibv_wr_set_sge(ex, a.mr->lkey, (uintptr_t)a.memory, 700);
    CHECK(!ibv_wr_complete(ex));
    struct ibv_poll_cq_attr poll = {0};
    for (uint64_t i = 1; i <= 3; i++) {
        int code;
        while ((code = ibv_start_poll(cq, &poll)) == ENOENT)
            ;
        CHECK(!code && cq->status == IBV_WC_SUCCESS && cq->wr_id == i);
        CHECK(ibv_wc_read_opcode(cq) == (i == 3 ? IBV_WC_SEND : IBV_WC_RDMA_WRITE));
        CHECK(ibv_wc_read_qp_num(cq) == a.qp->qp_num && ibv_wc_read_vendor_err(cq) == 0);
        if (i < 3) {
            /* The next one may be there already. */
            code = ibv_next_poll(cq);
            CHECK(!code || code == ENOENT);
            if (!code)
                CHECK(cq->wr_id == ++i);
        }
        ibv_end_poll(cq);
    }
    struct ibv_wc wc = wait_good(b.cq, 9, IBV_WC_RECV);
    CHECK(wc.byte_len == 700 && ntohl(wc.imm_data) == 99);
    same(&a, 0, &b, 0, 3000);
    same(&a, 0, &b, 10000, 700);
    CHECK(!strcmp(b.memory + 5000, text));
    uint64_t word = 0x0123456789abcdef;
    ibv_wr_start(ex);
    ex->wr_id = 4;
    ibv_wr_atomic_write(ex, b.mr->rkey, (uintptr_t)b.memory + 40960, &word);
    CHECK(!ibv_wr_complete(ex));
    int said;
    while ((said = ibv_start_poll(cq, &poll)) == ENOENT)
        ;
    CHECK(!said && cq->status == IBV_WC_SUCCESS && cq->wr_id == 4 && ibv_wc_read_opcode(cq) == IBV_WC_ATOMIC_WRITE);
    ibv_end_poll(cq);
    CHECK(!memcmp(b.memory + 40960, &word, sizeof word));
    /* All or nothing: five do not fit four, and an aborted one is nowhere. */
    ibv_wr_start(ex);
    for (int i = 0; i < 5; i++) {
        ibv_wr_rdma_write(ex, b.mr->rkey, (uintptr_t)b.memory + 20000);
        ibv_wr_set_sge(ex, a.mr->lkey, (uintptr_t)a.memory, 8);
    }
    CHECK(ibv_wr_complete(ex) == ENOMEM);
    /* A checksum that no device says it can make. */
    unsigned wr_flags = ex->wr_flags;
    ibv_wr_start(ex);
    ex->wr_flags = IBV_SEND_IP_CSUM;
    ibv_wr_rdma_write(ex, b.mr->rkey, (uintptr_t)b.memory + 20000);
    ibv_wr_set_sge(ex, a.mr->lkey, (uintptr_t)a.memory, 8);
    CHECK(ibv_wr_complete(ex) == EINVAL);
    ex->wr_flags = wr_flags;
    ibv_wr_start(ex);
    ibv_wr_send(ex);
    ibv_wr_abort(ex);
    ibv_wr_start(ex);
    ibv_wr_set_sge(ex, a.mr->lkey, (uintptr_t)a.memory, 8);
    CHECK(ibv_wr_complete(ex) == EINVAL);
    usleep(10000);
    CHECK(ibv_start_poll(cq, &poll) == ENOENT && b.memory[20000] == 0);
    CHECK(!ibv_destroy_qp(a.qp));
    a.qp = NULL;
    CHECK(!ibv_destroy_cq(ibv_cq_ex_to_cq(cq)));
    drop_pair(&a, &b);
}

/* Two contexts of one process, completion events, and regions that change. */
static void events(void) {
    make_side(&a, open_first());
    make_side(&b, open_first());
    make_qp(&a, IBV_QPT_RC);
    make_qp(&b, IBV_QPT_RC);
    connect_sides(&a, &b, IBV_QPT_RC);
    CHECK(!ibv_req_notify_cq(b.cq, 0));
    post_receive(&b, 1, 0, 100);
    struct ibv_sge sge = sge_of(&a, 0, 100);
    post(IBV_WR_SEND, 2, &sge, 1, 0, 0);
    struct ibv_cq *cq;
    void *context;
    CHECK(!ibv_get_cq_event(b.channel, &cq, &context) && cq == b.cq && context == &b);
    ibv_ack_cq_events(cq, 1);
    wait_good(b.cq, 1, IBV_WC_RECV);
    wait_good(a.cq, 2, IBV_WC_SEND);
    CHECK(!fcntl(b.channel->fd, F_SETFL, fcntl(b.channel->fd, F_GETFL) | O_NONBLOCK));
    CHECK(ibv_get_cq_event(b.channel, &cq, &context) == -1 && errno == EAGAIN);
    /* Only what is solicited. */
    CHECK(!ibv_req_notify_cq(b.cq, 1));
    post_receive(&b, 3, 0, 100);
    post_receive(&b, 4, 0, 100);
    post(IBV_WR_SEND, 5, &sge, 1, 0, 0);
    wait_good(a.cq, 5, IBV_WC_SEND);
    wait_good(b.cq, 3, IBV_WC_RECV);
    CHECK(ibv_get_cq_event(b.channel, &cq, &context) == -1 && errno == EAGAIN);
    post(IBV_WR_SEND, 6, &sge, 1, IBV_SEND_SOLICITED, 0);
    /* As the kernel's, these descriptors are never writable: event loops would spin. */
    struct pollfd writable[] = {{.fd = b.channel->fd, .events = POLLOUT}, {.fd = b.context->async_fd, .events = POLLOUT}};
    CHECK(poll(writable, 2, 0) == 0);
    struct pollfd fd = {.fd = b.channel->fd, .events = POLLIN};
    CHECK(poll(&fd, 1, 5000) == 1);
    CHECK(!ibv_get_cq_event(b.channel, &cq, &context));
    ibv_ack_cq_events(cq, 1);
    wait_good(a.cq, 6, IBV_WC_SEND);
    wait_good(b.cq, 4, IBV_WC_RECV);
    CHECK(!ibv_resize_cq(b.cq, 300) && b.cq->cqe == 300);
    CHECK(ibv_resize_cq(b.cq, 0) == EINVAL);

    uint32_t key = b.mr->rkey;
    CHECK(ibv_rereg_mr(b.mr, 0, NULL, NULL, 0, 0) == IBV_REREG_MR_ERR_INPUT);
    CHECK(!ibv_rereg_mr(b.mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, b.memory + 4096, 4096, 0));
    CHECK(b.mr->addr == b.memory + 4096 && b.mr->length == 4096 && b.mr->rkey == key);
    fill(&a, 0, 100, 7);
    post(IBV_WR_RDMA_WRITE, 7, &sge, 1, 0, 4096);
    wait_good(a.cq, 7, IBV_WC_RDMA_WRITE);
    same(&a, 0, &b, 4096, 100);
    CHECK(!ibv_rereg_mr(b.mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE));
    post(IBV_WR_RDMA_WRITE, 8, &sge, 1, 0, 4096);
    CHECK(wait_wc(a.cq).status == IBV_WC_REM_ACCESS_ERR);

    /* Named by another address. */
    struct ibv_mr *elsewhere = ibv_reg_mr_iova(b.pd, b.memory, 4096, 0x100000, IBV_ACCESS_LOCAL_WRITE);
    CHECK(elsewhere && elsewhere->addr == b.memory);
    CHECK(!ibv_dereg_mr(elsewhere));
    drop_side(&a);
    drop_side(&b);
    CHECK(!ibv_close_device(a.context) && !ibv_close_device(b.context));
}

/* What can be asked, in both shapes; and what is not offered. */
static void queries(void) {
    struct ibv_context *context = open_first();
    struct ibv_device_attr attr;
    struct ibv_device_attr_ex ex;
    CHECK(!ibv_query_device(context, &attr) && !ibv_query_device_ex(context, NULL, &ex));
    CHECK(!memcmp(&attr, &ex.orig_attr, offsetof(struct ibv_device_attr, phys_port_cnt) + 1) && attr.phys_port_cnt == 1 && attr.max_srq > 0);
    struct ibv_port_attr port[2];
    memset(port, 0xee, sizeof port);
    CHECK(!ibv_query_port(context, 1, port) && port->state == IBV_PORT_ACTIVE && port->link_layer == IBV_LINK_LAYER_ETHERNET);
    CHECK(*(unsigned char *)(port + 1) == 0xee);
    memset(port, 0xee, sizeof port);
#undef ibv_query_port
    CHECK(!ibv_query_port(context, 1, (struct _compat_ibv_port_attr *)port) && port->pkey_tbl_len == 1);
    CHECK(((unsigned char *)port)[47] != 0xee && ((unsigned char *)port)[48] == 0xee);
    CHECK(ibv_query_port(context, 2, (struct _compat_ibv_port_attr *)port) == EINVAL);
    union ibv_gid gid;
    struct ibv_gid_entry entry, table[4];
    struct ibv_gid_entry last;
    union ibv_gid third, empty, zero = {0};
    CHECK(!ibv_query_gid(context, 1, 0, &gid) && !ibv_query_gid(context, 1, 3, &third) && !memcmp(&gid, &third, sizeof gid));
    CHECK(!ibv_query_gid(context, 1, 4, &empty) && !memcmp(&empty, &zero, sizeof empty)); /* an empty entry, as with adapters */
    CHECK(ibv_query_gid(context, 1, 8, &gid) == -1 && errno == EINVAL && ibv_query_gid_ex(context, 1, 4, &last, 0) == ENODATA);
    CHECK(!ibv_query_gid_ex(context, 1, 3, &last, 0) && last.gid_index == 3);
    CHECK(!ibv_query_gid_ex(context, 1, 0, &entry, 0) && entry.gid_type == IBV_GID_TYPE_ROCE_V2 && entry.ndev_ifindex);
    CHECK(ibv_query_gid_table(context, table, 4, 0) == 4 && !memcmp(&table[0], &entry, sizeof entry) && !memcmp(&table[3], &last, sizeof last));
    uint16_t pkey;
    CHECK(!ibv_query_pkey(context, 1, 0, &pkey) && pkey == 0xffff && ibv_get_pkey_index(context, 1, 0xffff) == 0);
    CHECK(ibv_get_pkey_index(context, 1, 0x1234) == -1);
    CHECK(ibv_is_fork_initialized() == IBV_FORK_UNNEEDED && !ibv_fork_init());
    struct ibv_pd *pd = ibv_alloc_pd(context);
    CHECK(!ibv_reg_dmabuf_mr(pd, 0, 4096, 0, -1, IBV_ACCESS_LOCAL_WRITE) && errno == EBADF);
    CHECK(!ibv_reg_dmabuf_mr(pd, 0, 4096, 0, 0, IBV_ACCESS_LOCAL_WRITE) && errno == EINVAL); /* standard input */
    CHECK(!ibv_open_xrcd(context, &(struct ibv_xrcd_init_attr){0}) && errno == EINVAL);
    CHECK(!ibv_reg_mr(pd, (void *)4096, 4096, IBV_ACCESS_LOCAL_WRITE) && errno == EFAULT);
    CHECK(!strcmp(ibv_wc_status_str(IBV_WC_SUCCESS), "success") && !strcmp(ibv_wc_status_str(99), "unknown"));
    CHECK(ibv_rate_to_mbps(IBV_RATE_100_GBPS) == 103125 && mult_to_ibv_rate(16) == IBV_RATE_40_GBPS);
    CHECK(!ibv_dealloc_pd(pd) && !ibv_close_device(context));
}

int main(int count, char **arguments) {
    struct { const char *name; void (*run)(void); } all[] = {
        {"rc", rc}, {"uc", uc}, {"ud", ud}, {"srq", srq}, {"extended", extended}, {"events", events}, {"queries", queries}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (count > 1 && !strcmp(all[i].name, arguments[1])) {
            all[i].run();
            return 0;
        }
    return 2;
}
