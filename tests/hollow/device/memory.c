/* Memory of the device: blocks of host memory that cannot be touched before they exist, after they are freed, or asleep.
 *
 * A freed block keeps its addresses for ever and loses its pages, so whoever uses it afterwards is found: a copy is
 * refused, and an access by the processor is a segmentation fault, which a handler explains.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "hollow.h"

#define PAGE 4096ul
#define GRANULE (2ul << 20) /* of virtual memory */
#define WORTH_GIVING_BACK (1ul << 20)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct hollow_block *blocks; /* sorted by start; none overlap */
static size_t num_blocks, room;
static size_t used[HOLLOW_MAX_DEVICES];

static const char *const KINDS[] = {"host", "device", "pinned", "managed"};
static const char *const STATES[] = {"in use", "freed", "asleep"};

static size_t in_pages(size_t size) {
    return size ? (size + PAGE - 1) / PAGE * PAGE : PAGE;
}

/* Return the number of blocks that start at or before an address. */
static size_t position(const char *address) {
    size_t low = 0, high = num_blocks;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (blocks[middle].start <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static struct hollow_block *containing(const char *address) {
    size_t after = position(address);
    if (!after)
        return NULL;
    struct hollow_block *block = &blocks[after - 1];
    return address < block->start + block->mapped ? block : NULL;
}

static void insert(struct hollow_block block) {
    if (num_blocks == room) {
        room = room ? 2 * room : 1024;
        blocks = realloc(blocks, room * sizeof *blocks);
    }
    size_t at = position(block.start);
    memmove(&blocks[at + 1], &blocks[at], (num_blocks - at) * sizeof *blocks);
    blocks[at] = block;
    num_blocks++;
}

static void erase(struct hollow_block *block) {
    size_t behind = (size_t)(blocks + num_blocks - (block + 1));
    memmove(block, block + 1, behind * sizeof *blocks);
    num_blocks--;
}

static void take_pages(char *start, size_t size) {
    mmap(start, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

/* ---- what is left of a device ---- */

PUBLIC size_t hollow_total_bytes(void) {
    const char *gib = getenv("HOLLOW_GIB");
    return (size_t)((gib ? atof(gib) : 8.0) * (double)(1ul << 30));
}

PUBLIC size_t hollow_free_bytes(int device) {
    size_t total = hollow_total_bytes();
    return total > used[device] ? total - used[device] : 0;
}

PUBLIC bool hollow_charge(int device, size_t size) {
    pthread_mutex_lock(&lock);
    bool fits = size <= hollow_free_bytes(device);
    if (fits)
        used[device] += size;
    pthread_mutex_unlock(&lock);
    return fits;
}

PUBLIC void hollow_discharge(int device, size_t size) {
    pthread_mutex_lock(&lock);
    used[device] -= size;
    pthread_mutex_unlock(&lock);
}

/* ---- blocks ---- */

PUBLIC void *hollow_alloc(size_t size, enum hollow_kind kind) {
    int device = hollow_device();
    size_t pages = in_pages(size);
    if (kind == DEVICE && !hollow_charge(device, pages))
        return NULL;
    char *start = mmap(NULL, pages + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) {
        if (kind == DEVICE)
            hollow_discharge(device, pages);
        return NULL;
    }
    mprotect(start + pages, PAGE, PROT_NONE);
    pthread_mutex_lock(&lock);
    insert((struct hollow_block){start, size, pages + PAGE, kind, LIVE, device, true});
    pthread_mutex_unlock(&lock);
    if (kind == DEVICE)
        COUNT("allocations");
    else
        COUNT("pinned_allocations");
    return start;
}

PUBLIC bool hollow_release(void *start, bool is_pinned) {
    if (!start)
        return true;
    pthread_mutex_lock(&lock);
    struct hollow_block *block = containing(start);
    bool is_live = block && block->start == start && block->state == LIVE && block->is_owned;
    bool is_right = is_live && (block->kind == PINNED) == is_pinned;
    struct hollow_block was = block ? *block : (struct hollow_block){0};
    if (is_right) {
        block->state = FREED;
        take_pages(block->start, block->mapped);
        if (block->kind == DEVICE)
            used[block->device] -= block->mapped - PAGE;
    }
    pthread_mutex_unlock(&lock);
    if (is_right)
        COUNT("frees");
    else if (is_live)
        hollow_complain("%p is freed, which is a %s block: free it by the call of its kind", start, KINDS[was.kind]);
    else if (was.start && was.start != (char *)start)
        hollow_complain("%p is freed, which is byte %zu of a block", start, (size_t)((char *)start - was.start));
    else
        hollow_complain("%p is freed, which is %s", start, was.start ? STATES[was.state] : "no memory of the device");
    return is_right;
}

PUBLIC bool hollow_register(void *start, size_t size) {
    pthread_mutex_lock(&lock);
    bool is_new = !containing(start);
    if (is_new)
        insert((struct hollow_block){start, size, size, PINNED, LIVE, hollow_device(), false});
    pthread_mutex_unlock(&lock);
    COUNT("pinned_registrations");
    return is_new;
}

PUBLIC bool hollow_unregister(void *start) {
    pthread_mutex_lock(&lock);
    struct hollow_block *block = containing(start);
    bool is_registered = block && block->start == start && !block->is_owned;
    if (is_registered)
        erase(block);
    pthread_mutex_unlock(&lock);
    return is_registered;
}

PUBLIC bool hollow_find(const void *address, struct hollow_block *found) {
    pthread_mutex_lock(&lock);
    struct hollow_block *block = containing(address);
    if (block)
        *found = *block;
    pthread_mutex_unlock(&lock);
    return block != NULL;
}

/* ---- access ---- */

PUBLIC bool hollow_may_touch(const void *address, size_t size, const char *what) {
    struct hollow_block block;
    if (!size || !hollow_find(address, &block))
        return true;
    size_t offset = (size_t)((const char *)address - block.start);
    if (block.state != LIVE) {
        hollow_complain("%s touches byte %zu of a block of %zu bytes that is %s", what, offset, block.size,
                        STATES[block.state]);
        return false;
    }
    struct hollow_block last = block, next;
    const char *end = (const char *)address + size;
    /* Virtual memory that was mapped piece by piece is one range. */
    while (end > last.start + last.size && !last.is_owned && hollow_find(last.start + last.size, &next) &&
           next.state == LIVE && !next.is_owned)
        last = next;
    if (end > last.start + last.size) {
        hollow_complain("%s touches bytes %zu to %zu of a %s block of %zu bytes", what, offset, offset + size,
                        KINDS[block.kind], block.size);
        return false;
    }
    return true;
}

PUBLIC bool hollow_is_on_device(const void *address, size_t size, const char *what) {
    struct hollow_block block;
    if (!size)
        return true;
    if (!hollow_find(address, &block) || block.kind == HOST) {
        hollow_complain("%s is %p, which is memory of the host", what, address);
        return false;
    }
    return hollow_may_touch(address, size, what);
}

static enum hollow_kind kind_of(const void *address) {
    struct hollow_block block;
    return hollow_find(address, &block) ? block.kind : HOST;
}

PUBLIC bool hollow_copy(void *to, const void *from, size_t size, bool is_blocking) {
    if (!hollow_may_touch(from, size, "the source of a copy") || !hollow_may_touch(to, size, "the target of a copy"))
        return false;
    enum hollow_kind source = kind_of(from), target = kind_of(to);
    if (source == DEVICE && target == DEVICE)
        COUNT("copies_on_device");
    else if (source == DEVICE) {
        COUNT("copies_to_host");
        COUNT_BY("bytes_to_host", size);
    } else if (target == DEVICE) {
        COUNT("copies_to_device");
        COUNT_BY("bytes_to_device", size);
    } else
        COUNT("copies_on_host");
    if (is_blocking)
        COUNT("blocking_copies");
    else if ((source == DEVICE) != (target == DEVICE) && (source == HOST || target == HOST))
        COUNT("pageable_copies"); /* asynchronous by name, but the driver waits */
    memmove(to, from, size);
    return true;
}

PUBLIC bool hollow_set(void *to, int value, size_t size) {
    if (!hollow_may_touch(to, size, "a fill"))
        return false;
    COUNT("fills");
    char *first = (char *)(((uintptr_t)to + PAGE - 1) / PAGE * PAGE);
    char *last = (char *)(((uintptr_t)to + size) / PAGE * PAGE);
    /* A cache of gigabytes is made of zeros: pages that are given back read as zero and take no memory. Memory of the
     * host that was registered may be shared, and its pages keep what they hold. */
    if (value == 0 && size >= WORTH_GIVING_BACK && kind_of(to) == DEVICE &&
        madvise(first, (size_t)(last - first), MADV_DONTNEED) == 0) {
        memset(to, 0, (size_t)(first - (char *)to));
        memset(last, 0, (size_t)((char *)to + size - last));
    } else
        memset(to, value, size);
    return true;
}

/* ---- virtual memory ---- */

PUBLIC void *hollow_reserve(size_t size) {
    char *start = mmap(NULL, size + GRANULE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED)
        return NULL;
    return (void *)(((uintptr_t)start + GRANULE - 1) / GRANULE * GRANULE);
}

/* Blocks of virtual memory own no bytes of the device: who made the memory has been charged for it. */
PUBLIC bool hollow_map(void *start, size_t size, int device) {
    pthread_mutex_lock(&lock);
    struct hollow_block *block = containing(start);
    bool is_right = !block || (block->state == ASLEEP && block->start == start && block->size == size);
    if (is_right && mprotect(start, size, PROT_READ | PROT_WRITE) == 0) {
        if (block)
            erase(block);
        insert((struct hollow_block){start, size, size, DEVICE, LIVE, device, false});
    } else
        is_right = false;
    pthread_mutex_unlock(&lock);
    return is_right;
}

PUBLIC bool hollow_unmap(void *start, size_t size) {
    pthread_mutex_lock(&lock);
    struct hollow_block *block = containing(start);
    bool is_right = block && block->state == LIVE && block->start == start && block->size == size;
    if (is_right) {
        block->state = ASLEEP;
        take_pages(start, size);
    }
    pthread_mutex_unlock(&lock);
    return is_right;
}

/* ---- faults ---- */

static struct sigaction earlier;

/* Say which block was touched, and let the fault happen again under the earlier handler. */
static void explain(int number, siginfo_t *info, void *context) {
    (void)context;
    char *address = info->si_addr;
    struct hollow_block *block = containing(address); /* without the lock: the process is about to end */
    char text[200];
    if (block) {
        const char *state = block->state == LIVE ? "whose end is passed" : STATES[block->state];
        int length = snprintf(text, sizeof text, "hollow: illegal access of byte %zu of a %s block of %zu bytes, %s\n",
                              (size_t)(address - block->start), KINDS[block->kind], block->size, state);
        if (write(STDERR_FILENO, text, (size_t)length) < 0)
            _exit(128 + number);
    }
    sigaction(number, &earlier, NULL);
}

__attribute__((constructor)) static void explain_faults(void) {
    struct sigaction ours = {.sa_sigaction = explain, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigaction(SIGSEGV, &ours, &earlier);
}
