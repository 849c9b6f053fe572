/* GDRCopy's API as programs use it and misuse it, one case by name: on the stand-in for CUDA's driver, and on a real GPU. */
#include "gdr.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>

_Static_assert(sizeof(struct info_v1) == 40 && sizeof(struct info_v2) == 48, "sizes of the structures");
_Static_assert(offsetof(struct info_v2, page_size) == 16 && offsetof(struct info_v2, tm_cycles) == 24, "offsets");
_Static_assert(offsetof(struct info_v2, cycles_per_ms) == 32 && offsetof(struct info_v2, mapping_type) == 40, "offsets");

static gdr_t g;

static sigjmp_buf back;

static void jump(int signal) {
    (void)signal;
    siglongjmp(back, 1);
}

/* Whether a load and a store there fault. Who handled such signals before does so afterwards. */
static int faults(volatile void *at) {
    struct sigaction mine = {.sa_handler = jump, .sa_flags = SA_NODEFER}, segv, bus;
    volatile int faulted = 0;
    sigaction(SIGSEGV, &mine, &segv);
    sigaction(SIGBUS, &mine, &bus);
    if (!sigsetjmp(back, 1))
        (void)*(volatile unsigned char *)at;
    else
        faulted++;
    if (!sigsetjmp(back, 1))
        *(volatile unsigned char *)at = 0xEE;
    else
        faulted++;
    sigaction(SIGSEGV, &segv, NULL);
    sigaction(SIGBUS, &bus, NULL);
    CHECK(faulted == 0 || faulted == 2);
    return faulted == 2;
}

/* Every function was found by load_gdr; versions, attributes, names, and both structures about one buffer. */
static void facts(void) {
    int major = -1, minor = -1, value = -1;
    gdr_runtime_get_version(&major, &minor);
    CHECK(major == 2 && minor == 6);
    major = minor = -1;
    GIVES(0, gdr_driver_get_version(g, &major, &minor));
    CHECK(major == 2 && minor >= 0);
    GIVES(0, gdr_get_attribute(g, 1, &value));
    CHECK(value == 1); /* mappings outlive the memory */
    GIVES(0, gdr_get_attribute(g, 2, &value));
    CHECK(value == 1); /* through BAR1, always */
    GIVES(0, gdr_get_attribute(g, 3, &value));
    CHECK(value == 0);
    GIVES(EINVAL, gdr_get_attribute(g, 4, &value));
    GIVES(EINVAL, gdr_get_attribute(g, 0, &value));
    const char *names[] = {"None", "Write Combining", "Caching", "Device"}, *name;
    for (unsigned type = NONE; type <= DEVICE; type++) {
        GIVES(0, gdr_get_mapping_type_string(type, &name));
        CHECK(!strcmp(name, names[type]));
    }
    GIVES(EINVAL, gdr_get_mapping_type_string((enum mapping)4, &name));

    struct memory memory = allocate(300000);
    gdr_mh_t mh;
    struct { struct info_v1 info; unsigned char after[64]; } v1;
    struct { struct info_v2 info; unsigned char after[64]; } v2;
    memset(&v1, 0xA5, sizeof v1);
    memset(&v2, 0xA5, sizeof v2);
    GIVES(0, gdr_pin_buffer_v2(g, memory.at, 300000, 0, &mh));
    GIVES(0, gdr_get_info(g, mh, &v1.info));
    GIVES(0, gdr_get_info_v2(g, mh, &v2.info));
    CHECK(v1.info.va == memory.at && v1.info.mapped_size == 5 * GPU_PAGE && v1.info.page_size == GPU_PAGE);
    CHECK(!v1.info.mapped && !v1.info.wc_mapping && v2.info.va == memory.at && v2.info.mapped_size == 5 * GPU_PAGE);
    CHECK(!v2.info.mapped && !v2.info.wc_mapping && v2.info.mapping_type == NONE && v2.info.page_size == GPU_PAGE);
    for (int i = 0; i < 64; i++) CHECK(v1.after[i] == 0xA5 && v2.after[i] == 0xA5);
    void *va;
    GIVES(0, gdr_map_v2(g, mh, &va, 300000, WC));
    GIVES(0, gdr_get_info(g, mh, &v1.info));
    GIVES(0, gdr_get_info_v2(g, mh, &v2.info));
    CHECK(v1.info.mapped && v1.info.wc_mapping && v2.info.mapped && v2.info.wc_mapping && v2.info.mapping_type == WC);
    CHECK((uintptr_t)va % (unsigned long)sysconf(_SC_PAGESIZE) == 0);
    GIVES(0, gdr_unmap(g, mh, va, 300000));
    GIVES(0, gdr_get_info_v2(g, mh, &v2.info));
    CHECK(!v2.info.mapped && v2.info.mapping_type == NONE);
    GIVES(0, gdr_unpin_buffer(g, mh));
    GIVES(0, gdr_pin_buffer_v2(g, memory.at, 300000, 1, &mh)); /* through BAR1, please */
    GIVES(0, gdr_unpin_buffer(g, mh));
    GIVES(0, cuMemFree_v2(memory.whole));
}

