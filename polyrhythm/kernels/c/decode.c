/* One decoding step of attention for every running completion, over the shared-prompt cache.

   Keys and values of one layer are [kv head][slot][HEAD_DIM]. A span is one request: its prompt is stored once, its
   completions have a strip of slots each. A task is a few rows of one span and one kv head. It rotates their new keys and
   queries, stores keys and values, and attends to the prompt and then to each row's own strip, with an online softmax.
   Lanes are queries in the first part, so that one read of a prompt key serves all of them, and head dimensions in the
   second. No row is computed from another one: its bits depend on neither its neighbours nor the number of threads.

   Compiled with HEAD_DIM, NUM_KV_HEADS, REPEATS (query heads per kv head) and the most of them that are ever asked for. */

#include "tiles.h"

#define ROWS_PER_TASK (QUERIES / REPEATS)
#define NUM_HEADS (NUM_KV_HEADS * REPEATS)
_Static_assert(REPEATS <= MAX_REPEATS && MAX_REPEATS <= QUERIES, "a task has at least one row on every machine");

/* Rows [first_row, last_row) of the batch; positions are slots of the cache. */
typedef struct {
    int64_t SPAN_FIELDS;
} Span;

/* `sines` has its first half negated. */
static inline void rotate(const float *from, const float *cosines, const float *sines, float scale, float *to) {
    for (int d = 0; d < HEAD_DIM; d++) {
        float partner = from[(d + HEAD_DIM / 2) % HEAD_DIM];
        to[d] = (from[d] * cosines[d] + partner * sines[d]) * scale;
    }
}

/* One query against the keys of its own completion, after the prompt; the result is normalised. */
static void attend_own(const float *query, const float *keys, const float *values, int64_t length, float maximum, float sum,
                       vec *output) {
    const int64_t stride = HEAD_DIM;
    union {
        float each[TILE];
        vec vectors[TILE / LANES];
    } weights;
    vec q[CHUNKS];
    for (int c = 0; c < CHUNKS; c++) q[c] = load(query + c * LANES);
    for (int64_t start = 0; start < length; start += TILE) {
        const int count = length - start < TILE ? (int)(length - start) : TILE;
        const float *tile_keys = keys + start * stride, *tile_values = values + start * stride;
        float larger_maximum = maximum;
        for (int k = 0; k < TILE; k++) {
            if (k >= count) {
                weights.each[k] = -1e30f;
                continue;
            }
            vec products = q[0] * load(tile_keys + k * stride);
            for (int c = 1; c < CHUNKS; c++) products += q[c] * load(tile_keys + k * stride + c * LANES);
            const float score = sum_of(products);
            weights.each[k] = score;
            larger_maximum = score > larger_maximum ? score : larger_maximum;
        }
        const float rescale = exp_of(all(maximum - larger_maximum))[0];
        maximum = larger_maximum;
        vec partial = all(0);
        for (int v = 0; v < TILE / LANES; v++) {
            weights.vectors[v] = exp_of(weights.vectors[v] - maximum);
            partial += weights.vectors[v];
        }
        sum = sum * rescale + sum_of(partial);
        for (int c = 0; c < CHUNKS; c++) output[c] *= rescale;
        for (int k = 0; k < count; k++)
            for (int c = 0; c < CHUNKS; c++) output[c] += weights.each[k] * load(tile_values + k * stride + c * LANES);
    }
    for (int c = 0; c < CHUNKS; c++) output[c] *= 1.0f / sum;
}

