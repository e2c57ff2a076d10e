/* Vectors of LANES numbers in GCC's notation, which clang reads too. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef float unaligned_vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float half_vec __attribute__((vector_size(2 * LANES)));
typedef float quarter_vec __attribute__((vector_size(LANES)));

static inline vec load(const float *from) { return *(const unaligned_vec *)from; }
static inline void store(float *to, vec value) { *(unaligned_vec *)to = value; }
static inline vec all(float value) { return value - (vec){0}; }
static inline vec choose(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }
/* b if one of them is not a number. */
static inline vec larger(vec a, vec b) { return choose(a > b, a, b); }

static inline float sum_of(vec v) {
    half_vec h = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                 __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    quarter_vec q = __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4, 5, 6, 7);
    return (q[0] + q[2]) + (q[1] + q[3]);
}

/* exp to about one unit in the last place, for values up to 80; below -86 as -86; not a number stays so. */
static inline vec exp_of(vec x) {
    const float round_to_integer = 12582912.0f;
    const vec given = x;
    x = larger(all(-86.0f), x);
    vec shifted = x * 1.44269504f + round_to_integer;
    vec whole = shifted - round_to_integer;
    vec r = x - whole * 0.693359375f;
    r = r + whole * 2.12194440e-4f;
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return choose(given == given, (vec)((ivec)p + ((ivec)shifted << 23)), given);
}

static inline vec sigmoid(vec x) {
    const vec e = exp_of(choose(x > 0, -x, x)); /* of -|x| */
    const vec s = 1.0f / (1.0f + e);
    return choose(x > 0, s, e * s);
}

#define SWAP(distance, keep, take)                                       \
    for (int i = 0; i < LANES; i++)                                      \
        if (!(i & distance)) {                                           \
            const vec a = v[i], b = v[i + distance];                     \
            v[i] = __builtin_shufflevector(a, b, keep);                  \
            v[i + distance] = __builtin_shufflevector(a, b, take);       \
        }
#define LIST(...) __VA_ARGS__

/* Rows become columns: lane j of vector i and lane i of vector j change places. */
static inline void transpose_square(vec *v) {
    SWAP(1, LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
         LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
    SWAP(2, LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
         LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
    SWAP(4, LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
         LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
    SWAP(8, LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
         LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
}
