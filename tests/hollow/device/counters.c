/* Counters by name: what the host asked of the device, and which functions it called that are not written out. */
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hollow.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct hollow_counter *counters;

PUBLIC void hollow_add(struct hollow_counter *counter, long amount) {
    __atomic_add_fetch(&counter->count, amount, __ATOMIC_RELAXED);
    if (__atomic_exchange_n(&counter->is_listed, 1, __ATOMIC_RELAXED))
        return;
    pthread_mutex_lock(&lock);
    counter->next = counters;
    counters = counter;
    pthread_mutex_unlock(&lock);
}

PUBLIC int hollow_unwritten(struct hollow_counter *counter) {
    if (counter->count == 0 && getenv("HOLLOW_TRACE"))
        hollow_complain("%s", counter->name);
    hollow_add(counter, 1);
    return 0;
}

/* Write at most `size` bytes of "name count" lines into `text`; return the bytes that all lines need. */
PUBLIC size_t hollow_report(char *text, size_t size) {
    size_t used = 0;
    pthread_mutex_lock(&lock);
    for (struct hollow_counter *one = counters; one; one = one->next) {
        size_t room = used < size ? size - used : 0;
        used += (size_t)snprintf(room ? text + used : NULL, room, "%s %ld\n", one->name, one->count);
    }
    pthread_mutex_unlock(&lock);
    return used;
}

PUBLIC void hollow_clear(void) {
    pthread_mutex_lock(&lock);
    for (struct hollow_counter *one = counters; one; one = one->next)
        one->count = 0;
    pthread_mutex_unlock(&lock);
}

PUBLIC void hollow_complain(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "hollow: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
}

/* A process appends its counters to the file HOLLOW_COUNTS when it ends. */
__attribute__((destructor)) static void append_report(void) {
    const char *path = getenv("HOLLOW_COUNTS");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (!file)
        return;
    size_t size = hollow_report(NULL, 0) + 1;
    char *text = calloc(size, 1);
    if (text) {
        hollow_report(text, size);
        fprintf(file, "process %d\n%s", getpid(), text);
        free(text);
    }
    fclose(file);
}

/* ---- launches on the solid device, where the CPU computes what a kernel would have ---- */

static __thread int num_computing; /* operations of this thread that the CPU computes afterwards */

PUBLIC void hollow_compute(int change) {
    num_computing += change;
}

PUBLIC bool hollow_may_launch(void) {
    const char *solid = getenv("HOLLOW_SOLID"), *allowed = getenv("HOLLOW_UNCOMPUTED");
    if (num_computing || !solid || strcmp(solid, "1") || (allowed && !strcmp(allowed, "1")))
        return true;
    hollow_complain("a kernel was launched where nothing computes its numbers");
    return false;
}
