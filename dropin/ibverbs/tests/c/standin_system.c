/* A stand-in for the system's libibverbs, with one device "real0" whose every call says that it came here. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdlib.h>
#include <string.h>

static struct ibv_device device = {.name = "real0", .dev_name = "uverbs9"};
static struct ibv_context context = {.device = &device, .async_fd = -1};
static struct ibv_pd pd = {.context = &context};
static int lists, forks;

int ibv_fork_init(void) { return forks++; }
enum ibv_fork_status ibv_is_fork_initialized(void) { return forks ? IBV_FORK_ENABLED : IBV_FORK_DISABLED; }
int ibv_dontfork_range(void *base, size_t size) { return base == (void *)3 && size == 4 ? -7 : 0; }
int ibv_dofork_range(void *base, size_t size) { return base == (void *)3 && size == 4 ? -8 : 0; }
struct ibv_context *ibv_import_device(int fd) { return fd == 33 ? &context : NULL; }

struct ibv_device **(ibv_get_device_list)(int *count) {
    struct ibv_device **list = calloc(2, sizeof *list);
    list[0] = &device;
    *count = 1;
    lists++;
    return list;
}
void ibv_free_device_list(struct ibv_device **list) {
    lists--;
    free(list);
}
struct ibv_context *ibv_open_device(struct ibv_device *opened) { return opened == &device ? &context : NULL; }
int ibv_close_device(struct ibv_context *closed) { return closed == &context ? lists : -1; }
struct ibv_pd *ibv_alloc_pd(struct ibv_context *of) { return of == &context ? &pd : NULL; }
int ibv_dealloc_pd(struct ibv_pd *freed) { return freed == &pd ? 4711 : -1; }
int ibv_query_gid(struct ibv_context *of, uint8_t port, int index, union ibv_gid *gid) {
    memset(gid, port + index, sizeof *gid);
    return of == &context ? 0 : -1;
}
struct ibv_mr *(ibv_reg_mr)(struct ibv_pd *of, void *addr, size_t length, int access) {
    errno = of == &pd && addr == (void *)7 && length == 8 && access == 9 ? 4321 : 1;
    return NULL;
}
struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *of, uint64_t offset, size_t length, uint64_t iova, int fd, int access) {
    errno = of == &pd && offset == 1 && length == 2 && iova == 3 && fd == 4 && access == 5 ? 1234 : 1;
    return NULL;
}
void ibv_ack_async_event(struct ibv_async_event *event) { event->event_type = 99; }