/* Bytes of every length and alignment arrive, and none besides. */
static void copies(void) {
    enum { SIZE = 1 << 20 };
    static unsigned char wanted[SIZE], got[SIZE];
    struct memory memory = allocate(SIZE);
    pattern(wanted, SIZE, 1);
    put(memory.at, wanted, SIZE);
    struct mapped m = map(g, memory.at, SIZE);
    GIVES(0, gdr_copy_from_mapping(m.mh, got, m.at, SIZE));
    CHECK(!memcmp(got, wanted, SIZE));
    size_t lengths[] = {0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 31, 33, 63, 64, 65, 127, 128, 200, 511, 4096, 4099, 65536, 300001};
    unsigned seed = 2;
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (size_t shift = 0; shift < 70; shift += shift < 17 ? 1 : 7) {
            size_t length = lengths[i], at = 1000 + shift;
            if (length > 5000 && shift > 3) break;
            pattern(wanted + at, length, seed++);
            GIVES(0, gdr_copy_to_mapping(m.mh, m.at + at, wanted + at, length));
            holds(memory.at + at - 200, wanted + at - 200, length + 400);
            memset(got, 0, length + 400);
            /* Out again, to another alignment. */
            GIVES(0, gdr_copy_from_mapping(m.mh, got + 3, m.at + at, length));
            CHECK(!memcmp(got + 3, wanted + at, length) && !got[2] && !got[3 + length]);
        }
    holds(memory.at, wanted, SIZE);
    /* Programs also store and load by themselves. */
    for (int i = 0; i < 1000; i++) ((volatile uint32_t *)m.at)[i * 7] = 0xC0FFEE00u + (unsigned)i;
    atomic_thread_fence(memory_order_seq_cst);
    GIVES(0, gdr_copy_to_mapping(m.mh, m.at + SIZE - 1, wanted + SIZE - 1, 1)); /* its fence also sends those on their way */
    uint32_t word;
    for (int i = 0; i < 1000; i++) {
        CHECK(((volatile uint32_t *)m.at)[i * 7] == 0xC0FFEE00u + (unsigned)i);
        GIVES(0, cuMemcpyDtoH_v2(&word, memory.at + (uint64_t)i * 28, 4));
        CHECK(word == 0xC0FFEE00u + (unsigned)i);
    }
    unmap(g, &m);
    GIVES(0, cuMemFree_v2(memory.whole));
}

