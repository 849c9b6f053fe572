// The active side: the cases, by name. Each prints "ok", "FAILED" or, where devices may differ, "saw" with what was seen.
#include "peer.h"

#include <arpa/inet.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static FILE *from_server, *to_server;
static char answer[512];
static struct side *me;
static struct ends mine, peer;
static struct manner manner;
static int failures;
// Another path MTU for our side of the next pair.
static enum ibv_mtu our_mtu;
static const int ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND;
enum { WAIT = 20000 };

static void fail(const char *format, ...) {
    va_list list;
    va_start(list, format);
    printf("FAILED ");
    vprintf(format, list);
    printf("\n");
    va_end(list);
    failures++;
}

static void tell(const char *format, ...) {
    va_list list;
    va_start(list, format);
    vfprintf(to_server, format, list);
    fprintf(to_server, "\n");
    fflush(to_server);
    va_end(list);
}

static const char *hear(void) {
    if (!fgets(answer, sizeof answer, from_server)) {
        printf("FAILED: the server is gone\n");
        exit(1);
    }
    answer[strcspn(answer, "\n")] = 0;
    return answer;
}

#define ask(...) (tell(__VA_ARGS__), hear())

static struct manner usual(enum ibv_qp_type type, enum ibv_mtu mtu) {
    // Half a second and six retries: an emulated machine may be away for long.
    return (struct manner){type, mtu, 17, 6, 7, 12, 0, 0x123456};
}

// Fresh queue pairs on both sides, connected; `theirs` are the rights of the server's memory.
static void meet(struct manner how, int theirs) {
    manner = how;
    manner.access = IBV_ACCESS_LOCAL_WRITE;
    make_qp(me, &manner, &mine);
    char gid[33];
    for (int at = 0; at < 16; at++) sprintf(gid + 2 * at, "%02x", mine.gid.raw[at]);
    ask("qp %u %u %d %d %d %d %d %x %x %x %s", manner.type, manner.mtu, manner.timeout, manner.retries, manner.rnr_retries, manner.rnr_timer,
        theirs, manner.psn, mine.qpn, mine.psn, gid);
    int code;
    unsigned long long address;
    sscanf(answer, "%d %x %x %x %llx %32s", &code, &peer.qpn, &peer.psn, &peer.rkey, &address, gid);
    peer.address = address;
    for (int at = 0; at < 16; at++) {
        unsigned byte = 0;
        sscanf(gid + 2 * at, "%2x", &byte);
        peer.gid.raw[at] = byte;
    }
    if (code) fail("the server's queue pair: %s", strerror(code));
    if (our_mtu) manner.mtu = our_mtu;
    our_mtu = 0;
    if ((code = connect_qp(me, &manner, &mine, &peer))) fail("our queue pair: %s", strerror(code));
}

static struct ibv_send_wr request(enum ibv_wr_opcode opcode, struct ibv_sge *sge, uint32_t length) {
    *sge = (struct ibv_sge){(uintptr_t)me->buffer, length, me->region->lkey};
    struct ibv_send_wr wr = {.wr_id = 1, .sg_list = sge, .num_sge = length ? 1 : 0, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED};
    wr.imm_data = htonl(0xabcd0000 + length % 0xffff);
    if (opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        wr.wr.atomic.remote_addr = peer.address;
        wr.wr.atomic.rkey = peer.rkey;
    } else {
        wr.wr.rdma.remote_addr = peer.address;
        wr.wr.rdma.rkey = peer.rkey;
    }
    return wr;
}

static enum ibv_wc_status carry_out(struct ibv_send_wr *wr) {
    struct ibv_send_wr *bad;
    struct ibv_wc wc;
    int code = ibv_post_send(me->qp, wr, &bad);
    if (code) {
        fail("ibv_post_send: %s", strerror(code));
        return IBV_WC_GENERAL_ERR;
    }
    if (!poll_one(me, &wc, WAIT)) {
        fail("no completion within %d s", WAIT / 1000);
        return IBV_WC_GENERAL_ERR;
    }
    return wc.status;
}

