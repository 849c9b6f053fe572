/* What programs know of cuFile: the interface of version 1.19, written down from its documentation; and CUDA's driver, found by name. */
#ifndef CUFILE_H
#define CUFILE_H
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(what)                                                            \
    do {                                                                       \
        if (!(what)) {                                                         \
            fprintf(stderr, "%s:%d: FAILED: %s\n", __FILE__, __LINE__, #what); \
            fflush(NULL);                                                      \
            _exit(1);                                                          \
        }                                                                      \
    } while (0)
/* A number, and what it must be. */
#define GIVES(number, call)                                                                                     \
    do {                                                                                                        \
        long gave_ = (long)(call);                                                                              \
        if (gave_ != (long)(number)) {                                                                          \
            fprintf(stderr, "%s:%d: FAILED: %s gave %ld, not %ld\n", __FILE__, __LINE__, #call, gave_,           \
                    (long)(number));                                                                            \
            fflush(NULL);                                                                                       \
            _exit(1);                                                                                           \
        }                                                                                                       \
    } while (0)
#define IS(number, call) GIVES(number, (call).err)

typedef struct { int err, cu_err; } status_t;
typedef void *handle_t;
struct descr { int type; union { int fd; void *handle; } handle; const void *fs_ops; };
struct properties {
    struct { unsigned major, minor; size_t poll, max_direct_io; unsigned dstatus, dcontrol; } nvfs;
    unsigned fflags, cache, buffer_cache, pinned, batch_size, batch_timeout;
};
struct vector { void *base; size_t len; };
struct params {
    int mode;
    struct { void *base; off_t file_offset, buffer_offset; size_t size; } batch;
    handle_t fh;
    int opcode;
    void *cookie;
};
struct event { void *cookie; int status; size_t ret; };

#define FUNCTIONS(X)                                                                                  \
    X(status_t, cuFileDriverOpen, (void))                                                             \
    X(status_t, cuFileDriverClose_v2, (void))                                                         \
    X(long, cuFileUseCount, (void))                                                                   \
    X(status_t, cuFileGetVersion, (int *))                                                            \
    X(status_t, cuFileDriverGetProperties, (struct properties *))                                     \
    X(status_t, cuFileDriverSetMaxDirectIOSize, (size_t))                                             \
    X(status_t, cuFileDriverSetPollMode, (bool, size_t))                                              \
    X(status_t, cuFileHandleRegister, (handle_t *, struct descr *))                                   \
    X(void, cuFileHandleDeregister, (handle_t))                                                       \
    X(status_t, cuFileBufRegister, (const void *, size_t, int))                                       \
    X(status_t, cuFileBufDeregister, (const void *))                                                  \
    X(ssize_t, cuFileRead, (handle_t, void *, size_t, off_t, off_t))                                  \
    X(ssize_t, cuFileWrite, (handle_t, const void *, size_t, off_t, off_t))                           \
    X(ssize_t, cuFileReadv, (handle_t, const struct vector *, size_t, off_t, unsigned))               \
    X(ssize_t, cuFileWritev, (handle_t, const struct vector *, size_t, off_t, unsigned))              \
    X(status_t, cuFileStreamRegister, (void *, unsigned))                                             \
    X(status_t, cuFileStreamDeregister, (void *))                                                     \
    X(status_t, cuFileReadAsync, (handle_t, void *, size_t *, off_t *, off_t *, ssize_t *, void *))   \
    X(status_t, cuFileWriteAsync, (handle_t, void *, size_t *, off_t *, off_t *, ssize_t *, void *))  \
    X(status_t, cuFileBatchIOSetUp, (void **, unsigned))                                              \
    X(status_t, cuFileBatchIOSubmit, (void *, unsigned, struct params *, unsigned))                   \
    X(status_t, cuFileBatchIOGetStatus, (void *, unsigned, unsigned *, struct event *, struct timespec *)) \
    X(status_t, cuFileBatchIOCancel, (void *))                                                        \
    X(void, cuFileBatchIODestroy, (void *))                                                           \
    X(status_t, cuFileGetParameterBool, (int, bool *))                                                \
    X(status_t, cuFileSetParameterBool, (int, bool))                                                  \
    X(status_t, cuFileGetParameterSizeT, (int, size_t *))                                             \
    X(status_t, cuFileSetParameterSizeT, (int, size_t))                                               \
    X(status_t, cuFileGetParameterString, (int, char *, int))                                         \
    X(status_t, cuFileSetParameterString, (int, const char *))                                        \
    X(status_t, cuFileGetStatsL1, (uint64_t *))                                                       \
    X(status_t, cuFileGetStatsL2, (void *))                                                           \
    X(status_t, cuFileStatsReset, (void))

#define CUDA_FUNCTIONS(X)                                        \
    X(int, cuInit, (unsigned))                                   \
    X(int, cuDevicePrimaryCtxRetain, (void **, int))             \
    X(int, cuCtxSetCurrent, (void *))                            \
    X(int, cuMemAlloc_v2, (uint64_t *, size_t))                  \
    X(int, cuMemFree_v2, (uint64_t))                             \
    X(int, cuMemcpyHtoD_v2, (uint64_t, const void *, size_t))    \
    X(int, cuMemcpyDtoH_v2, (void *, uint64_t, size_t))          \
    X(int, cuMemsetD8_v2, (uint64_t, unsigned char, size_t))     \
    X(int, cuStreamCreate, (void **, unsigned))                  \
    X(int, cuMemcpyDtoHAsync_v2, (void *, uint64_t, size_t, void *)) \
    X(int, cuStreamSynchronize, (void *))

#define DECLARE(result, name, arguments) static result(*name) arguments;
FUNCTIONS(DECLARE)
CUDA_FUNCTIONS(DECLARE)

static void load(void) {
    void *library = dlopen("libcufile.so.0", RTLD_NOW);
    if (!library) fprintf(stderr, "FAILED: %s\n", dlerror());
    CHECK(library);
#define FIND(result, name, arguments) CHECK((name = (result(*) arguments)dlsym(library, #name)));
    FUNCTIONS(FIND)
    const char *path = getenv("NOBOUNCE_CUDA");
    void *driver = dlopen(path && *path ? path : "libcuda.so.1", RTLD_NOW), *context;
    CHECK(driver);
#define FIND_CUDA(result, name, arguments)                              \
    if (!(name = (result(*) arguments)dlsym(driver, #name))) printf("no %s\n", #name);
    CUDA_FUNCTIONS(FIND_CUDA)
    GIVES(0, cuInit(0));
    GIVES(0, cuDevicePrimaryCtxRetain(&context, 0));
    GIVES(0, cuCtxSetCurrent(context));
}

static void pattern(unsigned char *to, size_t size, unsigned seed) {
    for (size_t i = 0; i < size; i++) {
        seed = seed * 1664525u + 1013904223u;
        to[i] = (unsigned char)(seed >> 24);
    }
}
#endif