/* Small allocations share GPU pages. One inside a page can be pinned, but only its page can be mapped, as UCX does. */
static void small(void) {
    uint64_t at[8], inside = 0;
    unsigned char wanted[512], others[512], got[512];
    memset(others, 0x3C, sizeof others);
    for (int i = 0; i < 8; i++) {
        GIVES(0, cuMemAlloc_v2(&at[i], 512));
        put(at[i], others, sizeof others);
        if (at[i] % GPU_PAGE) inside = at[i];
    }
    CHECK(inside);
    gdr_mh_t mh;
    struct info_v2 info;
    void *va;
    GIVES(0, gdr_pin_buffer(g, inside, 512, 0, 0, &mh));
    GIVES(0, gdr_get_info_v2(g, mh, &info));
    CHECK(info.va == (inside & ~(GPU_PAGE - 1)) && info.mapped_size == GPU_PAGE);
    GIVES(EINVAL, gdr_map(g, mh, &va, 512)); /* GDRCopy maps no address inside a page */
    GIVES(0, gdr_unpin_buffer(g, mh));
    struct mapped m = map(g, inside & ~(GPU_PAGE - 1), GPU_PAGE);
    pattern(wanted, sizeof wanted, 77);
    GIVES(0, gdr_copy_to_mapping(m.mh, m.va + inside % GPU_PAGE, wanted, sizeof wanted));
    for (int i = 0; i < 8; i++) holds(at[i], at[i] == inside ? wanted : others, 512);
    GIVES(0, gdr_copy_from_mapping(m.mh, got, m.va + inside % GPU_PAGE, sizeof got));
    CHECK(!memcmp(got, wanted, sizeof got));
    unmap(g, &m);
    for (int i = 0; i < 8; i++) GIVES(0, cuMemFree_v2(at[i]));
}

/* Two pins of overlapping ranges are two: what goes in by one is seen by the other, which stays when the first goes. */
static void overlap(void) {
    unsigned char wanted[3 * 65536], got[3 * 65536];
    struct memory memory = allocate(4 * GPU_PAGE);
    pattern(wanted, sizeof wanted, 5);
    struct mapped first = map(g, memory.at, 3 * GPU_PAGE), second = map(g, memory.at + GPU_PAGE, 3 * GPU_PAGE);
    gdr_t other = gdr_open();
    CHECK(other && other != g);
    struct mapped third = map(other, memory.at, 4 * GPU_PAGE);
    CHECK(first.mh.h != second.mh.h && second.mh.h != third.mh.h);
    GIVES(0, gdr_copy_to_mapping(first.mh, first.at, wanted, 3 * GPU_PAGE));
    GIVES(0, gdr_copy_from_mapping(second.mh, got, second.at, 2 * GPU_PAGE));
    CHECK(!memcmp(got, wanted + GPU_PAGE, 2 * GPU_PAGE));
    GIVES(0, gdr_unmap(g, first.mh, first.va, first.size)); /* all of the first, and nothing of the others */
    CHECK(faults(first.va) && faults(first.va + GPU_PAGE) && !faults(third.va) && !faults(second.va + 3 * GPU_PAGE - 1));
    GIVES(0, gdr_unpin_buffer(g, first.mh));
    pattern(wanted, sizeof wanted, 6);
    GIVES(0, gdr_copy_to_mapping(second.mh, second.at, wanted, 3 * GPU_PAGE));
    holds(memory.at + GPU_PAGE, wanted, 3 * GPU_PAGE);
    GIVES(0, gdr_close(g)); /* takes the second, not the third */
    GIVES(EINVAL, gdr_copy_to_mapping(second.mh, second.at, wanted, 8));
    GIVES(0, gdr_copy_from_mapping(third.mh, got, third.at + GPU_PAGE, 3 * GPU_PAGE));
    CHECK(!memcmp(got, wanted, sizeof got));
    g = other;
    unmap(g, &third);
    GIVES(0, cuMemFree_v2(memory.whole));
}

