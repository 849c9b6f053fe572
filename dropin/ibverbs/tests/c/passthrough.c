/* Devices of the system beside ours: each call goes to the library whose object it is about. */
#include "rig.h"

int ibv_dontfork_range(void *base, size_t size);
int ibv_dofork_range(void *base, size_t size);

int main(void) {
    CHECK(ibv_fork_init() == 0); /* before it is loaded: passed on then */
    int count;
    struct ibv_device **list = ibv_get_device_list(&count);
    CHECK(list && count == 2 && !list[2]);
    CHECK(!strcmp(ibv_get_device_name(list[0]), "nb0") && !strcmp(ibv_get_device_name(list[1]), "real0"));
    CHECK(ibv_fork_init() == 1);
    CHECK(ibv_is_fork_initialized() == IBV_FORK_ENABLED);
    CHECK(ibv_dontfork_range((void *)3, 4) == -7 && ibv_dofork_range((void *)3, 4) == -8);
    CHECK(ibv_import_device(33) && ibv_import_device(33)->device == list[1] && !ibv_import_device(34));
    struct ibv_context *ours = ibv_open_device(list[0]), *theirs = ibv_open_device(list[1]);
    CHECK(ours && theirs && theirs->device == list[1]);
    ibv_free_device_list(list);
    union ibv_gid gid;
    CHECK(!ibv_query_gid(theirs, 1, 4, &gid) && gid.raw[15] == 5);
    CHECK(ibv_query_gid(ours, 1, 8, &gid) == -1 && errno == EINVAL);
    struct ibv_pd *pd = ibv_alloc_pd(ours), *real = ibv_alloc_pd(theirs);
    CHECK(pd && real && pd->context == ours && real->context == theirs);
    CHECK(!ibv_reg_mr(real, (void *)7, 8, 9) && errno == 4321);
    CHECK(!ibv_reg_dmabuf_mr(real, 1, 2, 3, 4, 5) && errno == 1234);
    CHECK(!ibv_reg_mr(pd, (void *)7, 8, 0) && errno == EFAULT);
    struct ibv_async_event event = {.element.qp = (struct ibv_qp *)real};
    ibv_ack_async_event(&event);
    CHECK(event.event_type == 99);
    CHECK(ibv_dealloc_pd(real) == 4711 && !ibv_dealloc_pd(pd));
    CHECK(ibv_dealloc_pd(pd) == EINVAL && ibv_dealloc_pd(NULL) == EINVAL); /* ours once, or nobody's: never theirs */
    CHECK(ibv_close_device(theirs) == 0 && !ibv_close_device(ours)); /* its list was freed, too */
    return 0;
}
