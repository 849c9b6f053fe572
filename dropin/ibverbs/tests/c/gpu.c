/* GPU memory, on a stand-in for CUDA's driver: registered by its address and by a descriptor, written and read. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/eventfd.h>
#include <sys/mman.h>

#include "rig.h"

#define LENGTH 300000
#define HANDLE (2ul << 20)

static struct side a, b;
static int (*to_gpu)(uint64_t, const void *, size_t);
static int (*from_gpu)(void *, uint64_t, size_t);

static void *find(void *driver, const char *name) {
    void *found = dlsym(driver, name);
    CHECK(found);
    return found;
}

static void transfer(enum ibv_wr_opcode opcode, uint64_t local, uint32_t lkey, uint64_t remote, uint32_t rkey) {
    struct ibv_sge sge = {.addr = local, .length = LENGTH, .lkey = lkey};
    struct ibv_send_wr wr = {.wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED}, *bad;
    wr.wr.rdma.remote_addr = remote;
    wr.wr.rdma.rkey = rkey;
    CHECK(!ibv_post_send(a.qp, &wr, &bad));
    wait_good(a.cq, 1, opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE);
}

/* A range of virtual memory made of two handles, as PyTorch's expandable segments are: what lies across both is one registration. */
static uint64_t two_handles(void *driver) {
    struct { unsigned kind, handle_types; struct { unsigned kind; int id; } location; void *windows; uint8_t compression, gpu_direct; uint16_t usage; uint8_t none[4]; }
        prop = {.kind = 1, .handle_types = 1, .location = {1, 0}, .gpu_direct = 1};
    struct { unsigned kind; int id; unsigned flags; } access = {1, 0, 3};
    int (*create)(uint64_t *, size_t, void *, uint64_t) = find(driver, "cuMemCreate");
    int (*map)(uint64_t, size_t, size_t, uint64_t, uint64_t) = find(driver, "cuMemMap");
    uint64_t start, handle;
    CHECK(!((int (*)(uint64_t *, size_t, size_t, uint64_t, uint64_t))find(driver, "cuMemAddressReserve"))(&start, 2 * HANDLE, 0, 0, 0));
    for (int i = 0; i < 2; i++) CHECK(!create(&handle, HANDLE, &prop, 0) && !map(start + i * HANDLE, HANDLE, 0, handle, 0));
    CHECK(!((int (*)(uint64_t, size_t, void *, size_t))find(driver, "cuMemSetAccess"))(start, 2 * HANDLE, &access, 1));
    return start;
}

static void across_handles(void *driver, uint64_t first, int file) {
    uint64_t across = two_handles(driver) + HANDLE - (LENGTH / 2 & ~4095ul);
    struct ibv_mr *from = ibv_reg_mr(a.pd, (void *)first, LENGTH, IBV_ACCESS_LOCAL_WRITE);
    struct ibv_mr *to = ibv_reg_dmabuf_mr(b.pd, 8192, LENGTH, across, file, ALL_ACCESS);
    CHECK(from && to);
    fill(&a, 0, LENGTH, 9);
    memset(b.memory, 0, LENGTH);
    CHECK(!to_gpu(first, a.memory, LENGTH));
    transfer(IBV_WR_RDMA_WRITE, first, from->lkey, across, to->rkey);
    CHECK(!from_gpu(b.memory, across, LENGTH));
    same(&a, 0, &b, 0, LENGTH);
    transfer(IBV_WR_RDMA_READ, (uintptr_t)a.memory + 400000, a.mr->lkey, across, to->rkey);
    same(&a, 0, &a, 400000, LENGTH);
    CHECK(!ibv_dereg_mr(from) && !ibv_dereg_mr(to));
}

/* Bytes arrive for memory without a window, and CUDA (its calls, or the GPU) does not come to them for as long as the device waits. */
static void stuck(void *driver, const char *knob, uint64_t gpu) {
    void (*turn)(int) = find(driver, knob);
    struct ibv_mr *mr = ibv_reg_mr(b.pd, (void *)gpu, LENGTH, ALL_ACCESS);
    struct ibv_sge sge = {.addr = (uintptr_t)a.memory, .length = 64, .lkey = a.mr->lkey};
    struct ibv_send_wr wr = {.wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED}, *bad;
    struct ibv_wc wc;
    CHECK(mr);
    wr.wr.rdma.remote_addr = gpu;
    wr.wr.rdma.rkey = mr->rkey;
    turn(!strcmp(knob, "fake_cuda_hold_calls") ? 1 : 12500000);
    CHECK(!ibv_post_send(a.qp, &wr, &bad));
    while (!ibv_poll_cq(a.cq, 1, &wc)) usleep(1000);
    CHECK(wc.status == IBV_WC_RETRY_EXC_ERR); /* it has less patience */
    struct ibv_async_event event;
    CHECK(!ibv_get_async_event(b.context, &event) && event.event_type == IBV_EVENT_QP_FATAL && event.element.qp == b.qp);
    ibv_ack_async_event(&event);
    turn(0);
    CHECK(!ibv_dereg_mr(mr));
    drop_pair(&a, &b);
}

