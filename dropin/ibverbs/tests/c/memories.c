/* Kinds of memory beside the ordinary one: paged on demand, none at all, the device's own; and objects by their handles. */
#define _GNU_SOURCE
#include <sys/mman.h>

#include "rig.h"

static struct side a, b;

static enum ibv_wc_status transfer(enum ibv_wr_opcode opcode, struct ibv_sge sge, uint64_t remote, uint32_t rkey) {
    struct ibv_send_wr wr = {.wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED}, *bad;
    wr.wr.rdma.remote_addr = remote;
    wr.wr.rdma.rkey = rkey;
    CHECK(!ibv_post_send(a.qp, &wr, &bad));
    return wait_wc(a.cq).status;
}

static void again(void) {
    CHECK(!ibv_destroy_qp(a.qp) && !ibv_destroy_qp(b.qp));
    make_qp(&a, IBV_QPT_RC);
    make_qp(&b, IBV_QPT_RC);
    connect_sides(&a, &b, IBV_QPT_RC);
}

/* Memory that is not mapped when it is registered, and what a program may advise about it. */
static void on_demand(void) {
    struct ibv_device_attr_ex attr;
    CHECK(!ibv_query_device_ex(a.context, NULL, &attr));
    CHECK(attr.odp_caps.general_caps == (IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT));
    CHECK(attr.odp_caps.per_transport_caps.rc_odp_caps & IBV_ODP_SUPPORT_ATOMIC);
    size_t length = 65536;
    char *later = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(later != MAP_FAILED && !munmap(later, length));
    CHECK(!ibv_reg_mr(b.pd, later, length, ALL_ACCESS) && errno == EFAULT);
    struct ibv_mr *mr = ibv_reg_mr(b.pd, later, length, ALL_ACCESS | IBV_ACCESS_ON_DEMAND);
    CHECK(mr && mr->addr == later && mr->length == length);
    CHECK(transfer(IBV_WR_RDMA_WRITE, sge_of(&a, 0, 1000), (uintptr_t)later, mr->rkey) == IBV_WC_REM_OP_ERR);
    again();
    CHECK(mmap(later, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == later);
    fill(&a, 0, 1000, 3);
    CHECK(transfer(IBV_WR_RDMA_WRITE, sge_of(&a, 0, 1000), (uintptr_t)later + 100, mr->rkey) == IBV_WC_SUCCESS);
    CHECK(!memcmp(a.memory, later + 100, 1000));
    struct ibv_sge part = {.addr = (uintptr_t)later, .length = length, .lkey = mr->lkey};
    for (int advice = IBV_ADVISE_MR_ADVICE_PREFETCH; advice <= IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT; advice++)
        CHECK(!ibv_advise_mr(b.pd, advice, IBV_ADVISE_MR_FLAG_FLUSH, &part, 1));
    CHECK(ibv_advise_mr(b.pd, 9, 0, &part, 1) == EOPNOTSUPP);
    CHECK(ibv_advise_mr(a.pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &part, 1) == ENOENT); /* another domain */
    part.length++;
    CHECK(ibv_advise_mr(b.pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &part, 1) == ENOENT);
    CHECK(!ibv_dereg_mr(mr));
    /* All of the process's memory by one key. */
    struct ibv_mr *all = ibv_reg_mr(b.pd, NULL, SIZE_MAX, ALL_ACCESS | IBV_ACCESS_ON_DEMAND);
    CHECK(all && all->length == SIZE_MAX);
    fill(&a, 0, 2000, 5);
    CHECK(transfer(IBV_WR_RDMA_WRITE, sge_of(&a, 0, 2000), (uintptr_t)b.memory + 7, all->rkey) == IBV_WC_SUCCESS);
    same(&a, 0, &b, 7, 2000);
    CHECK(!ibv_dereg_mr(all) && !munmap(later, length));
}

/* What is written through a null region is gone, and what is read is zero. */
static void nowhere(void) {
    struct ibv_mr *null = ibv_alloc_null_mr(a.pd);
    CHECK(null);
    fill(&b, 0, 3000, 6);
    struct ibv_sge sge = {.addr = 12345, .length = 3000, .lkey = null->lkey};
    CHECK(transfer(IBV_WR_RDMA_READ, sge, (uintptr_t)b.memory, b.mr->rkey) == IBV_WC_SUCCESS);
    CHECK(transfer(IBV_WR_RDMA_WRITE, sge, (uintptr_t)b.memory, b.mr->rkey) == IBV_WC_SUCCESS);
    for (int i = 0; i < 3000; i++)
        CHECK(!b.memory[i]);
    /* No peer may use it. */
    struct ibv_mr *theirs = ibv_alloc_null_mr(b.pd);
    CHECK(transfer(IBV_WR_RDMA_WRITE, sge_of(&a, 0, 8), 0, theirs->rkey) == IBV_WC_REM_ACCESS_ERR);
    again();
    CHECK(!ibv_dereg_mr(null) && !ibv_dereg_mr(theirs));
}

static void of_the_device(void) {
    struct ibv_device_attr_ex attr;
    CHECK(!ibv_query_device_ex(a.context, NULL, &attr) && attr.max_dm_size >= 65536);
    CHECK(!ibv_alloc_dm(b.context, &(struct ibv_alloc_dm_attr){.length = attr.max_dm_size + 1}) && errno == ENOMEM);
    CHECK(!ibv_alloc_dm(b.context, &(struct ibv_alloc_dm_attr){.length = 64, .comp_mask = 1}) && errno == EOPNOTSUPP);
    struct ibv_dm *dm = ibv_alloc_dm(b.context, &(struct ibv_alloc_dm_attr){.length = 10000, .log_align_req = 6});
    CHECK(dm);
    fill(&a, 0, 8000, 7);
    CHECK(!ibv_memcpy_to_dm(dm, 4, a.memory, 4000));
    CHECK(ibv_memcpy_to_dm(dm, 2, a.memory, 4) == EINVAL && ibv_memcpy_to_dm(dm, 9996, a.memory, 8) == EINVAL);
    CHECK(ibv_memcpy_from_dm(a.memory, dm, 0, 6) == EINVAL);
    CHECK(!ibv_reg_dm_mr(b.pd, dm, 0, 100, ALL_ACCESS) && errno == EINVAL); /* not zero based */
    CHECK(!ibv_reg_dm_mr(b.pd, dm, 4, 10000, ALL_ACCESS | IBV_ACCESS_ZERO_BASED) && errno == EINVAL);
    struct ibv_mr *mr = ibv_reg_dm_mr(b.pd, dm, 4, 9000, ALL_ACCESS | IBV_ACCESS_ZERO_BASED);
    CHECK(mr && ibv_free_dm(dm) == EBUSY);
    memset(a.memory + 100000, 0, 4000);
    CHECK(transfer(IBV_WR_RDMA_READ, sge_of(&a, 100000, 4000), 0, mr->rkey) == IBV_WC_SUCCESS);
    same(&a, 0, &a, 100000, 4000);
    CHECK(transfer(IBV_WR_RDMA_WRITE, sge_of(&a, 4000, 4000), 5000, mr->rkey) == IBV_WC_SUCCESS);
    memset(b.memory, 0, 4000);
    CHECK(!ibv_memcpy_from_dm(b.memory, dm, 5004, 4000));
    same(&a, 4000, &b, 0, 4000);
    CHECK(transfer(IBV_WR_RDMA_WRITE, sge_of(&a, 0, 8), 8996, mr->rkey) == IBV_WC_REM_ACCESS_ERR);
    again();
    CHECK(!ibv_dereg_mr(mr) && !ibv_free_dm(dm) && ibv_free_dm(dm) == EINVAL);
}

/* A second context, domain, region and device memory, by their handles. */
static void by_handle(void) {
    struct ibv_dm *dm = ibv_alloc_dm(b.context, &(struct ibv_alloc_dm_attr){.length = 64});
    CHECK(dm && b.context->cmd_fd >= 0 && !ibv_memcpy_to_dm(dm, 0, "abcdefg", 8));
    struct ibv_context *second = ibv_import_device(dup(b.context->cmd_fd));
    CHECK(second && second != b.context && second->device == b.context->device);
    struct ibv_pd *pd = ibv_import_pd(second, b.pd->handle);
    CHECK(pd && pd->context == second && !ibv_import_pd(second, b.pd->handle + 1000) && errno == ENOENT);
    struct ibv_mr *mr = ibv_import_mr(pd, b.mr->handle);
    CHECK(mr && mr->rkey == b.mr->rkey && mr->lkey == b.mr->lkey && !mr->addr);
    CHECK(!ibv_import_mr(pd, a.mr->handle)); /* of another domain */
    CHECK(ibv_dereg_mr(mr) == EINVAL);
    struct ibv_dm *same_dm = ibv_import_dm(second, dm->handle);
    char text[8];
    CHECK(same_dm && !ibv_memcpy_from_dm(text, same_dm, 0, 8) && !strcmp(text, "abcdefg"));
    /* A queue pair of the imported domain uses the region of the first one. */
    struct side c = b;
    c.context = second;
    c.pd = pd;
    c.mr = mr;
    c.qp = NULL;
    CHECK((c.cq = ibv_create_cq(second, 16, NULL, NULL, 0)));
    CHECK(!ibv_destroy_qp(a.qp));
    make_qp(&a, IBV_QPT_RC);
    make_qp(&c, IBV_QPT_RC);
    connect_sides(&a, &c, IBV_QPT_RC);
    fill(&a, 0, 500, 8);
    post_receive(&c, 4, 0, 500);
    struct ibv_sge sge = sge_of(&a, 0, 500);
    struct ibv_send_wr wr = {.wr_id = 2, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED}, *bad;
    CHECK(!ibv_post_send(a.qp, &wr, &bad));
    wait_good(a.cq, 2, IBV_WC_SEND);
    wait_good(c.cq, 4, IBV_WC_RECV);
    same(&a, 0, &b, 0, 500);
    CHECK(!ibv_destroy_qp(c.qp) && !ibv_destroy_cq(c.cq));
    ibv_unimport_dm(same_dm);
    ibv_unimport_mr(mr);
    ibv_unimport_pd(pd);
    CHECK(!ibv_close_device(second) && !ibv_free_dm(dm));
    CHECK(!ibv_import_device(0)); /* standard input */
}

int main(void) {
    make_pair(&a, &b, IBV_QPT_RC);
    on_demand();
    nowhere();
    of_the_device();
    by_handle();
    drop_pair(&a, &b);
    return 0;
}