/* What was unmapped faults, whichever pointer to it is left, and comes back when it is mapped again. */
static void unmapped(void) {
    enum { SIZE = 4 << 20 };
    static unsigned char wanted[SIZE], got[SIZE];
    struct memory memory = allocate(SIZE);
    struct mapped m = map(g, memory.at, SIZE);
    pattern(wanted, SIZE, 21);
    for (int round = 0; round < 3; round++) {
        GIVES(0, gdr_copy_to_mapping(m.mh, m.at, wanted, SIZE));
        GIVES(0, gdr_unmap(g, m.mh, m.va, SIZE));
        CHECK(faults(m.va) && faults(m.va + 4095) && faults(m.va + SIZE / 2) && faults(m.va + SIZE - 1));
        GIVES(EINVAL, gdr_copy_to_mapping(m.mh, m.at, got, 64));
        GIVES(EINVAL, gdr_copy_from_mapping(m.mh, got, m.at, 64));
        holds(memory.at, wanted, SIZE); /* nothing of it arrived */
        void *va;
        GIVES(0, gdr_map(g, m.mh, &va, SIZE));
        m.at = (unsigned char *)va + (m.at - m.va);
        m.va = va;
        GIVES(0, gdr_copy_from_mapping(m.mh, got, m.at, SIZE));
        CHECK(!memcmp(got, wanted, SIZE));
        pattern(wanted, SIZE, 22 + (unsigned)round);
        for (size_t i = 0; i < SIZE; i += 8) memcpy((void *)(m.at + i), wanted + i, 8);
        atomic_thread_fence(memory_order_seq_cst);
    }
    GIVES(0, gdr_copy_to_mapping(m.mh, m.at, wanted, 1));
    holds(memory.at, wanted, SIZE);
    GIVES(0, gdr_unpin_buffer(g, m.mh)); /* still mapped */
    CHECK(faults(m.va) && faults(m.va + SIZE - 1));
    GIVES(0, cuMemFree_v2(memory.whole));
}

/* Of what is pinned, only what was asked for is mapped, in whole pages of the host. */
static void part(void) {
    enum { SIZE = 4 * 65536, SHOWN = 65536 + 100 };
    unsigned char wanted[SIZE], got[SIZE];
    size_t page = (size_t)sysconf(_SC_PAGESIZE), end = (SHOWN + page - 1) / page * page;
    struct memory memory = allocate(SIZE);
    gdr_mh_t mh;
    void *va;
    struct info_v2 info;
    pattern(wanted, SIZE, 31);
    put(memory.at, wanted, SIZE);
    GIVES(0, gdr_pin_buffer(g, memory.at, SIZE, 0, 0, &mh));
    GIVES(0, gdr_map(g, mh, &va, SHOWN));
    GIVES(0, gdr_get_info_v2(g, mh, &info));
    CHECK(info.mapped && info.mapped_size == SIZE); /* what is pinned, with GDRCopy, too */
    CHECK(faults((char *)va + end) && faults((char *)va + SIZE - 1));
    GIVES(0, gdr_copy_from_mapping(mh, got, va, end));
    CHECK(!memcmp(got, wanted, end));
    GIVES(EINVAL, gdr_copy_from_mapping(mh, got, va, end + 1));
    GIVES(EINVAL, gdr_copy_to_mapping(mh, (char *)va + end, wanted, 1));
    GIVES(EAGAIN, gdr_map(g, mh, &va, SIZE));
    GIVES(0, gdr_unmap(g, mh, va, SHOWN));
    CHECK(faults(va) && faults((char *)va + end - 1));
    GIVES(0, gdr_map(g, mh, &va, SIZE)); /* all of it this time */
    GIVES(0, gdr_copy_from_mapping(mh, got, va, SIZE));
    CHECK(!memcmp(got, wanted, SIZE));
    GIVES(0, gdr_unmap(g, mh, va, SIZE));
    GIVES(0, gdr_map(g, mh, &va, 1));
    CHECK(!faults((char *)va + page - 1) && faults((char *)va + page));
    GIVES(0, gdr_unpin_buffer(g, mh));
    GIVES(0, cuMemFree_v2(memory.whole));
}

