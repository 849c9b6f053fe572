/* Processes that end with GPU memory pinned and mapped, and what they leave behind: nothing. NVML's word on BAR1 and on the GPU's memory is what it
 * was before, and another process can pin as much.
 *
 *     deaths killed|returns|quits [MIB COUNT]     buffers of so many MiB each; without them more than half of the GPU's memory, or of BAR1
 *
 * killed: by SIGKILL, inside a copy; returns: main returns; quits: _exit. */
#include "gdr.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>

enum { MIB = 1 << 20, MOST = 4096, WORD = 64, LIMIT = 15, SETTLE = 6 };
static const unsigned long long SLACK = 64ull * MIB; /* what a driver may keep for itself */

/* ---- What NVML says. ---- */

/* nvmlBAR1Memory_t and nvmlMemory_t. */
struct bytes {
    unsigned long long total, free, used;
};
#define NVML_FUNCTIONS(X)                                           \
    X(int, nvmlInit_v2, (void))                                     \
    X(int, nvmlDeviceGetCount_v2, (unsigned *))                     \
    X(int, nvmlDeviceGetHandleByIndex_v2, (unsigned, void **))      \
    X(int, nvmlDeviceGetBAR1MemoryInfo, (void *, struct bytes *))   \
    X(int, nvmlDeviceGetMemoryInfo, (void *, struct bytes *))
#define DECLARE_NVML(result, name, arguments) static result(*name) arguments;
NVML_FUNCTIONS(DECLARE_NVML)

/* What all GPUs together have in use, and how large BAR1 is. */
struct used {
    unsigned long long bar1, memory, bar1_size;
};

static int has_nvml(void) {
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library) return 0;
#define FIND_NVML(result, name, arguments) CHECK((name = (result(*) arguments)dlsym(library, #name)));
    NVML_FUNCTIONS(FIND_NVML)
    GIVES(0, nvmlInit_v2());
    return 1;
}

static struct used look(void) {
    struct used used = {0, 0, 0};
    unsigned count = 0;
    GIVES(0, nvmlDeviceGetCount_v2(&count));
    for (unsigned i = 0; i < count; i++) {
        struct bytes bar1, memory;
        void *device;
        GIVES(0, nvmlDeviceGetHandleByIndex_v2(i, &device));
        GIVES(0, nvmlDeviceGetBAR1MemoryInfo(device, &bar1));
        GIVES(0, nvmlDeviceGetMemoryInfo(device, &memory));
        used.bar1_size = !i || bar1.total < used.bar1_size ? bar1.total : used.bar1_size;
        used.bar1 += bar1.used;
        used.memory += memory.used;
    }
    return used;
}

static int is_as(struct used before, struct used now) {
    return now.bar1 <= before.bar1 + SLACK && now.memory <= before.memory + SLACK;
}

static void tell(const char *when, struct used used) {
    printf("figure %-16s BAR1 %7llu MiB used, memory %7llu MiB\n", when, used.bar1 / MIB, used.memory / MIB);
}

/* ---- The process that dies. ---- */

/* So many that, were they kept by the dead, the next could not have as many: more than half. */
static size_t count_for(void *driver, size_t size, size_t bar1_size) {
    int (*total_of)(size_t *, int) = (int (*)(size_t *, int))dlsym(driver, "cuDeviceTotalMem_v2");
    size_t total = 0;
    CHECK(total_of);
    GIVES(0, total_of(&total, 0));
    size_t count = (bar1_size < total ? bar1_size : total) / 8 * 5 / size;
    return count < MOST ? count : MOST;
}

/* A driver gives back what a dead process had in its own time. */
static void allocate_within(uint64_t *at, size_t size, double end) {
    int gave;
    while ((gave = cuMemAlloc_v2(at, size)) && now() < end) usleep(50000);
    GIVES(0, gave);
}

