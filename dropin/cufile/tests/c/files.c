/* Files by cuFile's interface: `files CASE FOLDER`. */
#include "cufile.h"

#define SIZE (6ul << 20)
#define PIECE 65536ul

static const char *folder;
static unsigned char *right, *found;

static int make(const char *name, int flags) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0);
    CHECK(write(fd, right, SIZE) == (ssize_t)SIZE);
    CHECK(fsync(fd) == 0 && close(fd) == 0);
    fd = open(path, flags);
    return fd;
}

static handle_t registered(int fd) {
    struct descr descr = {.type = 1, .handle.fd = fd};
    handle_t handle = NULL;
    IS(0, cuFileHandleRegister(&handle, &descr));
    CHECK(handle);
    return handle;
}

static uint64_t gpu_memory(void) {
    uint64_t at;
    GIVES(0, cuMemAlloc_v2(&at, SIZE));
    unsigned char *nothing = calloc(1, SIZE);
    GIVES(0, cuMemcpyHtoD_v2(at, nothing, SIZE));
    free(nothing);
    return at;
}

static void holds(uint64_t at, size_t offset, size_t from, size_t len) {
    GIVES(0, cuMemcpyDtoH_v2(found, at + offset, len));
    CHECK(memcmp(found, right + from, len) == 0);
}

/* Reads of every kind, and the same bytes written to another file. */
static void moves(int fd, bool is_registered) {
    handle_t file = registered(fd);
    uint64_t gpu = gpu_memory();
    void *base = (void *)gpu;
    if (is_registered) IS(0, cuFileBufRegister(base, SIZE, 0));
    size_t sizes[] = {1, 4095, 4096, PIECE, PIECE + 1, 1 << 20, 5 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        GIVES(sizes[i], cuFileRead(file, base, sizes[i], 777, 4096));
        holds(gpu, 4096, 777, sizes[i]);
    }
    GIVES(SIZE, cuFileRead(file, base, SIZE, 0, 0));
    holds(gpu, 0, 0, SIZE);
    handle_t copy = registered(make("copy", O_RDWR));
    GIVES(SIZE - 5, cuFileWrite(copy, base, SIZE - 5, 10, 5));
    unsigned char *host = malloc(SIZE);
    GIVES(SIZE - 5, cuFileRead(copy, host, SIZE - 5, 10, 0));
    CHECK(memcmp(host, right + 5, SIZE - 5) == 0);
    /* Host memory that is registered, too. */
    IS(0, cuFileBufRegister(host, SIZE, 0));
    GIVES(100, cuFileRead(copy, host, 100, 10, 7));
    CHECK(memcmp(host + 7, right + 5, 100) == 0);
    IS(0, cuFileBufDeregister(host));
    if (is_registered) IS(0, cuFileBufDeregister(base));
    cuFileHandleDeregister(file);
    cuFileHandleDeregister(copy);
    GIVES(0, cuMemFree_v2(gpu));
}

static void ends(void) {
    handle_t file = registered(make("ends", O_RDONLY));
    uint64_t gpu = gpu_memory();
    void *base = (void *)gpu;
    IS(0, cuFileBufRegister(base, SIZE, 0));
    GIVES(10, cuFileRead(file, base, 4096, SIZE - 10, 0));
    GIVES(0, cuFileRead(file, base, 4096, SIZE, 0));
    GIVES(0, cuFileRead(file, base, 4096, SIZE + 100, 0));
    GIVES(0, cuFileRead(file, base, 0, 0, 0));
    struct vector vectors[] = {{base, 100}, {(void *)(gpu + 4096), SIZE}, {(void *)(gpu + 8192), 5}};
    GIVES(150, cuFileReadv(file, vectors, 3, SIZE - 150, 0));
    holds(gpu, 0, SIZE - 150, 100);
    holds(gpu, 4096, SIZE - 50, 50);
    handle_t out = registered(make("out", O_RDWR));
    GIVES(200, cuFileWritev(out, (struct vector[]){{base, 100}, {base, 100}}, 2, 4, 0));
    /* Not open for writing: an error of the system. */
    errno = 0;
    GIVES(-1, cuFileWrite(file, base, 10, 0, 0));
    GIVES(EBADF, errno);
}

