/* Communicators of the hollow NCCL: who is in them, and how contributions reach all ranks.
 *
 * In every collective each rank posts one letter and reads all letters. A rank posts the letters of a group of collectives
 * before it reads any. So a rank that has read all letters of one collective knows that all have read those of the groups
 * before, and discards its own.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "hollow.h"
#include "nccl.h"

static const char *const CALLS[] = {"set-up", "all-reduce", "all-gather", "reduce-scatter", "broadcast",
                                    "reduce", "all-to-all", "send", "receive"};

static void name_letter(char *name, const struct communicator *of, unsigned long number, int rank) {
    snprintf(name, MAIL_NAME_BYTES, "%s/%lu.%d", of->name, number, rank);
}

static void name_direct(char *name, const struct communicator *of, unsigned long number, int from, int to) {
    snprintf(name, MAIL_NAME_BYTES, "%s/%d-%d.%lu", of->name, from, to, number);
}

static bool is_collective(const struct order *order) {
    return order->call != SEND && order->call != RECEIVE;
}

enum result exchange_begin(struct order *order) {
    char name[MAIL_NAME_BYTES];
    struct communicator *of = order->of;
    struct envelope envelope = {order->call, order->type, order->operation, order->at, order->bytes};
    if (is_collective(order)) {
        order->number = of->calls++;
        name_letter(name, of, order->number, of->rank);
    } else if (order->call == SEND)
        name_direct(name, of, of->sent[order->at]++, of->rank, order->at);
    else
        order->number = of->received[order->at]++;
    if (order->call == RECEIVE)
        return SUCCESS;
    return mail_post(name, &envelope, order->payload) ? SUCCESS : SYSTEM_ERROR;
}

static bool agrees(const struct order *order, const struct envelope *theirs, int rank) {
    bool is_direct = order->call == RECEIVE;
    bool is_equal = theirs->type == order->type && theirs->bytes == order->bytes &&
                    (is_direct || (theirs->call == (int)order->call && theirs->operation == order->operation &&
                                   theirs->root == order->at));
    if (!is_equal)
        hollow_complain("rank %d of %d calls %s of %zu bytes of type %d, and rank %d %s of %zu bytes of type %d",
                        order->of->rank, order->of->size, CALLS[order->call], order->bytes, order->type, rank,
                        CALLS[theirs->call], theirs->bytes, theirs->type);
    return is_equal;
}

void free_letters(void **letters, int count) {
    for (int i = 0; i < count; i++)
        free(letters[i]);
}

static enum result receive(const char *name, const struct order *order, int from, void **letter) {
    struct envelope envelope;
    if (!mail_await(name, &envelope, letter, &order->of->is_aborted))
        return REMOTE_ERROR;
    return agrees(order, &envelope, from) ? SUCCESS : INVALID_USAGE;
}

enum result exchange_end(struct order *order, void **letters) {
    char name[MAIL_NAME_BYTES];
    struct communicator *of = order->of;
    enum result result = SUCCESS;
    if (order->call == RECEIVE) {
        name_direct(name, of, order->number, order->at, of->rank);
        result = receive(name, order, order->at, &letters[0]);
        mail_discard(name);
        return result;
    }
    for (int rank = 0; rank < of->size && result == SUCCESS; rank++) {
        name_letter(name, of, order->number, rank);
        result = receive(name, order, rank, &letters[rank]);
    }
    for (; result == SUCCESS && of->discarded < of->group_start; of->discarded++) {
        name_letter(name, of, of->discarded, of->rank);
        mail_discard(name);
    }
    return result;
}

/* ---- how a communicator begins and ends ---- */