/* Every mistake is an error number, and harms nothing. */
static void misuse(void) {
    struct memory memory = allocate(4 * GPU_PAGE);
    unsigned char host[256], wanted[256];
    gdr_mh_t mh, none = {0}, no_such = {0x1234567};
    gdr_t not_open = (gdr_t)(void *)host;
    struct info_v2 info;
    int flag;
    void *va, *again;
    pattern(wanted, sizeof wanted, 9);

    GIVES(EINVAL, gdr_pin_buffer(NULL, memory.at, GPU_PAGE, 0, 0, &mh));
    GIVES(EINVAL, gdr_pin_buffer(not_open, memory.at, GPU_PAGE, 0, 0, &mh));
    GIVES(EINVAL, gdr_pin_buffer(g, memory.at, GPU_PAGE, 0, 0, NULL));
    GIVES(EINVAL, gdr_pin_buffer(g, memory.at, 0, 0, 0, &mh));
    GIVES(EINVAL, gdr_pin_buffer(g, ~0ul - 100, 200, 0, 0, &mh));
    GIVES(EINVAL, gdr_pin_buffer(g, memory.at, ~0ul, 0, 0, &mh));
    GIVES(EINVAL, gdr_pin_buffer(g, (unsigned long)host, 64, 0, 0, &mh));
    GIVES(EINVAL, gdr_pin_buffer(g, 0, 64, 0, 0, &mh));
    GIVES(EINVAL, gdr_pin_buffer_v2(g, memory.at, GPU_PAGE, 2, &mh));
    CHECK(gdr_pin_buffer(g, memory.at, 1ul << 40, 0, 0, &mh)); /* far more than there is */
    uint64_t managed;
    void *pinned;
    GIVES(0, cuMemAllocManaged(&managed, GPU_PAGE, 1));
    GIVES(EINVAL, gdr_pin_buffer(g, managed, 64, 0, 0, &mh));
    GIVES(0, cuMemHostAlloc(&pinned, 2 * GPU_PAGE, 0));
    GIVES(EINVAL, gdr_pin_buffer(g, ((unsigned long)pinned + GPU_PAGE - 1) & ~(GPU_PAGE - 1), 64, 0, 0, &mh));

    GIVES(0, gdr_pin_buffer(g, memory.at, GPU_PAGE, 7, 7, &mh)); /* tokens: nobody looks at them any more */
    GIVES(EINVAL, gdr_get_info_v2(g, none, &info));
    GIVES(EINVAL, gdr_get_info_v2(g, no_such, &info));
    GIVES(EINVAL, gdr_get_info_v2(g, mh, NULL));
    GIVES(EINVAL, gdr_get_info(NULL, mh, NULL));
    GIVES(EINVAL, gdr_get_callback_flag(g, mh, NULL));
    GIVES(0, gdr_get_callback_flag(g, mh, &flag));
    CHECK(flag == 0);
    GIVES(EINVAL, gdr_copy_to_mapping(mh, host, wanted, 8)); /* not mapped yet */
    GIVES(EINVAL, gdr_copy_from_mapping(mh, host, host, 8));
    GIVES(EINVAL, gdr_unmap(g, mh, host, GPU_PAGE));
    GIVES(EINVAL, gdr_map(g, mh, NULL, GPU_PAGE));
    GIVES(EINVAL, gdr_map(g, mh, &va, 0));
    GIVES(EINVAL, gdr_map(g, mh, &va, GPU_PAGE + 1));
    GIVES(EINVAL, gdr_map(g, mh, &va, ~0ul));
    GIVES(ENOTSUP, gdr_map_v2(g, mh, &va, GPU_PAGE, CACHING));
    GIVES(ENOTSUP, gdr_map_v2(g, mh, &va, GPU_PAGE, DEVICE));
    GIVES(EINVAL, gdr_map_v2(g, mh, &va, GPU_PAGE, -1));
    GIVES(EINVAL, gdr_map(g, none, &va, GPU_PAGE));
    GIVES(0, gdr_map(g, mh, &va, GPU_PAGE));
    GIVES(EAGAIN, gdr_map(g, mh, &again, GPU_PAGE));
    GIVES(EAGAIN, gdr_map_v2(g, mh, &again, GPU_PAGE, CACHING));

    /* Copies beyond the mapping, before it, around the end of all addresses, and from memory that is not there. */
    GIVES(EINVAL, gdr_copy_to_mapping(mh, (char *)va + GPU_PAGE - 8, wanted, 16));
    GIVES(EINVAL, gdr_copy_to_mapping(mh, (char *)va - 8, wanted, 16));
    GIVES(EINVAL, gdr_copy_to_mapping(mh, va, wanted, ~0ul));
    GIVES(EINVAL, gdr_copy_to_mapping(mh, host, wanted, 8));
    GIVES(EINVAL, gdr_copy_from_mapping(mh, host, host, 8));
    GIVES(EINVAL, gdr_copy_from_mapping(none, host, va, 8));
    GIVES(EFAULT, gdr_copy_to_mapping(mh, va, NULL, 8));
    GIVES(EFAULT, gdr_copy_to_mapping(mh, va, (void *)64, 8));
    GIVES(0, gdr_copy_to_mapping(mh, va, wanted, sizeof wanted)); /* and all goes on */
    holds(memory.at, wanted, sizeof wanted);

    /* In the wrong order, twice, by the wrong owner. */
    gdr_t other = gdr_open();
    CHECK(other);
    GIVES(EINVAL, gdr_unmap(other, mh, va, GPU_PAGE));
    GIVES(EINVAL, gdr_unpin_buffer(other, mh));
    GIVES(EINVAL, gdr_unmap(g, mh, (char *)va + 4096, GPU_PAGE));
    GIVES(EINVAL, gdr_unmap(g, mh, va, 0));
    GIVES(0, gdr_unmap(g, mh, va, GPU_PAGE));
    GIVES(EINVAL, gdr_unmap(g, mh, va, GPU_PAGE));
    CHECK(faults(va));
    GIVES(0, gdr_map(g, mh, &va, GPU_PAGE));
    GIVES(0, gdr_unpin_buffer(g, mh)); /* still mapped */
    CHECK(faults(va));
    GIVES(EINVAL, gdr_unmap(g, mh, va, GPU_PAGE));
    GIVES(EINVAL, gdr_unpin_buffer(g, mh));
    GIVES(EINVAL, gdr_copy_to_mapping(mh, va, wanted, 8));
    GIVES(EINVAL, gdr_get_callback_flag(g, mh, &flag));
    gdr_mh_t next;
    GIVES(0, gdr_pin_buffer(other, memory.at, GPU_PAGE, 0, 0, &next));
    CHECK(next.h != mh.h); /* a handle does not come back */
    GIVES(0, gdr_map(other, next, &va, GPU_PAGE));
    GIVES(0, gdr_close(other));
    CHECK(faults(va));
    GIVES(EINVAL, gdr_close(other));
    GIVES(EINVAL, gdr_copy_to_mapping(next, va, wanted, 8));
    GIVES(EINVAL, gdr_pin_buffer(other, memory.at, GPU_PAGE, 0, 0, &next));
    GIVES(EINVAL, gdr_close(NULL));
    GIVES(0, cuMemFree_v2(memory.whole));
    GIVES(EINVAL, gdr_pin_buffer(g, memory.at, GPU_PAGE, 0, 0, &mh)); /* freed */
}

