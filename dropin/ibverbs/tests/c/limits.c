/* The limits that a query reports are those that hold: as much is granted, and no more. */
#include "rig.h"

static struct side a;
static struct ibv_device_attr device;

static struct ibv_qp *make(struct ibv_qp_cap cap) {
    struct ibv_qp_init_attr init = {.send_cq = a.cq, .recv_cq = a.cq, .qp_type = IBV_QPT_RC, .cap = cap};
    errno = 0;
    return ibv_create_qp(a.pd, &init);
}

static void queue_pairs(void) {
    uint32_t wr = device.max_qp_wr, sge = device.max_sge;
    struct ibv_qp *qp = make((struct ibv_qp_cap){wr, wr, sge, sge, 0});
    CHECK(qp && !ibv_destroy_qp(qp));
    CHECK(!make((struct ibv_qp_cap){wr + 1, 1, 1, 1, 0}) && errno == EINVAL);
    CHECK(!make((struct ibv_qp_cap){1, wr + 1, 1, 1, 0}) && errno == EINVAL);
    CHECK(!make((struct ibv_qp_cap){1, 1, sge + 1, 1, 0}) && errno == EINVAL);
    CHECK(!make((struct ibv_qp_cap){1, 1, 1, sge + 1, 0}) && errno == EINVAL);

    /* As many receives as were asked for, each with as long a list; none of them longer. */
    CHECK((qp = make((struct ibv_qp_cap){1, 8, 1, sge, 0})));
    to_init(qp, IBV_QPT_RC);
    struct ibv_sge *list = calloc(sge + 1, sizeof *list);
    for (uint32_t i = 0; i <= sge; i++)
        list[i] = sge_of(&a, i * 8, 8);
    struct ibv_recv_wr receive = {.sg_list = list, .num_sge = sge + 1}, *bad = NULL;
    CHECK(ibv_post_recv(qp, &receive, &bad) == EINVAL && bad == &receive);
    receive.num_sge = sge;
    for (int i = 0; i < 8; i++)
        CHECK(!ibv_post_recv(qp, &receive, &bad));
    bad = NULL;
    CHECK(ibv_post_recv(qp, &receive, &bad) == ENOMEM && bad == &receive);
    CHECK(!ibv_destroy_qp(qp));
    free(list);
}

static struct ibv_srq *make_srq(uint32_t wr, uint32_t sge) {
    struct ibv_srq_init_attr init = {.attr = {.max_wr = wr, .max_sge = sge}};
    errno = 0;
    return ibv_create_srq(a.pd, &init);
}

static void shared_receive_queues(void) {
    uint32_t wr = device.max_srq_wr, sge = device.max_srq_sge;
    struct ibv_srq *srq = make_srq(wr, sge);
    CHECK(srq);
    struct ibv_srq_attr attr = {.srq_limit = wr + 1};
    CHECK(ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT) == EINVAL);
    CHECK(!ibv_query_srq(srq, &attr) && attr.max_wr == wr && attr.max_sge == sge && attr.srq_limit == 0);
    struct ibv_sge *list = calloc(sge + 1, sizeof *list);
    for (uint32_t i = 0; i <= sge; i++)
        list[i] = sge_of(&a, i * 8, 8);
    struct ibv_recv_wr receive = {.sg_list = list, .num_sge = sge + 1}, *bad = NULL;
    CHECK(ibv_post_srq_recv(srq, &receive, &bad) == EINVAL && bad == &receive);
    receive.num_sge = sge;
    for (uint32_t i = 0; i < wr; i++)
        CHECK(!ibv_post_srq_recv(srq, &receive, &bad));
    CHECK(ibv_post_srq_recv(srq, &receive, &bad) == ENOMEM);
    CHECK(!ibv_destroy_srq(srq));
    free(list);
    CHECK(!make_srq(wr + 1, 1) && errno == EINVAL);
    CHECK(!make_srq(1, sge + 1) && errno == EINVAL);
}

static void address_handles(void) {
    struct ibv_ah_attr address = address_of(a.gid);
    struct ibv_ah **handles = calloc(device.max_ah, sizeof *handles);
    for (int i = 0; i < device.max_ah; i++)
        CHECK((handles[i] = ibv_create_ah(a.pd, &address)));
    CHECK(!ibv_create_ah(a.pd, &address) && errno == ENOMEM);
    /* One less, and there is room for one more. */
    CHECK(!ibv_destroy_ah(handles[0]) && (handles[0] = ibv_create_ah(a.pd, &address)));
    CHECK(!ibv_create_ah(a.pd, &address) && errno == ENOMEM);
    for (int i = 0; i < device.max_ah; i++)
        CHECK(!ibv_destroy_ah(handles[i]));
    free(handles);
}

static void completion_queues(void) {
    struct ibv_cq *cq = ibv_create_cq(a.context, device.max_cqe, NULL, NULL, 0);
    CHECK(cq && cq->cqe == device.max_cqe && ibv_resize_cq(cq, device.max_cqe + 1) == EINVAL);
    CHECK(!ibv_resize_cq(cq, device.max_cqe) && !ibv_destroy_cq(cq));
    CHECK(!ibv_create_cq(a.context, device.max_cqe + 1, NULL, NULL, 0) && errno == EINVAL);
}

int main(void) {
    struct ibv_context *context = open_first();
    make_side(&a, context);
    CHECK(!ibv_query_device(context, &device));
    queue_pairs();
    shared_receive_queues();
    address_handles();
    completion_queues();
    drop_side(&a);
    CHECK(!ibv_close_device(context));
    return 0;
}
