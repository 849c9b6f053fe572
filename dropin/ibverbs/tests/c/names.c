/* The devices' names and paths. */
#include <infiniband/verbs.h>
#include <stdio.h>

int main(void) {
    struct ibv_device **list = ibv_get_device_list(NULL);
    for (int i = 0; list && list[i]; i++)
        printf("%s %s %s %s %016llx\n", list[i]->name, list[i]->dev_name, list[i]->dev_path, list[i]->ibdev_path,
               (unsigned long long)__builtin_bswap64(ibv_get_device_guid(list[i])));
    ibv_free_device_list(list);
    return !list;
}
