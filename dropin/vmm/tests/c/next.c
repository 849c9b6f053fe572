/* Built as two libraries: `which` of each says its number, and asks the next one. The caller of RTLD_NEXT must be this library. */
#define _GNU_SOURCE
#include <dlfcn.h>

int which(int sum) {
    int (*next)(int) = (int (*)(int))dlsym(RTLD_NEXT, "which");
    return next ? next(sum * 10 + NUMBER) : sum * 10 + NUMBER;
}

/* A name of libcuda, asked for in the same way. */
int cuWhich(int sum) {
    int (*next)(int) = (int (*)(int))dlsym(RTLD_NEXT, "cuWhich");
    return next ? next(sum * 10 + NUMBER) : sum * 10 + NUMBER;
}
