/* The answers that cuBLASLt must give. */
#include <string.h>

#include "hollow.h"

#define ALGORITHM_BYTES 64 /* of a cublasLtMatmulHeuristicResult_t: the algorithm; its workspace and status follow */

static char handle;

PUBLIC int cublasLtCreate(void **made) {
    *made = &handle;
    return 0;
}

PUBLIC size_t cublasLtGetVersion(void) {
    return 130101;
}

PUBLIC int cublasLtMatmulDescCreate(void **made) {
    return cublasLtCreate(made);
}

PUBLIC int cublasLtMatrixLayoutCreate(void **made) {
    return cublasLtCreate(made);
}

PUBLIC int cublasLtMatmulPreferenceCreate(void **made) {
    return cublasLtCreate(made);
}

PUBLIC int cublasLtMatmulAlgoGetHeuristic(void *of, void *product, void *a, void *b, void *c, void *d, void *preference,
                                          int wanted, void *results, int *found) {
    (void)of, (void)product, (void)a, (void)b, (void)c, (void)d, (void)preference;
    memset(results, 0, ALGORITHM_BYTES + 2 * sizeof(size_t));
    *found = wanted > 0;
    return 0;
}

PUBLIC int cublasLtMatmul(void) {
    COUNT("products");
    return 0;
}
