/* Letters between the ranks of a communicator: files in one directory, complete as soon as they have their name. */
#ifndef HOLLOW_MAIL_H
#define HOLLOW_MAIL_H

#include <stdbool.h>
#include <stddef.h>

#define MAIL_NAME_BYTES 200

struct envelope {
    int call, type, operation, root; /* must be equal on all ranks */
    size_t bytes;                    /* of the payload */
};

/* Every function returns false, and says why, if it fails. `name` is relative to the directory of all letters. */
bool mail_open(const char *directory);
bool mail_post(const char *name, const struct envelope *envelope, const void *payload);
bool mail_await(const char *name, struct envelope *envelope, void **payload, const volatile int *is_aborted);
void mail_discard(const char *name);

#endif
