// The passive side: obeys one command a line.
#include "peer.h"

#include <string.h>
#include <unistd.h>

static void read_gid(const char *text, union ibv_gid *gid) {
    for (int at = 0; at < 16; at++) {
        unsigned byte = 0;
        sscanf(text + 2 * at, "%2x", &byte);
        gid->raw[at] = byte;
    }
}

// A second type 2 window on part of the memory, bound by the queue pair itself: the only thing a peer may invalidate.
static int bind_window(struct side *side, unsigned offset, unsigned length, uint32_t *key) {
    side->window = ibv_alloc_mw(side->domain, IBV_MW_TYPE_2);
    if (!side->window) return 1;
    struct ibv_send_wr wr = {.wr_id = 77, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED}, *bad;
    wr.bind_mw.mw = side->window;
    wr.bind_mw.rkey = ibv_inc_rkey(side->window->rkey);
    wr.bind_mw.bind_info = (struct ibv_mw_bind_info){side->region, (uintptr_t)side->buffer + offset, length, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE};
    struct ibv_wc wc;
    if (ibv_post_send(side->qp, &wr, &bad) || !poll_one(side, &wc, 2000) || wc.status) return 1;
    *key = wr.bind_mw.rkey;
    return 0;
}

int serve(struct side *side, FILE *in, FILE *out) {
    char line[512], word[32], gid[64];
    struct manner manner;
    struct ends mine = {0}, peer;
    while (fgets(line, sizeof line, in)) {
        unsigned type, mtu, first, second;
        sscanf(line, "%31s", word);
        if (!strcmp(word, "qp")) {
            sscanf(line, "qp %u %u %d %d %d %d %d %x %x %x %63s", &type, &mtu, &manner.timeout, &manner.retries, &manner.rnr_retries,
                   &manner.rnr_timer, &manner.access, &manner.psn, &peer.qpn, &peer.psn, gid);
            manner.type = type;
            manner.mtu = mtu;
            read_gid(gid, &peer.gid);
            make_qp(side, &manner, &mine);
            int code = connect_qp(side, &manner, &mine, &peer);
            fprintf(out, "%d %x %x %x %llx ", code, mine.qpn, mine.psn, mine.rkey, (unsigned long long)mine.address);
            for (int at = 0; at < 16; at++) fprintf(out, "%02x", mine.gid.raw[at]);
        } else if (sscanf(line, "receive %u %u", &first, &second) == 2) {
            fprintf(out, "%d", post_receive(side, first, second));
        } else if (sscanf(line, "receive-after %u %u", &first, &second) == 2) {
            usleep(first * 1000);
            fprintf(out, "%d", post_receive(side, 0, second));
        } else if (sscanf(line, "fill %u %x", &first, &second) == 2) {
            fill(side->buffer, first, second);
            fprintf(out, "0");
        } else if (sscanf(line, "sum %u %u", &first, &second) == 2) {
            fprintf(out, "%x", sum(side->buffer + first, second));
        } else if (sscanf(line, "poll %u", &first) == 1) {
            struct ibv_wc wc;
            if (poll_one(side, &wc, first)) {
                fprintf(out, "%s %d %u %x %x", status_name(wc.status), wc.opcode, wc.byte_len, wc.wc_flags, wc.status ? 0 : wc.imm_data);
            } else {
                fprintf(out, "none");
            }
        } else if (!strcmp(word, "state")) {
            char text[256];
            events(side, text, sizeof text);
            fprintf(out, "%s; events: %s", qp_state(side), text);
        } else if (sscanf(line, "window %u %u", &first, &second) == 2) {
            uint32_t key = 0;
            int code = bind_window(side, first, second, &key);
            fprintf(out, "%d %x", code, key);
        } else if (sscanf(line, "unbind %x", &first) == 1) {
            struct ibv_send_wr wr = {.wr_id = 78, .opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED, .invalidate_rkey = first}, *bad;
            struct ibv_wc wc;
            fprintf(out, "%d", ibv_post_send(side->qp, &wr, &bad) || !poll_one(side, &wc, 2000) || wc.status);
        } else {
            break;
        }
        fprintf(out, "\n");
        fflush(out);
    }
    return 0;
}
