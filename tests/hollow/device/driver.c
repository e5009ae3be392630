/* The driver's interface to memory, modules and kernels: what Triton, vLLM's sleep mode and torch's loader call. */
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hollow.h"

static CUresult checked(bool is_right) {
    return is_right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

PUBLIC CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_SUCCESS                ? "no error"
            : error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory"
                                                : "invalid argument (of the hollow device)";
    return CUDA_SUCCESS;
}

PUBLIC CUresult cuGetErrorName(CUresult error, const char **name) {
    *name = error == CUDA_SUCCESS                ? "CUDA_SUCCESS"
            : error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
                                                : "CUDA_ERROR_INVALID_VALUE";
    return CUDA_SUCCESS;
}

/* ---- memory ---- */

PUBLIC CUresult cuMemGetInfo(size_t *free_bytes, size_t *total) {
    *free_bytes = hollow_free_bytes(hollow_device());
    *total = hollow_total_bytes();
    return CUDA_SUCCESS;
}

PUBLIC CUresult cuMemAlloc(CUdeviceptr *start, size_t size) {
    *start = (CUdeviceptr)hollow_alloc(size, DEVICE);
    return *start ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

PUBLIC CUresult cuMemFree(CUdeviceptr start) {
    return checked(hollow_release((void *)start, false));
}

static CUresult to_device(CUdeviceptr to, const void *from, size_t size, bool waits) {
    void *target = (void *)to;
    return checked(hollow_is_on_device(target, size, "the target of a copy to the device") &&
                   hollow_copy(target, from, size, waits));
}

static CUresult to_host(void *to, CUdeviceptr from, size_t size, bool waits) {
    const void *source = (const void *)from;
    return checked(hollow_is_on_device(source, size, "the source of a copy from the device") &&
                   hollow_copy(to, source, size, waits));
}

PUBLIC CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t size) {
    return to_device(to, from, size, true);
}

PUBLIC CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t size) {
    return to_host(to, from, size, true);
}

PUBLIC CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t size, CUstream stream) {
    (void)stream;
    return to_device(to, from, size, false);
}

PUBLIC CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t size, CUstream stream) {
    (void)stream;
    return to_host(to, from, size, false);
}

PUBLIC CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t size) {
    const void *source = (const void *)from;
    bool is_right = hollow_is_on_device(source, size, "the source of a copy within the device");
    return is_right ? to_device(to, source, size, false) : checked(false);
}

PUBLIC CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    (void)stream;
    return cuMemcpyDtoD(to, from, size);
}

PUBLIC CUresult cuMemsetD8(CUdeviceptr to, unsigned char value, size_t size) {
    return checked(hollow_is_on_device((void *)to, size, "a fill") && hollow_set((void *)to, value, size));
}

PUBLIC CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t size, CUstream stream) {
    (void)stream;
    return cuMemsetD8(to, value, size);
}

PUBLIC CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    struct hollow_block block;
    if (!hollow_find((void *)pointer, &block) || block.state != LIVE)
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)value = block.kind == PINNED ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(void **)value = block.start;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)value = block.size;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        *(CUdeviceptr *)value = pointer;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)value = block.device;
        break;
    default:
        *(int *)value = 0;
    }
    return CUDA_SUCCESS;
}

/* ---- virtual memory ---- */

struct physical { /* kept after its end, so that a use of it is found */
    size_t size;
    int device;
    bool is_released;
};

static bool is_usable(const struct physical *memory) {
    if (memory->is_released)
        hollow_complain("a handle of %zu bytes is used, which was released", memory->size);
    return !memory->is_released;
}

PUBLIC CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                              CUmemAllocationGranularity_flags option) {
    (void)properties, (void)option;
    *bytes = 2u << 20;
    return CUDA_SUCCESS;
}

PUBLIC CUresult cuMemAddressReserve(CUdeviceptr *start, size_t size, size_t alignment, CUdeviceptr at,
                                    unsigned long long flags) {
    (void)alignment, (void)at, (void)flags;
    *start = (CUdeviceptr)hollow_reserve(size);
    return *start ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Addresses stay reserved, so that a use after the end is found. */
PUBLIC CUresult cuMemAddressFree(CUdeviceptr start, size_t size) {
    (void)start, (void)size;
    return CUDA_SUCCESS;
}

PUBLIC CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
                            unsigned long long flags) {
    (void)flags;
    int device = properties->location.id;
    if (!hollow_charge(device, size))
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct physical *memory = malloc(sizeof *memory);
    *memory = (struct physical){size, device, false};
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)memory;
    COUNT("allocations");
    return CUDA_SUCCESS;
}

