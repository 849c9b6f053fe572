/* Multicast by librdmacm and libibverbs, two members in one process: joins and their events, copies for every member, a member that only
 * sends, leaving, and what is refused. Takes an address and a group. Says what is wrong, or "all right". */
#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CHECK(what) do { if (!(what)) { fprintf(stderr, "line %d: %s (errno %s)\n", __LINE__, #what, strerror(errno)); exit(1); } } while (0)
#define GRH 40
#define BYTES 1024

static struct addrinfo *address, *group;
static struct rdma_event_channel *channel;

struct member {
    struct rdma_cm_id *id;
    struct ibv_cq *cq;
    struct ibv_mr *mr;
    struct ibv_ah *ah;
    uint32_t qpn, qkey;
    char bytes[GRH + BYTES];
};

static struct rdma_cm_event *next(enum rdma_cm_event_type expected)
{
    struct pollfd ready = {.fd = channel->fd, .events = POLLIN};
    struct rdma_cm_event *event;

    CHECK(poll(&ready, 1, 20000) == 1);
    CHECK(rdma_get_cm_event(channel, &event) == 0);
    if (event->event != expected) {
        fprintf(stderr, "%s (%d) where %s was expected\n", rdma_event_str(event->event), event->status, rdma_event_str(expected));
        exit(1);
    }
    return event;
}

static void make(struct member *member)
{
    struct ibv_qp_init_attr attr = {.qp_type = IBV_QPT_UD, .cap = {.max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1}};

    CHECK(rdma_create_id(channel, &member->id, member, RDMA_PS_UDP) == 0);
    CHECK(rdma_join_multicast(member->id, group->ai_addr, NULL) == -1 && errno == EINVAL); /* not bound to a device */
    CHECK(rdma_bind_addr(member->id, address->ai_addr) == 0);
    CHECK((member->cq = ibv_create_cq(member->id->verbs, 16, NULL, NULL, 0)) != NULL);
    attr.send_cq = attr.recv_cq = member->cq;
    CHECK(rdma_create_qp(member->id, NULL, &attr) == 0);
    CHECK((member->mr = ibv_reg_mr(member->id->pd, member->bytes, sizeof member->bytes, IBV_ACCESS_LOCAL_WRITE)) != NULL);
}

static void joined(struct member *member)
{
    struct rdma_cm_event *event = next(RDMA_CM_EVENT_MULTICAST_JOIN);

    CHECK(event->id == member->id && event->status == 0);
    CHECK(event->param.ud.private_data == member); /* the context of the join */
    CHECK(event->param.ud.qp_num == 0xffffff && event->param.ud.qkey == 0x01234567);
    member->qpn = event->param.ud.qp_num;
    member->qkey = event->param.ud.qkey;
    CHECK((member->ah = ibv_create_ah(member->id->pd, &event->param.ud.ah_attr)) != NULL);
    rdma_ack_cm_event(event);
}

static void receive(struct member *member)
{
    struct ibv_sge sge = {.addr = (uintptr_t)member->bytes, .length = sizeof member->bytes, .lkey = member->mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = 1, .sg_list = &sge, .num_sge = 1}, *bad;

    memset(member->bytes, 0, sizeof member->bytes);
    CHECK(ibv_post_recv(member->id->qp, &wr, &bad) == 0);
}

static void send_from(struct member *member, int seed)
{
    static char data[BYTES];
    struct ibv_mr *mr = ibv_reg_mr(member->id->pd, data, sizeof data, 0);
    struct ibv_sge sge = {.addr = (uintptr_t)data, .length = sizeof data};
    struct ibv_send_wr wr = {.wr_id = 2, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED}, *bad;
    struct ibv_wc wc;
    int got, i;

    CHECK(mr != NULL);
    for (i = 0; i < BYTES; i++)
        data[i] = seed + i * 7;
    sge.lkey = mr->lkey;
    wr.wr.ud.ah = member->ah;
    wr.wr.ud.remote_qpn = member->qpn;
    wr.wr.ud.remote_qkey = member->qkey;
    CHECK(ibv_post_send(member->id->qp, &wr, &bad) == 0);
    do
        CHECK((got = ibv_poll_cq(member->cq, 1, &wc)) >= 0);
    while (got == 0 || (wc.opcode & IBV_WC_RECV)); /* its own copy may come first: `heard` looks at the bytes */
    CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == 2);
    ibv_dereg_mr(mr);
}

