// peer -g GID_INDEX -p PORT [-4|-6] [SERVER CASE...]: the server without, the client with the server's address.
#include "peer.h"

#include <dlfcn.h>
#include <netdb.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int control(const char *host, const char *port) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = host ? 0 : AI_PASSIVE, .ai_family = host ? AF_UNSPEC : AF_INET6}, *found;
    if (getaddrinfo(host, port, &hints, &found)) return -1;
    int one = 1, fd = socket(found->ai_family, SOCK_STREAM, 0);
    if (fd < 0) return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (host) return connect(fd, found->ai_addr, found->ai_addrlen) ? -1 : fd;
    if (bind(fd, found->ai_addr, found->ai_addrlen) || listen(fd, 1)) return -1;
    return accept(fd, NULL, NULL);
}

// On the host the library can say what its device counted.
static void report(void) {
    size_t (*ask)(char *, size_t) = (size_t(*)(char *, size_t))dlsym(RTLD_DEFAULT, "nobounce_report");
    static char text[65536];
    if (ask && ask(text, sizeof text) < sizeof text) printf("REPORT %s\n", text);
}

int main(int count, char **words) {
    int option, gid = 0;
    const char *port = "20000";
    while ((option = getopt(count, words, "g:p:")) != -1) {
        if (option == 'g') gid = atoi(optarg);
        if (option == 'p') port = optarg;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    signal(SIGPIPE, SIG_IGN);
    struct side side = {0};
    open_side(&side, gid);
    int fd = control(words[optind], port);
    if (fd < 0) {
        perror("FAILED control connection");
        return 1;
    }
    FILE *in = fdopen(fd, "r"), *out = fdopen(dup(fd), "w");
    int code = words[optind] ? run_client(&side, in, out, count - optind - 1, words + optind + 1) : serve(&side, in, out);
    report();
    return code;
}
