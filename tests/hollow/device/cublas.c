/* The answers that cuBLAS must give. Products are counted; who wants their numbers computes them on the host. */
#include "hollow.h"

static char handle;

PUBLIC int cublasCreate_v2(void **made) {
    *made = &handle;
    return 0;
}

PUBLIC int cublasGetVersion_v2(void *of, int *version) {
    (void)of;
    *version = 130101;
    return 0;
}

PUBLIC int cublasGetMathMode(void *of, int *mode) {
    (void)of;
    *mode = 0;
    return 0;
}

PUBLIC int cublasGetPointerMode_v2(void *of, int *mode) {
    (void)of;
    *mode = 0;
    return 0;
}

PUBLIC const char *cublasGetStatusString(int status) {
    (void)status;
    return "a status of the hollow cuBLAS";
}

#define PRODUCT(function)        \
    PUBLIC int function(void) {  \
        COUNT("products");       \
        return 0;                \
    }

PRODUCT(cublasGemmEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemmStridedBatched)
