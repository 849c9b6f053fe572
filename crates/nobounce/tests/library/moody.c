/* A libibverbs that is another one (REAL, by its path), but for its moods. A mood is a file in the folder that MOODY_FOLDER names:
 *
 *   down       the port says that it is down, no event tells, and requests are taken and never end: rxe of Linux 6.1
 *   unanswered a request is taken, nothing is sent, and it ends because nobody answered
 *   watched    the length of each request, and whether its bytes came with it, is a line of the file `posted`
 *   elsewhere  the GIDs are of a network that this machine is not in
 *
 * It is linked with the other one, so that everything else is found there by whoever looks here. */
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#undef ibv_query_port

static int is_in_mood(const char *mood) {
    char path[4096];
    const char *folder = getenv("MOODY_FOLDER");
    snprintf(path, sizeof path, "%s/%s", folder ? folder : "/nowhere", mood);
    return access(path, F_OK) == 0;
}

static void *real(const char *name) {
    static void *library;
    if (!library)
        library = dlopen(REAL, RTLD_NOW | RTLD_LOCAL);
    void *found = library ? dlsym(library, name) : NULL;
    if (!found) {
        fprintf(stderr, "moody: no %s in %s\n", name, REAL);
        abort();
    }
    return found;
}

int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *attr) {
    int (*query)(struct ibv_context *, uint8_t, struct _compat_ibv_port_attr *) = real("ibv_query_port");
    int code = query(context, port, attr);
    if (!code && is_in_mood("down"))
        *(enum ibv_port_state *)attr = IBV_PORT_DOWN; /* the first field, in every version */
    return code;
}

int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry, uint32_t flags, size_t size) {
    int (*query)(struct ibv_context *, uint32_t, uint32_t, struct ibv_gid_entry *, uint32_t, size_t) = real("_ibv_query_gid_ex");
    int code = query(context, port, index, entry, flags, size);
    if (!code && is_in_mood("elsewhere")) {
        const uint8_t other[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 203, 0, 113, 7};
        memcpy(entry->gid.raw, other, sizeof other);
    }
    return code;
}

static int (*real_post)(struct ibv_qp *, struct ibv_send_wr *, struct ibv_send_wr **);
static int (*real_poll)(struct ibv_cq *, int, struct ibv_wc *);

static struct {
    struct ibv_cq *cq; /* none: nothing is unanswered */
    uint64_t wr_id;
    uint32_t qp_num;
} unanswered;

static int post(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
    if (is_in_mood("down"))
        return 0;
    if (is_in_mood("watched")) {
        char path[4096];
        snprintf(path, sizeof path, "%s/posted", getenv("MOODY_FOLDER"));
        FILE *posted = fopen(path, "a");
        fprintf(posted, "%u %s\n", wr->num_sge ? wr->sg_list->length : 0, wr->send_flags & IBV_SEND_INLINE ? "inline" : "fetched");
        fclose(posted);
    }
    if (!is_in_mood("unanswered"))
        return real_post(qp, wr, bad);
    unanswered.cq = qp->send_cq;
    unanswered.wr_id = wr->wr_id;
    unanswered.qp_num = qp->qp_num;
    return 0;
}

static int poll(struct ibv_cq *cq, int most, struct ibv_wc *wcs) {
    if (cq != unanswered.cq || most < 1)
        return real_poll(cq, most, wcs);
    unanswered.cq = NULL;
    wcs[0].wr_id = unanswered.wr_id;
    wcs[0].qp_num = unanswered.qp_num;
    wcs[0].status = IBV_WC_RETRY_EXC_ERR;
    return 1;
}

struct ibv_context *ibv_open_device(struct ibv_device *device) {
    struct ibv_context *(*open)(struct ibv_device *) = real("ibv_open_device");
    struct ibv_context *context = open(device);
    if (context) {
        real_post = context->ops.post_send;
        real_poll = context->ops.poll_cq;
        context->ops.post_send = post;
        context->ops.poll_cq = poll;
    }
    return context;
}
