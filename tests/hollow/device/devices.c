/* The devices: how many there are, what they say of themselves, and which one a thread uses. */
#include <cuda.h>
#include <stdlib.h>
#include <string.h>

#include "hollow.h"

static __thread int current;
static bool is_active[HOLLOW_MAX_DEVICES];

/* Devices are alike, so CUDA_VISIBLE_DEVICES only says how many of them a process sees. */
static int visible(int devices) {
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text)
        return devices;
    int named = *text != '\0';
    for (; *text; text++)
        named += *text == ',';
    return named < devices ? named : devices;
}

PUBLIC int hollow_devices(void) {
    const char *number = getenv("HOLLOW_DEVICES");
    int devices = number ? atoi(number) : 1;
    return visible(devices < HOLLOW_MAX_DEVICES ? devices : HOLLOW_MAX_DEVICES);
}

PUBLIC int hollow_device(void) {
    return current;
}

PUBLIC bool hollow_set_device(int device) {
    if (device < 0 || device >= hollow_devices())
        return false;
    current = device;
    is_active[device] = true;
    return true;
}

/* Sizes of an H100, so that libraries choose the kernels that they would choose there. */
static const struct {
    CUdevice_attribute attribute;
    int value;
} SIZES[] = {
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
    {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
    {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, 32},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 2147483647},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 232448},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 233472},
    {CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
    {CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 65536},
    {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 52428800},
    {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 5120},
    {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1980000},
    {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 2619000},
    {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
    {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 1},
    {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1},
    {CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1},
    {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_ECC_ENABLED, 1},
};

PUBLIC int hollow_attribute(int attribute) {
    for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES; i++)
        if ((int)SIZES[i].attribute == attribute)
            return SIZES[i].value;
    return 0;
}

PUBLIC CUresult cuInit(unsigned flags) {
    return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

PUBLIC CUresult cuDriverGetVersion(int *version) {
    *version = HOLLOW_CUDA_VERSION;
    return CUDA_SUCCESS;
}

PUBLIC CUresult cuDeviceGetCount(int *devices) {
    *devices = hollow_devices();
    return CUDA_SUCCESS;
}

PUBLIC CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < hollow_devices() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

PUBLIC CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
    (void)device;
    strncpy(name, HOLLOW_NAME, (size_t)size);
    return CUDA_SUCCESS;
}

PUBLIC CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    memset(uuid, device + 1, sizeof *uuid);
    return CUDA_SUCCESS;
}

PUBLIC CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    (void)device;
    *value = hollow_attribute((int)attribute);
    return CUDA_SUCCESS;
}

PUBLIC CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    (void)device;
    *bytes = hollow_total_bytes();
    return CUDA_SUCCESS;
}

/* A context is the number of its device, away from NULL. */
static CUcontext context_of(int device) {
    return (CUcontext)(uintptr_t)(0x1000 + device);
}

PUBLIC CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    is_active[device] = true;
    *context = context_of(device);
    return CUDA_SUCCESS;
}

PUBLIC CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = is_active[device];
    return CUDA_SUCCESS;
}

PUBLIC CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = is_active[current] ? context_of(current) : NULL;
    return CUDA_SUCCESS;
}

PUBLIC CUresult cuCtxSetCurrent(CUcontext context) {
    if (context)
        hollow_set_device((int)((uintptr_t)context - 0x1000));
    return CUDA_SUCCESS;
}

static __thread int pushed[16], num_pushed;

PUBLIC CUresult cuCtxPushCurrent(CUcontext context) {
    if (num_pushed == 16)
        return CUDA_ERROR_INVALID_CONTEXT;
    pushed[num_pushed++] = current;
    return cuCtxSetCurrent(context);
}

PUBLIC CUresult cuCtxPopCurrent(CUcontext *context) {
    if (!num_pushed)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (context)
        *context = context_of(current);
    current = pushed[--num_pushed];
    return CUDA_SUCCESS;
}

PUBLIC CUresult cuCtxGetDevice(CUdevice *device) {
    *device = current;
    return CUDA_SUCCESS;
}
