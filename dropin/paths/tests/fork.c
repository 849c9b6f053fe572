// A process that is forked while another thread makes the view. Its library stands for libibverbs.
#ifdef LIBRARY
#include <unistd.h>
const char *nobounce_view(void) {
    sleep(1);
    return "/nowhere";
}
#else
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void *look(void *unused) {
    access("/sys/class/infiniband/nb0", F_OK);
    return unused;
}

int main(void) {
    pthread_t maker;
    struct timespec start, end, nap = {0, 300 * 1000 * 1000};
    pthread_create(&maker, NULL, look, NULL);
    nanosleep(&nap, NULL);
    if (fork() == 0) {
        clock_gettime(CLOCK_MONOTONIC, &start);
        for (int look = 0; look < 3; look++) access("/sys/class/infiniband/nb0", F_OK);
        clock_gettime(CLOCK_MONOTONIC, &end);
        double took = end.tv_sec - start.tv_sec + (end.tv_nsec - start.tv_nsec) / 1e9;
        printf("%s\n", took < 1 ? "at once" : "late");
        exit(0);
    }
    pthread_join(maker, NULL);
    wait(NULL);
    char path[32] = "/sys/class/infiniband/";
    printf("%s\n", access(path, F_OK) ? "the view" : "the system");
}
#endif