int main(int argc, char **argv) {
    int refused = argc > 1 && !strcmp(argv[1], "refused"); /* the environment forbids what the memory would need */
    make_pair(&a, &b, IBV_QPT_RC);
    /* The stand-in exports nothing: this is as good as a dma-buf to whoever looks at its name only. */
    int file = memfd_create("dmabuf", 0), none = open("/dev/null", O_RDONLY), event = eventfd(0, 0);
    CHECK(!ftruncate(file, 1 << 20));
    CHECK(refused || (!ibv_reg_dmabuf_mr(a.pd, 0, 4096, 0x10000, file, IBV_ACCESS_LOCAL_WRITE) && errno == EOPNOTSUPP)); /* no CUDA yet */
    void *driver = dlopen(getenv("NOBOUNCE_CUDA"), RTLD_NOW);
    CHECK(driver);
    uint64_t context, first, second;
    CHECK(!((int (*)(unsigned))find(driver, "cuInit"))(0));
    CHECK(!((int (*)(uint64_t *, int))find(driver, "cuDevicePrimaryCtxRetain"))(&context, 0));
    CHECK(!((int (*)(uint64_t))find(driver, "cuCtxSetCurrent"))(context));
    int (*allocate)(uint64_t *, size_t) = find(driver, "cuMemAlloc_v2");
    to_gpu = find(driver, "cuMemcpyHtoD_v2");
    from_gpu = find(driver, "cuMemcpyDtoH_v2");
    CHECK(!allocate(&first, 1 << 20) && !allocate(&second, 1 << 20));

    if (refused) {
        CHECK(!ibv_reg_mr(a.pd, (void *)first, LENGTH, IBV_ACCESS_LOCAL_WRITE) && errno == EOPNOTSUPP);
        CHECK(!ibv_reg_dmabuf_mr(a.pd, 0, LENGTH, second, file, ALL_ACCESS) && errno == EOPNOTSUPP);
        CHECK(!ibv_reg_dmabuf_mr(a.pd, 0, 4096, (uintptr_t)a.memory, file, ALL_ACCESS) && errno == EOPNOTSUPP); /* the host's */
        drop_pair(&a, &b);
        return 0;
    }
    if (argc > 1) {
        stuck(driver, argv[1], second);
        return 0;
    }
    struct ibv_mr *at_a = ibv_reg_mr(a.pd, (void *)first, LENGTH, IBV_ACCESS_LOCAL_WRITE);
    struct ibv_mr *at_b = ibv_reg_dmabuf_mr(b.pd, 0, LENGTH, second, file, ALL_ACCESS);
    CHECK(at_a && at_b && at_b->addr == NULL && at_b->length == LENGTH);
    /* As the kernel: offset and address at the same place of a page, and the range in the dma-buf. */
    CHECK(!ibv_reg_dmabuf_mr(b.pd, 8, LENGTH, second, file, ALL_ACCESS) && errno == EINVAL);
    CHECK(!ibv_reg_dmabuf_mr(b.pd, 0, LENGTH, second + 8, file, ALL_ACCESS) && errno == EINVAL);
    CHECK(!ibv_reg_dmabuf_mr(b.pd, (1 << 20) - 4096, 8192, second, file, ALL_ACCESS) && errno == EINVAL);
    CHECK(!ibv_reg_dmabuf_mr(b.pd, UINT64_MAX - 4095, LENGTH, second, file, ALL_ACCESS) && errno == EINVAL);
    struct ibv_mr *inside = ibv_reg_dmabuf_mr(b.pd, (1 << 20) - 4096 + 8, 4088, second + 8, file, ALL_ACCESS);
    CHECK(inside && !ibv_dereg_mr(inside));
    /* The descriptor may be closed at once. */
    CHECK(!close(file) && !ibv_reg_dmabuf_mr(b.pd, 0, LENGTH, second, file, ALL_ACCESS) && errno == EBADF);
    CHECK(!ibv_reg_dmabuf_mr(b.pd, 0, LENGTH, second, none, ALL_ACCESS) && errno == EINVAL);
    CHECK(!ibv_reg_dmabuf_mr(b.pd, 0, LENGTH, second, event, ALL_ACCESS) && errno == EINVAL);
    file = memfd_create("dmabuf", 0);
    CHECK(!ftruncate(file, 1 << 20));
    CHECK(!ibv_reg_dmabuf_mr(b.pd, 0, 4096, (uintptr_t)b.memory + (1 << 21), file, ALL_ACCESS) && errno == EOPNOTSUPP);

    fill(&a, 0, LENGTH, 6);
    CHECK(!to_gpu(first, a.memory, LENGTH));
    transfer(IBV_WR_RDMA_WRITE, first, at_a->lkey, second, at_b->rkey);
    /* The library says so, too, while the devices are open. */
    size_t (*report)(char *, size_t) = find(RTLD_DEFAULT, "nobounce_report");
    char said[20000], cut[5];
    size_t length = report(said, sizeof said);
    CHECK(length == strlen(said) && said[0] == '[' && said[length - 1] == ']' && length < sizeof said);
    CHECK(strstr(said, "\"window\": {\"bytes\": 300000, \"operations\": 1}"));
    CHECK(report(cut, sizeof cut) >= length && !memcmp(cut, said, 4) && !cut[4] && report(NULL, 0) >= length);
    CHECK(!from_gpu(b.memory, second, LENGTH));
    same(&a, 0, &b, 0, LENGTH);
    transfer(IBV_WR_RDMA_READ, (uintptr_t)a.memory + 400000, a.mr->lkey, second, at_b->rkey);
    same(&a, 0, &a, 400000, LENGTH);
    CHECK(!ibv_dereg_mr(at_a) && !ibv_dereg_mr(at_b));
    across_handles(driver, first, file);
    length = report(said, sizeof said);
    CHECK(length < sizeof said && strstr(said, "\"window\": {\"bytes\": 600000, \"operations\": 2}"));
    drop_pair(&a, &b);
    return 0;
}
