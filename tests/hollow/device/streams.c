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
    unsigned long long capture; /* the number of the last capture that the stream took part in */
};

struct CUevent_st {
    bool is_recorded;
    double at_ms;               /* of the host's clock */
    unsigned long long capture; /* of the stream that recorded it */
};

#define MAX_CAPTURES 16 /* at a time */
static unsigned long long active[MAX_CAPTURES], num_captures;

static bool is_active(unsigned long long capture) {
    for (int place = 0; place < MAX_CAPTURES; place++)
        if (capture && active[place] == capture)
            return true;
    return false;
}

static bool replace_active(unsigned long long old, unsigned long long new) {
    for (int place = 0; place < MAX_CAPTURES; place++)
        if (__atomic_compare_exchange_n(&active[place], &old, new, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            return true;
    return false;
}

/* What waits for a stream that is captured is an error, as it is on a GPU. */
static cudaError_t unless(bool is_capturing) {
    return hollow_remember(is_capturing ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
}

/* ---- streams ---- */

PUBLIC cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    (void)flags;
    *stream = malloc(sizeof **stream);
    **stream = (struct CUstream_st){hollow_device(), priority, 0};
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

/* Return the number of the capture that a stream takes part in, 0 if there is none. */
static unsigned long long capture_of(cudaStream_t stream) {
    return is_own(stream) && is_active(stream->capture) ? stream->capture : 0;
}

bool is_captured(cudaStream_t stream) {
    return capture_of(stream) != 0;
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
    COUNT("waits_for_stream");
    return unless(capture_of(stream));
}

PUBLIC cudaError_t cudaDeviceSynchronize(void) {
    COUNT("waits_for_device");
    for (int place = 0; place < MAX_CAPTURES; place++)
        if (active[place])
            return unless(true);
    return cudaSuccess;
}

PUBLIC cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    (void)flags;
    COUNT("waits_of_streams");
    if (is_own(stream) && is_active(event->capture))
        stream->capture = event->capture;
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
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    event->is_recorded = true;
    event->capture = capture_of(stream);
    event->at_ms = (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
    COUNT("events");
    return cudaSuccess;
}

PUBLIC cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    (void)flags;
    return cudaEventRecord(event, stream);
}

PUBLIC cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    COUNT("waits_for_event");
    return unless(is_active(event->capture));
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
    (void)mode;
    unsigned long long capture = __atomic_add_fetch(&num_captures, 1, __ATOMIC_RELAXED);
    if (!is_own(stream) || capture_of(stream) || !replace_active(0, capture))
        return unless(true);
    stream->capture = capture;
    return cudaSuccess;
}

PUBLIC cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    unsigned long long capture = capture_of(stream);
    if (!capture)
        return hollow_remember(cudaErrorIllegalState);
    replace_active(capture, 0);
    *graph = next_graph();
    return cudaSuccess;
}

static enum cudaStreamCaptureStatus capture_status(cudaStream_t stream) {
    return capture_of(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}

PUBLIC cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = capture_status(stream);
    return cudaSuccess;
}

PUBLIC cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph,
                                            const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges,
                                            size_t *num_dependencies) {
    *status = capture_status(stream);
    if (id)
        *id = capture_of(stream);
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
