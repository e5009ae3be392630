/* The answers that NVML, the library of nvidia-smi, must give. A handle is the number of its device, plus one. */
#include <stdio.h>

#include "hollow.h"

static int device_of(const void *handle) {
    return (int)((uintptr_t)handle - 1);
}

PUBLIC int nvmlDeviceGetCount_v2(unsigned *devices) {
    *devices = (unsigned)hollow_devices();
    return 0;
}

PUBLIC int nvmlDeviceGetHandleByIndex_v2(unsigned device, void **handle) {
    *handle = (void *)(uintptr_t)(device + 1);
    return 0;
}

PUBLIC int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **handle) {
    unsigned bus = 1; /* of the first device */
    sscanf(id, "%*x:%x", &bus);
    return nvmlDeviceGetHandleByIndex_v2(bus - 1, handle);
}

PUBLIC int nvmlDeviceGetIndex(void *handle, unsigned *device) {
    *device = (unsigned)device_of(handle);
    return 0;
}

PUBLIC int nvmlDeviceGetName(void *handle, char *name, unsigned size) {
    (void)handle;
    snprintf(name, size, "%s", HOLLOW_NAME);
    return 0;
}

PUBLIC int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned size) {
    snprintf(uuid, size, "GPU-hollow-%d", device_of(handle));
    return 0;
}

PUBLIC int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    (void)handle;
    *major = 9;
    *minor = 0;
    return 0;
}

PUBLIC int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *total_free_used) {
    total_free_used[0] = hollow_total_bytes();
    total_free_used[1] = hollow_free_bytes(device_of(handle));
    total_free_used[2] = total_free_used[0] - total_free_used[1];
    return 0;
}

PUBLIC int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    snprintf(version, size, "580.00");
    return 0;
}

PUBLIC int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = HOLLOW_CUDA_VERSION;
    return 0;
}

PUBLIC const char *nvmlErrorString(int status) {
    (void)status;
    return "a status of the hollow NVML";
}

#define NOT_SUPPORTED 3

PUBLIC int nvmlDeviceGetNvLinkState(void *handle, unsigned link, int *state) {
    (void)handle, (void)link;
    *state = 0;
    return NOT_SUPPORTED;
}

PUBLIC int nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned link, int *type) {
    (void)handle, (void)link, (void)type;
    return NOT_SUPPORTED;
}

PUBLIC int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned link, void *place) {
    (void)handle, (void)link, (void)place;
    return NOT_SUPPORTED;
}

PUBLIC int nvmlDeviceGetP2PStatus(void *handle, void *peer, int index, int *status) {
    (void)handle, (void)peer, (void)index;
    *status = 1; /* not supported by the chipset */
    return 0;
}

#define EMPTY(function)                                                 \
    PUBLIC int function(void *handle, unsigned *count, void *found) {   \
        (void)handle, (void)found;                                      \
        *count = 0;                                                     \
        return 0;                                                       \
    }

EMPTY(nvmlDeviceGetComputeRunningProcesses)
EMPTY(nvmlDeviceGetComputeRunningProcesses_v3)
EMPTY(nvmlDeviceGetGraphicsRunningProcesses_v3)
