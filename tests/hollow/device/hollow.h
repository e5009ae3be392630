/* What the parts of the hollow device share.
 *
 * The hollow device is a stub of CUDA's driver and libraries for machines without a GPU. Its memory is host memory, its
 * streams run in program order, and its kernels do nothing. libcuda.so.1 holds the state; the other libraries use it.
 */
#ifndef HOLLOW_H
#define HOLLOW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PUBLIC __attribute__((visibility("default")))

#define HOLLOW_NAME "Hollow H100 (no GPU)"
#define HOLLOW_CUDA_VERSION 13000
#define HOLLOW_MAX_DEVICES 64

/* ---- devices ---- */

int hollow_devices(void);                        /* HOLLOW_DEVICES, 1 by default */
int hollow_device(void);                         /* the current device of this thread */
bool hollow_set_device(int device);              /* false: there is no such device */
size_t hollow_total_bytes(void);                 /* HOLLOW_GIB of a device, 8 by default */
size_t hollow_free_bytes(int device);            /* of this process alone */
int hollow_attribute(int attribute);             /* CUdevice_attribute; cudaDeviceAttr has the same numbers */

/* ---- memory ---- */

enum hollow_kind { HOST, DEVICE, PINNED, MANAGED };
enum hollow_state { LIVE, FREED, ASLEEP };

struct hollow_block {
    char *start;
    size_t size;   /* as asked for */
    size_t mapped; /* whole pages, and one that nobody may touch */
    enum hollow_kind kind;
    enum hollow_state state;
    int device;
    bool is_owned; /* made by hollow_alloc */
};

void *hollow_alloc(size_t size, enum hollow_kind kind); /* NULL: out of memory */
bool hollow_release(void *start, bool is_pinned);       /* false: not the start of a live block of this kind */
bool hollow_register(void *start, size_t size);         /* pin memory of the host */
bool hollow_unregister(void *start);
bool hollow_find(const void *address, struct hollow_block *found); /* false: plain host memory */

/* Whether [address, address + size) lies within one live block, or in plain host memory. Says why not on stderr. */
bool hollow_may_touch(const void *address, size_t size, const char *what);
bool hollow_is_on_device(const void *address, size_t size, const char *what); /* the same, and on a device */
bool hollow_copy(void *to, const void *from, size_t size, bool is_blocking);
bool hollow_set(void *to, int value, size_t size);

/* Virtual memory: reserved addresses sleep until they are mapped. */
void *hollow_reserve(size_t size);
bool hollow_charge(int device, size_t size); /* false: the device is full */
void hollow_discharge(int device, size_t size);
bool hollow_map(void *start, size_t size, int device);
bool hollow_unmap(void *start, size_t size);

/* ---- counters ---- */

struct hollow_counter {
    const char *name;
    long count;
    struct hollow_counter *next;
    int is_listed;
};

void hollow_add(struct hollow_counter *counter, long amount);
int hollow_unwritten(struct hollow_counter *counter); /* the body of a function that is not written out */
bool hollow_may_launch(void); /* false on the solid device if no operation computes what the kernel would have */
void hollow_complain(const char *format, ...) __attribute__((format(printf, 1, 2)));

#define COUNT_BY(label, amount)                            \
    do {                                                   \
        static struct hollow_counter counter_ = {.name = label}; \
        hollow_add(&counter_, (long)(amount));             \
    } while (0)
#define COUNT(label) COUNT_BY(label, 1)

/* One line of the generated stubs: a function that would have moved bytes. */
#define REFUSAL(function)                              \
    PUBLIC int function(void) {                        \
        hollow_complain(#function " is not written out"); \
        return 801; /* not supported */                \
    }

/* One line of the generated stubs: a function that succeeds and is counted. */
#define STUB(function)                                                      \
    PUBLIC int function(void) {                                             \
        static struct hollow_counter counter_ = {.name = "unwritten " #function}; \
        return hollow_unwritten(&counter_);                                 \
    }

#endif