static const char *const OPS[] = {[IBV_WR_RDMA_WRITE] = "WRITE", [IBV_WR_RDMA_WRITE_WITH_IMM] = "WRITE with immediate", [IBV_WR_SEND] = "SEND",
                                  [IBV_WR_SEND_WITH_IMM] = "SEND with immediate", [IBV_WR_RDMA_READ] = "READ"};

// One message of one kind and length, its bytes and its completion at the other side checked.
static int one(enum ibv_wr_opcode opcode, uint32_t length) {
    static uint32_t seed;
    struct ibv_sge sge;
    struct ibv_send_wr wr = request(opcode, &sge, length);
    int takes_receive = opcode != IBV_WR_RDMA_WRITE && opcode != IBV_WR_RDMA_READ;
    int immediate = opcode == IBV_WR_SEND_WITH_IMM || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    uint32_t wanted, got;
    seed++;
    ask("fill %u %x", length + 8, seed * 77);
    if (takes_receive) ask("receive 0 %u", length ? length : 1);
    if (opcode == IBV_WR_RDMA_READ) {
        fill(me->buffer, length + 8, seed);
        sscanf(ask("sum 0 %u", length), "%x", &wanted);
    } else {
        fill(me->buffer, length, seed);
        wanted = sum(me->buffer, length);
    }
    enum ibv_wc_status status = carry_out(&wr);
    if (status) {
        fail("%s of %u bytes: %s", OPS[opcode], length, status_name(status));
        return 1;
    }
    if (takes_receive) {
        char name[32];
        int kind;
        unsigned bytes, flags, value;
        if (sscanf(ask("poll %d", WAIT), "%31s %d %u %x %x", name, &kind, &bytes, &flags, &value) != 5 || strcmp(name, "SUCCESS") || bytes != length ||
            !(flags & IBV_WC_WITH_IMM) != !immediate || (immediate && value != wr.imm_data)) {
            fail("%s of %u bytes: the receiver saw '%s'", OPS[opcode], length, answer);
            return 1;
        }
    }
    if (opcode == IBV_WR_RDMA_READ) got = sum(me->buffer, length);
    else sscanf(ask("sum 0 %u", length), "%x", &got);
    // An unreliable WRITE is done when it has left: its bytes may still be on their way.
    for (int tries = 0; manner.type == IBV_QPT_UC && got != wanted && tries < 100; tries++) {
        usleep(20000);
        sscanf(ask("sum 0 %u", length), "%x", &got);
    }
    if (got != wanted) {
        fail("%s of %u bytes: the data differ", OPS[opcode], length);
        return 1;
    }
    return 0;
}

// Whether answers may be lost: the kernel never answers the repetition of a READ of no bytes (docs/reference/interop.md).
static int lossy;

static int every_length(enum ibv_wr_opcode opcode, uint32_t mtu, uint32_t most) {
    const uint32_t lengths[] = {0, 1, 2, 3, 4, 5, mtu - 1, mtu, mtu + 1, 2 * mtu, 3 * mtu + 1, 16 * mtu + 3, 65537, 1 << 20};
    int count = 0;
    for (size_t at = 0; at < sizeof lengths / sizeof lengths[0]; at++) {
        if (lengths[at] > most || (lossy && opcode == IBV_WR_RDMA_READ && !lengths[at])) continue;
        if (one(opcode, lengths[at])) return -1;
        count++;
    }
    return count;
}

static uint32_t bytes_of(enum ibv_mtu mtu) { return 128u << mtu; }

