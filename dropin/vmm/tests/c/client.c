/* client WAY: creates memory by a cuMemCreate that it found in this way. The path of libcuda is in LIBCUDA. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct prop { int kind, handle_types, location_kind, location; void *data; unsigned char flags[8]; };
typedef int (*create_t)(unsigned long long *, size_t, const struct prop *, unsigned long long);
typedef int (*get1_t)(const char *, void **, int, unsigned long long);
typedef int (*get2_t)(const char *, void **, int, unsigned long long, int *);

#ifdef LINKED
int cuMemCreate(unsigned long long *, size_t, const struct prop *, unsigned long long);
int cuGetProcAddress_v2(const char *, void **, int, unsigned long long, int *);
#endif

#define CHECK(what) do { if (!(what)) { printf("line %d: %s\n", __LINE__, #what); exit(1); } } while (0)

static void create_all(create_t create) {
    struct prop props[] = {
        {1, 0, 1, 0, NULL, {0}}, /* device memory without a handle type */
        {1, 1, 1, 0, NULL, {0}}, /* with the file descriptor */
        {1, 8, 1, 0, NULL, {0}}, /* with a fabric handle */
        {1, 0, 2, 0, NULL, {0}}, /* host memory */
    };
    for (unsigned i = 0; i < sizeof props / sizeof *props; i++) {
        struct prop before = props[i];
        unsigned long long handle = 0;
        int code = create(&handle, 4096, &props[i], 2);
        CHECK((code == 0 && handle == 4098) || code == 801);
        CHECK(!memcmp(&before, &props[i], sizeof before));
    }
}

int main(int count, char **words) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    const char *way = count > 1 ? words[1] : "";
#ifdef LINKED
    if (!strcmp(way, "linked"))
        return create_all(cuMemCreate), 0;
    if (!strcmp(way, "linked address")) {
        void *found = NULL;
        CHECK(!cuGetProcAddress_v2("cuMemCreate", &found, 13000, 0, NULL) && found);
        return create_all((create_t)found), 0;
    }
#endif
    if (!strcmp(way, "module")) {
        void *module = dlopen(getenv("MODULE"), RTLD_NOW | RTLD_LOCAL);
        CHECK(module);
        void *found = dlsym(module, "module_create");
        CHECK(found);
        return create_all((create_t)found), 0;
    }
    if (!strcmp(way, "default")) {
        void *found = dlsym(RTLD_DEFAULT, "cuMemCreate");
        CHECK(found);
        return create_all((create_t)found), 0;
    }
    if (!strcmp(way, "absent")) {
        /* No libcuda: the names are not there, and other lookups do as without the library. */
        CHECK(!dlsym(RTLD_DEFAULT, "cuMemCreate") && !dlsym(RTLD_DEFAULT, "cuGetProcAddress_v2") && !dlsym(RTLD_DEFAULT, "cuInit"));
        CHECK(dlsym(RTLD_DEFAULT, "getpid") && !dlsym(RTLD_DEFAULT, "c") && !dlsym(RTLD_DEFAULT, ""));
        CHECK(((pid_t(*)(void))dlsym(RTLD_NEXT, "getpid"))() == getpid());
        return 0;
    }
    void *cuda = dlopen(getenv("LIBCUDA"), RTLD_NOW | RTLD_LOCAL);
    CHECK(cuda);
    void *release = dlsym(cuda, "cuMemRelease"), *found = NULL;
    CHECK(release && ((int (*)(unsigned long long))release)(1) == 0);
    if (!strcmp(way, "dlsym")) {
        found = dlsym(cuda, "cuMemCreate");
    } else if (!strcmp(way, "address")) {
        get1_t get = (get1_t)dlsym(cuda, "cuGetProcAddress");
        CHECK(get && !get("cuMemRelease", &found, 11030, 0) && found == release);
        CHECK(!get("cuGetProcAddress", &found, 11030, 0) && found == (void *)get);
        CHECK(get("cuNothing", &found, 11030, 0) == 500);
        CHECK(!get("cuMemCreate", &found, 11030, 0));
    } else if (!strcmp(way, "address of address")) {
        get2_t get = (get2_t)dlsym(cuda, "cuGetProcAddress_v2"), again;
        CHECK(get && !get("cuGetProcAddress", (void **)&again, 13000, 0, NULL) && again == get);
        CHECK(!again("cuMemCreate", &found, 13000, 0, NULL));
    }
    CHECK(found);
    create_all((create_t)found);
    return 0;
}
