/* What the parts of the runtime share. */
#ifndef HOLLOW_RUNTIME_H
#define HOLLOW_RUNTIME_H

#include <driver_types.h>

cudaError_t hollow_remember(cudaError_t error); /* for cudaGetLastError; returns it */

#endif
