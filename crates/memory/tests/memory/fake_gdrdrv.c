// A stand-in for GDRCopy's kernel module, for tests only: loaded before other libraries, it answers for /dev/gdrdrv. What is pinned are
// the stand-in driver's files. FAKE_GDRDRV_ROOM is how many bytes BAR1 has; FAKE_DMABUF_ROOM, how many of a dma-buf can be mapped at once.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAGIC 0xDA
enum { PIN = 1, UNPIN = 2, MOST = 4096 };

struct pin {
    uint64_t addr, size, token;
    uint32_t va_space, pad;
    uint64_t handle;
};

static struct { int file; uint64_t offset, size; } pinned[MOST];
static uint64_t used;
static int nodes[1024];

static int is_node(int fd) { return fd >= 0 && fd < 1024 && nodes[fd]; }

static int open_node(void)
{
    int fd = memfd_create("gdrdrv", MFD_CLOEXEC);
    if (fd >= 0 && fd < 1024)
        nodes[fd] = 1;
    return fd;
}

#define OPEN(name)                                                                       \
    int name(const char *path, int flags, ...)                                           \
    {                                                                                    \
        static int (*real)(const char *, int, ...);                                      \
        va_list rest;                                                                    \
        va_start(rest, flags);                                                           \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;          \
        va_end(rest);                                                                    \
        if (strcmp(path, "/dev/gdrdrv") == 0)                                            \
            return open_node();                                                          \
        if (!real)                                                                       \
            real = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name);             \
        return real(path, flags, mode);                                                  \
    }
OPEN(open)
OPEN(open64)

int close(int fd)
{
    static int (*real)(int);
    if (!real)
        real = (int (*)(int))dlsym(RTLD_NEXT, "close");
    if (is_node(fd))
        nodes[fd] = 0;
    return real(fd);
}

static int pin(struct pin *pin)
{
    const char *room = getenv("FAKE_GDRDRV_ROOM"), *driver = getenv("NOBOUNCE_CUDA");
    void *cuda = driver ? dlopen(driver, RTLD_NOW | RTLD_NOLOAD) : NULL;
    int (*file_of)(uint64_t, size_t, uint64_t *) = NULL;
    if (cuda)
        file_of = (int (*)(uint64_t, size_t, uint64_t *))dlsym(cuda, "fake_cuda_pinned_file");
    if (!file_of)
        return ENXIO;
    if (room && used + pin->size > strtoull(room, NULL, 10))
        return ENOMEM;
    for (int at = 1; at < MOST; at++) {
        if (pinned[at].size)
            continue;
        int file = file_of(pin->addr, pin->size, &pinned[at].offset);
        if (file < 0)
            return EINVAL;
        pinned[at].file = file;
        pinned[at].size = pin->size;
        used += pin->size;
        pin->handle = at;
        return 0;
    }
    return ENOMEM;
}

int ioctl(int fd, unsigned long request, ...)
{
    static int (*real)(int, unsigned long, ...);
    va_list rest;
    va_start(rest, request);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    if (is_node(fd) && _IOC_TYPE(request) == MAGIC) {
        if (_IOC_NR(request) == PIN) {
            errno = pin(argument);
            return errno ? -1 : 0;
        }
        uint64_t handle = *(uint64_t *)argument;
        if (_IOC_NR(request) != UNPIN || handle >= MOST || !pinned[handle].size) {
            errno = EINVAL;
            return -1;
        }
        used -= pinned[handle].size;
        pinned[handle].size = 0;
        return 0;
    }
    if (!real)
        real = (int (*)(int, unsigned long, ...))dlsym(RTLD_NEXT, "ioctl");
    return real(fd, request, argument);
}

// A file that somebody else than the stand-in driver maps is one of its dma-bufs.
static int is_full(size_t len, int flags, int fd, void *caller)
{
    const char *room = getenv("FAKE_DMABUF_ROOM");
    Dl_info from;
    if (!room || fd < 0 || !(flags & MAP_SHARED) || !(flags & MAP_FIXED) || len <= strtoull(room, NULL, 10))
        return 0;
    return dladdr(caller, &from) && from.dli_fname && !strstr(from.dli_fname, "fake_cuda");
}

#define MMAP(name)                                                                                     \
    void *name(void *at, size_t len, int protection, int flags, int fd, off_t offset)                  \
    {                                                                                                  \
        static void *(*real)(void *, size_t, int, int, int, off_t);                                    \
        if (!real)                                                                                     \
            real = (void *(*)(void *, size_t, int, int, int, off_t))dlsym(RTLD_NEXT, #name);           \
        if (is_node(fd)) {                                                                             \
            uint64_t handle = offset / getpagesize();                                                  \
            if (handle >= MOST || !pinned[handle].size) {                                              \
                errno = EINVAL;                                                                        \
                return MAP_FAILED;                                                                     \
            }                                                                                          \
            return real(at, len, protection, flags, pinned[handle].file, pinned[handle].offset);       \
        }                                                                                              \
        if (is_full(len, flags, fd, __builtin_return_address(0))) {                                    \
            errno = ENOMEM;                                                                            \
            return MAP_FAILED;                                                                         \
        }                                                                                              \
        return real(at, len, protection, flags, fd, offset);                                           \
    }
MMAP(mmap)
MMAP(mmap64)
