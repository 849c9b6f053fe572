/* What loading the library costs: microseconds, and KiB of memory. */
#include <dlfcn.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

static long resident(void) {
    long total, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%ld %ld", &total, &resident) != 2)
        return 0;
    fclose(file);
    return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

int main(void) {
    struct timespec begin, end;
    long before = resident();
    clock_gettime(CLOCK_MONOTONIC, &begin);
    if (!dlopen("libibverbs.so.1", RTLD_NOW))
        return puts(dlerror()), 1;
    clock_gettime(CLOCK_MONOTONIC, &end);
    long us = (end.tv_sec - begin.tv_sec) * 1000000 + (end.tv_nsec - begin.tv_nsec) / 1000;
    printf("%ld %ld\n", us, resident() - before);
    return 0;
}
