/* The runtime (libcudart) on the hollow driver: devices, memory, and copies. */
#define CUDART_API_NO_INLINE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>

#include "hollow.h"
#include "runtime.h"

static __thread cudaError_t last;

cudaError_t hollow_remember(cudaError_t error) {
    if (error)
        last = error;
    return error;
}

static cudaError_t checked(bool is_right) {
    return hollow_remember(is_right ? cudaSuccess : cudaErrorInvalidValue);
}

PUBLIC cudaError_t cudaGetLastError(void) {
    cudaError_t error = last;
    last = cudaSuccess;
    return error;
}

PUBLIC cudaError_t cudaPeekAtLastError(void) {
    return last;
}

static const struct {
    cudaError_t error;
    const char *name, *text;
} ERRORS[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "nothing computes the numbers of this kernel"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported by the hollow device"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
};

PUBLIC const char *cudaGetErrorString(cudaError_t error) {
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (ERRORS[i].error == error)
            return ERRORS[i].text;
    return "unrecognized error code";
}

PUBLIC const char *cudaGetErrorName(cudaError_t error) {
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (ERRORS[i].error == error)
            return ERRORS[i].name;
    return "unrecognized error code";
}

/* ---- devices ---- */

PUBLIC cudaError_t cudaGetDeviceCount(int *devices) {
    *devices = hollow_devices();
    return cudaSuccess;
}

PUBLIC cudaError_t cudaGetDevice(int *device) {
    *device = hollow_device();
    return cudaSuccess;
}

PUBLIC cudaError_t cudaSetDevice(int device) {
    return hollow_remember(hollow_set_device(device) ? cudaSuccess : cudaErrorInvalidDevice);
}

PUBLIC cudaError_t cudaDriverGetVersion(int *version) {
    *version = HOLLOW_CUDA_VERSION;
    return cudaSuccess;
}

PUBLIC cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = HOLLOW_CUDA_VERSION;
    return cudaSuccess;
}

PUBLIC cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    (void)device;
    *value = hollow_attribute((int)attribute);
    return cudaSuccess;
}

static size_t of(CUdevice_attribute attribute) {
    return (size_t)hollow_attribute((int)attribute);
}

