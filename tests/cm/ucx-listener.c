/* A server that listens by address and a client that connects by address, over UCX: the way on which UCX's rdmacm module is used.
 * ucx-listener ADDRESS PORT        server, for one client
 * ucx-listener ADDRESS PORT ROUNDS client: sends a message, has it sent back, compares it, so many times */
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucp/api/ucp.h>

enum { LENGTH = 100000 };

static ucp_worker_h worker;
static ucp_conn_request_h request;
static int failed;

static void die(const char *what, ucs_status_t status)
{
    fprintf(stderr, "%s: %s\n", what, ucs_status_string(status));
    exit(1);
}

static void connected(ucp_conn_request_h asked, void *context)
{
    (void)context;
    request = asked;
}

static void on_error(void *context, ucp_ep_h endpoint, ucs_status_t status)
{
    (void)context;
    (void)endpoint;
    failed = 1;
    if (status != UCS_ERR_CONNECTION_RESET) fprintf(stderr, "endpoint: %s\n", ucs_status_string(status));
}

/* Drives UCX until the operation is over. */
static void finish(void *operation, const char *what)
{
    ucs_status_t status;

    if (operation == NULL) return;
    if (UCS_PTR_IS_ERR(operation)) die(what, UCS_PTR_STATUS(operation));
    while ((status = ucp_request_check_status(operation)) == UCS_INPROGRESS) ucp_worker_progress(worker);
    ucp_request_free(operation);
    if (status != UCS_OK) die(what, status);
}

int main(int argc, char **argv)
{
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_TAG};
    ucp_worker_params_t worker_params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE, .thread_mode = UCS_THREAD_MODE_SINGLE};
    ucp_ep_params_t ep_params = {.field_mask = UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
                                 .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                                 .err_handler = {.cb = on_error}};
    ucp_request_param_t none = {0};
    ucp_request_param_t force = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = 0};
    struct sockaddr_in address = {.sin_family = AF_INET};
    static unsigned char sent[LENGTH], received[LENGTH];
    ucp_context_h context;
    ucp_config_t *config;
    ucp_ep_h endpoint;
    ucs_status_t status;
    int rounds = argc > 3 ? atoi(argv[3]) : 0;

    if (argc < 3) return 2;
    inet_pton(AF_INET, argv[1], &address.sin_addr);
    address.sin_port = htons((unsigned short)atoi(argv[2]));
    if ((status = ucp_config_read(NULL, NULL, &config)) != UCS_OK) die("ucp_config_read", status);
    if ((status = ucp_init(&params, config, &context)) != UCS_OK) die("ucp_init", status);
    ucp_config_release(config);
    if ((status = ucp_worker_create(context, &worker_params, &worker)) != UCS_OK) die("ucp_worker_create", status);

    if (rounds == 0) {
        ucp_listener_params_t listen = {.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER,
                                        .sockaddr = {(struct sockaddr *)&address, sizeof address},
                                        .conn_handler = {.cb = connected}};
        ucp_listener_h listener;

        if ((status = ucp_listener_create(worker, &listen, &listener)) != UCS_OK) die("ucp_listener_create", status);
        printf("listening\n");
        fflush(stdout);
        while (request == NULL) ucp_worker_progress(worker);
        ep_params.field_mask |= UCP_EP_PARAM_FIELD_CONN_REQUEST;
        ep_params.conn_request = request;
        if ((status = ucp_ep_create(worker, &ep_params, &endpoint)) != UCS_OK) die("ucp_ep_create", status);
        while (!failed) {
            ucp_tag_recv_info_t info;
            ucp_tag_message_h message;

            ucp_worker_progress(worker);
            if ((message = ucp_tag_probe_nb(worker, 1, ~0ull, 1, &info)) == NULL) continue;
            finish(ucp_tag_msg_recv_nbx(worker, received, info.length, message, &none), "receive");
            finish(ucp_tag_send_nbx(endpoint, received, info.length, 2, &none), "send");
        }
        finish(ucp_ep_close_nbx(endpoint, &(ucp_request_param_t){.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_EP_CLOSE_FLAG_FORCE}), "close");
        ucp_listener_destroy(listener);
    } else {
        ep_params.field_mask |= UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
        ep_params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
        ep_params.sockaddr = (ucs_sock_addr_t){(struct sockaddr *)&address, sizeof address};
        if ((status = ucp_ep_create(worker, &ep_params, &endpoint)) != UCS_OK) die("ucp_ep_create", status);
        for (int round = 0; round < rounds; round++) {
            for (int i = 0; i < LENGTH; i++) sent[i] = (unsigned char)(i * 7 + round);
            finish(ucp_tag_send_nbx(endpoint, sent, LENGTH, 1, &none), "send");
            finish(ucp_tag_recv_nbx(worker, received, LENGTH, 2, ~0ull, &none), "receive");
            if (memcmp(sent, received, LENGTH) != 0) {
                printf("round %d: wrong bytes\n", round);
                return 1;
            }
        }
        finish(ucp_ep_close_nbx(endpoint, &force), "close");
        printf("%d rounds right\n", rounds);
    }
    ucp_worker_destroy(worker);
    ucp_cleanup(context);
    return 0;
}