PUBLIC CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    struct physical *memory = (struct physical *)(uintptr_t)handle;
    if (!is_usable(memory))
        return checked(false);
    memory->is_released = true;
    hollow_discharge(memory->device, memory->size);
    COUNT("frees");
    return CUDA_SUCCESS;
}

PUBLIC CUresult cuMemMap(CUdeviceptr start, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags) {
    (void)flags;
    struct physical *memory = (struct physical *)(uintptr_t)handle;
    return checked(is_usable(memory) && offset + size <= memory->size && hollow_map((void *)start, size, memory->device));
}

PUBLIC CUresult cuMemUnmap(CUdeviceptr start, size_t size) {
    return checked(hollow_unmap((void *)start, size));
}

/* Memory of one process cannot be opened in another. */
PUBLIC CUresult cuMemExportToShareableHandle(void *shared, CUmemGenericAllocationHandle handle,
                                             CUmemAllocationHandleType type, unsigned long long flags) {
    (void)shared, (void)handle, (void)type, (void)flags;
    return CUDA_ERROR_NOT_SUPPORTED;
}

PUBLIC CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shared,
                                               CUmemAllocationHandleType type) {
    (void)handle, (void)shared, (void)type;
    return CUDA_ERROR_NOT_SUPPORTED;
}

PUBLIC CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr start) {
    (void)handle, (void)start;
    return CUDA_ERROR_NOT_SUPPORTED;
}

PUBLIC CUresult cuIpcOpenMemHandle(CUdeviceptr *start, CUipcMemHandle handle, unsigned flags) {
    (void)start, (void)handle, (void)flags;
    return CUDA_ERROR_NOT_SUPPORTED;
}

/* ---- kernels: a module or a library is its image, a function is its name ---- */

PUBLIC CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    *module = (CUmodule)(uintptr_t)image;
    return CUDA_SUCCESS;
}

PUBLIC CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *options,
                                   void **values) {
    (void)count, (void)options, (void)values;
    return cuModuleLoadData(module, image);
}

PUBLIC CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    (void)module;
    *function = (CUfunction)strdup(name);
    return CUDA_SUCCESS;
}

PUBLIC CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *options, void **values,
                                  unsigned count, CUlibraryOption *more, void **more_values, unsigned more_count) {
    (void)options, (void)values, (void)count, (void)more, (void)more_values, (void)more_count;
    *library = (CUlibrary)(uintptr_t)code;
    return CUDA_SUCCESS;
}

PUBLIC CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    (void)library;
    *kernel = (CUkernel)strdup(name);
    return CUDA_SUCCESS;
}

PUBLIC CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    (void)function;
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
             : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 64
                                                                  : 0;
    return CUDA_SUCCESS;
}

PUBLIC CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
    (void)function, (void)config;
    *clusters = 16;
    return CUDA_SUCCESS;
}

PUBLIC CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int size, size_t shared) {
    (void)function, (void)size, (void)shared;
    *blocks = 2;
    return CUDA_SUCCESS;
}

PUBLIC CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                               unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **arguments,
                               void **extra) {
    (void)function, (void)shared, (void)stream, (void)arguments, (void)extra;
    COUNT("kernels");
    if (!hollow_may_launch())
        return CUDA_ERROR_LAUNCH_FAILED;
    bool is_right = grid_x && grid_y && grid_z && block_x && block_y && block_z;
    return checked(is_right && (size_t)block_x * block_y * block_z <= 1024);
}

PUBLIC CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
    return cuLaunchKernel(function, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
                          config->blockDimY, config->blockDimZ, config->sharedMemBytes, config->hStream, arguments,
                          extra);
}

/* ---- waiting ---- */

PUBLIC CUresult cuCtxSynchronize(void) {
    COUNT("waits_for_device");
    return CUDA_SUCCESS;
}

PUBLIC CUresult cuStreamSynchronize(CUstream stream) {
    (void)stream;
    COUNT("waits_for_stream");
    return CUDA_SUCCESS;
}

/* ---- functions by name ---- */

/* Return the newest version of a function that is written out or stubbed. */
PUBLIC CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags,
                                 CUdriverProcAddressQueryResult *status) {
    (void)version, (void)flags;
    static const char *const SUFFIXES[] = {"_v4", "_v3", "_v2", ""};
    static void *libcuda;
    if (!libcuda)
        libcuda = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    char name[128];
    *function = NULL;
    for (size_t i = 0; i < 4 && !*function; i++) {
        snprintf(name, sizeof name, "%s%s", symbol, SUFFIXES[i]);
        *function = dlsym(libcuda, name);
    }
    if (status)
        *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
