/* Collectives of the hollow NCCL. They move real bytes between the ranks of one machine, and the host waits for them. */
#include "nccl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hollow.h"
#include "reduce.h"

#define VERSION 22907
#define MAX_ORDERS 4096
#define MAX_FACTORS 64

static __thread struct order group[MAX_ORDERS];
static __thread int group_depth, group_size;
static double factors[MAX_FACTORS]; /* of operations that multiply before they add */
static int num_factors;

/* The bytes that a rank contributes, or receives from a peer. */
static size_t letter_bytes(const struct order *order) {
    size_t bytes = order->count * bytes_of(order->type);
    bool is_for_each = order->call == REDUCE_SCATTER || order->call == ALL_TO_ALL;
    return is_for_each ? bytes * (size_t)order->of->size : bytes;
}

static size_t bytes_received(const struct order *order) {
    size_t bytes = order->count * bytes_of(order->type);
    bool is_from_each = order->call == ALL_GATHER || order->call == ALL_TO_ALL;
    return is_from_each ? bytes * (size_t)order->of->size : bytes;
}

static bool sends(const struct order *order) {
    return order->call != RECEIVE && (order->call != BROADCAST || order->at == order->of->rank);
}

static bool receives(const struct order *order) {
    return order->call != SEND && (order->call != REDUCE || order->at == order->of->rank);
}

/* Copy what this rank contributes: a later order of the group may overwrite its place. */
static enum result begin(struct order *order) {
    if ((sends(order) && !hollow_is_on_device(order->send, order->bytes, "what NCCL sends")) ||
        (receives(order) && !hollow_is_on_device(order->receive, bytes_received(order), "what NCCL receives")))
        return INVALID_ARGUMENT;
    order->payload = calloc(order->bytes + 1, 1);
    if (sends(order))
        memcpy(order->payload, order->send, order->bytes);
    if (order->operation > AVERAGE)
        scale(order->payload, order->bytes / bytes_of(order->type), order->type,
              factors[order->operation - AVERAGE - 1]);
    return exchange_begin(order);
}

/* Reduce the part of all contributions that starts at `offset` numbers. */
static void reduce_part(struct order *order, void **letters, size_t offset) {
    void *terms[order->of->size];
    for (int rank = 0; rank < order->of->size; rank++)
        terms[rank] = (char *)letters[rank] + offset * bytes_of(order->type);
    int reduction = order->operation > AVERAGE ? SUM : order->operation;
    reduce(order->receive, terms, order->of->size, order->count, order->type, reduction);
}

static void deliver(struct order *order, void **letters) {
    struct communicator *of = order->of;
    size_t bytes = order->count * bytes_of(order->type);
    char *to = order->receive;
    switch (order->call) {
    case ALL_REDUCE:
    case REDUCE:
        reduce_part(order, letters, 0);
        break;
    case REDUCE_SCATTER:
        reduce_part(order, letters, order->count * (size_t)of->rank);
        break;
    case ALL_GATHER:
        for (int rank = 0; rank < of->size; rank++)
            memcpy(to + (size_t)rank * bytes, letters[rank], bytes);
        break;
    case ALL_TO_ALL:
        for (int rank = 0; rank < of->size; rank++)
            memcpy(to + (size_t)rank * bytes, (char *)letters[rank] + (size_t)of->rank * bytes, bytes);
        break;
    case BROADCAST:
        memcpy(to, letters[order->at], bytes);
        break;
    default:
        memcpy(to, letters[0], bytes);
    }
}

static enum result finish(struct order *order) {
    if (order->call == SEND)
        return SUCCESS;
    void **letters = calloc((size_t)order->of->size, sizeof *letters);
    enum result result = exchange_end(order, letters);
    if (result == SUCCESS && receives(order))
        deliver(order, letters);
    free_letters(letters, order->of->size);
    free(letters);
    return result;
}

/* All contributions are posted before any is awaited, as a group of NCCL promises. */
static enum result run(struct order *orders, int count) {
    enum result result = SUCCESS;
    for (int i = 0; i < count; i++)
        orders[i].of->group_start = orders[i].of->calls;
    for (int i = 0; i < count && result == SUCCESS; i++)
        result = begin(&orders[i]);
    for (int i = 0; i < count && result == SUCCESS; i++)
        result = finish(&orders[i]);
    for (int i = 0; i < count; i++)
        free(orders[i].payload);
    return result;
}

/* ---- graphs: collectives that are captured wait for a launch ---- */

struct captured {
    int count;
    struct order orders[];
};

static void (*keep)(void *); /* takes what is captured, while a graph is captured */

PUBLIC void hollow_capture_collectives(void (*taker)(void *)) {
    keep = taker;
}

PUBLIC int hollow_launch_collectives(struct captured *captured) {
    return run(captured->orders, captured->count);
}

