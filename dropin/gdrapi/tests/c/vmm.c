/* Memory of cuMemCreate by GDRCopy's interface, one case by name: with a handle that can be exported as a file descriptor, and without one. */
#include "gdr.h"

/* CUmemAllocationProp and CUmemAccessDesc, as far as they are used here. */
struct properties {
    uint32_t kind, handle_types, location, device;
    void *windows;
    uint8_t compression, is_rdma_capable;
    uint16_t usage;
    uint8_t reserved[4];
};
struct access {
    uint32_t location, device, flags;
};
enum { PINNED = 1, POSIX_FD = 1, ON_DEVICE = 1, READ_WRITE = 3, RECOMMENDED = 1 };
_Static_assert(sizeof(struct properties) == 32 && sizeof(struct access) == 12, "sizes of the structures");

#define VMM_FUNCTIONS(X)                                                                 \
    X(int, cuMemGetAllocationGranularity, (size_t *, const struct properties *, unsigned)) \
    X(int, cuMemCreate, (uint64_t *, size_t, const struct properties *, unsigned long long)) \
    X(int, cuMemRelease, (uint64_t))                                                     \
    X(int, cuMemAddressReserve, (uint64_t *, size_t, size_t, uint64_t, unsigned long long)) \
    X(int, cuMemAddressFree, (uint64_t, size_t))                                         \
    X(int, cuMemMap, (uint64_t, size_t, size_t, uint64_t, unsigned long long))           \
    X(int, cuMemUnmap, (uint64_t, size_t))                                               \
    X(int, cuMemSetAccess, (uint64_t, size_t, const struct access *, size_t))
VMM_FUNCTIONS(DECLARE)

static gdr_t g;

struct vmm {
    uint64_t at, handle;
    size_t size;
};

static struct vmm create(size_t size, uint32_t handle_types) {
    struct properties properties = {.kind = PINNED, .handle_types = handle_types, .location = ON_DEVICE, .is_rdma_capable = 1};
    struct access access = {.location = ON_DEVICE, .flags = READ_WRITE};
    struct vmm vmm = {0};
    size_t grain = 0;
    GIVES(0, cuMemGetAllocationGranularity(&grain, &properties, RECOMMENDED));
    CHECK(grain);
    vmm.size = (size + grain - 1) / grain * grain;
    GIVES(0, cuMemCreate(&vmm.handle, vmm.size, &properties, 0));
    GIVES(0, cuMemAddressReserve(&vmm.at, vmm.size, 0, 0, 0));
    GIVES(0, cuMemMap(vmm.at, vmm.size, 0, vmm.handle, 0));
    GIVES(0, cuMemSetAccess(vmm.at, vmm.size, &access, 1));
    return vmm;
}

static void destroy(struct vmm *vmm) {
    GIVES(0, cuMemUnmap(vmm->at, vmm->size));
    GIVES(0, cuMemRelease(vmm->handle));
    GIVES(0, cuMemAddressFree(vmm->at, vmm->size));
}

/* Bytes in by the mapping are what CUDA reads, bytes that CUDA writes come out of it, and nothing beside them changes. */
static void both_ways(struct vmm *vmm, struct mapped *m, size_t size) {
    enum { PIECE = 300001, AT = 70007 };
    unsigned char *wanted = malloc(size), *got = malloc(size);
    CHECK(wanted && got && size > AT + PIECE);
    pattern(wanted, size, 41);
    put(vmm->at, wanted, size);
    GIVES(0, gdr_copy_from_mapping(m->mh, got, m->at, size));
    CHECK(!memcmp(got, wanted, size));
    pattern(wanted + AT, PIECE, 42);
    GIVES(0, gdr_copy_to_mapping(m->mh, m->at + AT, wanted + AT, PIECE));
    holds(vmm->at, wanted, size);
    pattern(wanted, size, 43);
    GIVES(0, gdr_copy_to_mapping(m->mh, m->at, wanted, size));
    holds(vmm->at, wanted, size);
    free(wanted);
    free(got);
}

/* Pinned, mapped, written, read back; the second half by a pin of its own; and unmapped by its owner while it is pinned. */
static void exportable(void) {
    enum { SIZE = 4 << 20 };
    static unsigned char before[SIZE], fresh[SIZE], got[SIZE];
    struct vmm vmm = create(SIZE, POSIX_FD), next;
    struct mapped whole = map(g, vmm.at, SIZE), half = map(g, vmm.at + SIZE / 2, SIZE / 2);
    int flag = -1;
    CHECK(whole.info.va == vmm.at && whole.info.mapped_size == SIZE && whole.info.mapping_type == WC);
    both_ways(&vmm, &whole, SIZE);
    pattern(before, SIZE, 44);
    GIVES(0, gdr_copy_to_mapping(half.mh, half.at, before + SIZE / 2, SIZE / 2));
    GIVES(0, gdr_copy_to_mapping(whole.mh, whole.at, before, SIZE / 2));
    holds(vmm.at, before, SIZE);
    unmap(g, &half);
    GIVES(0, gdr_get_callback_flag(g, whole.mh, &flag));
    CHECK(flag == 0);
    destroy(&vmm);
    GIVES(0, gdr_get_callback_flag(g, whole.mh, &flag));
    CHECK(flag == 0);
    GIVES(0, gdr_copy_from_mapping(whole.mh, got, whole.at, SIZE)); /* still what it was */
    CHECK(!memcmp(got, before, SIZE));
    /* What is created next, perhaps at the same address, is other memory. */
    next = create(SIZE, POSIX_FD);
    pattern(fresh, SIZE, 45);
    put(next.at, fresh, SIZE);
    GIVES(0, gdr_copy_to_mapping(whole.mh, whole.at, before, SIZE));
    holds(next.at, fresh, SIZE);
    unmap(g, &whole);
    holds(next.at, fresh, SIZE);
    destroy(&next);
}

/* Without a handle type: a driver that lets nobody export it gives no window, which is an error that harms nothing; another one gives one. */
static void private(void) {
    enum { SIZE = 4 << 20 };
    struct vmm vmm = create(SIZE, 0);
    gdr_mh_t mh = {0};
    int gave = gdr_pin_buffer(g, vmm.at, SIZE, 0, 0, &mh);
    if (gave) {
        GIVES(ENOTSUP, gave);
        CHECK(!mh.h);
        printf("refused: memory without a handle type cannot be exported here\n");
    } else {
        GIVES(0, gdr_unpin_buffer(g, mh));
        struct mapped m = map(g, vmm.at, SIZE);
        both_ways(&vmm, &m, SIZE);
        unmap(g, &m);
        printf("pinned: memory without a handle type can be exported here\n");
    }
    destroy(&vmm);
    exportable(); /* all goes on */
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    load_gdr("libgdrapi.so.2");
    void *driver = load_cuda();
    VMM_FUNCTIONS(FIND_CUDA)
    g = gdr_open();
    CHECK(g);
    if (!strcmp(argv[1], "exportable"))
        exportable();
    else if (!strcmp(argv[1], "private"))
        private();
    else
        CHECK(!"a case: exportable or private");
    GIVES(0, gdr_close(g));
    printf("%s: good\n", argv[1]);
    return 0;
}