/* Memory freed while mapped: the mapping stays, and reaches nothing that was allocated since. (Allocations of less than 2 MiB are parts of
 * larger ones, which CUDA gives out again without telling anybody, GDRCopy neither.) */
static void freed(void) {
    enum { SIZE = 4 << 20 };
    static unsigned char wanted[SIZE], fresh[SIZE], got[SIZE];
    struct memory memory = allocate(SIZE), next[4];
    struct mapped m = map(g, memory.at, SIZE);
    int flag = -1;
    pattern(wanted, SIZE, 11);
    pattern(fresh, SIZE, 12);
    GIVES(0, gdr_copy_to_mapping(m.mh, m.at, wanted, SIZE));
    GIVES(0, gdr_get_callback_flag(g, m.mh, &flag));
    CHECK(flag == 0);
    GIVES(0, cuMemFree_v2(memory.whole));
    GIVES(0, gdr_get_callback_flag(g, m.mh, &flag));
    CHECK(flag == 0); /* nobody took the mapping away */
    GIVES(0, gdr_copy_from_mapping(m.mh, got, m.at, SIZE)); /* still what it was */
    CHECK(!memcmp(got, wanted, SIZE));
    for (int i = 0; i < 4; i++) {
        next[i] = allocate(SIZE);
        put(next[i].at, fresh, SIZE);
    }
    GIVES(0, gdr_copy_to_mapping(m.mh, m.at, wanted, SIZE));
    ((volatile uint32_t *)m.at)[0] = 0xDEAD;
    for (int i = 0; i < 4; i++) holds(next[i].at, fresh, SIZE);
    /* Unmapped and mapped again, it is still the old memory. */
    void *va;
    GIVES(0, gdr_copy_to_mapping(m.mh, m.at, wanted, 4));
    GIVES(0, gdr_unmap(g, m.mh, m.va, SIZE));
    CHECK(faults(m.va));
    GIVES(0, gdr_map(g, m.mh, &va, SIZE));
    GIVES(0, gdr_copy_from_mapping(m.mh, got, va, SIZE));
    CHECK(!memcmp(got, wanted, SIZE));
    m.va = va;
    unmap(g, &m);
    for (int i = 0; i < 4; i++) {
        holds(next[i].at, fresh, SIZE);
        GIVES(0, cuMemFree_v2(next[i].whole));
    }
}