static enum result run_or_keep(struct order *orders, int count) {
    if (!keep)
        return run(orders, count);
    size_t bytes = (size_t)count * sizeof *orders;
    struct captured *captured = malloc(sizeof *captured + bytes);
    captured->count = count;
    memcpy(captured->orders, orders, bytes);
    keep(captured);
    return SUCCESS;
}

/* ---- orders ---- */

enum result do_order(struct order order) {
    bool reduces = order.call == ALL_REDUCE || order.call == REDUCE || order.call == REDUCE_SCATTER;
    if (!order.of || (reduces && !can_reduce(order.type)))
        return INVALID_ARGUMENT;
    order.bytes = letter_bytes(&order);
    COUNT("collectives");
    COUNT_BY("bytes_of_collectives", order.bytes);
    if (!group_depth)
        return run_or_keep(&order, 1);
    if (group_size == MAX_ORDERS)
        return INTERNAL_ERROR;
    group[group_size++] = order;
    return SUCCESS;
}

PUBLIC int ncclGroupStart(void) {
    group_depth++;
    return SUCCESS;
}

PUBLIC int ncclGroupEnd(void) {
    if (!group_depth)
        return INVALID_USAGE;
    if (--group_depth)
        return SUCCESS;
    int count = group_size;
    group_size = 0;
    return run_or_keep(group, count);
}

/* ---- the calls ---- */

PUBLIC int ncclAllReduce(const void *send, void *receive, size_t count, int type, int operation,
                         struct communicator *of) {
    return do_order((struct order){of, ALL_REDUCE, send, receive, count, type, operation, 0});
}

PUBLIC int ncclAllGather(const void *send, void *receive, size_t count, int type, struct communicator *of) {
    return do_order((struct order){of, ALL_GATHER, send, receive, count, type, 0, 0});
}

PUBLIC int ncclReduceScatter(const void *send, void *receive, size_t count, int type, int operation,
                             struct communicator *of) {
    return do_order((struct order){of, REDUCE_SCATTER, send, receive, count, type, operation, 0});
}

PUBLIC int ncclBroadcast(const void *send, void *receive, size_t count, int type, int root, struct communicator *of) {
    return do_order((struct order){of, BROADCAST, send, receive, count, type, 0, root});
}

PUBLIC int ncclBcast(void *buffer, size_t count, int type, int root, struct communicator *of) {
    return ncclBroadcast(buffer, buffer, count, type, root, of);
}

PUBLIC int ncclReduce(const void *send, void *receive, size_t count, int type, int operation, int root,
                      struct communicator *of) {
    return do_order((struct order){of, REDUCE, send, receive, count, type, operation, root});
}

PUBLIC int ncclAlltoAll(const void *send, void *receive, size_t count, int type, struct communicator *of) {
    return do_order((struct order){of, ALL_TO_ALL, send, receive, count, type, 0, 0});
}

PUBLIC int ncclSend(const void *send, size_t count, int type, int peer, struct communicator *of) {
    return do_order((struct order){of, SEND, send, NULL, count, type, 0, peer});
}

PUBLIC int ncclRecv(void *receive, size_t count, int type, int peer, struct communicator *of) {
    return do_order((struct order){of, RECEIVE, NULL, receive, count, type, 0, peer});
}

/* The factor is read from the memory of the device or of the host, which are the same here. */
PUBLIC int ncclRedOpCreatePreMulSum(int *operation, void *factor, int type, int residence, struct communicator *of) {
    (void)residence, (void)of;
    if (num_factors == MAX_FACTORS || (type != FLOAT32 && type != FLOAT64))
        return INVALID_ARGUMENT;
    factors[num_factors++] = type == FLOAT64 ? *(double *)factor : (double)*(float *)factor;
    *operation = AVERAGE + num_factors;
    return SUCCESS;
}

PUBLIC int ncclGetVersion(int *version) {
    *version = VERSION;
    return SUCCESS;
}

PUBLIC const char *ncclGetErrorString(int result) {
    static const char *const TEXTS[] = {"no error",         "unhandled cuda error", "unhandled system error",
                                        "internal error",   "invalid argument",     "invalid usage",
                                        "remote process exited or there was a network error"};
    return result >= 0 && result <= REMOTE_ERROR ? TEXTS[result] : "unknown result code";
}

PUBLIC const char *ncclGetLastError(struct communicator *of) {
    (void)of;
    return "the hollow device has said on stderr what was wrong";
}

PUBLIC int ncclMemAlloc(void **start, size_t size) {
    *start = hollow_alloc(size, DEVICE);
    return *start ? SUCCESS : UNHANDLED;
}

PUBLIC int ncclMemFree(void *start) {
    return hollow_release(start, false) ? SUCCESS : INVALID_ARGUMENT;
}
