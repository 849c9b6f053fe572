/* A libcuda that says which handle types it was asked for. It refuses to add one if REFUSE is set. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct prop { int kind, handle_types, location_kind, location; void *data; unsigned char flags[8]; };

int cuMemCreate(unsigned long long *handle, size_t size, const struct prop *prop, unsigned long long flags) {
    printf("asked %d of %d\n", prop->handle_types, prop->location_kind);
    if (getenv("REFUSE") && prop->handle_types & 1)
        return 801;
    *handle = size + flags;
    return 0;
}

int cuMemRelease(unsigned long long handle) {
    return handle ? 0 : 1;
}

int cuGetProcAddress_v2(const char *name, void **place, int version, unsigned long long flags, int *status);

int cuGetProcAddress(const char *name, void **place, int version, unsigned long long flags) {
    (void)flags;
    *place = !strcmp(name, "cuMemCreate") ? (void *)cuMemCreate
        : !strcmp(name, "cuMemRelease") ? (void *)cuMemRelease
        : strcmp(name, "cuGetProcAddress") ? NULL : version >= 12000 ? (void *)cuGetProcAddress_v2 : (void *)cuGetProcAddress;
    return *place ? 0 : 500;
}

int cuGetProcAddress_v2(const char *name, void **place, int version, unsigned long long flags, int *status) {
    int code = cuGetProcAddress(name, place, version, flags);
    if (status)
        *status = code ? 1 : 0;
    return code;
}
