/* What the parts of the runtime share. */
#ifndef HOLLOW_RUNTIME_H
#define HOLLOW_RUNTIME_H

#include <driver_types.h>
#include <stdbool.h>

bool is_captured(cudaStream_t stream);
cudaError_t hollow_remember(cudaError_t error); /* for cudaGetLastError; returns it */

#endif
