#define _GNU_SOURCE
#include "mail.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "hollow.h"

#define PATH_BYTES 400
#define FIRST_PAUSE_US 20
#define LONGEST_PAUSE_US 2000

/* Write the path of a letter, or of an unfinished letter, below HOLLOW_MAIL. */
static void locate(char *path, const char *name, const char *ending) {
    const char *place = getenv("HOLLOW_MAIL");
    snprintf(path, PATH_BYTES, "%s/%s%s", place ? place : "/dev/shm", name, ending);
}

static bool fail(const char *action, const char *path) {
    hollow_complain("cannot %s %s: %s", action, path, strerror(errno));
    return false;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static double patience(void) {
    const char *text = getenv("HOLLOW_TIMEOUT_S");
    return text ? atof(text) : 300.0;
}

bool mail_open(const char *directory) {
    char path[PATH_BYTES];
    locate(path, directory, "");
    return mkdir(path, 0700) == 0 || errno == EEXIST || fail("make", path);
}

static bool write_all(int file, const void *bytes, size_t size) {
    for (size_t done = 0; done < size;) {
        ssize_t now = write(file, (const char *)bytes + done, size - done);
        if (now < 0)
            return false;
        done += (size_t)now;
    }
    return true;
}

static bool read_all(int file, void *bytes, size_t size) {
    for (size_t done = 0; done < size;) {
        ssize_t now = read(file, (char *)bytes + done, size - done);
        if (now <= 0)
            return false;
        done += (size_t)now;
    }
    return true;
}

bool mail_post(const char *name, const struct envelope *envelope, const void *payload) {
    char unfinished[PATH_BYTES], path[PATH_BYTES];
    locate(unfinished, name, ".part");
    locate(path, name, "");
    int file = open(unfinished, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (file < 0)
        return fail("write", unfinished);
    bool is_written = write_all(file, envelope, sizeof *envelope) && write_all(file, payload, envelope->bytes);
    is_written = close(file) == 0 && is_written;
    return (is_written && rename(unfinished, path) == 0) || fail("write", path);
}

static int await_file(const char *path, const volatile int *is_aborted) {
    double deadline = seconds() + patience();
    useconds_t pause = FIRST_PAUSE_US;
    for (;;) {
        int file = open(path, O_RDONLY | O_CLOEXEC);
        if (file >= 0)
            return file;
        if (*is_aborted || seconds() > deadline) {
            hollow_complain("no letter %s: %s", path, *is_aborted ? "the communicator is aborted" : "time is up");
            return -1;
        }
        usleep(pause);
        pause = pause < LONGEST_PAUSE_US ? 2 * pause : LONGEST_PAUSE_US;
    }
}

bool mail_await(const char *name, struct envelope *envelope, void **payload, const volatile int *is_aborted) {
    char path[PATH_BYTES];
    locate(path, name, "");
    int file = await_file(path, is_aborted);
    if (file < 0)
        return false;
    *payload = NULL;
    bool is_read = read_all(file, envelope, sizeof *envelope);
    if (is_read) {
        *payload = malloc(envelope->bytes + 1);
        is_read = *payload && read_all(file, *payload, envelope->bytes);
    }
    close(file);
    if (!is_read)
        free(*payload);
    return is_read || fail("read", path);
}

void mail_discard(const char *name) {
    char path[PATH_BYTES];
    locate(path, name, "");
    unlink(path);
}
