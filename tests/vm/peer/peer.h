// A test program for both ends of the cable: the kernel's device in the guest, nb0 on the host. The client decides what happens and
// checks it; the server obeys commands that come over TCP, one line each, and answers each with one line.
#ifndef PEER_H
#define PEER_H

#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>

// Of headers newer than Debian's.
enum { ACCESS_FLUSH_GLOBAL = 1 << 8, WITH_FLUSH = 1 << 11, FLUSH_GLOBAL = 1, FLUSH_RANGE = 0 };

enum { BUFFER = 4 << 20, QKEY = 0x11111111, GRH = 40 };

// What both sides must know to connect two queue pairs.
struct ends {
    uint32_t qpn, psn, rkey;
    uint64_t address;
    union ibv_gid gid;
};

// How a queue pair is to behave; what is 0 in the client's call takes the values of `usual`.
struct manner {
    enum ibv_qp_type type;
    enum ibv_mtu mtu;
    int timeout, retries, rnr_retries, rnr_timer, access;
    uint32_t psn;
};

// One device with one queue pair at a time.
struct side {
    struct ibv_context *context;
    struct ibv_pd *domain;
    struct ibv_cq *queue;
    struct ibv_qp *qp;
    struct ibv_mr *region;
    struct ibv_mw *window;
    uint8_t *buffer;
    // Requests are built call by call.
    int extended;
    int gid_index;
    union ibv_gid gid;
};

void open_side(struct side *side, int gid_index);
// A fresh queue pair, the old one gone, and memory registered with the rights asked for; in INIT.
int make_qp(struct side *side, const struct manner *manner, struct ends *mine);
// To RTS, connected to the other end.
int connect_qp(struct side *side, const struct manner *manner, const struct ends *mine, const struct ends *peer);
int post_receive(struct side *side, uint32_t offset, uint32_t length);
// One completion within so many milliseconds: 1, or 0 if none came.
int poll_one(struct side *side, struct ibv_wc *wc, int milliseconds);
// The state of the queue pair, as text.
const char *qp_state(struct side *side);
// Asynchronous events that wait, as text.
void events(struct side *side, char *text, size_t room);
uint32_t sum(const uint8_t *from, size_t length);
void fill(uint8_t *to, size_t length, uint32_t seed);
double now(void);
// Whether the device of this side offers FLUSH.
int has_flush(struct side *side);
const char *status_name(enum ibv_wc_status status);

int serve(struct side *side, FILE *in, FILE *out);
int run_client(struct side *side, FILE *in, FILE *out, int count, char **names);

#endif
