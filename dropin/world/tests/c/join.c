/* Joins as a C program does, and says what came of it. */
#include "nobounce.h"

#include <stdio.h>
#include <string.h>

int main(int count, char **arguments) {
    nb_options options = NB_OPTIONS;
    char error[512] = "";
    nb_leave(NULL);
    if (nb_channel(NULL, 0) || nb_heap(NULL) || nb_heap_bytes(NULL) || nb_reports(NULL, error, sizeof error) || !nb_barrier(NULL))
        return 3;
    if (count > 1)
        options.rendezvous = strcmp(arguments[1], "none") ? arguments[1] : NULL;
    options.timeout_ms = 200;
    nb_world *world = nb_join(&options, error, sizeof error);
    if (!world) {
        char shorter[8];
        memset(shorter, 'x', sizeof shorter);
        if (nb_join(&options, shorter, 4) || strlen(shorter) != 3 || shorter[4] != 'x' || nb_join(&options, NULL, 0) || nb_join(NULL, shorter, sizeof shorter))
            return 3;
        printf("refused: %s\n", error);
        return 0;
    }
    printf("joined: channel %d, no other %d, heap %zu at %d, barrier %d, reports %zu\n", nb_channel(world, 0) != NULL, nb_channel(world, 1) == NULL,
           nb_heap_bytes(world), nb_heap(world) != NULL, nb_barrier(world), nb_reports(world, error, sizeof error));
    nb_leave(world);
    return 0;
}
