/* How processes and threads end, and what else happens to them. */
#include <sys/socket.h>
#include <sys/time.h>

#include "rig.h"

static struct side a, b;

static void once(void) {
    fill(&a, 0, 64, 3);
    struct ibv_sge sge = sge_of(&a, 0, 64);
    struct ibv_send_wr wr = {.wr_id = 5, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED}, *bad;
    wr.wr.rdma.remote_addr = (uintptr_t)b.memory;
    wr.wr.rdma.rkey = b.mr->rkey;
    CHECK(!ibv_post_send(a.qp, &wr, &bad));
    wait_good(a.cq, 5, IBV_WC_RDMA_WRITE);
    same(&a, 0, &b, 0, 64);
}

static void reap(pid_t child) {
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* A child finds its parent's objects dead, tidies up without a hang, and may open its own; the parent goes on. */
static void forked(void) {
    make_pair(&a, &b, IBV_QPT_RC);
    once();
    pid_t child = fork();
    if (!child) {
        struct ibv_wc wc;
        struct ibv_async_event event;
        CHECK(ibv_poll_cq(a.cq, 1, &wc) == -1);
        CHECK(!ibv_alloc_pd(a.context) && errno == EIO);
        CHECK(!ibv_reg_mr(a.pd, a.memory, 4096, 0) && errno == EIO);
        CHECK(ibv_get_async_event(a.context, &event) == -1);
        CHECK(!ibv_destroy_qp(a.qp) && !ibv_destroy_cq(a.cq) && !ibv_destroy_comp_channel(a.channel));
        CHECK(!ibv_dereg_mr(a.mr) && !ibv_dealloc_pd(a.pd) && !ibv_close_device(a.context));
        make_pair(&a, &b, IBV_QPT_RC);
        once();
        drop_pair(&a, &b);
        exit(0);
    }
    for (int i = 0; i < 100; i++)
        once();
    reap(child);
    once();
    /* Many forks while another thread is at work. */
    for (int i = 0; i < 20; i++) {
        child = fork();
        if (!child)
            _exit(0);
        once();
        reap(child);
    }
    drop_pair(&a, &b);
}

/* With everything open, by every way out. */
static void exits(void) {
    for (int how = 0; how < 3; how++) {
        pid_t child = fork();
        if (!child) {
            make_pair(&a, &b, IBV_QPT_RC);
            once();
            CHECK(!ibv_req_notify_cq(b.cq, 0));
            if (how == 0)
                exit(0);
            if (how == 1)
                ibv_close_device(a.context);
            if (how == 2)
                _exit(0);
            exit(0);
        }
        reap(child);
    }
}

static void *wait_for_completions(void *unused) {
    struct ibv_cq *cq;
    void *context;
    ibv_get_cq_event(b.channel, &cq, &context);
    return unused;
}

static void *wait_for_events(void *unused) {
    struct ibv_async_event event;
    for (;;)
        if (!ibv_get_async_event(b.context, &event))
            ibv_ack_async_event(&event);
    return unused;
}

static void *work(void *unused) {
    for (;;) {
        once();
        pthread_testcancel();
    }
    return unused;
}

static void *send_later(void *unused) {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    usleep(300000);
    struct ibv_sge sge = sge_of(&a, 0, 8);
    struct ibv_send_wr wr = {.wr_id = 5, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED}, *bad;
    CHECK(!ibv_post_send(a.qp, &wr, &bad));
    return unused;
}

static void cancel(void *(*body)(void *)) {
    pthread_t thread;
    void *result;
    CHECK(!pthread_create(&thread, NULL, body, NULL));
    usleep(50000);
    CHECK(!pthread_cancel(thread) && !pthread_join(thread, &result) && result == PTHREAD_CANCELED);
}

/* A thread is cancelled while it waits; one that works, where it does not hold anything of ours. */
static void cancelled(void) {
    make_pair(&a, &b, IBV_QPT_RC);
    once();
    cancel(wait_for_completions);
    cancel(wait_for_events);
    /* The next thread that waits is woken. */
    post_receive(&b, 1, 0, 100);
    CHECK(!ibv_req_notify_cq(b.cq, 0));
    pthread_t sender;
    CHECK(!pthread_create(&sender, NULL, send_later, NULL));
    struct ibv_cq *cq;
    void *context;
    CHECK(!ibv_get_cq_event(b.channel, &cq, &context) && cq == b.cq);
    ibv_ack_cq_events(cq, 1);
    CHECK(!pthread_join(sender, NULL));
    wait_good(b.cq, 1, IBV_WC_RECV);
    wait_good(a.cq, 5, IBV_WC_SEND);
    /* While it posts and polls: it ends where it could be cancelled, which is nowhere in our functions. */
    pthread_t thread;
    void *result;
    CHECK(!pthread_create(&thread, NULL, work, NULL));
    usleep(20000);
    CHECK(!pthread_cancel(thread) && !pthread_join(thread, &result) && result == PTHREAD_CANCELED);
    once();
    drop_pair(&a, &b);
}

static void nothing(int signal) {
    (void)signal;
}

/* A signal ends a wait as it ends a read. */
static void signalled(void) {
    make_pair(&a, &b, IBV_QPT_RC);
    struct sigaction action = {.sa_handler = nothing};
    CHECK(!sigaction(SIGALRM, &action, NULL));
    struct ibv_cq *cq;
    void *context;
    alarm(1);
    CHECK(ibv_get_cq_event(b.channel, &cq, &context) == -1 && errno == EINTR);
    once();
    drop_pair(&a, &b);
}

/* One whose handler says that calls go on after it does not end a wait, as it does not end a read. */
static void restarted(void) {
    make_pair(&a, &b, IBV_QPT_RC);
    post_receive(&b, 1, 0, 100);
    CHECK(!ibv_req_notify_cq(b.cq, 0));
    signal(SIGALRM, nothing);
    struct itimerval often = {{0, 50000}, {0, 50000}};
    CHECK(!setitimer(ITIMER_REAL, &often, NULL));
    pthread_t sender;
    CHECK(!pthread_create(&sender, NULL, send_later, NULL));
    struct ibv_cq *cq;
    void *context;
    CHECK(!ibv_get_cq_event(b.channel, &cq, &context) && cq == b.cq && context == &b);
    ibv_ack_cq_events(cq, 1);
    CHECK(!pthread_join(sender, NULL));
    wait_good(b.cq, 1, IBV_WC_RECV);
    wait_good(a.cq, 5, IBV_WC_SEND);
    drop_pair(&a, &b);
}

static void exchange(int with, union ibv_gid *gid, uint32_t *qpn) {
    struct { union ibv_gid gid; uint32_t qpn; } there, here = {*gid, *qpn};
    CHECK(write(with, &here, sizeof here) == sizeof here && read(with, &there, sizeof there) == sizeof there);
    *gid = there.gid;
    *qpn = there.qpn;
}

/* A side of its own process, connected with the one at the other end of the socket. */
static void connect_over(int socket) {
    make_side(&a, open_first());
    make_qp(&a, IBV_QPT_RC);
    for (int i = 0; i < 32; i++)
        post_receive(&a, 1, 4096, 64);
    union ibv_gid gid = a.gid;
    uint32_t qpn = a.qp->qp_num;
    exchange(socket, &gid, &qpn);
    to_rts(a.qp, IBV_QPT_RC, gid, qpn);
    exchange(socket, &gid, &qpn); /* both are ready */
}

static void send_one(void) {
    struct ibv_sge sge = sge_of(&a, 0, 8);
    struct ibv_send_wr wr = {.wr_id = 5, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED}, *bad;
    CHECK(!ibv_post_send(a.qp, &wr, &bad));
}

static void wait_received(int with_sent) {
    for (int received = 0, sent = !with_sent; !received || !sent;) {
        struct ibv_wc wc = wait_wc(a.cq);
        CHECK(wc.status == IBV_WC_SUCCESS);
        received |= wc.opcode == IBV_WC_RECV;
        sent |= wc.opcode == IBV_WC_SEND;
    }
}

/* A process that leaves right after it got what it was waiting for, with everything open: whoever sent that learns that it arrived. */
static void leaves(void) {
    for (int rounds = 0; rounds <= 20; rounds += 10)
        for (int i = 0; i < 4; i++) {
            int sockets[2];
            CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, sockets));
            pid_t child = fork();
            if (!child) {
                connect_over(sockets[1]);
                wait_received(0);
                for (int i = 0; i < rounds; i++) {
                    send_one();
                    wait_received(1);
                }
                exit(0);
            }
            connect_over(sockets[0]);
            for (int i = 0; i < rounds; i++) {
                send_one();
                wait_received(1);
            }
            send_one();
            wait_good(a.cq, 5, IBV_WC_SEND);
            reap(child);
            drop_side(&a);
            CHECK(!ibv_close_device(a.context));
            close(sockets[0]);
            close(sockets[1]);
        }
}

