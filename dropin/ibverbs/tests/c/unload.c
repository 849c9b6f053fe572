/* The library loaded by name and given back again, as some clients do, with everything open. */
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>

int main(void) {
    for (int i = 0; i < 3; i++) {
        void *library = dlopen("libibverbs.so.1", RTLD_LAZY);
        if (!library)
            return puts(dlerror()), 1;
        struct ibv_device **(*list)(int *) = dlsym(library, "ibv_get_device_list");
        struct ibv_context *(*open)(struct ibv_device *) = dlvsym(library, "ibv_open_device", "IBVERBS_1.1");
        struct ibv_pd *(*alloc)(struct ibv_context *) = dlsym(library, "ibv_alloc_pd");
        struct ibv_cq *(*cq)(struct ibv_context *, int, void *, struct ibv_comp_channel *, int) = dlsym(library, "ibv_create_cq");
        struct ibv_qp *(*qp)(struct ibv_pd *, struct ibv_qp_init_attr *) = dlsym(library, "ibv_create_qp");
        struct ibv_context *context = open(list(NULL)[0]);
        struct ibv_qp_init_attr init = {.qp_type = IBV_QPT_RC, .cap = {.max_send_wr = 1, .max_send_sge = 1}};
        init.send_cq = init.recv_cq = cq(context, 4, NULL, NULL, 0);
        if (!qp(alloc(context), &init) || dlclose(library))
            return 1;
    }
    return 0;
}