static void misuse(void) {
    int fd = make("misuse", O_RDWR);
    handle_t file = registered(fd), other;
    uint64_t gpu = gpu_memory();
    void *base = (void *)gpu;
    struct descr descr = {.type = 2, .handle.fd = fd};
    IS(5018, cuFileHandleRegister(&other, &descr));
    descr.type = 1, descr.handle.fd = 12345;
    IS(5022, cuFileHandleRegister(&other, &descr));
    int pipes[2];
    CHECK(pipe(pipes) == 0);
    descr.handle.fd = pipes[0];
    IS(5018, cuFileHandleRegister(&other, &descr));
    IS(5022, cuFileHandleRegister(NULL, &descr));
    IS(5022, cuFileBufRegister(NULL, 10, 0));
    IS(5022, cuFileBufRegister(base, 0, 0));
    IS(5014, cuFileBufRegister(base, SIZE * 1000, 0));
    IS(0, cuFileBufRegister(base, SIZE, 0));
    IS(5023, cuFileBufRegister(base, SIZE, 0));
    IS(5024, cuFileBufDeregister((char *)base + 1));
    GIVES(-5022, cuFileRead(file, base, 10, -1, 0));
    GIVES(-5022, cuFileRead(file, base, 10, 0, -1));
    GIVES(-5027, cuFileRead((handle_t)99, base, 10, 0, 0));
    GIVES(-5012, cuFileRead(file, (void *)16, 10, 0, 0));
    GIVES(-5014, cuFileRead(file, base, 4096, 0, SIZE - 10));
    /* The program's descriptor may be closed. */
    CHECK(close(fd) == 0);
    GIVES(10, cuFileRead(file, base, 10, 0, 0));
    cuFileHandleDeregister(file);
    cuFileHandleDeregister(file);
    GIVES(-5027, cuFileRead(file, base, 10, 0, 0));
    IS(0, cuFileBufDeregister(base));
    IS(5024, cuFileBufDeregister(base));
}

static void driver(void) {
    int version = 0;
    IS(0, cuFileGetVersion(&version));
    CHECK(version >= 1060);
    IS(5001, cuFileDriverClose_v2());
    IS(0, cuFileDriverOpen());
    IS(0, cuFileDriverOpen());
    GIVES(2, cuFileUseCount());
    handle_t file = registered(make("driver", O_RDONLY));
    IS(0, cuFileDriverClose_v2());
    unsigned char byte;
    GIVES(1, cuFileRead(file, &byte, 1, 3, 0));
    CHECK(byte == right[3]);
    IS(0, cuFileDriverClose_v2());
    GIVES(-5027, cuFileRead(file, &byte, 1, 3, 0));
    struct properties properties;
    IS(0, cuFileDriverSetMaxDirectIOSize(4096));
    IS(0, cuFileDriverGetProperties(&properties));
    CHECK(properties.nvfs.max_direct_io == 4096 && properties.nvfs.dstatus == 0 && properties.nvfs.dcontrol == 2);
    CHECK(properties.fflags == 6 && properties.batch_size == 128);
    bool flag = false;
    IS(0, cuFileGetParameterBool(1, &flag));
    CHECK(flag);
    size_t number = 0;
    IS(0, cuFileSetParameterSizeT(2, 77));
    IS(0, cuFileGetParameterSizeT(2, &number));
    CHECK(number == 77);
    IS(5022, cuFileGetParameterSizeT(12, &number));
    IS(5022, cuFileGetParameterBool(-1, &flag));
    char text[8];
    IS(0, cuFileSetParameterString(0, "TRACE"));
    IS(0, cuFileGetParameterString(0, text, sizeof text));
    CHECK(strcmp(text, "TRACE") == 0);
    IS(5022, cuFileGetParameterString(0, text, 5));
    IS(5007, cuFileGetStatsL2(NULL));
}

