/* A program that runs out of memory: what cannot be made is an error, what exists goes on, and all is well again afterwards. */
#define _GNU_SOURCE
#include <dirent.h>
#include <sys/resource.h>

#include "rig.h"

enum { MANY = 100000 };

static struct side a, b;
static void *made[MANY];

static void transfer(void) {
    struct ibv_sge sge = sge_of(&a, 0, 3000);
    struct ibv_send_wr wr = {.wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED}, *bad;
    wr.wr.rdma.remote_addr = (uintptr_t)b.memory;
    wr.wr.rdma.rkey = b.mr->rkey;
    CHECK(!ibv_post_send(a.qp, &wr, &bad));
    wait_good(a.cq, 1, IBV_WC_RDMA_WRITE);
}

static void *make_pd(void) { return ibv_alloc_pd(a.context); }
static void drop_pd(void *pd) { CHECK(!ibv_dealloc_pd(pd)); }
static void *make_cq(void) { return ibv_create_cq(a.context, 4096, NULL, NULL, 0); }
static void drop_cq(void *cq) { CHECK(!ibv_destroy_cq(cq)); }
static void *make_mr(void) { return ibv_reg_mr(a.pd, a.memory, 100, ALL_ACCESS); }
static void drop_mr(void *mr) { CHECK(!ibv_dereg_mr(mr)); }
static void *make_queue_pair(void) {
    struct ibv_qp_init_attr init = qp_attributes(&a, IBV_QPT_RC);
    return ibv_create_qp(a.pd, &init);
}
static void drop_queue_pair(void *qp) { CHECK(!ibv_destroy_qp(qp)); }

/* Bytes of address space of this process. */
static size_t space(void) {
    unsigned long pages;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file && fscanf(file, "%lu", &pages) == 1 && !fclose(file));
    return pages * 4096;
}

/* Whether all threads but this one sleep. */
static int threads_sleep(void) {
    int all = 1;
    DIR *folder = opendir("/proc/self/task");
    CHECK(folder);
    for (struct dirent *entry; (entry = readdir(folder));) {
        char path[300], state = 0;
        snprintf(path, sizeof path, "/proc/self/task/%s/stat", entry->d_name);
        FILE *file = entry->d_name[0] == '.' || atoi(entry->d_name) == getpid() ? NULL : fopen(path, "r");
        if (!file)
            continue;
        all &= fscanf(file, "%*d (%*[^)]) %c", &state) == 1 && state == 'S';
        fclose(file);
    }
    closedir(folder);
    return all;
}

static void limit(size_t bytes) {
    struct rlimit to = {bytes, RLIM_INFINITY};
    CHECK(!setrlimit(RLIMIT_AS, &to));
}

static void exhaust(void *(*make)(void), void (*drop)(void *)) {
    int count = 0;
    limit(space() + (1 << 20));
    /* Blocks that the C library has kept free are the program's, too. */
    void *hoard[64];
    int hoarded = 0;
    for (size_t size = 1 << 20; size >= 4096 && hoarded < 64; size /= 2)
        while (hoarded < 64 && (hoard[hoarded] = malloc(size)))
            hoarded++;
    errno = 0;
    while (count < MANY && (made[count] = make()))
        count++;
    int why = errno;
    if (count == MANY)
        printf("%d objects, and memory is left\n", count);
    else if (why != ENOMEM)
        printf("object %d: %s\n", count, strerror(why));
    CHECK(count == MANY || why == ENOMEM);
    transfer();
    while (hoarded)
        free(hoard[--hoarded]);
    limit(RLIM_INFINITY);
    while (count)
        drop(made[--count]);
    void *again = make();
    CHECK(again);
    drop(again);
    transfer();
}

int main(void) {
    make_pair(&a, &b, IBV_QPT_RC);
    transfer();
    /* The C library aborts where a thread that starts finds no memory: ours sleep by then. */
    while (!threads_sleep())
        usleep(1000);
    exhaust(make_pd, drop_pd);
    exhaust(make_cq, drop_cq);
    exhaust(make_mr, drop_mr);
    exhaust(make_queue_pair, drop_queue_pair);
    drop_pair(&a, &b);
    return 0;
}
