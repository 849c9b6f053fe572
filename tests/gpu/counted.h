/* What nb0 has counted in this process: bytes that came into its memory or left it, by the way they took. For C and C++. */
#ifndef COUNTED_H
#define COUNTED_H

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Into host memory; into GPU memory through the window; into GPU memory by the copy engine; by way of one more buffer. All 0 on another adapter. */
struct counted {
    unsigned long long cpu, window, engine, staged;
};

static inline unsigned long long counted_bytes(const char *in, const char *way) {
    char name[48];
    snprintf(name, sizeof name, "\"%s\": {\"bytes\": ", way);
    const char *at = strstr(in, name);
    return at ? strtoull(at + strlen(name), NULL, 10) : 0;
}

/* What nb0 says of its devices in this process, or nothing. */
static inline const char *counted_report(void) {
    static __thread char said[1 << 16];
    size_t (*report)(char *, size_t) = NULL;
    /* Only where the program has it already: asking must not bring an adapter into a program that uses none. */
    void *library = dlopen("libibverbs.so.1", RTLD_LAZY | RTLD_NOLOAD), *found = library ? dlsym(library, "nobounce_report") : NULL;
    memcpy(&report, &found, sizeof report);
    return report && report(said, sizeof said) < sizeof said ? said : NULL;
}

static inline struct counted counted_sum(const char *direction) {
    struct counted sum = {0, 0, 0, 0};
    const char *said = counted_report();
    if (!said) return sum;
    /* One object for each device that is open. */
    for (const char *at = strstr(said, direction); at; at = strstr(at + 1, direction)) {
        sum.cpu += counted_bytes(at, "cpu");
        sum.window += counted_bytes(at, "window");
        sum.engine += counted_bytes(at, "copy-engine");
        sum.staged += counted_bytes(at, "staged");
    }
    return sum;
}

static inline struct counted count_in(void) { return counted_sum("\"in\": "); }

/* The same for bytes that left. */
static inline struct counted count_out(void) { return counted_sum("\"out\": "); }

/* Whether requests have ended in an error on any of them, or were flushed by one. */
static inline int counted_errors(void) {
    const char *said = counted_report(), *errors = "\"errors\": {", *flushed = "\"flushed\": ";
    for (const char *at = said ? strstr(said, errors) : NULL; at; at = strstr(at + 1, errors))
        if (at[strlen(errors)] != '}') return 1;
    for (const char *at = said ? strstr(said, flushed) : NULL; at; at = strstr(at + 1, flushed))
        if (strtoull(at + strlen(flushed), NULL, 10)) return 1;
    return 0;
}

static inline struct counted count_since(struct counted before) {
    struct counted now = count_in();
    now.cpu -= before.cpu;
    now.window -= before.window;
    now.engine -= before.engine;
    now.staged -= before.staged;
    return now;
}

#endif
