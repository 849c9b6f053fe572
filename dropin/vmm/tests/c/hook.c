/* Another library that interposes dlsym and counts what is asked for; and one more definition of a function, behind it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

static int asked;
static void *(*next)(void *, const char *);

__attribute__((constructor)) static void start(void) {
    next = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    if (!next)
        next = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", OLD);
}

void *dlsym(void *handle, const char *name) {
    asked++;
    if (!next)
        start();
    return next(handle, name);
}

__attribute__((destructor)) static void end(void) {
    printf("hook: %s\n", asked ? "asked" : "not asked");
}