static void counted(void) {
    handle_t file = registered(make("counted", O_RDONLY));
    IS(0, cuFileStatsReset());
    unsigned char bytes[100];
    GIVES(100, cuFileRead(file, bytes, 100, 0, 0));
    GIVES(50, cuFileRead(file, bytes, 50, 0, 0));
    GIVES(-5022, cuFileRead(file, bytes, 50, -5, 0));
    uint64_t stats[80];
    memset(stats, 0xEE, sizeof stats);
    IS(0, cuFileGetStatsL1(stats));
    CHECK(stats[0] == 2 && stats[1] == 1 && stats[2] == 0 && stats[12] == 150 && stats[13] == 0);
    CHECK(stats[63] == 0 && stats[64] == 0xEEEEEEEEEEEEEEEEul);
}

static void batch(void) {
    enum { N = 16 };
    handle_t file = registered(make("batch", O_RDWR));
    uint64_t gpu = gpu_memory();
    IS(0, cuFileBufRegister((void *)gpu, SIZE, 0));
    void *id;
    IS(5022, cuFileBatchIOSetUp(&id, 0));
    IS(0, cuFileBatchIOSetUp(&id, N));
    struct params all[N + 1] = {0};
    for (size_t i = 0; i < N; i++) {
        all[i].mode = 1, all[i].fh = file, all[i].opcode = 0, all[i].cookie = (void *)(i + 1);
        all[i].batch.base = (void *)gpu, all[i].batch.size = PIECE;
        all[i].batch.file_offset = (off_t)((N - 1 - i) * PIECE), all[i].batch.buffer_offset = (off_t)(i * PIECE);
    }
    IS(5037, cuFileBatchIOSubmit(id, N + 1, all, 0));
    all[3].batch.file_offset = -1; /* fails alone */
    IS(0, cuFileBatchIOSubmit(id, N, all, 0));
    unsigned done = 0;
    bool seen[N] = {0};
    while (done < N) {
        struct event events[5];
        unsigned count = 5;
        struct timespec limit = {10, 0};
        IS(0, cuFileBatchIOGetStatus(id, 1, &count, events, &limit));
        CHECK(count >= 1 && count <= 5);
        for (unsigned i = 0; i < count; i++) {
            size_t number = (size_t)events[i].cookie - 1;
            CHECK(number < N && !seen[number]);
            seen[number] = true;
            if (number == 3) {
                CHECK(events[i].status == 0x40 && (ssize_t)events[i].ret == -5022);
            } else {
                CHECK(events[i].status == 0x10 && events[i].ret == PIECE);
                holds(gpu, number * PIECE, (N - 1 - number) * PIECE, PIECE);
            }
        }
        done += count;
    }
    /* Nothing is open: no wait, no event. */
    unsigned count = 5;
    struct event events[5];
    IS(0, cuFileBatchIOGetStatus(id, 1, &count, events, NULL));
    GIVES(0, count);
    IS(0, cuFileBatchIOSubmit(id, 2, all, 0));
    IS(0, cuFileBatchIOCancel(id));
    cuFileBatchIODestroy(id);
    IS(5022, cuFileBatchIOCancel(id));
    all[0].opcode = 7;
    IS(0, cuFileBatchIOSetUp(&id, N));
    IS(5022, cuFileBatchIOSubmit(id, 1, all, 0));
}

static void streams(void) {
    handle_t file = registered(make("streams", O_RDWR));
    uint64_t gpu = gpu_memory();
    IS(0, cuFileBufRegister((void *)gpu, SIZE, 0));
    void *stream = NULL;
    GIVES(0, cuStreamCreate(&stream, 1));
    IS(0, cuFileStreamRegister(stream, 0));
    size_t size = PIECE;
    off_t from = 100, to = 4096;
    ssize_t moved = -9;
    IS(0, cuFileReadAsync(file, (void *)gpu, &size, &from, &to, &moved, stream));
    GIVES(0, cuMemcpyDtoHAsync_v2(found, gpu + 4096, PIECE, stream));
    GIVES(0, cuStreamSynchronize(stream));
    GIVES(PIECE, moved);
    CHECK(memcmp(found, right + 100, PIECE) == 0);
    from = 0;
    IS(0, cuFileWriteAsync(file, (void *)gpu, &size, &from, &to, &moved, stream));
    GIVES(PIECE, moved);
    from = -1;
    IS(0, cuFileReadAsync(file, (void *)gpu, &size, &from, &to, &moved, stream));
    GIVES(-5022, moved);
    IS(5022, cuFileReadAsync(file, (void *)gpu, NULL, &from, &to, &moved, stream));
    IS(0, cuFileStreamDeregister(stream));
}

