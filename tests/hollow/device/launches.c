/* Kernels of the runtime: registered by the binaries that contain them, checked and counted when launched, never run. */
#define CUDART_API_NO_INLINE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#include "hollow.h"
#include "runtime.h"

static cudaError_t launch(dim3 grid, dim3 block) {
    COUNT("kernels");
    if (!hollow_may_launch())
        return hollow_remember(cudaErrorLaunchFailure);
    size_t threads = (size_t)block.x * block.y * block.z;
    bool is_right = grid.x && grid.y <= 65535 && grid.y && grid.z && grid.z <= 65535 && threads && threads <= 1024;
    return hollow_remember(is_right ? cudaSuccess : cudaErrorInvalidConfiguration);
}

PUBLIC cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                    cudaStream_t stream) {
    (void)function, (void)arguments, (void)shared, (void)stream;
    return launch(grid, block);
}

PUBLIC cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    (void)function, (void)arguments;
    return launch(config->gridDim, config->blockDim);
}

PUBLIC cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                                               size_t shared, cudaStream_t stream) {
    (void)function, (void)arguments, (void)shared, (void)stream;
    return launch(grid, block);
}

PUBLIC cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                      cudaStream_t stream) {
    (void)kernel, (void)arguments, (void)shared, (void)stream;
    return launch(grid, block);
}

/* ---- what the <<<...>>> of a compiled kernel calls ---- */

static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} configuration;

PUBLIC unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared = shared;
    configuration.stream = stream;
    return 0;
}

PUBLIC cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *(void **)stream = configuration.stream;
    return cudaSuccess;
}

PUBLIC void **__cudaRegisterFatBinary(void *binary) {
    void **handle = malloc(sizeof *handle);
    *handle = binary;
    return handle;
}

PUBLIC void __cudaUnregisterFatBinary(void **handle) {
    free(handle);
}

PUBLIC cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)(uintptr_t)function;
    return cudaSuccess;
}

PUBLIC cudaError_t cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    return __cudaGetKernel(kernel, function);
}

PUBLIC cudaError_t cudaGetFuncBySymbol(cudaFunction_t *function, const void *symbol) {
    *function = (cudaFunction_t)(uintptr_t)symbol;
    return cudaSuccess;
}

PUBLIC cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    *address = (void *)(uintptr_t)symbol;
    return cudaSuccess;
}

/* ---- what libraries ask of a kernel before they launch it ---- */

PUBLIC cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
    (void)function;
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = hollow_attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
    found->maxDynamicSharedSizeBytes = hollow_attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    found->numRegs = 64;
    found->binaryVersion = found->ptxVersion = 90;
    return cudaSuccess;
}

PUBLIC cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int size,
                                                                 size_t shared) {
    (void)function, (void)size, (void)shared;
    *blocks = 2;
    return cudaSuccess;
}

PUBLIC cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int size,
                                                                          size_t shared, unsigned flags) {
    (void)flags;
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, size, shared);
}

PUBLIC cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *function,
                                                  const cudaLaunchConfig_t *config) {
    (void)function, (void)config;
    *clusters = 16;
    return cudaSuccess;
}

/* ---- the driver's functions, through the runtime ---- */

PUBLIC cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                                    unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *status) {
    CUresult found = cuGetProcAddress(symbol, function, (int)version, flags, NULL);
    if (status)
        *status = found == CUDA_SUCCESS ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

/* Memory of another process cannot be opened. */
PUBLIC cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *start) {
    (void)handle, (void)start;
    return hollow_remember(cudaErrorNotSupported);
}

PUBLIC cudaError_t cudaIpcOpenMemHandle(void **start, cudaIpcMemHandle_t handle, unsigned flags) {
    (void)start, (void)handle, (void)flags;
    return hollow_remember(cudaErrorNotSupported);
}
