/* The answers that NVRTC must give: a program that is compiled is empty, and its functions have their own names. */
#include "hollow.h"

static char program;

PUBLIC int nvrtcVersion(int *major, int *minor) {
    *major = HOLLOW_CUDA_VERSION / 1000;
    *minor = 0;
    return 0;
}

PUBLIC int nvrtcGetNumSupportedArchs(int *number) {
    *number = 1;
    return 0;
}

PUBLIC int nvrtcGetSupportedArchs(int *supported) {
    *supported = 90;
    return 0;
}

PUBLIC int nvrtcCreateProgram(void **made) {
    *made = &program;
    return 0;
}

PUBLIC int nvrtcGetCUBINSize(void *of, size_t *size) {
    (void)of;
    *size = 8;
    return 0;
}

PUBLIC int nvrtcGetPTXSize(void *of, size_t *size) {
    return nvrtcGetCUBINSize(of, size);
}

PUBLIC int nvrtcGetProgramLogSize(void *of, size_t *size) {
    (void)of;
    *size = 1;
    return 0;
}

PUBLIC int nvrtcGetLoweredName(void *of, const char *expression, const char **name) {
    (void)of;
    *name = expression;
    return 0;
}

PUBLIC const char *nvrtcGetErrorString(int status) {
    (void)status;
    return "a status of the hollow NVRTC";
}
