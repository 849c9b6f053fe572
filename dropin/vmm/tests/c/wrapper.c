/* Another library that wraps cuMemCreate. It finds libcuda's when it is loaded, or with LAZY at the first call. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>

typedef int (*create_t)(unsigned long long *, unsigned long, const void *, unsigned long long);
static create_t next;

static void find(void) {
    void *cuda = dlopen(getenv("LIBCUDA"), RTLD_NOW);
    if (cuda)
        next = (create_t)dlsym(cuda, "cuMemCreate");
}

__attribute__((constructor)) static void start(void) {
    if (!getenv("LAZY"))
        find();
}

int cuMemCreate(unsigned long long *handle, unsigned long size, const void *prop, unsigned long long flags) {
    if (!next)
        find();
    return next ? next(handle, size, prop, flags) : 3;
}
