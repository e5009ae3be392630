#include "reduce.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

size_t bytes_of(int number) {
    static const size_t BYTES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return BYTES[number];
}

bool can_reduce(int number) {
    return number < FLOAT8_E4M3;
}

#define REDUCE_IN(type)                                                                       \
    static void reduce_##type(type *total, const type *term, size_t count, int reduction) {   \
        for (size_t i = 0; i < count; i++)                                                    \
            switch (reduction) {                                                              \
            case PRODUCT:                                                                     \
                total[i] *= term[i];                                                          \
                break;                                                                        \
            case MAXIMUM:                                                                     \
                total[i] = term[i] > total[i] ? term[i] : total[i];                           \
                break;                                                                        \
            case MINIMUM:                                                                     \
                total[i] = term[i] < total[i] ? term[i] : total[i];                           \
                break;                                                                        \
            default:                                                                          \
                total[i] += term[i];                                                          \
            }                                                                                 \
    }                                                                                         \
    static void scale_##type(type *numbers, size_t count, double factor) {                    \
        for (size_t i = 0; i < count; i++)                                                    \
            numbers[i] = (type)(numbers[i] * factor);                                         \
    }

REDUCE_IN(int8_t)
REDUCE_IN(uint8_t)
REDUCE_IN(int32_t)
REDUCE_IN(uint32_t)
REDUCE_IN(int64_t)
REDUCE_IN(uint64_t)
REDUCE_IN(float)
REDUCE_IN(double)

/* ---- floats of two bytes are reduced as floats of four ---- */

static float widened(uint16_t bits, int number) {
    float value;
    if (number == FLOAT16) {
        _Float16 half;
        memcpy(&half, &bits, sizeof half);
        return (float)half;
    }
    uint32_t wide = (uint32_t)bits << 16;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t narrowed(float value, int number) {
    uint16_t bits;
    if (number == FLOAT16) {
        _Float16 half = (_Float16)value;
        memcpy(&bits, &half, sizeof bits);
        return bits;
    }
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    if (value != value)
        return (uint16_t)(wide >> 16 | 0x40);
    return (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16); /* to the nearest, ties to even */
}

static void *widen(const void *numbers, size_t count, int number) {
    float *wide = calloc(count + 1, sizeof *wide);
    for (size_t i = 0; i < count; i++)
        wide[i] = widened(((const uint16_t *)numbers)[i], number);
    return wide;
}

static void narrow(void *numbers, const float *wide, size_t count, int number) {
    for (size_t i = 0; i < count; i++)
        ((uint16_t *)numbers)[i] = narrowed(wide[i], number);
}

static bool is_narrow(int number) {
    return number == FLOAT16 || number == BFLOAT16;
}

/* ---- by type ---- */

static void reduce_one(void *total, const void *term, size_t count, int number, int reduction) {
    switch (number) {
    case INT8:
        reduce_int8_t(total, term, count, reduction);
        break;
    case UINT8:
        reduce_uint8_t(total, term, count, reduction);
        break;
    case INT32:
        reduce_int32_t(total, term, count, reduction);
        break;
    case UINT32:
        reduce_uint32_t(total, term, count, reduction);
        break;
    case INT64:
        reduce_int64_t(total, term, count, reduction);
        break;
    case UINT64:
        reduce_uint64_t(total, term, count, reduction);
        break;
    case FLOAT64:
        reduce_double(total, term, count, reduction);
        break;
    default:
        reduce_float(total, term, count, reduction);
    }
}

void scale(void *numbers, size_t count, int number, double factor) {
    if (is_narrow(number)) {
        float *wide = widen(numbers, count, number);
        scale_float(wide, count, factor);
        narrow(numbers, wide, count, number);
        free(wide);
        return;
    }
    switch (number) {
    case INT8:
        scale_int8_t(numbers, count, factor);
        break;
    case UINT8:
        scale_uint8_t(numbers, count, factor);
        break;
    case INT32:
        scale_int32_t(numbers, count, factor);
        break;
    case UINT32:
        scale_uint32_t(numbers, count, factor);
        break;
    case INT64:
        scale_int64_t(numbers, count, factor);
        break;
    case UINT64:
        scale_uint64_t(numbers, count, factor);
        break;
    case FLOAT64:
        scale_double(numbers, count, factor);
        break;
    default:
        scale_float(numbers, count, factor);
    }
}

static void reduce_wide(void *total, void *const *terms, int num_terms, size_t count, int number, int reduction) {
    memcpy(total, terms[0], count * bytes_of(number));
    for (int i = 1; i < num_terms; i++)
        reduce_one(total, terms[i], count, number, reduction);
    if (reduction == AVERAGE)
        scale(total, count, number, 1.0 / num_terms);
}

void reduce(void *total, void *const *terms, int num_terms, size_t count, int number, int reduction) {
    if (!is_narrow(number)) {
        reduce_wide(total, terms, num_terms, count, number, reduction);
        return;
    }
    void **wide = calloc((size_t)num_terms, sizeof *wide);
    float *sum = calloc(count + 1, sizeof *sum);
    for (int i = 0; i < num_terms; i++)
        wide[i] = widen(terms[i], count, number);
    reduce_wide(sum, wide, num_terms, count, FLOAT32, reduction);
    narrow(total, sum, count, number);
    for (int i = 0; i < num_terms; i++)
        free(wide[i]);
    free(wide);
    free(sum);
}
