/* Sums and other reductions of collectives, in the numbers of NCCL's types. */
#ifndef HOLLOW_REDUCE_H
#define HOLLOW_REDUCE_H

#include <stdbool.h>
#include <stddef.h>

/* The values of ncclDataType_t and ncclRedOp_t. */
enum number { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 };
enum reduction { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE };

size_t bytes_of(int number);
bool can_reduce(int number);

/* Reduce `terms`, arrays of `count` numbers, in their order, into `total`. Floats of two bytes are rounded once. */
void reduce(void *total, void *const *terms, int num_terms, size_t count, int number, int reduction);

/* Multiply all numbers by a factor. */
void scale(void *numbers, size_t count, int number, double factor);

#endif