static void faulted(int signal) {
    (void)signal;
    _exit(0);
}

static void wait_good(pid_t child) {
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* A child has nothing of its parent's: errors, a fault where it touches the mapping, and the parent does not notice. */
static void forked(void) {
    struct memory memory = allocate(2 * GPU_PAGE);
    struct mapped m = map(g, memory.at, GPU_PAGE);
    gdr_mh_t not_mapped;
    GIVES(0, gdr_pin_buffer(g, memory.at + GPU_PAGE, GPU_PAGE, 0, 0, &not_mapped));
    unsigned char wanted[64], got[64];
    pattern(wanted, sizeof wanted, 13);
    GIVES(0, gdr_copy_to_mapping(m.mh, m.at, wanted, sizeof wanted));
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        void *va;
        gdr_mh_t mh;
        int flag;
        GIVES(EACCES, gdr_copy_from_mapping(m.mh, got, m.at, sizeof got));
        GIVES(EACCES, gdr_copy_to_mapping(m.mh, m.at, got, sizeof got));
        GIVES(EACCES, gdr_map(g, not_mapped, &va, GPU_PAGE));
        GIVES(EACCES, gdr_pin_buffer(g, memory.at, GPU_PAGE, 0, 0, &mh));
        GIVES(EACCES, gdr_unmap(g, m.mh, m.va, m.size));
        GIVES(EACCES, gdr_unpin_buffer(g, m.mh));
        GIVES(EACCES, gdr_get_callback_flag(g, m.mh, &flag));
        GIVES(EACCES, gdr_close(g));
        gdr_t own = gdr_open(); /* it may open one of its own, but CUDA does not survive the fork */
        CHECK(own && own != g);
        GIVES(EACCES, gdr_pin_buffer(own, memory.at, GPU_PAGE, 0, 0, &mh));
        GIVES(EACCES, gdr_copy_from_mapping(m.mh, got, m.at, sizeof got));
        GIVES(0, gdr_close(own));
        signal(SIGSEGV, faulted);
        signal(SIGBUS, faulted);
        unsigned char seen = *(volatile unsigned char *)m.at;
        fprintf(stderr, "FAILED: the child read %d through its parent's mapping\n", seen);
        _exit(1);
    }
    wait_good(child);
    GIVES(0, gdr_copy_from_mapping(m.mh, got, m.at, sizeof got));
    CHECK(!memcmp(got, wanted, sizeof got));
    GIVES(0, gdr_unpin_buffer(g, not_mapped));
    unmap(g, &m);
    GIVES(0, cuMemFree_v2(memory.whole));
}

enum { THREADS = 8, ROUNDS = 60 };
static struct memory shared;
static struct mapped contested;
static atomic_int is_over;