static void connected(enum ibv_qp_type type, enum ibv_mtu mtu, uint32_t most) {
    static const enum ibv_wr_opcode kinds[] = {IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ};
    struct manner how = usual(type, mtu);
    // The sequence numbers wrap within the first few messages, in both directions; at most 256 packets later.
    how.psn = 0xfffffa;
    meet(how, ALL);
    for (int at = 0; at < (type == IBV_QPT_RC ? 5 : 4); at++) {
        int count = every_length(kinds[at], bytes_of(mtu), most);
        if (count < 0) return;
        printf("ok %s %s, path MTU %u: %d lengths up to %u\n", type == IBV_QPT_RC ? "RC" : "UC", OPS[kinds[at]], bytes_of(mtu), count, most);
    }
}

static void rc_data(void) {
    for (enum ibv_mtu mtu = IBV_MTU_256; mtu <= IBV_MTU_4096; mtu++) connected(IBV_QPT_RC, mtu, 1 << 20);
}

static void rc_short(void) {
    for (enum ibv_mtu mtu = IBV_MTU_256; mtu <= IBV_MTU_4096; mtu++) connected(IBV_QPT_RC, mtu, 4 * bytes_of(mtu));
}

static void rc_lossy(void) {
    lossy = 1;
    rc_short();
    lossy = 0;
}

static void uc_data(void) {
    for (enum ibv_mtu mtu = IBV_MTU_256; mtu <= IBV_MTU_4096; mtu++) connected(IBV_QPT_UC, mtu, 4 * bytes_of(mtu));
}

// The wrap lies in the middle of one long message, and of one long answer.
static void wrap(void) {
    for (int at = 0; at < 3; at++) {
        static const enum ibv_wr_opcode kinds[] = {IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ};
        struct manner how = usual(IBV_QPT_RC, IBV_MTU_256);
        how.psn = 0xfffff0 - 1000;
        meet(how, ALL);
        if (!one(kinds[at], 1 << 20)) printf("ok %s of 4096 packets over the wrap of the sequence numbers\n", OPS[kinds[at]]);
    }
}

static void atomics(void) {
    meet(usual(IBV_QPT_RC, IBV_MTU_1024), ALL);
    struct ibv_sge sge;
    uint64_t expected, *result = (uint64_t *)me->buffer;
    ask("fill 8 5");
    fill((uint8_t *)&expected, 8, 5);
    for (int turn = 0; turn < 40; turn++) {
        int swap = turn % 2;
        struct ibv_send_wr wr = request(swap ? IBV_WR_ATOMIC_CMP_AND_SWP : IBV_WR_ATOMIC_FETCH_AND_ADD, &sge, 8);
        // Every fourth swap compares with something else and must change nothing.
        int refused = swap && turn % 8 == 7;
        wr.wr.atomic.compare_add = swap ? expected + refused : 0x0102030405060708u + turn;
        wr.wr.atomic.swap = 0x1111111111111111u * turn;
        enum ibv_wc_status status = carry_out(&wr);
        if (status) return fail("atomic: %s", status_name(status));
        if (*result != expected) return fail("atomic %d: found %llx instead of %llx", turn, (unsigned long long)*result, (unsigned long long)expected);
        if (!swap) expected += wr.wr.atomic.compare_add;
        else if (!refused) expected = wr.wr.atomic.swap;
    }
    uint32_t got;
    sscanf(ask("sum 0 8"), "%x", &got);
    if (got != sum((uint8_t *)&expected, 8)) return fail("atomics: the memory differs at the end");
    printf("ok 40 atomics, values checked\n");
}

// FLUSH, where this side's library has it.
static void flush(void) {
    void (*call)(struct ibv_qp_ex *, uint32_t, uint64_t, size_t, uint8_t, uint8_t);
    struct manner how = usual(IBV_QPT_RC, IBV_MTU_1024);
    how.retries = 2;
    meet(how, ALL | ACCESS_FLUSH_GLOBAL);
    struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(me->qp);
    struct ibv_wc wc;
    memcpy(&call, &ex->wr_atomic_write + 1, sizeof call); // the member after it, in newer headers
    ibv_wr_start(ex);
    ex->wr_flags = IBV_SEND_SIGNALED;
    call(ex, peer.rkey, peer.address, 3008, FLUSH_GLOBAL, FLUSH_RANGE);
    int code = ibv_wr_complete(ex);
    if (code) return fail("FLUSH: ibv_wr_complete: %s", strerror(code));
    if (!poll_one(me, &wc, WAIT)) return fail("FLUSH: no completion within %d s", WAIT / 1000);
    printf("saw FLUSH: %s\n", status_name(wc.status));
}

