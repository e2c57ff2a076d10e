/* Vectors of LANES numbers in GCC's notation, which clang reads too: as many as one register of this machine holds.

   A longer vector would live in memory, and every operation would read and write it there.

   Every C file is compiled with macros that its Python file gives: numbers and the fields of structs that both know. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#define FIRST_LANES(...) __VA_ARGS__
#elif defined(__AVX__)
#define LANES 8
#define FIRST_LANES(a, b, c, d, e, f, g, h, ...) a, b, c, d, e, f, g, h
#else
#define LANES 4
#define FIRST_LANES(a, b, c, d, ...) a, b, c, d
#endif

_Static_assert(WIDEST_VECTOR % LANES == 0, "rows that suit the widest vector suit every machine's");

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef float unaligned_vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float four __attribute__((vector_size(16)));

/* What several sums need stays in a register: GCC would read it from memory for each of them. */
#if defined(__AVX512F__)
#define IN_REGISTER(value) __asm__("" : "+v"(value))
#elif defined(__SSE__)
#define IN_REGISTER(value) __asm__("" : "+x"(value))
#elif defined(__aarch64__)
#define IN_REGISTER(value) __asm__("" : "+w"(value))
#else
#define IN_REGISTER(value) (void)0
#endif

static inline vec load(const float *from) { return *(const unaligned_vec *)from; }
static inline void store(float *to, vec value) { *(unaligned_vec *)to = value; }
static inline vec all(float value) { return value - (vec){0}; }
static inline vec choose(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }
/* b if one of them is not a number. */
static inline vec larger(vec a, vec b) { return choose(a > b, a, b); }

static inline float sum_of(vec v) {
    four parts[LANES / 4], sum;
    memcpy(parts, &v, sizeof(v));
    sum = parts[0];
    for (int i = 1; i < LANES / 4; i++) sum += parts[i];
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
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
#define B(lane) (LANES + lane)

/* Rows become columns: lane j of vector i and lane i of vector j change places. */
static inline void transpose_square(vec *v) {
    SWAP(1, FIRST_LANES(0, B(0), 2, B(2), 4, B(4), 6, B(6), 8, B(8), 10, B(10), 12, B(12), 14, B(14)),
         FIRST_LANES(1, B(1), 3, B(3), 5, B(5), 7, B(7), 9, B(9), 11, B(11), 13, B(13), 15, B(15)))
    SWAP(2, FIRST_LANES(0, 1, B(0), B(1), 4, 5, B(4), B(5), 8, 9, B(8), B(9), 12, 13, B(12), B(13)),
         FIRST_LANES(2, 3, B(2), B(3), 6, 7, B(6), B(7), 10, 11, B(10), B(11), 14, 15, B(14), B(15)))
#if LANES >= 8
    SWAP(4, FIRST_LANES(0, 1, 2, 3, B(0), B(1), B(2), B(3), 8, 9, 10, 11, B(8), B(9), B(10), B(11)),
         FIRST_LANES(4, 5, 6, 7, B(4), B(5), B(6), B(7), 12, 13, 14, 15, B(12), B(13), B(14), B(15)))
#endif
#if LANES >= 16
    SWAP(8, FIRST_LANES(0, 1, 2, 3, 4, 5, 6, 7, B(0), B(1), B(2), B(3), B(4), B(5), B(6), B(7)),
         FIRST_LANES(8, 9, 10, 11, 12, 13, 14, 15, B(8), B(9), B(10), B(11), B(12), B(13), B(14), B(15)))
#endif
}
#undef SWAP
#undef B
