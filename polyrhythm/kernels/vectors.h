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
static inline vec larger(vec a, vec b) { return choose(a > b, a, b); }

static inline float sum_of(vec v) {
    half_vec h = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                 __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    quarter_vec q = __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4, 5, 6, 7);
    return (q[0] + q[2]) + (q[1] + q[3]);
}

/* exp to about one unit in the last place, for values up to 80; below -86 as -86. */
static inline vec exp_of(vec x) {
    const float round_to_integer = 12582912.0f;
    x = larger(x, all(-86.0f));
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
    return (vec)((ivec)p + ((ivec)shifted << 23));
}

static inline vec sigmoid(vec x) {
    const vec e = exp_of(choose(x > 0, -x, x)); /* of -|x| */
    const vec s = 1.0f / (1.0f + e);
    return choose(x > 0, s, e * s);
}