// Words written at once, in order with WRITEs before and after.
static void words(void) {
    me->extended = 1;
    meet(usual(IBV_QPT_RC, IBV_MTU_1024), ALL);
    struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(me->qp);
    if (!ex) return fail("no extended queue pair");
    for (int turn = 0; turn < 40; turn++) {
        uint64_t word = 0x0102030405060708u * (turn + 1), last = ~word;
        fill(me->buffer, 3000, turn);
        ibv_wr_start(ex);
        ex->wr_id = turn;
        ex->wr_flags = IBV_SEND_SIGNALED;
        ibv_wr_atomic_write(ex, peer.rkey, peer.address, &word);
        ibv_wr_rdma_write(ex, peer.rkey, peer.address + 8);
        ibv_wr_set_sge(ex, me->region->lkey, (uintptr_t)me->buffer, 3000);
        ibv_wr_atomic_write(ex, peer.rkey, peer.address + 4096, &last);
        int code = ibv_wr_complete(ex);
        if (code) return fail("ibv_wr_complete: %s", strerror(code));
        for (int at = 0; at < 3; at++) {
            struct ibv_wc wc;
            if (!poll_one(me, &wc, WAIT)) return fail("turn %d: no completion within %d s", turn, WAIT / 1000);
            if (wc.status) return fail("turn %d, request %d: %s", turn, at, status_name(wc.status));
        }
        uint8_t there[3008];
        memcpy(there, &word, 8);
        memcpy(there + 8, me->buffer, 3000);
        uint32_t got;
        sscanf(ask("sum 0 3008"), "%x", &got);
        if (got != sum(there, sizeof there)) return fail("turn %d: the memory differs", turn);
        sscanf(ask("sum 4096 8"), "%x", &got);
        if (got != sum((uint8_t *)&last, 8)) return fail("turn %d: the last word differs", turn);
    }
    printf("ok 80 atomic writes, values checked\n");
    if (has_flush(me)) flush();
    me->extended = 0;
}

// Many requests at once: more READs than may be outstanding, lists of pieces, unsignalled requests, and fences if asked for.
static void many(int fence) {
    meet(usual(IBV_QPT_RC, IBV_MTU_1024), ALL);
    ask("fill %u 9", 1 << 20);
    enum { EACH = 24, LENGTH = 5000 };
    struct ibv_sge sges[EACH * 2];
    struct ibv_send_wr *bad, wr;
    memset(me->buffer, 0, 1 << 20);
    for (int at = 0; at < EACH; at++) {
        wr = request(at % 3 == 2 ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ, sges, LENGTH);
        // Two pieces of odd lengths, the second one first in memory.
        sges[2 * at] = (struct ibv_sge){(uintptr_t)me->buffer + at * LENGTH + 1777, LENGTH - 1777, me->region->lkey};
        sges[2 * at + 1] = (struct ibv_sge){(uintptr_t)me->buffer + at * LENGTH, 1777, me->region->lkey};
        wr.sg_list = sges + 2 * at;
        wr.num_sge = 2;
        wr.wr.rdma.remote_addr = peer.address + at * LENGTH;
        wr.send_flags = at % 4 == 3 || at == EACH - 1 ? IBV_SEND_SIGNALED | fence : 0;
        wr.wr_id = at;
        if (ibv_post_send(me->qp, &wr, &bad)) return fail("posting the %dth of many", at);
    }
    struct ibv_wc wc;
    for (int at = 3; at < EACH; at += 4) {
        if (!poll_one(me, &wc, WAIT)) return fail("many at once: no completion");
        if (wc.status || wc.wr_id != (uint64_t)at) return fail("many at once: %s for request %d", status_name(wc.status), (int)wc.wr_id);
    }
    static uint8_t wanted[EACH * LENGTH];
    fill(wanted, sizeof wanted, 9);
    for (int at = 0; at < EACH; at++) {
        if (at % 3 == 2) continue;
        uint8_t *theirs = wanted + at * LENGTH, *ours = me->buffer + at * LENGTH;
        if (memcmp(ours + 1777, theirs, LENGTH - 1777) || memcmp(ours, theirs + LENGTH - 1777, 1777)) return fail("many at once: the data of READ %d differ", at);
    }
    printf("ok %d READs and WRITEs at once, in pieces%s\n", EACH, fence ? ", with fences" : "");
}

