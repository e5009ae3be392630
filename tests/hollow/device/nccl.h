/* What the parts of the hollow NCCL share. */
#ifndef HOLLOW_NCCL_H
#define HOLLOW_NCCL_H

#include <stddef.h>

#include "mail.h"

#define UNIQUE_ID_BYTES 128

/* The values of ncclResult_t. */
enum result { SUCCESS, UNHANDLED, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR };
enum call { SETUP, ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, ALL_TO_ALL, SEND, RECEIVE };

struct communicator {
    char name[UNIQUE_ID_BYTES]; /* the directory of its letters */
    int rank, size, device;
    unsigned long calls;            /* collectives begun */
    unsigned long group_start;      /* the first collective of the latest group */
    unsigned long discarded;        /* own letters discarded */
    unsigned long *sent, *received; /* letters by peer */
    volatile int is_aborted;
};

struct order {
    struct communicator *of;
    enum call call;
    const void *send;
    void *receive;
    size_t count;            /* NCCL's: per rank, except of an all-reduce, a broadcast and a reduce */
    int type, operation, at; /* `at`: the root, or the peer */
    size_t bytes;  /* of each letter */
    void *payload; /* what this rank contributes */
    unsigned long number;
};

/* Post a contribution to a collective, and receive all contributions; `letters` are to be freed. */
enum result exchange_begin(struct order *order);
enum result exchange_end(struct order *order, void **letters);
void free_letters(void **letters, int count);

/* Do an order now, or at the end of the group that is open. */
enum result do_order(struct order order);

#endif
