/* Thread domains, parent domains, and completion queues that record times. */
#include "rig.h"

static void *allocate(struct ibv_pd *pd, void *context, size_t size, size_t alignment, uint64_t kind) { return IBV_ALLOCATOR_USE_DEFAULT; }
static void release(struct ibv_pd *pd, void *context, void *pointer, uint64_t kind) {}

static uint64_t nanoseconds(clockid_t clock) {
    struct timespec now;
    CHECK(!clock_gettime(clock, &now));
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}

int main(void) {
    struct ibv_context *context = open_first();
    struct side a, b;
    make_side(&a, context);
    make_side(&b, context);
    struct ibv_td *td = ibv_alloc_td(context, &(struct ibv_td_init_attr){0});
    CHECK(td && td->context == context);
    CHECK(!ibv_alloc_td(context, &(struct ibv_td_init_attr){.comp_mask = 1}) && errno == EOPNOTSUPP);
    struct ibv_parent_domain_init_attr init = {.pd = a.pd, .td = td};
    init.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
    CHECK(!ibv_alloc_parent_domain(context, &init) && errno == EINVAL); /* without allocators */
    init.alloc = allocate;
    init.free = release;
    struct ibv_pd *parent = ibv_alloc_parent_domain(context, &init);
    CHECK(parent && parent != a.pd);
    CHECK(ibv_dealloc_td(td) == EBUSY);

    /* Its objects are those of the domain: the region was registered there. */
    struct ibv_pd *pd = a.pd;
    a.pd = parent;
    struct ibv_cq_init_attr_ex cq_init = {.cqe = 16, .comp_mask = IBV_CQ_INIT_ATTR_MASK_PD, .parent_domain = parent};
    cq_init.wc_flags = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;
    struct ibv_cq_ex *cq = ibv_create_cq_ex(context, &cq_init);
    CHECK(cq);
    struct ibv_cq *plain = a.cq;
    a.cq = ibv_cq_ex_to_cq(cq);
    make_qp(&a, IBV_QPT_RC);
    make_qp(&b, IBV_QPT_RC);
    connect_sides(&a, &b, IBV_QPT_RC);
    struct ibv_values_ex before = {.comp_mask = IBV_VALUES_MASK_RAW_CLOCK}, after = before;
    uint64_t clock_before = nanoseconds(CLOCK_REALTIME), last = 0;
    CHECK(!ibv_query_rt_values_ex(context, &before));
    for (int i = 0; i < 3; i++) {
        struct ibv_sge sge = sge_of(&a, 0, 64);
        struct ibv_send_wr wr = {.wr_id = i, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED}, *bad;
        wr.wr.rdma.remote_addr = (uintptr_t)b.memory;
        wr.wr.rdma.rkey = b.mr->rkey;
        CHECK(!ibv_post_send(a.qp, &wr, &bad));
        int code;
        struct ibv_poll_cq_attr poll = {0};
        while ((code = ibv_start_poll(cq, &poll)) == ENOENT)
            ;
        CHECK(!code && cq->status == IBV_WC_SUCCESS && cq->wr_id == i);
        uint64_t raw = ibv_wc_read_completion_ts(cq), wall = ibv_wc_read_completion_wallclock_ns(cq);
        ibv_end_poll(cq);
        CHECK(raw >= (uint64_t)before.raw_clock.tv_nsec && raw > last);
        CHECK(wall + 1000000000 > clock_before && wall <= nanoseconds(CLOCK_REALTIME) + 1000000000);
        last = raw;
    }
    CHECK(!ibv_query_rt_values_ex(context, &after) && last <= (uint64_t)after.raw_clock.tv_nsec);
    struct ibv_device_attr_ex attr;
    CHECK(!ibv_query_device_ex(context, NULL, &attr));
    CHECK(attr.hca_core_clock == 1000000 && attr.completion_timestamp_mask == UINT64_MAX);

    CHECK(ibv_dealloc_pd(pd) == EBUSY && ibv_dealloc_pd(parent) == EBUSY);
    CHECK(!ibv_destroy_qp(a.qp) && !ibv_destroy_cq(a.cq) && !ibv_dealloc_pd(parent));
    CHECK(!ibv_dealloc_td(td) && ibv_dealloc_td(td) == EINVAL);
    a.qp = NULL;
    a.cq = plain;
    a.pd = pd;
    drop_pair(&a, &b);
    return 0;
}