/* Pins and maps, says so, and ends when nobody holds the other end of its input; or goes on copying until it is killed. */
static int hold(const char *way, size_t size, size_t count, size_t bar1_size) {
    static struct mapped m[MOST];
    static uint64_t at[MOST];
    unsigned char wanted[WORD], *block = malloc(MIB), end;
    load_gdr("libgdrapi.so.2");
    void *driver = load_cuda();
    gdr_t g = gdr_open();
    CHECK(g && block);
    if (!count) count = count_for(driver, size, bar1_size);
    CHECK(count && count <= MOST);
    double start = now();
    for (size_t i = 0; i < count; i++) {
        allocate_within(&at[i], size, start + LIMIT);
        m[i] = map(g, at[i], size);
        for (int is_end = 0; is_end < 2; is_end++) {
            size_t place = is_end ? size - WORD : 0;
            pattern(wanted, WORD, (unsigned)i * 2 + (unsigned)is_end);
            GIVES(0, gdr_copy_to_mapping(m[i].mh, m[i].at + place, wanted, WORD));
            holds(at[i] + place, wanted, WORD);
        }
    }
    printf("pinned and mapped %zu buffers of %zu MiB in %.0f ms\n", count, size / MIB, (now() - start) * 1e3);
    fflush(stdout);
    if (!strcmp(way, "killed")) {
        struct pollfd alone = {.fd = 0, .events = POLLIN};
        pattern(block, MIB, 51);
        /* Its parent may have failed, and does not kill it then. */
        for (size_t i = 0; i % 64 || !poll(&alone, 1, 0); i++) GIVES(0, gdr_copy_to_mapping(m[i % count].mh, m[i % count].at, block, MIB));
    }
    CHECK(read(0, &end, 1) == 0);
    if (!strcmp(way, "quits")) _exit(0);
    if (!strcmp(way, "tidy")) {
        for (size_t i = 0; i < count; i++) {
            unmap(g, &m[i]);
            GIVES(0, cuMemFree_v2(at[i]));
        }
        GIVES(0, gdr_close(g));
    }
    return 0;
}

/* ---- The one that looks on, without CUDA. ---- */

struct process {
    pid_t pid;
    int input, output;
};

static struct process start(const char *way, const char *size, const char *count, const char *bar1_size) {
    struct process process;
    int input[2], output[2];
    CHECK(!pipe(input) && !pipe(output));
    process.pid = fork();
    CHECK(process.pid >= 0);
    if (process.pid == 0) {
        dup2(input[0], 0);
        dup2(output[1], 1);
        for (int i = 0; i < 2; i++) close(input[i]), close(output[i]);
        execl("/proc/self/exe", "deaths", "hold", way, size, count, bar1_size, (char *)NULL);
        _exit(127);
    }
    close(input[0]);
    close(output[1]);
    process.input = input[1];
    process.output = output[0];
    return process;
}

/* Waits for its line, and passes it on. */
static void wait_until_pinned(struct process *process) {
    char line[256] = "";
    struct pollfd ready = {.fd = process->output, .events = POLLIN};
    ssize_t length = poll(&ready, 1, 2 * LIMIT * 1000) == 1 ? read(process->output, line, sizeof line - 1) : -1;
    if (length <= 0) kill(process->pid, SIGKILL);
    CHECK(length > 0 && strstr(line, "pinned and mapped"));
    fputs(line, stdout);
}

static int end_of(struct process *process) {
    int status = -1;
    close(process->input);
    CHECK(waitpid(process->pid, &status, 0) == process->pid);
    close(process->output);
    return status;
}

int main(int argc, char **argv) {
    CHECK(argc > 1);
    if (!strcmp(argv[1], "hold")) {
        CHECK(argc == 6);
        return hold(argv[2], strtoul(argv[3], NULL, 0) * MIB, strtoul(argv[4], NULL, 0), strtoul(argv[5], NULL, 0));
    }
    const char *way = argv[1], *count = argc > 3 ? argv[3] : "0";
    char size[24], bar1_size[24];
    int is_killed = !strcmp(way, "killed"), has_words = has_nvml();
    CHECK(is_killed || !strcmp(way, "returns") || !strcmp(way, "quits"));
    struct used before = {0, 0, ~0ull}, after = {0, 0, 0};
    if (has_words) tell("before", before = look());
    snprintf(bar1_size, sizeof bar1_size, "%llu", before.bar1_size);
    /* Some GPUs have a BAR1 of 256 MiB. */
    snprintf(size, sizeof size, "%s", argc > 2 ? argv[2] : before.bar1_size < 8ull << 30 ? "16" : "1024");

    struct process first = start(way, size, count, bar1_size);
    wait_until_pinned(&first);
    if (has_words) tell("while pinned", look());
    if (is_killed) {
        usleep(20000);
        CHECK(!kill(first.pid, SIGKILL));
    }
    int status = end_of(&first);
    CHECK(is_killed ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL : WIFEXITED(status) && WEXITSTATUS(status) == 0);
    double died = now();
    if (has_words) {
        while (!is_as(before, after = look()) && now() < died + SETTLE) usleep(50000);
        tell("after its end", after);
        CHECK(is_as(before, after));
        printf("NVML: as before after %.0f ms\n", (now() - died) * 1e3);
    } else {
        printf("NVML: there is none, so that BAR1 was not looked at\n");
    }
    fflush(stdout);

    /* As much again, by another one. */
    struct process next = start("tidy", size, count, bar1_size);
    wait_until_pinned(&next);
    status = end_of(&next);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    printf("%s: good\n", way);
    return 0;
}