/* A few rows of one span and one kv head: store what is new, then attend. Row strides are in floats. */
INLINE void run_task(const Span *span, int64_t first, int64_t last, int head, const float *queries_and_keys, int64_t qk_stride,
                     const float *new_values, int64_t value_stride, const float *cosines, const float *sines, float *keys,
                     float *values, int64_t num_slots, float scale, float *out, const int width) {
    const int64_t stride = HEAD_DIM;
    float queries[QUERIES][HEAD_DIM] __attribute__((aligned(64))), outputs[QUERIES][HEAD_DIM] __attribute__((aligned(64)));
    Wide by_dimension[HEAD_DIM];
    IntegerWide everything;
    Softmax prompt;
    memset(queries, 0, sizeof(queries));
    for (int w = 0; w < width; w++) everything[w] = (ivec){0} + TILE;
    keys += head * num_slots * HEAD_DIM;
    values += head * num_slots * HEAD_DIM;
    for (int64_t row = first; row < last; row++) {
        const float *qk = queries_and_keys + row * qk_stride, *c = cosines + row * HEAD_DIM, *s = sines + row * HEAD_DIM;
        const int64_t slot =
            span->strips_start + (row - span->first_row) * span->strip_length + span->own_length - 1;
        rotate(qk + (NUM_HEADS + head) * HEAD_DIM, c, s, 1.0f, keys + slot * stride);
        memcpy(values + slot * stride, new_values + row * value_stride + head * HEAD_DIM, sizeof(float) * HEAD_DIM);
        for (int r = 0; r < REPEATS; r++)
            rotate(qk + (head * REPEATS + r) * HEAD_DIM, c, s, scale, queries[(row - first) * REPEATS + r]);
    }
    transpose(queries, by_dimension, width);
    start_softmax(&prompt);
    for (int64_t start = 0; start < span->prompt_length; start += TILE) {
        const int64_t left = span->prompt_length - start, slot = (span->prompt_start + start) * stride;
        attend_tile(by_dimension, keys + slot, stride, values + slot, stride, left < TILE ? (int)left : TILE, everything,
                    &prompt, width);
    }
    transpose_back(prompt.output, outputs, width);
    for (int64_t row = first; row < last; row++) {
        const int64_t own = (span->strips_start + (row - span->first_row) * span->strip_length) * stride;
        for (int r = 0; r < REPEATS; r++) {
            const int lane = (int)(row - first) * REPEATS + r;
            vec output[CHUNKS];
            for (int c = 0; c < CHUNKS; c++) output[c] = load(outputs[lane] + c * LANES);
            attend_own(queries[lane], keys + own, values + own, span->own_length,
                       ((const float *)prompt.maximum)[lane], ((const float *)prompt.sum)[lane], output);
            for (int c = 0; c < CHUNKS; c++)
                store(out + (row * NUM_HEADS + head * REPEATS + r) * HEAD_DIM + c * LANES, output[c]);
        }
    }
}

static inline int64_t blocks_of(const Span *span) {
    return (span->last_row - span->first_row + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
}

void decode_attention(const Span *spans, int64_t num_spans, const float *queries_and_keys, int64_t qk_stride,
                      const float *new_values, int64_t value_stride, const float *cosines, const float *sines, float *keys,
                      float *values, int64_t num_slots, float scale, int num_threads, float *out) {
    int64_t num_blocks = 0;
    for (int64_t i = 0; i < num_spans; i++) num_blocks += blocks_of(&spans[i]);
    (void)num_threads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads)
    for (int64_t task = 0; task < num_blocks * NUM_KV_HEADS; task++) {
        int64_t block = task / NUM_KV_HEADS, i = 0;
        for (; block >= blocks_of(&spans[i]); i++) block -= blocks_of(&spans[i]);
        const Span *span = &spans[i];
        const int64_t first = span->first_row + block * ROWS_PER_TASK;
        const int64_t last = first + ROWS_PER_TASK < span->last_row ? first + ROWS_PER_TASK : span->last_row;
#define RUN(width)                                                                                                    \
    run_task(span, first, last, (int)(task % NUM_KV_HEADS), queries_and_keys, qk_stride, new_values, value_stride, cosines, \
             sines, keys, values, num_slots, scale, out, width)
        WITH_WIDTH_FOR((last - first) * REPEATS, RUN);
    }
}
