/* What a program meets at the edges of librdmacm, both sides in one process: limits of private data, refusals with private data, ports
 * that are taken, listeners that are not there, options, channels that change. Takes an address, and a second word where the library is not
 * ours but the system's: what is only ours is left out then. Says what is wrong, or "all right". */
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what) do { if (!(what)) { fprintf(stderr, "line %d: %s (errno %s)\n", __LINE__, #what, strerror(errno)); exit(1); } } while (0)

static struct sockaddr_in address;
static struct rdma_event_channel *channel;

static struct rdma_cm_event *next_on(struct rdma_event_channel *from, enum rdma_cm_event_type expected)
{
    struct pollfd ready = {.fd = from->fd, .events = POLLIN | POLLOUT}; /* never writable */
    struct rdma_cm_event *event;

    if (poll(&ready, 1, 20000) != 1 || ready.revents != POLLIN) {
        fprintf(stderr, "no event; %s was expected\n", rdma_event_str(expected));
        exit(1);
    }
    CHECK(rdma_get_cm_event(from, &event) == 0);
    if (event->event == RDMA_CM_EVENT_TIMEWAIT_EXIT && expected != event->event) {
        rdma_ack_cm_event(event);
        return next_on(from, expected);
    }
    if (event->event != expected) {
        fprintf(stderr, "%s (%d) where %s was expected\n", rdma_event_str(event->event), event->status, rdma_event_str(expected));
        exit(1);
    }
    return event;
}

static void expect(enum rdma_cm_event_type expected)
{
    rdma_ack_cm_event(next_on(channel, expected));
}

static struct rdma_cm_id *resolved(int port)
{
    struct sockaddr_in to = address;
    struct rdma_cm_id *id;

    to.sin_port = htons(port);
    CHECK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
    CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 1000) == 0);
    expect(RDMA_CM_EVENT_ADDR_RESOLVED);
    CHECK(rdma_resolve_route(id, 1000) == 0);
    expect(RDMA_CM_EVENT_ROUTE_RESOLVED);
    CHECK(id->verbs != NULL && id->port_num == 1 && id->route.num_paths == 1);
    return id;
}

static struct rdma_cm_id *listener(int port)
{
    struct sockaddr_in at = address;
    struct rdma_cm_id *id;

    at.sin_port = htons(port);
    CHECK(rdma_create_id(channel, &id, (void *)0x77, RDMA_PS_TCP) == 0);
    CHECK(rdma_bind_addr(id, (struct sockaddr *)&at) == 0);
    CHECK(rdma_listen(id, 10) == 0);
    return id;
}

static volatile int late_returned;

static void *too_late(void *none)
{
    struct rdma_cm_event *event;

    rdma_get_cm_event(channel, &event);
    late_returned = 1;
    return none;
}

int main(int argc, char **argv)
{
    struct rdma_conn_param param = {.retry_count = 7, .qp_num = 5}, answer = {.qp_num = 6};
    unsigned char data[256];
    struct rdma_cm_id *server, *client, *other, *asked;
    struct rdma_cm_event *event;
    struct rdma_event_channel *second;
    int one = 1, port;
    pthread_t late;
    unsigned char tos = 32, timeout = 18;

    CHECK(argc == 2 || argc == 3);
    for (int i = 0; i < 256; i++) data[i] = (unsigned char)(i + 1);
    address.sin_family = AF_INET;
    inet_pton(AF_INET, argv[1], &address.sin_addr);
    CHECK((channel = rdma_create_event_channel()) != NULL);

    /* A port of the library's choice; a port that is taken, also from those who would share it; one that is shared until somebody listens. */
    server = listener(0);
    port = ntohs(rdma_get_src_port(server));
    CHECK(port != 0);
    address.sin_port = htons(port);
    CHECK(rdma_create_id(channel, &other, NULL, RDMA_PS_TCP) == 0);
    CHECK(rdma_bind_addr(other, (struct sockaddr *)&address) == -1 && errno == EADDRINUSE);
    CHECK(rdma_set_option(other, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &one, sizeof one) == 0);
    CHECK(rdma_bind_addr(other, (struct sockaddr *)&address) == -1 && errno == EADDRINUSE);
    CHECK(rdma_destroy_id(other) == 0);
    CHECK(rdma_create_id(channel, &other, NULL, RDMA_PS_TCP) == 0 && rdma_create_id(channel, &client, NULL, RDMA_PS_TCP) == 0);
    CHECK(rdma_set_option(other, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &one, sizeof one) == 0);
    CHECK(rdma_set_option(client, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &one, sizeof one) == 0);
    address.sin_port = htons(7471);
    CHECK(rdma_bind_addr(other, (struct sockaddr *)&address) == 0 && rdma_bind_addr(client, (struct sockaddr *)&address) == 0);
    CHECK(rdma_destroy_id(client) == 0);
    CHECK(rdma_listen(other, 1) == 0);
    CHECK(rdma_destroy_id(other) == 0);
    address.sin_port = htons(port);

    /* Options. */
    client = resolved(port);
    CHECK(rdma_set_option(client, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, 1) == 0);
    CHECK(rdma_set_option(client, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &timeout, 1) == 0);
    CHECK(rdma_set_option(client, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &one, sizeof one) == -1 && errno == EINVAL);
    CHECK(rdma_set_option(client, RDMA_OPTION_IB, 99, &one, sizeof one) == -1 && errno == ENOSYS);

    /* 56 bytes fit a request, and 148 a refusal. */
    param.private_data = data;
    param.private_data_len = 57;
    CHECK(rdma_connect(client, &param) == -1 && errno == EINVAL);
    param.private_data_len = 56;
    CHECK(rdma_connect(client, &param) == 0);
    event = next_on(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
    asked = event->id;
    CHECK(event->listen_id == server && asked->context == (void *)0x77 && event->param.conn.qp_num == 5);
    CHECK(event->param.conn.private_data_len == 56 && memcmp(event->param.conn.private_data, data, 56) == 0);
    CHECK(rdma_get_dst_port(asked) == rdma_get_src_port(client) && rdma_get_src_port(asked) == htons(port));
    rdma_ack_cm_event(event);
    CHECK(rdma_reject(asked, data, 149) == -1 && errno == EINVAL);
    CHECK(rdma_reject(asked, data, 148) == 0);
    event = next_on(channel, RDMA_CM_EVENT_REJECTED);
    CHECK(event->id == client && event->status == 28);
    CHECK(event->param.conn.private_data_len == 148 && memcmp(event->param.conn.private_data, data, 148) == 0);
    rdma_ack_cm_event(event);
    CHECK(rdma_destroy_id(asked) == 0 && rdma_destroy_id(client) == 0);

    /* 196 fit an answer; the queue pairs are somebody else's here. */
    client = resolved(port);
    CHECK(rdma_connect(client, &param) == 0);
    event = next_on(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
    asked = event->id;
    rdma_ack_cm_event(event);
    answer.private_data = data;
    answer.private_data_len = 197;
    /* The kernel refuses the request then; ours waits for a better answer. */
    if (argc == 2) CHECK(rdma_accept(asked, &answer) == -1 && errno == EINVAL);
    answer.private_data_len = 196;
    CHECK(rdma_accept(asked, &answer) == 0);
    event = next_on(channel, RDMA_CM_EVENT_CONNECT_RESPONSE);
    CHECK(event->param.conn.private_data_len == 196 && memcmp(event->param.conn.private_data, data, 196) == 0);
    rdma_ack_cm_event(event);
    CHECK(rdma_establish(client) == 0);
    expect(RDMA_CM_EVENT_ESTABLISHED);

    /* Another channel: what comes, comes there. */
    CHECK((second = rdma_create_event_channel()) != NULL);
    CHECK(rdma_migrate_id(client, second) == 0 && client->channel == second);
    CHECK(rdma_disconnect(asked) == 0);
    event = next_on(second, RDMA_CM_EVENT_DISCONNECTED);
    CHECK(event->id == client);
    rdma_ack_cm_event(event);
    /* With the kernel the answer to the other side is the program's business. */
    CHECK(rdma_disconnect(client) == 0);
    expect(RDMA_CM_EVENT_DISCONNECTED);
    CHECK(rdma_destroy_id(client) == 0 && rdma_destroy_id(asked) == 0);
    if (argc == 2) CHECK(rdma_destroy_id(asked) == -1 && errno == EINVAL);
    rdma_destroy_event_channel(second);

    /* A listener that is gone. */
    CHECK(rdma_destroy_id(server) == 0);
    client = resolved(port);
    param.private_data_len = 0;
    CHECK(rdma_connect(client, &param) == 0);
    event = next_on(channel, RDMA_CM_EVENT_REJECTED);
    CHECK(event->status == 8);
    rdma_ack_cm_event(event);
    CHECK(rdma_destroy_id(client) == 0);

    if (argc == 3) {
        printf("all right\n");
        return 0;
    }

    /* What is not offered says so. */
    CHECK(rdma_create_id(channel, &client, NULL, RDMA_PS_UDP) == 0);
    CHECK(rdma_set_local_ece(client, &(struct ibv_ece){0}) == -1 && errno == EOPNOTSUPP);
    CHECK(rdma_destroy_id(client) == 0);

    /* A child has none of its parent's: calls fail, and none hangs. */
    if (fork() == 0) {
        alarm(20);
        CHECK(rdma_get_cm_event(channel, &event) == -1 && errno == EIO);
        CHECK(rdma_create_id(channel, &client, NULL, RDMA_PS_TCP) == -1 && errno == EIO);
        _exit(0);
    }
    CHECK(wait(&port) > 0 && WIFEXITED(port) && WEXITSTATUS(port) == 0);
    rdma_destroy_event_channel(channel);

    /* A thread that asks a moment too late (rping has one) gets no error before main has ended, and can be cancelled. */
    CHECK(pthread_create(&late, NULL, too_late, NULL) == 0);
    usleep(500000);
    CHECK(!late_returned && pthread_cancel(late) == 0 && pthread_join(late, NULL) == 0);
    printf("all right\n");
    return 0;
}