/* Each thread has pages of its own, and opens, pins, maps, copies and closes again and again. */
static void *worker(void *argument) {
    size_t index = (size_t)argument, size = 2 * GPU_PAGE;
    uint64_t at = shared.at + index * size;
    unsigned char *wanted = malloc(size), *got = malloc(size);
    CHECK(wanted && got);
    for (unsigned round = 0; round < ROUNDS; round++) {
        gdr_t own = gdr_open();
        CHECK(own);
        struct mapped m = map(own, at, size);
        pattern(wanted, size, (unsigned)index * 1000 + round);
        GIVES(0, gdr_copy_to_mapping(m.mh, m.at, wanted, size));
        GIVES(0, gdr_copy_from_mapping(m.mh, got, m.at, size));
        CHECK(!memcmp(wanted, got, size));
        if (round % 2) unmap(own, &m);
        GIVES(0, gdr_close(own));
    }
    free(wanted);
    free(got);
    return NULL;
}

/* Copies through a handle that another thread unmaps or takes away: they succeed or are refused. */
static void *copier(void *argument) {
    unsigned char bytes[4096] = {0};
    int gave;
    do gave = argument ? gdr_copy_from_mapping(contested.mh, bytes, contested.at, sizeof bytes) : gdr_copy_to_mapping(contested.mh, contested.at, bytes, sizeof bytes);
    while (gave == 0 || (gave == EINVAL && !is_over));
    GIVES(EINVAL, gave);
    return NULL;
}

static void threads(void) {
    pthread_t started[THREADS];
    shared = allocate(2 * THREADS * GPU_PAGE);
    for (size_t i = 0; i < THREADS; i++) CHECK(!pthread_create(&started[i], NULL, worker, (void *)i));
    for (size_t i = 0; i < THREADS; i++) CHECK(!pthread_join(started[i], NULL));
    contested = map(g, shared.at, GPU_PAGE);
    is_over = 0;
    for (size_t i = 0; i < 3; i++) CHECK(!pthread_create(&started[i], NULL, copier, (void *)(i % 2)));
    /* Mostly back to back: a copy that faulted in between is told the same though it is mapped again. (Seen in one run of five where it was not.) */
    for (int i = 0; i < 6000; i++) {
        void *va;
        if (i % 64 == 0) usleep(20);
        GIVES(0, gdr_unmap(g, contested.mh, contested.va, contested.size));
        GIVES(0, gdr_map(g, contested.mh, &va, contested.size));
        CHECK(va == contested.va); /* not promised, but what the copiers know */
    }
    unmap(g, &contested);
    is_over = 1;
    for (size_t i = 0; i < 3; i++) CHECK(!pthread_join(started[i], NULL));
    GIVES(0, cuMemFree_v2(shared.whole));
}

/* The process ends with everything open, and the library was given back. */
static void exits(void) {
    struct memory memory = allocate(GPU_PAGE);
    struct mapped m = map(g, memory.at, GPU_PAGE);
    m.at[0] = 1;
    dlclose(gdr_library);
    m.at[1] = 2;
    exit(0);
}

/* Nothing can be pinned here, and the program is told before it tries. */
static void closed(void) {
    errno = 0;
    CHECK(!gdr_open() && errno == ENODEV);
}

int main(int argc, char **argv) {
    const struct { const char *name; void (*run)(void); } cases[] = {
        {"facts", facts}, {"copies", copies}, {"small", small}, {"overlap", overlap}, {"unmapped", unmapped}, {"part", part}, {"misuse", misuse},
        {"freed", freed}, {"forked", forked}, {"threads", threads}, {"exits", exits},
    };
    CHECK(argc > 1);
    load_gdr("libgdrapi.so.2");
    if (!strcmp(argv[1], "closed")) {
        closed();
        return 0;
    }
    load_cuda();
    g = gdr_open();
    CHECK(g);
    int found = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (!strcmp(argv[1], cases[i].name) || (!strcmp(argv[1], "all") && strcmp(cases[i].name, "exits"))) {
            double start = now();
            cases[i].run();
            found = 1;
            printf("%s: good, %.0f ms\n", cases[i].name, (now() - start) * 1e3);
            fflush(stdout);
        }
    CHECK(found);
    GIVES(0, gdr_close(g));
    return 0;
}