static void leave_now(int number) {
    (void)number;
    exit(7);
}

/* exit() in the handler of a signal that interrupted malloc: what we do at exit must not allocate in that thread. */
static void interrupted(void) {
    for (int i = 0; i < 20; i++) {
        pid_t child = fork();
        if (!child) {
            make_pair(&a, &b, IBV_QPT_RC);
            once();
            alarm(20);
            signal(SIGUSR1, leave_now);
            timer_t timer;
            CHECK(!timer_create(CLOCK_MONOTONIC, &(struct sigevent){.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1}, &timer));
            CHECK(!timer_settime(timer, 0, &(struct itimerspec){.it_value.tv_nsec = 3000000 + i * 100000}, NULL));
            /* Longer than what malloc keeps for each thread: every call takes the lock of the heap. */
            void *kept[64] = {0};
            for (size_t size = 2000, at = 0;; size = size * 7 % 49999 + 2000, at = (at + 1) % 64) {
                free(kept[at]);
                kept[at] = malloc(size);
            }
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 7);
    }
}

int main(int count, char **arguments) {
    struct { const char *name; void (*run)(void); } all[] = {
        {"forked", forked}, {"exits", exits}, {"cancelled", cancelled}, {"signalled", signalled}, {"restarted", restarted}, {"leaves", leaves}, {"interrupted", interrupted}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (count > 1 && !strcmp(all[i].name, arguments[1])) {
            all[i].run();
            return 0;
        }
    return 2;
}