/* Exchange one int with all ranks, in rank order. */
static enum result exchange_ints(struct communicator *of, int mine, int *all) {
    void *letters[of->size];
    memset(letters, 0, sizeof letters);
    struct order order = {.of = of, .call = SETUP, .bytes = sizeof mine, .payload = &mine};
    of->group_start = of->calls;
    enum result result = exchange_begin(&order);
    if (result == SUCCESS)
        result = exchange_end(&order, letters);
    for (int rank = 0; rank < of->size && result == SUCCESS; rank++)
        memcpy(&all[rank], letters[rank], sizeof mine);
    free_letters(letters, of->size);
    return result;
}

static struct communicator *make(const char *name, int rank, int size) {
    struct communicator *made = calloc(1, sizeof *made);
    snprintf(made->name, sizeof made->name, "%s", name);
    made->rank = rank;
    made->size = size;
    made->device = hollow_device();
    made->sent = calloc((size_t)size, sizeof *made->sent);
    made->received = calloc((size_t)size, sizeof *made->received);
    return made;
}

/* The letters of the last group stay, because a slower rank may not have read them. */
static void destroy(struct communicator *of) {
    free(of->sent);
    free(of->received);
    free(of);
}

static enum result begin(struct communicator *of) {
    int devices[of->size];
    enum result result = mail_open(of->name) ? exchange_ints(of, of->device, devices) : SYSTEM_ERROR;
    for (int rank = 0; rank < of->size && result == SUCCESS; rank++)
        if (rank != of->rank && devices[rank] == of->device) {
            hollow_complain("ranks %d and %d both use device %d", of->rank, rank, of->device);
            result = INVALID_USAGE;
        }
    return result;
}

PUBLIC int ncclGetUniqueId(char *id) {
    unsigned char number[12];
    if (getrandom(number, sizeof number, 0) != (ssize_t)sizeof number)
        return SYSTEM_ERROR;
    memset(id, 0, UNIQUE_ID_BYTES);
    int used = snprintf(id, UNIQUE_ID_BYTES, "hollow-");
    for (size_t i = 0; i < sizeof number; i++)
        used += snprintf(id + used, (size_t)(UNIQUE_ID_BYTES - used), "%02x", number[i]);
    return SUCCESS;
}

struct unique_id {
    char name[UNIQUE_ID_BYTES];
};

PUBLIC int ncclCommInitRankConfig(struct communicator **made, int size, struct unique_id id, int rank, void *config) {
    (void)config;
    *made = make(id.name, rank, size);
    COUNT("communicators");
    return begin(*made);
}

PUBLIC int ncclCommInitRank(struct communicator **made, int size, struct unique_id id, int rank) {
    return ncclCommInitRankConfig(made, size, id, rank, NULL);
}

PUBLIC int ncclCommInitRankScalable(struct communicator **made, int size, int rank, int num_ids, struct unique_id *ids,
                                    void *config) {
    (void)num_ids;
    return ncclCommInitRankConfig(made, size, ids[0], rank, config);
}

PUBLIC int ncclCommSplit(struct communicator *of, int color, int key, struct communicator **made, void *config) {
    (void)of, (void)color, (void)key, (void)config;
    hollow_complain("communicators cannot be split");
    *made = NULL;
    return INVALID_USAGE;
}

PUBLIC int ncclCommDestroy(struct communicator *of) {
    destroy(of);
    return SUCCESS;
}

/* Whoever waits for a letter gives up; the memory stays, because that thread still reads it. */
PUBLIC int ncclCommAbort(struct communicator *of) {
    of->is_aborted = 1;
    return SUCCESS;
}

PUBLIC int ncclCommCount(struct communicator *of, int *size) {
    *size = of->size;
    return SUCCESS;
}

PUBLIC int ncclCommUserRank(struct communicator *of, int *rank) {
    *rank = of->rank;
    return SUCCESS;
}

PUBLIC int ncclCommCuDevice(struct communicator *of, int *device) {
    *device = of->device;
    return SUCCESS;
}

PUBLIC int ncclCommGetAsyncError(struct communicator *of, int *error) {
    (void)of;
    *error = SUCCESS;
    return SUCCESS;
}
