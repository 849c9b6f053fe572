/* Connects and disconnects many times, one connection after the other, between two machines or processes. Every tenth request is refused.
 * All private data have their full length and are checked; either side ends every second connection; nothing may be left open.
 *
 *   often ADDRESS PORT          serves, until a client has had enough
 *   often ADDRESS PORT COUNT    asks COUNT times; says "COUNT connections right", or what is wrong */
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <netdb.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(what) do { if (!(what)) { fprintf(stderr, "line %d: %s (errno %s), connection %u\n", __LINE__, #what, strerror(errno), number); exit(1); } } while (0)

/* What is left of the messages' private data for programs. */
enum { REQUEST = 56, ANSWER = 196, REFUSAL = 148, CONSUMER = 28, TENTH = 10 };
/* The number by which a client says that it was the last. */
static const unsigned LAST = 0xffffffff;

static struct rdma_event_channel *channel;
static unsigned number;

/* The first four bytes are the number, the others follow from it. */
static void fill(unsigned char *data, int length, unsigned of)
{
    for (int i = 0; i < length; i++) data[i] = (unsigned char)(i < 4 ? of >> 8 * i : of * 31 + (unsigned)i);
}

static void compare(const struct rdma_cm_event *event, int length, unsigned of)
{
    unsigned char expected[256];
    const struct rdma_conn_param *param = &event->param.conn;

    fill(expected, length, of);
    CHECK(param->private_data_len >= length && memcmp(param->private_data, expected, (size_t)length) == 0);
}

static struct rdma_cm_event *next(void)
{
    struct rdma_cm_event *event;

    do {
        CHECK(rdma_get_cm_event(channel, &event) == 0);
        if (event->event != RDMA_CM_EVENT_TIMEWAIT_EXIT) return event;
        rdma_ack_cm_event(event);
    } while (1);
}

static struct rdma_cm_event *expect(enum rdma_cm_event_type expected)
{
    struct rdma_cm_event *event = next();

    if (event->event != expected) {
        fprintf(stderr, "connection %u: %s (%d) where %s was expected\n", number, rdma_event_str(event->event), event->status, rdma_event_str(expected));
        exit(1);
    }
    return event;
}

static void make_queue_pair(struct rdma_cm_id *id)
{
    struct ibv_qp_init_attr attr = {.qp_type = IBV_QPT_RC, .cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1}};

    CHECK(rdma_create_qp(id, NULL, &attr) == 0);
}

static void drop(struct rdma_cm_id *id)
{
    if (id->qp) rdma_destroy_qp(id);
    CHECK(rdma_destroy_id(id) == 0);
}

static int open_files(void)
{
    DIR *folder = opendir("/proc/self/fd");
    int count = 0;

    CHECK(folder != NULL);
    while (readdir(folder)) count++;
    closedir(folder);
    return count;
}

static void serve(const struct sockaddr *address)
{
    struct rdma_conn_param param = {.responder_resources = 1, .initiator_depth = 1};
    unsigned char data[256];
    struct rdma_cm_id *listener;
    int last = 0;

    CHECK(rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP) == 0);
    CHECK(rdma_bind_addr(listener, (struct sockaddr *)address) == 0 && rdma_listen(listener, 16) == 0);
    while (!last) {
        struct rdma_cm_event *event = next();
        struct rdma_cm_id *id = event->id;
        const unsigned char *asked = event->param.conn.private_data;

        switch (event->event) {
        case RDMA_CM_EVENT_CONNECT_REQUEST:
            CHECK(asked != NULL && event->param.conn.private_data_len >= 4);
            number = asked[0] | (unsigned)asked[1] << 8 | (unsigned)asked[2] << 16 | (unsigned)asked[3] << 24;
            compare(event, REQUEST, number);
            id->context = (void *)(uintptr_t)number;
            last = number == LAST;
            if (number % TENTH == TENTH - 1 || last) {
                fill(data, REFUSAL, number);
                CHECK(rdma_reject(id, data, REFUSAL) == 0);
                rdma_ack_cm_event(event);
                drop(id);
                continue;
            }
            make_queue_pair(id);
            fill(data, ANSWER, number);
            param.private_data = data;
            param.private_data_len = ANSWER;
            CHECK(rdma_accept(id, &param) == 0);
            break;
        case RDMA_CM_EVENT_ESTABLISHED:
            if ((uintptr_t)id->context % 2) CHECK(rdma_disconnect(id) == 0);
            break;
        case RDMA_CM_EVENT_DISCONNECTED:
            if ((uintptr_t)id->context % 2 == 0) CHECK(rdma_disconnect(id) == 0);
            rdma_ack_cm_event(event);
            drop(id);
            continue;
        default:
            fprintf(stderr, "after connection %u: %s (%d)\n", number, rdma_event_str(event->event), event->status);
            exit(1);
        }
        rdma_ack_cm_event(event);
    }
    CHECK(rdma_destroy_id(listener) == 0);
}

/* One connection, or one refusal. */
static void ask(const struct sockaddr *address)
{
    struct rdma_conn_param param = {.responder_resources = 1, .initiator_depth = 1, .retry_count = 7, .private_data_len = REQUEST};
    unsigned char data[REQUEST];
    struct rdma_cm_event *event;
    struct rdma_cm_id *id;
    int refused = number % TENTH == TENTH - 1 || number == LAST;

    CHECK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
    CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)address, 10000) == 0);
    rdma_ack_cm_event(expect(RDMA_CM_EVENT_ADDR_RESOLVED));
    CHECK(rdma_resolve_route(id, 10000) == 0);
    rdma_ack_cm_event(expect(RDMA_CM_EVENT_ROUTE_RESOLVED));
    make_queue_pair(id);
    fill(data, REQUEST, number);
    param.private_data = data;
    CHECK(rdma_connect(id, &param) == 0);
    event = expect(refused ? RDMA_CM_EVENT_REJECTED : RDMA_CM_EVENT_ESTABLISHED);
    /* The last refusal may be lost, and its server is gone then. */
    if (number != LAST) {
        compare(event, refused ? REFUSAL : ANSWER, number);
        CHECK(!refused || event->status == CONSUMER);
    }
    rdma_ack_cm_event(event);
    if (!refused) {
        if (number % 2 == 0) CHECK(rdma_disconnect(id) == 0);
        rdma_ack_cm_event(expect(RDMA_CM_EVENT_DISCONNECTED));
        if (number % 2) CHECK(rdma_disconnect(id) == 0);
    }
    drop(id);
}

int main(int argc, char **argv)
{
    struct addrinfo *address;
    unsigned count = argc > 3 ? (unsigned)atoi(argv[3]) : 0;
    int open_after_first = 0;

    CHECK(argc > 2 && getaddrinfo(argv[1], argv[2], NULL, &address) == 0);
    CHECK((channel = rdma_create_event_channel()) != NULL);
    if (!count) {
        serve(address->ai_addr);
        return 0;
    }
    for (number = 0; number < count; number++) {
        ask(address->ai_addr);
        if (number == 0) open_after_first = open_files();
    }
    /* Devices of one address come to know each other at any time; a leak has one for each connection. */
    CHECK(open_files() < open_after_first + 10);
    printf("%u connections right\n", count);
    number = LAST;
    ask(address->ai_addr);
    return 0;
}
