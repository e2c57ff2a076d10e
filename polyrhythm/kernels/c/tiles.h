/* Attention of up to QUERIES queries to a tile of keys, with an online softmax.

   Queries come as [HEAD_DIM][WIDTH] vectors, a lane for each: one read of a key then serves all of them. A lane is never
   computed from another one, and keys it does not see change none of its bits, so a query's result depends on its keys and
   their tiles alone. Functions take the `width` that is in use as a constant. */

#include "vectors.h"

#define TILE 64 /* keys per update of the running maximum */
#define CHUNKS (HEAD_DIM / LANES)
/* AT_ONCE rows, or DIMENSIONS_AT_ONCE, have their sums in registers, WIDTH vectors each. */
#if LANES == 16
#define WIDTH 2
#define AT_ONCE 4
#define DIMENSIONS_AT_ONCE 8
#elif LANES == 8
#define WIDTH 3
#define AT_ONCE 4
#define DIMENSIONS_AT_ONCE 4
#else
#define WIDTH 4
#define AT_ONCE 2
#define DIMENSIONS_AT_ONCE 2
#endif
#define QUERIES (WIDTH * LANES)
#define INLINE static inline __attribute__((always_inline))

/* What is done with the width that so many queries need. */
#define WITH_WIDTH_FOR(num_queries, DO)                     \
    do {                                                    \
        if (WIDTH > 2 && (num_queries) > 2 * LANES) {       \
            DO(WIDTH);                                      \
        } else if ((num_queries) > LANES) {                 \
            DO(2);                                          \
        } else {                                            \
            DO(1);                                          \
        }                                                   \
    } while (0)

typedef vec Wide[WIDTH];
typedef ivec IntegerWide[WIDTH];

typedef struct {
    Wide maximum, sum;
    Wide output[HEAD_DIM];
} Softmax;

/* [QUERIES][HEAD_DIM] to [HEAD_DIM][WIDTH] vectors of queries. */
INLINE void transpose(const float (*rows)[HEAD_DIM], Wide *by_dimension, const int width) {
    for (int w = 0; w < width; w++)
        for (int start = 0; start < HEAD_DIM; start += LANES) {
            vec square[LANES];
            for (int lane = 0; lane < LANES; lane++) square[lane] = load(rows[w * LANES + lane] + start);
            transpose_square(square);
            for (int i = 0; i < LANES; i++) by_dimension[start + i][w] = square[i];
        }
}

/* And back. */
INLINE void transpose_back(const Wide *by_dimension, float (*rows)[HEAD_DIM], const int width) {
    for (int w = 0; w < width; w++)
        for (int start = 0; start < HEAD_DIM; start += LANES) {
            vec square[LANES];
            for (int i = 0; i < LANES; i++) square[i] = by_dimension[start + i][w];
            transpose_square(square);
            for (int lane = 0; lane < LANES; lane++) store(rows[w * LANES + lane] + start, square[lane]);
        }
}

/* products[k] = row k times every lane, for the rows from `k` on whose sums fit in registers. */
INLINE void multiply_rows(const Wide *lanes, const float *rows, int64_t stride, Wide *products, const int num_rows,
                          const int width) {
    Wide sums[AT_ONCE];
    for (int j = 0; j < num_rows; j++)
        for (int w = 0; w < width; w++) sums[j][w] = all(0);
    for (int d = 0; d < HEAD_DIM; d++) {
        Wide lane;
        for (int w = 0; w < width; w++) {
            lane[w] = lanes[d][w];
            IN_REGISTER(lane[w]);
        }
        for (int j = 0; j < num_rows; j++)
            for (int w = 0; w < width; w++) sums[j][w] += lane[w] * rows[j * stride + d];
    }
    for (int j = 0; j < num_rows; j++)
        for (int w = 0; w < width; w++) products[j][w] = sums[j][w];
}

/* The same for `count` rows. */
INLINE void multiply(const Wide *lanes, const float *rows, int64_t stride, int count, Wide *products, const int width) {
    int k = 0;
    for (; k + AT_ONCE <= count; k += AT_ONCE)
        multiply_rows(lanes, rows + k * stride, stride, products + k, AT_ONCE, width);
    for (; k < count; k++) multiply_rows(lanes, rows + k * stride, stride, products + k, 1, width);
}

/* output[d] = output[d] * rescale + the weighted sum of `count` rows, in every lane. */
INLINE void accumulate(const Wide *weights, const float *rows, int64_t stride, int count, const vec *rescale, Wide *output,
                       const int width) {
    for (int d = 0; d < HEAD_DIM; d += DIMENSIONS_AT_ONCE) {
        Wide sums[DIMENSIONS_AT_ONCE];
        for (int j = 0; j < DIMENSIONS_AT_ONCE; j++)
            for (int w = 0; w < width; w++) sums[j][w] = output[d + j][w] * rescale[w];
        for (int k = 0; k < count; k++) {
            Wide weight;
            for (int w = 0; w < width; w++) {
                weight[w] = weights[k][w];
                IN_REGISTER(weight[w]);
            }
            for (int j = 0; j < DIMENSIONS_AT_ONCE; j++)
                for (int w = 0; w < width; w++) sums[j][w] += weight[w] * rows[k * stride + d + j];
        }
        for (int j = 0; j < DIMENSIONS_AT_ONCE; j++)
            for (int w = 0; w < width; w++) output[d + j][w] = sums[j][w];
    }
}

/* A tile of at most TILE keys; a lane sees the first visible[lane] of them. */
INLINE void attend_tile(const Wide *queries, const float *keys, int64_t key_stride, const float *values, int64_t value_stride,
                        int count, const ivec *visible, Softmax *state, const int width) {
    Wide weights[TILE], rescale;
    multiply(queries, keys, key_stride, count, weights, width);
    for (int w = 0; w < width; w++) {
        vec maximum = state->maximum[w];
        for (int k = 0; k < count; k++) {
            weights[k][w] = choose(visible[w] > k, weights[k][w], all(-1e30f));
            maximum = larger(maximum, weights[k][w]);
        }
        rescale[w] = exp_of(state->maximum[w] - maximum);
        vec sum = state->sum[w] * rescale[w];
        for (int k = 0; k < count; k++) {
            weights[k][w] = choose(visible[w] > k, exp_of(weights[k][w] - maximum), all(0));
            sum += weights[k][w];
        }
        state->maximum[w] = maximum;
        state->sum[w] = sum;
    }
    accumulate(weights, values, value_stride, count, rescale, state->output, width);
}

static inline void start_softmax(Softmax *state) {
    for (int w = 0; w < WIDTH; w++) {
        state->maximum[w] = all(-1e30f);
        state->sum[w] = all(0);
    }
    memset(state->output, 0, sizeof(state->output));
}
