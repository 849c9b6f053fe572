/* A module that links libcuda, as extensions of Python do. */
struct prop { int kind, handle_types, location_kind, location; void *data; unsigned char flags[8]; };
int cuMemCreate(unsigned long long *, unsigned long, const struct prop *, unsigned long long);

int module_create(unsigned long long *handle, unsigned long size, const struct prop *prop, unsigned long long flags) {
    return cuMemCreate(handle, size, prop, flags);
}
