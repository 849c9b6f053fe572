/* A stand-in for NVML, for the tests of deaths.c: one GPU with a BAR1 of 64 MiB, whose use grows by NVML_KEEPS MiB with every question. */
#include <stdlib.h>

struct bytes {
    unsigned long long total, free, used;
};

int nvmlInit_v2(void) { return 0; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 1;
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = &nvmlInit_v2;
    return index ? 2 : 0;
}

int nvmlDeviceGetBAR1MemoryInfo(void *device, struct bytes *bytes) {
    static unsigned long long questions;
    const char *keeps = getenv("NVML_KEEPS");
    bytes->total = 64 << 20;
    bytes->used = (keeps ? strtoull(keeps, NULL, 10) << 20 : 0) * questions++;
    return 0;
}

int nvmlDeviceGetMemoryInfo(void *device, struct bytes *bytes) {
    bytes->used = 5 << 20;
    return 0;
}
