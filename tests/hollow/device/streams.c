/* Streams, events, graphs and launches of the runtime. Everything happens at once, in the order of the program. */
#define CUDART_API_NO_INLINE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "hollow.h"
#include "runtime.h"

struct CUstream_st {
    int device, priority;
};

struct CUevent_st {
    bool is_recorded;
    double at_ms; /* of the host's clock */
};

static int num_capturing;
static unsigned long long num_captures;

/* What waits for the device while a stream is captured is an error, as it is on a GPU. */
static cudaError_t unless_capturing(void) {
    return hollow_remember(num_capturing ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
}

/* ---- streams ---- */

PUBLIC cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    (void)flags;
    *stream = malloc(sizeof **stream);
    **stream = (struct CUstream_st){hollow_device(), priority};
    return cudaSuccess;
}

PUBLIC cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

PUBLIC cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithPriority(stream, 0, 0);
}

static bool is_own(cudaStream_t stream) {
    return stream && stream != cudaStreamLegacy && stream != cudaStreamPerThread;
}

PUBLIC cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    if (is_own(stream))
        free(stream);
    return cudaSuccess;
}

PUBLIC cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = is_own(stream) ? stream->priority : 0;
    return cudaSuccess;
}

PUBLIC cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device) {
    *device = is_own(stream) ? stream->device : hollow_device();
    return cudaSuccess;
}

PUBLIC cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned *flags) {
    *flags = is_own(stream) ? cudaStreamNonBlocking : cudaStreamDefault;
    return cudaSuccess;
}

PUBLIC cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *id) {
    *id = (unsigned long long)(uintptr_t)stream;
    return cudaSuccess;
}

PUBLIC cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

PUBLIC cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    (void)stream;
    COUNT("waits_for_stream");
    return unless_capturing();
}

PUBLIC cudaError_t cudaDeviceSynchronize(void) {
    COUNT("waits_for_device");
    return unless_capturing();
}

PUBLIC cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    (void)stream, (void)event, (void)flags;
    COUNT("waits_of_streams");
    return cudaSuccess;
}

PUBLIC cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *data,
                                         unsigned flags) {
    (void)flags;
    callback(stream, cudaSuccess, data);
    return cudaSuccess;
}

PUBLIC cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    (void)stream;
    function(data);
    return cudaSuccess;
}

/* ---- events ---- */

PUBLIC cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    (void)flags;
    *event = calloc(1, sizeof **event);
    return cudaSuccess;
}

PUBLIC cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return cudaEventCreateWithFlags(event, 0);
}

PUBLIC cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

PUBLIC cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    (void)stream;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    event->is_recorded = true;
    event->at_ms = (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
    COUNT("events");
    return cudaSuccess;
}

PUBLIC cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    (void)flags;
    return cudaEventRecord(event, stream);
}

PUBLIC cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    (void)event;
    COUNT("waits_for_event");
    return unless_capturing();
}

PUBLIC cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
    if (!start->is_recorded || !end->is_recorded)
        return hollow_remember(cudaErrorInvalidResourceHandle);
    *ms = (float)(end->at_ms - start->at_ms);
    return cudaSuccess;
}

/* ---- graphs: a graph is a number, and a launch of it is counted ---- */

static void *next_graph(void) {
    static uintptr_t graphs = 0x5000;
    return (void *)__atomic_add_fetch(&graphs, 16, __ATOMIC_RELAXED);
}

PUBLIC cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    (void)stream, (void)mode;
    __atomic_add_fetch(&num_capturing, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&num_captures, 1, __ATOMIC_RELAXED);
    return cudaSuccess;
}

PUBLIC cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    (void)stream;
    __atomic_sub_fetch(&num_capturing, 1, __ATOMIC_RELAXED);
    *graph = next_graph();
    return cudaSuccess;
}

static enum cudaStreamCaptureStatus capture_status(void) {
    return num_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}

PUBLIC cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    (void)stream;
    *status = capture_status();
    return cudaSuccess;
}

PUBLIC cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph,
                                            const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges,
                                            size_t *num_dependencies) {
    (void)stream;
    *status = capture_status();
    if (id)
        *id = num_captures;
    if (graph)
        *graph = NULL;
    if (dependencies)
        *dependencies = NULL;
    if (edges)
        *edges = NULL;
    if (num_dependencies)
        *num_dependencies = 0;
    return cudaSuccess;
}

PUBLIC cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
    (void)graph, (void)flags;
    *made = next_graph();
    return cudaSuccess;
}

PUBLIC cudaError_t cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(made, graph, flags);
}

PUBLIC cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    (void)graph;
    if (!nodes)
        *count = 1;
    return cudaSuccess;
}

PUBLIC cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    (void)graph, (void)stream;
    COUNT("graph_launches");
    return cudaSuccess;
}