static void crowd(void) { many(0); }

static void fences(void) { many(IBV_SEND_FENCE); }

static void datagrams(void) {
    for (int turn = 0; turn < 10; turn++) {
        struct manner how = usual(IBV_QPT_UD, IBV_MTU_1024);
        meet(how, ALL);
        struct ibv_ah_attr attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = peer.gid, .sgid_index = me->gid_index, .hop_limit = 64}};
        struct ibv_ah *ah = ibv_create_ah(me->domain, &attr);
        if (!ah) return fail("ibv_create_ah");
        static const uint32_t lengths[] = {0, 1, 3, 4, 100, 511, 1000, 2048, 4096, 8};
        uint32_t length = lengths[turn], wanted, got;
        int immediate = turn % 2, wrong_key = turn == 9;
        struct ibv_sge sge;
        struct ibv_send_wr wr = request(immediate ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND, &sge, length);
        wr.wr.ud.ah = ah;
        wr.wr.ud.remote_qpn = peer.qpn;
        wr.wr.ud.remote_qkey = QKEY + wrong_key;
        fill(me->buffer, length, turn + 1);
        wanted = sum(me->buffer, length);
        ask("receive 0 %u", 4096 + GRH);
        enum ibv_wc_status status = carry_out(&wr);
        if (status) fail("a datagram of %u bytes: %s", length, status_name(status));
        char name[32];
        int kind;
        unsigned bytes, flags, value;
        int fields = sscanf(ask("poll %d", wrong_key ? 500 : WAIT), "%31s %d %u %x %x", name, &kind, &bytes, &flags, &value);
        if (wrong_key) {
            if (strcmp(answer, "none")) fail("a datagram with a wrong key arrived: %s", answer);
            else printf("ok a datagram with a wrong key is dropped\n");
        } else if (fields != 5 || bytes != length + GRH || !(flags & IBV_WC_GRH) || (immediate && value != wr.imm_data)) {
            fail("a datagram of %u bytes: the receiver saw '%s'", length, answer);
        } else {
            sscanf(ask("sum %d %u", GRH, length), "%x", &got);
            if (got != wanted) fail("a datagram of %u bytes: the data differ", length);
            else printf("ok a datagram of %u bytes%s\n", length, immediate ? " with immediate" : "");
        }
        ibv_destroy_ah(ah);
    }
}

// One request that must fail: what we see, and what the other side sees.
static void wrong(const char *what, struct ibv_send_wr *wr) {
    double start = now();
    struct ibv_send_wr *bad;
    struct ibv_wc wc;
    int code = ibv_post_send(me->qp, wr, &bad);
    if (code) return (void)printf("saw %s: posting is refused, %s\n", what, strerror(code));
    if (!poll_one(me, &wc, WAIT)) return fail("%s: no completion within %d s", what, WAIT / 1000);
    enum ibv_wc_status status = wc.status;
    double took = now() - start;
    const char *state = qp_state(me);
    ask("poll 300");
    char receive[32] = "none", gone[64];
    sscanf(answer, "%31s", receive);
    events(me, gone, sizeof gone);
    ask("state");
    printf("saw %s: %s, state %s, events: %s; the other side: completion %s, state %s; %s\n", what, status_name(status), state, gone, receive, answer,
           took < 10 ? "in time" : "late");
}