/* Memory that is freed while it is registered, and allocated again at the same address. */
static void freed(void) {
    handle_t file = registered(make("freed", O_RDWR));
    uint64_t gpu = gpu_memory(), again;
    IS(0, cuFileBufRegister((void *)gpu, SIZE, 0));
    GIVES(PIECE, cuFileRead(file, (void *)gpu, PIECE, 0, 0));
    GIVES(0, cuMemFree_v2(gpu));
    again = gpu_memory();
    CHECK(again == gpu);
    GIVES(PIECE, cuFileRead(file, (void *)again, PIECE, 100, 0));
    holds(again, 0, 100, PIECE);
    IS(0, cuFileBufRegister((void *)again, SIZE, 0));
    GIVES(0, cuMemFree_v2(again));
    CHECK(gpu_memory() == again);
    IS(0, cuFileBufRegister((void *)again, SIZE, 0));
    GIVES(PIECE, cuFileRead(file, (void *)again, PIECE, 7, 0));
    holds(again, 0, 7, PIECE);
    /* A small registration inside of it does not hide it. */
    IS(0, cuFileBufRegister((void *)(again + 4096), 4096, 0));
    GIVES(PIECE, cuFileRead(file, (void *)again, PIECE, 9, 4096));
    holds(again, 4096, 9, PIECE);
}

/* A program that forbids the compatibility mode gets no bounce through host memory. */
static void required(void) {
    handle_t file = registered(make("required", O_RDONLY));
    uint64_t gpu = gpu_memory();
    IS(0, cuFileSetParameterBool(1, false));
    GIVES(PIECE, cuFileRead(file, (void *)gpu, PIECE, 0, 0)); /* through a window of its own */
    IS(0, cuFileBufRegister((void *)gpu, SIZE, 0));
    GIVES(5ul << 20, cuFileRead(file, (void *)gpu, 5 << 20, 0, 0));
    holds(gpu, 0, 0, 5 << 20);
}

static void forked(void) {
    handle_t file = registered(make("forked", O_RDONLY));
    unsigned char byte = 0;
    GIVES(1, cuFileRead(file, &byte, 1, 5, 0));
    void *batch;
    IS(0, cuFileBatchIOSetUp(&batch, 4));
    pid_t child = fork();
    if (child == 0) {
        GIVES(-5027, cuFileRead(file, &byte, 1, 5, 0));
        GIVES(0, cuFileUseCount());
        handle_t own = registered(make("child", O_RDONLY));
        GIVES(1, cuFileRead(own, &byte, 1, 6, 0));
        CHECK(byte == right[6]);
        /* The parent's number still names nothing. */
        GIVES(-5027, cuFileRead(file, &byte, 1, 5, 0));
        IS(5022, cuFileBatchIOCancel(batch));
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    GIVES(1, cuFileRead(file, &byte, 1, 5, 0));
}

int main(int count, char **arguments) {
    CHECK(count == 3);
    folder = arguments[2];
    load();
    right = malloc(SIZE), found = malloc(SIZE);
    pattern(right, SIZE, 7);
    const char *name = arguments[1];
#define CASE(word, call) \
    if (strcmp(name, word) == 0) call
    CASE("registered", moves(make("file", O_RDWR), true));
    CASE("unregistered", moves(make("file", O_RDWR), false));
    CASE("direct", moves(make("file", O_RDWR | O_DIRECT), true));
    CASE("ends", ends());
    CASE("misuse", misuse());
    CASE("driver", driver());
    CASE("counted", counted());
    CASE("batch", batch());
    CASE("streams", streams());
    CASE("required", required());
    CASE("forked", forked());
    CASE("freed", freed());
    printf("%s: good\n", name);
    return 0;
}
