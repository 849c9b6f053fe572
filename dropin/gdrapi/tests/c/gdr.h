/* What programs that use GDRCopy know of it: the interface of version 2.6, written down from its documentation; and CUDA's driver, found
 * by name. The library is loaded as NCCL and NVSHMEM load it, by dlopen. */
#ifndef GDR_H
#define GDR_H
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CHECK(what)                                                                       \
    do {                                                                                  \
        if (!(what)) {                                                                    \
            fprintf(stderr, "%s:%d: FAILED: %s\n", __FILE__, __LINE__, #what);             \
            fflush(NULL);                                                                 \
            _exit(1);                                                                     \
        }                                                                                 \
    } while (0)
/* A call that returns an error number, and the one it must return. */
#define GIVES(number, call)                                                                                           \
    do {                                                                                                              \
        int gave_ = (call);                                                                                           \
        if (gave_ != (number)) {                                                                                      \
            fprintf(stderr, "%s:%d: FAILED: %s gave %d (%s), not %d\n", __FILE__, __LINE__, #call, gave_,              \
                    strerror(gave_), (int)(number));                                                                  \
            fflush(NULL);                                                                                             \
            _exit(1);                                                                                                 \
        }                                                                                                             \
    } while (0)

#define GPU_PAGE 65536ul

typedef struct gdr *gdr_t;
typedef struct { unsigned long h; } gdr_mh_t;
enum mapping { NONE, WC, CACHING, DEVICE };

struct info_v1 {
    uint64_t va, mapped_size;
    uint32_t page_size;
    uint64_t tm_cycles;
    uint32_t cycles_per_ms;
    unsigned mapped : 1, wc_mapping : 1;
};

struct info_v2 {
    uint64_t va, mapped_size;
    uint32_t page_size;
    uint64_t tm_cycles;
    uint32_t cycles_per_ms;
    unsigned mapped : 1, wc_mapping : 1;
    enum mapping mapping_type;
};

#define GDR_FUNCTIONS(X)                                                                         \
    X(gdr_t, gdr_open, (void))                                                                   \
    X(int, gdr_close, (gdr_t))                                                                   \
    X(int, gdr_pin_buffer, (gdr_t, unsigned long, size_t, uint64_t, uint32_t, gdr_mh_t *))       \
    X(int, gdr_pin_buffer_v2, (gdr_t, unsigned long, size_t, uint32_t, gdr_mh_t *))              \
    X(int, gdr_unpin_buffer, (gdr_t, gdr_mh_t))                                                  \
    X(int, gdr_get_callback_flag, (gdr_t, gdr_mh_t, int *))                                      \
    X(int, gdr_get_info, (gdr_t, gdr_mh_t, struct info_v1 *))                                    \
    X(int, gdr_get_info_v2, (gdr_t, gdr_mh_t, struct info_v2 *))                                 \
    X(int, gdr_map, (gdr_t, gdr_mh_t, void **, size_t))                                          \
    X(int, gdr_map_v2, (gdr_t, gdr_mh_t, void **, size_t, int))                                  \
    X(int, gdr_unmap, (gdr_t, gdr_mh_t, void *, size_t))                                         \
    X(int, gdr_copy_to_mapping, (gdr_mh_t, void *, const void *, size_t))                        \
    X(int, gdr_copy_from_mapping, (gdr_mh_t, void *, const void *, size_t))                      \
    X(void, gdr_runtime_get_version, (int *, int *))                                             \
    X(int, gdr_driver_get_version, (gdr_t, int *, int *))                                        \
    X(int, gdr_get_attribute, (gdr_t, unsigned, int *))                                          \
    X(int, gdr_get_mapping_type_string, (enum mapping, const char **))

#define CUDA_FUNCTIONS(X)                                            \
    X(int, cuInit, (unsigned))                                       \
    X(int, cuDevicePrimaryCtxRetain, (void **, int))                 \
    X(int, cuCtxSetCurrent, (void *))                                \
    X(int, cuMemAlloc_v2, (uint64_t *, size_t))                      \
    X(int, cuMemAllocManaged, (uint64_t *, size_t, unsigned))        \
    X(int, cuMemHostAlloc, (void **, size_t, unsigned))              \
    X(int, cuMemFree_v2, (uint64_t))                                 \
    X(int, cuMemcpyHtoD_v2, (uint64_t, const void *, size_t))        \
    X(int, cuCtxSynchronize, (void))                                 \
    X(int, cuMemcpyDtoH_v2, (void *, uint64_t, size_t))

#define DECLARE(result, name, arguments) static result(*name) arguments;
GDR_FUNCTIONS(DECLARE)
CUDA_FUNCTIONS(DECLARE)

static void *gdr_library;

static void load_gdr(const char *name) {
    gdr_library = dlopen(name, RTLD_NOW);
    if (!gdr_library) fprintf(stderr, "FAILED: %s\n", dlerror());
    CHECK(gdr_library);
#define FIND_GDR(result, name, arguments) CHECK((name = (result(*) arguments)dlsym(gdr_library, #name)));
    GDR_FUNCTIONS(FIND_GDR)
}

/* Gives the driver's library, for functions that only some of these programs know. */
static void *load_cuda(void) {
    const char *name = getenv("NOBOUNCE_CUDA");
    void *driver = dlopen(name && *name ? name : "libcuda.so.1", RTLD_NOW), *context;
    CHECK(driver);
#define FIND_CUDA(result, name, arguments) CHECK((name = (result(*) arguments)dlsym(driver, #name)));
    CUDA_FUNCTIONS(FIND_CUDA)
    GIVES(0, cuInit(0));
    GIVES(0, cuDevicePrimaryCtxRetain(&context, 0));
    GIVES(0, cuCtxSetCurrent(context));
    return driver;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* GPU memory that begins with a GPU page, as programs allocate it for GDRCopy. */
struct memory {
    uint64_t whole, at;
    size_t size;
};

static struct memory allocate(size_t size) {
    struct memory memory = {.size = size};
    GIVES(0, cuMemAlloc_v2(&memory.whole, size + GPU_PAGE));
    memory.at = (memory.whole + GPU_PAGE - 1) & ~(GPU_PAGE - 1);
    return memory;
}

static void pattern(unsigned char *to, size_t size, unsigned seed) {
    for (size_t i = 0; i < size; i++) {
        seed = seed * 1664525u + 1013904223u;
        to[i] = (unsigned char)(seed >> 24);
    }
}

/* A pinned and mapped buffer. */
struct mapped {
    gdr_mh_t mh;
    struct info_v2 info;
    unsigned char *va, *at;
    size_t size;
};

static struct mapped map(gdr_t g, uint64_t at, size_t size) {
    struct mapped mapped = {.size = size};
    void *va = NULL;
    GIVES(0, gdr_pin_buffer(g, at, size, 0, 0, &mapped.mh));
    CHECK(mapped.mh.h);
    GIVES(0, gdr_map(g, mapped.mh, &va, size));
    GIVES(0, gdr_get_info_v2(g, mapped.mh, &mapped.info));
    mapped.va = va;
    mapped.at = mapped.va + (at - mapped.info.va);
    return mapped;
}

static void unmap(gdr_t g, struct mapped *mapped) {
    GIVES(0, gdr_unmap(g, mapped->mh, mapped->va, mapped->size));
    GIVES(0, gdr_unpin_buffer(g, mapped->mh));
}

/* Puts bytes into GPU memory by CUDA. From pageable memory the call returns before they are there: without the wait they
   could land on what is stored through the mapping next. */
static void put(uint64_t at, const void *bytes, size_t size) {
    GIVES(0, cuMemcpyHtoD_v2(at, bytes, size));
    GIVES(0, cuCtxSynchronize());
}

/* What the GPU says is at an address. */
static void holds(uint64_t at, const void *wanted, size_t size) {
    unsigned char *found = malloc(size);
    CHECK(found);
    GIVES(0, cuMemcpyDtoH_v2(found, at, size));
    CHECK(!memcmp(found, wanted, size));
    free(found);
}
#endif