static void errors(void) {
    struct ibv_sge sge;
    struct ibv_send_wr wr;
    static const enum ibv_wr_opcode kinds[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ};
    for (int at = 0; at < 2; at++) {
        char what[64];
        meet(usual(IBV_QPT_RC, IBV_MTU_1024), ALL);
        wr = request(kinds[at], &sge, 3000);
        wr.wr.rdma.rkey ^= 0x5a5a00;
        snprintf(what, sizeof what, "%s with a wrong key", OPS[kinds[at]]);
        wrong(what, &wr);
        meet(usual(IBV_QPT_RC, IBV_MTU_1024), ALL);
        wr = request(kinds[at], &sge, 3000);
        wr.wr.rdma.remote_addr += BUFFER - 2999;
        snprintf(what, sizeof what, "%s one byte beyond the region", OPS[kinds[at]]);
        wrong(what, &wr);
        meet(usual(IBV_QPT_RC, IBV_MTU_1024), IBV_ACCESS_LOCAL_WRITE);
        wr = request(kinds[at], &sge, 3000);
        snprintf(what, sizeof what, "%s without the right", OPS[kinds[at]]);
        wrong(what, &wr);
    }
    meet(usual(IBV_QPT_RC, IBV_MTU_1024), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
    wr = request(IBV_WR_ATOMIC_FETCH_AND_ADD, &sge, 8);
    wrong("atomic without the right", &wr);
    meet(usual(IBV_QPT_RC, IBV_MTU_1024), ALL);
    wr = request(IBV_WR_ATOMIC_FETCH_AND_ADD, &sge, 8);
    wr.wr.atomic.remote_addr += 4;
    wrong("atomic on an odd address", &wr);
    meet(usual(IBV_QPT_RC, IBV_MTU_1024), ALL);
    ask("receive 0 100");
    wr = request(IBV_WR_SEND, &sge, 3000);
    wrong("SEND longer than the receive", &wr);
    meet(usual(IBV_QPT_RC, IBV_MTU_1024), ALL);
    ask("receive 0 100");
    wr = request(IBV_WR_SEND, &sge, 800);
    wrong("SEND of one packet longer than the receive", &wr);
    struct manner how = usual(IBV_QPT_RC, IBV_MTU_1024);
    how.rnr_retries = 2;
    meet(how, ALL);
    wr = request(IBV_WR_SEND, &sge, 100);
    wrong("SEND that never finds a receive", &wr);
    how = usual(IBV_QPT_RC, IBV_MTU_1024);
    how.timeout = 14;
    how.retries = 3;
    meet(how, ALL);
    struct ends nobody = peer;
    nobody.qpn += 100;
    make_qp(me, &manner, &mine);
    connect_qp(me, &manner, &mine, &nobody);
    wr = request(IBV_WR_RDMA_WRITE, &sge, 100);
    wrong("WRITE to a queue pair that does not exist", &wr);
    meet(how, ALL);
    nobody = peer;
    nobody.gid.raw[15] += 7;
    make_qp(me, &manner, &mine);
    int code = connect_qp(me, &manner, &mine, &nobody);
    if (code) {
        printf("saw WRITE to a GID that nobody has: refused when the queue pair is connected, %s\n", strerror(code));
    } else {
        wr = request(IBV_WR_RDMA_WRITE, &sge, 100);
        wrong("WRITE to a GID that nobody has", &wr);
    }
}

static void rnr(void) {
    meet(usual(IBV_QPT_RC, IBV_MTU_1024), ALL);
    struct ibv_sge sge;
    struct ibv_send_wr wr = request(IBV_WR_SEND, &sge, 3000), *bad;
    struct ibv_wc wc;
    fill(me->buffer, 3000, 3);
    tell("receive-after 300 3000");
    double start = now();
    if (ibv_post_send(me->qp, &wr, &bad)) return fail("ibv_post_send");
    if (!poll_one(me, &wc, WAIT) || wc.status) return fail("SEND before the receive: %s", status_name(wc.status));
    double took = now() - start;
    hear();
    ask("poll %d", WAIT);
    uint32_t got;
    sscanf(ask("sum 0 3000"), "%x", &got);
    if (got != sum(me->buffer, 3000)) return fail("SEND before the receive: the data differ");
    if (took < 0.25) return fail("SEND before the receive ended after %.3f s", took);
    printf("ok SEND waits for a receive that is posted 0.3 s later\n");
}

// A window of the server's is invalidated by our SEND: it can be written through before, and not after.
static void invalidate(void) {
    struct ibv_sge sge;
    meet(usual(IBV_QPT_RC, IBV_MTU_1024), ALL);
    unsigned code, key;
    sscanf(ask("window 8192 4096"), "%u %x", &code, &key);
    if (code) return fail("the other side has no memory windows");
    for (int length = 500; length <= 2500; length += 2000) {
        struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, &sge, 300);
        wr.wr.rdma.remote_addr = peer.address + 8192;
        wr.wr.rdma.rkey = key;
        enum ibv_wc_status status = carry_out(&wr);
        if (status) return fail("WRITE through the window: %s", status_name(status));
        ask("receive 0 3000");
        wr = request(IBV_WR_SEND_WITH_INV, &sge, length);
        wr.invalidate_rkey = key;
        status = carry_out(&wr);
        if (status) return fail("SEND with invalidate: %s", status_name(status));
        ask("poll %d", WAIT);
        printf("saw SEND of %d bytes with invalidate: the receiver's completion has %s\n", length, answer);
        wr = request(IBV_WR_RDMA_WRITE, &sge, 300);
        wr.wr.rdma.remote_addr = peer.address + 8192;
        wr.wr.rdma.rkey = key;
        wrong("WRITE through the window after that", &wr);
        if (length > 2000) break;
        meet(usual(IBV_QPT_RC, IBV_MTU_1024), ALL);
        sscanf(ask("window 8192 4096"), "%u %x", &code, &key);
        if (code) return fail("a second window");
    }
    // A window that its owner took back, and what is no window at all.
    meet(usual(IBV_QPT_RC, IBV_MTU_1024), ALL);
    sscanf(ask("window 8192 4096"), "%u %x", &code, &key);
    if (code) return fail("a third window");
    sscanf(ask("unbind %x", key), "%u", &code);
    if (code) return fail("the server's LOCAL_INV");
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, &sge, 300);
    wr.wr.rdma.remote_addr = peer.address + 8192;
    wr.wr.rdma.rkey = key;
    wrong("WRITE through a window that its owner took back", &wr);
    meet(usual(IBV_QPT_RC, IBV_MTU_1024), ALL);
    ask("receive 0 3000");
    wr = request(IBV_WR_SEND_WITH_INV, &sge, 2000);
    wr.invalidate_rkey = peer.rkey;
    wrong("SEND that invalidates an ordinary region", &wr);
}