/* The bytes are looked at, not the completion, which `send_from` may have taken. */
static int has_heard(struct member *member, int seed, double seconds)
{
    struct timespec now, begin;
    struct ibv_wc wc;
    int i;

    clock_gettime(CLOCK_MONOTONIC, &begin);
    do {
        CHECK(ibv_poll_cq(member->cq, 1, &wc) >= 0);
        for (i = 0; i < BYTES && ((volatile char *)member->bytes)[GRH + i] == (char)(seed + i * 7); i++)
            ;
        if (i == BYTES)
            return 1;
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while (now.tv_sec - begin.tv_sec + (now.tv_nsec - begin.tv_nsec) / 1e9 < seconds);
    return 0;
}

int main(int argc, char **argv)
{
    static struct member one, other, sender;
    struct rdma_cm_join_mc_attr_ex only_sends = {.comp_mask = RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS,
                                                 .join_flags = RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER};
    struct ibv_device_attr attr;
    union ibv_gid gid;

    if (argc != 3 || getaddrinfo(argv[1], NULL, NULL, &address) || getaddrinfo(argv[2], NULL, NULL, &group))
        return 2;
    CHECK((channel = rdma_create_event_channel()) != NULL);
    make(&one);
    make(&other);
    make(&sender);
    CHECK(ibv_query_device(one.id->verbs, &attr) == 0 && attr.max_mcast_grp > 0 && attr.max_mcast_qp_attach > 1);

    CHECK(rdma_leave_multicast(one.id, group->ai_addr) == -1 && errno == EADDRNOTAVAIL);
    CHECK(rdma_join_multicast(one.id, group->ai_addr, &one) == 0);
    joined(&one);
    CHECK(rdma_join_multicast(other.id, group->ai_addr, &other) == 0);
    joined(&other);
    only_sends.addr = group->ai_addr;
    CHECK(rdma_join_multicast_ex(sender.id, &only_sends, &sender) == 0);
    joined(&sender);

    receive(&one);
    receive(&other);
    receive(&sender);
    send_from(&sender, 1);
    CHECK(has_heard(&one, 1, 20) && has_heard(&other, 1, 20) && !has_heard(&sender, 1, 0.1));

    /* A member hears itself. */
    receive(&one);
    receive(&other);
    send_from(&one, 2);
    CHECK(has_heard(&one, 2, 20) && has_heard(&other, 2, 20));

    /* A queue pair that is attached is in use. */
    CHECK(ibv_destroy_qp(other.id->qp) == EBUSY);
    CHECK(rdma_leave_multicast(other.id, group->ai_addr) == 0);
    receive(&one);
    receive(&other);
    send_from(&sender, 3);
    CHECK(has_heard(&one, 3, 20) && !has_heard(&other, 3, 0.1));

    /* By verbs alone. */
    memcpy(&gid, &one.id->route.addr.addr.ibaddr.sgid, sizeof gid);
    CHECK(ibv_attach_mcast(other.id->qp, &gid, 0) == EINVAL); /* no group */
    CHECK(ibv_detach_mcast(other.id->qp, &gid, 0) == EINVAL);
    if (group->ai_family == AF_INET) {
        memset(&gid, 0, sizeof gid);
        gid.raw[10] = gid.raw[11] = 0xff;
        memcpy(gid.raw + 12, &((struct sockaddr_in *)group->ai_addr)->sin_addr, 4);
    } else {
        memcpy(gid.raw, &((struct sockaddr_in6 *)group->ai_addr)->sin6_addr, 16);
    }
    CHECK(ibv_attach_mcast(other.id->qp, &gid, 0) == 0);
    receive(&one);
    send_from(&sender, 4);
    CHECK(has_heard(&one, 4, 20) && has_heard(&other, 4, 20));
    CHECK(ibv_detach_mcast(other.id->qp, &gid, 0) == 0);
    CHECK(ibv_detach_mcast(other.id->qp, &gid, 0) == EINVAL);

    /* Left before the event was taken: it does not come any more. */
    CHECK(rdma_join_multicast(other.id, group->ai_addr, NULL) == 0);
    CHECK(rdma_leave_multicast(other.id, group->ai_addr) == 0);
    CHECK(poll(&(struct pollfd){.fd = channel->fd, .events = POLLIN}, 1, 100) == 0);

    /* Two joins of one group, two events; a queue pair is destroyed although its identifier has not left. */
    CHECK(rdma_join_multicast(other.id, group->ai_addr, &other) == 0 && rdma_join_multicast(other.id, group->ai_addr, &other) == 0);
    ibv_destroy_ah(other.ah);
    joined(&other);
    ibv_destroy_ah(other.ah);
    joined(&other);
    CHECK(rdma_leave_multicast(other.id, group->ai_addr) == 0);
    receive(&one);
    receive(&other);
    send_from(&sender, 5);
    CHECK(has_heard(&one, 5, 20) && has_heard(&other, 5, 20));

    CHECK(rdma_leave_multicast(one.id, group->ai_addr) == 0 && rdma_leave_multicast(sender.id, group->ai_addr) == 0);
    for (struct member **end = (struct member *[]){&one, &other, &sender, NULL}; *end; end++) {
        ibv_destroy_ah((*end)->ah);
        rdma_destroy_qp((*end)->id);
        CHECK(ibv_dereg_mr((*end)->mr) == 0 && ibv_destroy_cq((*end)->cq) == 0);
        CHECK(rdma_destroy_id((*end)->id) == 0);
    }
    rdma_destroy_event_channel(channel);
    printf("all right\n");
    return 0;
}
