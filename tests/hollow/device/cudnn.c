/* The answers that cuDNN must give. */
#include "hollow.h"

static char handle;

PUBLIC size_t cudnnGetVersion(void) {
    return 92000;
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