// READs of no bytes, each behind a WRITE, while answers are lost: whether a repeated one is answered.
static void empty_reads(void) {
    struct manner how = usual(IBV_QPT_RC, IBV_MTU_1024);
    how.timeout = 14;
    meet(how, ALL);
    for (int turn = 1; turn <= 60; turn++) {
        struct ibv_sge sge;
        struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, &sge, 100);
        enum ibv_wc_status status = carry_out(&wr);
        if (status) return fail("WRITE: %s", status_name(status));
        wr = request(IBV_WR_RDMA_READ, &sge, 0);
        status = carry_out(&wr);
        if (status) return (void)printf("saw READs of no bytes: %s at READ %d\n", status_name(status), turn);
    }
    printf("saw READs of no bytes: all succeed\n");
}

// READs of 4096 packets each, for a minute and a half: whether one is left unanswered.
static void long_reads(void) {
    meet(usual(IBV_QPT_RC, IBV_MTU_256), ALL);
    double end = now() + 90;
    int count = 0;
    while (now() < end) {
        struct ibv_sge sge;
        struct ibv_send_wr wr = request(IBV_WR_RDMA_READ, &sge, 1 << 20);
        enum ibv_wc_status status = carry_out(&wr);
        if (status) return (void)printf("saw long READs: %s at READ %d\n", status_name(status), count + 1);
        count++;
    }
    printf("saw long READs: all %d succeed\n", count);
}