PUBLIC cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    memset(found, 0, sizeof *found);
    strcpy(found->name, HOLLOW_NAME);
    memset(&found->uuid, device + 1, sizeof found->uuid);
    found->pciBusID = device + 1;
    found->totalGlobalMem = hollow_total_bytes();
    found->major = (int)of(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    found->minor = (int)of(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    found->multiProcessorCount = (int)of(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    found->warpSize = (int)of(CU_DEVICE_ATTRIBUTE_WARP_SIZE);
    found->maxThreadsPerBlock = (int)of(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
    found->maxThreadsPerMultiProcessor = (int)of(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
    found->maxBlocksPerMultiProcessor = (int)of(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR);
    for (int axis = 0; axis < 3; axis++) {
        found->maxThreadsDim[axis] = hollow_attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X + axis);
        found->maxGridSize[axis] = hollow_attribute(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X + axis);
    }
    found->sharedMemPerBlock = of(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK);
    found->sharedMemPerBlockOptin = of(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    found->sharedMemPerMultiprocessor = of(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
    found->reservedSharedMemPerBlock = of(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK);
    found->regsPerBlock = (int)of(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK);
    found->regsPerMultiprocessor = (int)of(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR);
    found->totalConstMem = of(CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY);
    found->l2CacheSize = (int)of(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
    found->memoryBusWidth = (int)of(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH);
    found->asyncEngineCount = (int)of(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT);
    found->unifiedAddressing = found->managedMemory = found->canMapHostMemory = 1;
    found->concurrentKernels = found->cooperativeLaunch = found->clusterLaunch = 1;
    found->streamPrioritiesSupported = found->memoryPoolsSupported = found->hostRegisterSupported = 1;
    found->canUseHostPointerForRegisteredMem = 1;
    return cudaSuccess;
}

PUBLIC cudaError_t cudaDeviceGetPCIBusId(char *id, int size, int device) {
    snprintf(id, (size_t)size, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

/* Devices of one process reach each other through the host alone. */
PUBLIC cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    (void)device, (void)peer;
    *can = 0;
    return cudaSuccess;
}

/* ---- memory ---- */

PUBLIC cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *free_bytes = hollow_free_bytes(hollow_device());
    *total = hollow_total_bytes();
    return cudaSuccess;
}

static cudaError_t allocate(void **start, size_t size, enum hollow_kind kind) {
    *start = hollow_alloc(size, kind);
    return hollow_remember(*start ? cudaSuccess : cudaErrorMemoryAllocation);
}

PUBLIC cudaError_t cudaMalloc(void **start, size_t size) {
    return allocate(start, size, DEVICE);
}

PUBLIC cudaError_t cudaMallocAsync(void **start, size_t size, cudaStream_t stream) {
    (void)stream;
    return allocate(start, size, DEVICE);
}

PUBLIC cudaError_t cudaMallocManaged(void **start, size_t size, unsigned flags) {
    (void)flags;
    return allocate(start, size, MANAGED);
}

PUBLIC cudaError_t cudaHostAlloc(void **start, size_t size, unsigned flags) {
    (void)flags;
    return allocate(start, size, PINNED);
}

PUBLIC cudaError_t cudaMallocHost(void **start, size_t size) {
    return allocate(start, size, PINNED);
}

PUBLIC cudaError_t cudaFree(void *start) {
    return checked(hollow_release(start, false));
}

PUBLIC cudaError_t cudaFreeAsync(void *start, cudaStream_t stream) {
    (void)stream;
    return checked(hollow_release(start, false));
}

PUBLIC cudaError_t cudaFreeHost(void *start) {
    return checked(hollow_release(start, true));
}

PUBLIC cudaError_t cudaHostRegister(void *start, size_t size, unsigned flags) {
    (void)flags;
    return checked(hollow_register(start, size));
}

PUBLIC cudaError_t cudaHostUnregister(void *start) {
    return checked(hollow_unregister(start));
}

PUBLIC cudaError_t cudaHostGetDevicePointer(void **on_device, void *on_host, unsigned flags) {
    (void)flags;
    *on_device = on_host;
    return cudaSuccess;
}

PUBLIC cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *pointer) {
    static const enum cudaMemoryType TYPES[] = {cudaMemoryTypeUnregistered, cudaMemoryTypeDevice, cudaMemoryTypeHost,
                                                cudaMemoryTypeManaged};
    struct hollow_block block = {.kind = HOST, .device = -2};
    bool is_known = hollow_find(pointer, &block) && block.state == LIVE;
    memset(found, 0, sizeof *found);
    found->type = is_known ? TYPES[block.kind] : cudaMemoryTypeUnregistered;
    found->device = is_known ? block.device : -2;
    found->devicePointer = is_known ? (void *)(uintptr_t)pointer : NULL;
    found->hostPointer = found->type == cudaMemoryTypeDevice ? NULL : (void *)(uintptr_t)pointer;
    return cudaSuccess;
}

/* ---- copies ---- */

static bool is_kept(enum cudaMemcpyKind kind, const void *to, const void *from, size_t size) {
    bool reads_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    bool writes_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    return (!reads_device || hollow_is_on_device(from, size, "the source of a copy from the device")) &&
           (!writes_device || hollow_is_on_device(to, size, "the target of a copy to the device"));
}

PUBLIC cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    return checked(is_kept(kind, to, from, size) && hollow_copy(to, from, size, true));
}

/* A copy that is captured is checked, and moves nothing: the solid device does it at each launch. */
static bool copy_later(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return is_kept(kind, to, from, size) && (is_captured(stream) || hollow_copy(to, from, size, false));
}

PUBLIC cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind,
                                   cudaStream_t stream) {
    return checked(copy_later(to, from, size, kind, stream));
}

PUBLIC cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size,
                                       cudaStream_t stream) {
    (void)to_device, (void)from_device;
    return checked(copy_later(to, from, size, cudaMemcpyDeviceToDevice, stream));
}

PUBLIC cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                     size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    bool is_right = true;
    for (size_t row = 0; row < height && is_right; row++) {
        char *target = (char *)to + row * to_pitch;
        const char *source = (const char *)from + row * from_pitch;
        is_right = copy_later(target, source, width, kind, stream);
    }
    return checked(is_right);
}

PUBLIC cudaError_t cudaMemset(void *to, int value, size_t size) {
    return checked(hollow_is_on_device(to, size, "a fill") && hollow_set(to, value, size));
}

PUBLIC cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) {
    if (is_captured(stream))
        return checked(hollow_is_on_device(to, size, "a fill"));
    return cudaMemset(to, value, size);
}
