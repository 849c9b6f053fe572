/* Every call that libnobounce-paths.so stands before, on a folder that only the view has. Prints what went wrong. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define THERE "/sys/class/infiniband/nb0/fw_ver"
#define FOLDER "/sys/class/infiniband"
#define LINK "/sys/class/infiniband/link"
#define GONE "/sys/class/infiniband/none"

static int failures;

#define CHECK(condition) \
    do { \
        errno = 0; \
        if (!(condition)) { \
            printf("%s: %s\n", #condition, strerror(errno)); \
            failures++; \
        } \
    } while (0)
/* A failed call leaves the errno of the call itself. */
#define FAILS(expression, wanted) \
    do { \
        errno = 0; \
        long got = (long)(expression); \
        if ((got != -1 && got != 0) || errno != (wanted)) { \
            printf("%s: %ld, %s\n", #expression, got, strerror(errno)); \
            failures++; \
        } \
    } while (0)

static int count(const char *folder) {
    DIR *dir = opendir(folder);
    int entries = 0;
    if (!dir) return -1;
    while (readdir(dir)) entries++;
    closedir(dir);
    return entries;
}

static int content(int fd) {
    char text[8] = "";
    if (fd < 0) return 0;
    ssize_t length = read(fd, text, sizeof text);
    close(fd);
    return length == 4 && memcmp(text, "1.2\n", 4) == 0;
}

static int content_of(FILE *file) {
    char text[8] = "";
    if (!file) return 0;
    char *line = fgets(text, sizeof text, file);
    fclose(file);
    return line && strcmp(text, "1.2\n") == 0;
}

static int scan(const char *folder) {
    struct dirent **names;
    int entries = scandir(folder, &names, NULL, alphasort);
    for (int i = 0; i < entries; i++) free(names[i]);
    if (entries >= 0) free(names);
    return entries;
}

int main(int argc, char **argv) {
    char *view = getenv("NOBOUNCE_VIEW");
    char path[4096], wanted[4096];
    struct stat facts;
    struct statx more;

    (void)argv;
    CHECK(content(open(THERE, O_RDONLY)));
    CHECK(content(open64(THERE, O_RDONLY)));
    CHECK(content(openat(AT_FDCWD, THERE, O_RDONLY)));
    /* Not known to the compiler: the fortified form. */
    CHECK(content(open(THERE, argc > 100 ? O_RDWR : O_RDONLY)));
    CHECK(content_of(fopen(THERE, "r")));
    CHECK(content_of(fopen64(THERE, "r")));
    CHECK(access(THERE, R_OK) == 0);
    CHECK(eaccess(THERE, R_OK) == 0);
    CHECK(faccessat(AT_FDCWD, THERE, R_OK, 0) == 0);
    CHECK(stat(THERE, &facts) == 0 && facts.st_size == 4);
    CHECK(lstat(LINK, &facts) == 0 && S_ISLNK(facts.st_mode));
    CHECK(fstatat(AT_FDCWD, THERE, &facts, 0) == 0 && facts.st_size == 4);
    CHECK(statx(AT_FDCWD, THERE, 0, STATX_SIZE, &more) == 0 && more.stx_size == 4);
    CHECK(stat("/dev/infiniband/uverbs0", &facts) == 0 && S_ISCHR(facts.st_mode));
    CHECK(readlink(LINK, path, sizeof path) == 3 && memcmp(path, "nb0", 3) == 0);
    CHECK(readlinkat(AT_FDCWD, LINK, path, sizeof path) == 3);
    CHECK(count(FOLDER) == 5 && count(FOLDER "/") == 5);
    CHECK(scan(FOLDER) == 5);
    snprintf(wanted, sizeof wanted, FOLDER "/nb0");
    CHECK(realpath(LINK, path) == path && strcmp(path, wanted) == 0);
    char *made = canonicalize_file_name(LINK);
    CHECK(made && strcmp(made, wanted) == 0);
    free(made);

    FAILS(open(GONE, O_RDONLY), ENOENT);
    FAILS(fopen(GONE, "r"), ENOENT);
    FAILS(access(GONE, F_OK), ENOENT);
    FAILS(stat(GONE, &facts), ENOENT);
    FAILS(readlink(THERE, path, sizeof path), EINVAL);
    FAILS(realpath(GONE, path), ENOENT);
    FAILS(opendir(THERE), ENOTDIR);
    char *no_path = argc > 100 ? "" : NULL;
    FAILS(access(no_path, F_OK), EFAULT);

    /* Nothing else is touched: names that only begin alike, and files made with a mode. */
    FAILS(access("/sys/class/infinibandx", F_OK), ENOENT);
    FAILS(access("/sys/class/infiniband_mad", F_OK), ENOENT);
    FAILS(access("sys/class/infiniband", F_OK), ENOENT);
    snprintf(path, sizeof path, "%s/made", view ? view : "/tmp");
    umask(0);
    int fd = open(path, O_CREAT | O_WRONLY, 0640);
    CHECK(fd >= 0 && fstat(fd, &facts) == 0 && (facts.st_mode & 0777) == 0640);
    CHECK(unlink(path) == 0);
    return failures != 0;
}