// WRITEs without end, until one fails: for what happens to the other side meanwhile.
static void stream(void) {
    struct manner how = usual(IBV_QPT_RC, IBV_MTU_1024);
    how.timeout = 15;
    how.retries = 4;
    meet(how, ALL);
    struct ibv_sge sge;
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, &sge, 65536);
    double last = now(), end = now() + 60;
    long count = 0;
    printf("streaming\n");
    while (now() < end) {
        struct ibv_send_wr *bad;
        struct ibv_wc wc;
        int code = ibv_post_send(me->qp, &wr, &bad);
        if (code) return (void)printf("saw the stream end: posting is refused, %s\n", strerror(code));
        if (!poll_one(me, &wc, 30000)) return fail("the stream hangs: no completion within 30 s");
        if (wc.status) {
            char text[128];
            events(me, text, sizeof text);
            printf("saw the stream end: %s after %ld messages, %s, state %s, events: %s\n", status_name(wc.status), count,
                   now() - last < 10 ? "in time" : "late", qp_state(me), text);
            return;
        }
        count++;
        last = now();
    }
    fail("the stream did not end");
}

// Each side was told another path MTU: our packets are longer, or shorter, than what the other one expects.
static void mtu_mismatch(void) {
    for (enum ibv_mtu ours = IBV_MTU_4096; ours >= IBV_MTU_1024; ours -= 2) {
        enum ibv_mtu theirs = ours == IBV_MTU_4096 ? IBV_MTU_1024 : IBV_MTU_4096;
        struct ibv_sge sge;
        char what[80];
        struct manner how = usual(IBV_QPT_RC, theirs);
        how.timeout = 14;
        how.retries = 3;
        our_mtu = ours;
        meet(how, ALL);
        struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, &sge, 10000);
        snprintf(what, sizeof what, "WRITE in packets of %u to a side told %u", bytes_of(ours), bytes_of(theirs));
        wrong(what, &wr);
        our_mtu = ours;
        meet(how, ALL);
        wr = request(IBV_WR_RDMA_READ, &sge, 10000);
        snprintf(what, sizeof what, "READ answered in packets of %u where %u are expected", bytes_of(theirs), bytes_of(ours));
        wrong(what, &wr);
    }
}

static const struct {
    const char *name;
    void (*run)(void);
} CASES[] = {{"rc", rc_data},  {"rc-short", rc_short}, {"rc-lossy", rc_lossy}, {"uc", uc_data},   {"ud", datagrams}, {"wrap", wrap},     {"atomics", atomics}, {"words", words}, {"crowd", crowd}, {"fences", fences}, {"empty-reads", empty_reads}, {"long-reads", long_reads},
             {"errors", errors}, {"rnr", rnr},         {"invalidate", invalidate}, {"stream", stream}, {"mtu-mismatch", mtu_mismatch}};

int run_client(struct side *side, FILE *in, FILE *out, int count, char **names) {
    me = side;
    from_server = in;
    to_server = out;
    for (int at = 0; at < count; at++) {
        size_t known = 0;
        while (known < sizeof CASES / sizeof CASES[0] && strcmp(CASES[known].name, names[at])) known++;
        if (known == sizeof CASES / sizeof CASES[0]) {
            fail("no case is called %s", names[at]);
            continue;
        }
        CASES[known].run();
    }
    return failures != 0;
}
