/* The answers that cuDNN must give. */
#include "hollow.h"

static char handle;
static const int version[] = {HOLLOW_CUDNN_VERSION}; /* major, minor, patch: build.py takes them from torch */

PUBLIC size_t cudnnGetVersion(void) {
    return (size_t)(10000 * version[0] + 100 * version[1] + version[2]);
}

PUBLIC int cudnnGetProperty(int place, int *number) {
    *number = version[place];
    return 0;
}

PUBLIC size_t cudnnGetCudartVersion(void) {
    return HOLLOW_CUDA_VERSION;
}

PUBLIC int cudnnCreate(void **made) {
    *made = &handle;
    return 0;
}

PUBLIC const char *cudnnGetErrorString(int status) {
    (void)status;
    return "a status of the hollow cuDNN";
}

PUBLIC void cudnnGetLastErrorString(char *message, size_t size) {
    if (size)
        *message = 0;
}

/* Graphs of operations, which cuDNN's frontend describes. Every graph is supported, by one engine without a workspace. */
enum { TYPE_INT64 = 3, TYPE_INT32 = 23 };

PUBLIC int cudnnBackendCreateDescriptor(int type, void **made) {
    (void)type;
    *made = &handle;
    return 0;
}

PUBLIC int cudnnBackendGetAttribute(void *of, int name, int type, int64_t requested, int64_t *number, void *elements) {
    (void)of, (void)name;
    if (number)
        *number = 1;
    if (requested > 0 && type == TYPE_INT64)
        *(int64_t *)elements = 0;
    if (requested > 0 && type == TYPE_INT32)
        *(int32_t *)elements = 0;
    return 0;
}
