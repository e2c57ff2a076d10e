/* Attention of a packed row, forward and backward: prompts once, completions over their prompt and themselves.

   A segment is a prompt or a completion: its tokens attend to the whole prompt before it, if it has one, and causally to
   their own segment. The QUERIES queries of a block are (token, repeat) pairs of one segment and one kv head. Keys are met in
   tiles counted from the start of the prompt and from the start of the segment, so a completion's bits are the same
   whether its prompt is shared or its own.

   Gradients of keys and values add up over the blocks of a task; tasks of one span of tokens write to different parts.
   Neither depends on the number of threads. Compiled with HEAD_DIM, REPEATS (query heads per kv head) and the fields of the
   structs below. */

#include "tiles.h"

/* Sums of so many keys and vectors of a head are kept in registers. */
#define KEYS_AT_ONCE 4
#define CHUNKS_AT_ONCE (LANES == 16 && CHUNKS < 8 ? CHUNKS : LANES == 16 && CHUNKS % 4 == 0 ? 4 : CHUNKS % 2 == 0 ? 2 : 1)
_Static_assert(TILE % KEYS_AT_ONCE == 0, "weights of a whole tile are read");

typedef struct {
    int64_t SEGMENT_FIELDS;
} Segment;

typedef struct {
    int64_t BLOCK_FIELDS; /* its first query is counted within the segment */
} Block;

typedef struct {
    int64_t TASK_FIELDS; /* blocks, the tokens whose gradients they add to, and where */
} Task;

typedef struct {
    float *data;
    int64_t STRIDES; /* in floats */
} Rows;

typedef struct {
    int num_lanes;
    int64_t last_token;
    IntegerWide token; /* of each lane, within the segment */
    float rows[QUERIES][HEAD_DIM] __attribute__((aligned(64)));
    Wide by_dimension[HEAD_DIM];
} Lanes;

static inline float *row_of(Rows rows, int64_t token, int64_t head) { return rows.data + token * rows.token + head * rows.head; }

/* The rows of a block's lanes, times `scale`; lanes without a query are zero and count as the last token. */
INLINE void gather(const Segment *segment, int64_t first, int head, Rows from, float scale, Lanes *lanes, const int width) {
    const int64_t left = segment->length * REPEATS - first;
    lanes->num_lanes = left < width * LANES ? (int)left : width * LANES;
    lanes->last_token = (first + lanes->num_lanes - 1) / REPEATS;
    for (int lane = 0; lane < width * LANES; lane++) {
        const int64_t query = first + (lane < lanes->num_lanes ? lane : lanes->num_lanes - 1);
        const float *row = row_of(from, segment->start + query / REPEATS, head * REPEATS + query % REPEATS);
        ((int32_t *)lanes->token)[lane] = (int32_t)(query / REPEATS);
        for (int d = 0; d < HEAD_DIM; d++) lanes->rows[lane][d] = lane < lanes->num_lanes ? row[d] * scale : 0.0f;
    }
    transpose(lanes->rows, lanes->by_dimension, width);
}

INLINE void scatter(const Segment *segment, int64_t first, int head, const Lanes *lanes, const Wide *by_dimension,
                    const vec *factor, Rows to, const int width) {
    float rows[QUERIES][HEAD_DIM] __attribute__((aligned(64)));
    transpose_back(by_dimension, rows, width);
    for (int lane = 0; lane < lanes->num_lanes; lane++) {
        const int64_t query = first + lane;
        float *row = row_of(to, segment->start + query / REPEATS, head * REPEATS + query % REPEATS);
        for (int d = 0; d < HEAD_DIM; d++) row[d] = rows[lane][d] * ((const float *)factor)[lane];
    }
}

/* The tiles that a block meets: first those of the prompt, then those of its own segment. */
typedef struct {
    int64_t token;
    int count;
    IntegerWide visible;
} Tile;

INLINE int next_tile(const Segment *segment, const Lanes *lanes, int64_t *position, Tile *tile, const int width) {
    const int64_t prompt = segment->prompt_length, own = lanes->last_token + 1;
    const int in_prompt = *position < prompt;
    const int64_t offset = in_prompt ? *position : *position - prompt;
    const int64_t left = in_prompt ? prompt - offset : own - offset;
    if (left <= 0) return 0;
    tile->token = (in_prompt ? segment->prompt_start : segment->start) + offset;
    tile->count = left < TILE ? (int)left : TILE;
    for (int w = 0; w < width; w++) tile->visible[w] = in_prompt ? (ivec){0} + TILE : lanes->token[w] + 1 - (int)offset;
    *position += tile->count;
    return 1;
}

INLINE void attend_block(const Segment *segment, int64_t first, int head, Rows queries, Rows keys, Rows values, float scale,
                         Rows out, float *logsumexp, const int width) {
    Lanes lanes;
    Softmax state;
    Tile tile;
    Wide inverse;
    int64_t position = 0;
    gather(segment, first, head, queries, scale, &lanes, width);
    start_softmax(&state);
    while (next_tile(segment, &lanes, &position, &tile, width))
        attend_tile(lanes.by_dimension, row_of(keys, tile.token, head), keys.token, row_of(values, tile.token, head),
                    values.token, tile.count, tile.visible, &state, width);
    for (int w = 0; w < width; w++) inverse[w] = 1.0f / state.sum[w];
    scatter(segment, first, head, &lanes, state.output, inverse, out, width);
    for (int lane = 0; lane < lanes.num_lanes; lane++)
        logsumexp[segment->start * REPEATS + first + lane] =
            ((const float *)state.maximum)[lane] + logf(((const float *)state.sum)[lane]);
}

/* rows[k] += the lanes' rows weighted by weights[k], for `count` rows of a tile. */
INLINE void add_weighted(const Wide *weights, const float (*lanes)[HEAD_DIM], int num_lanes, float *rows, int64_t stride,
                         int count) {
    for (int k = 0; k < count; k += KEYS_AT_ONCE) {
        const int num_rows = count - k < KEYS_AT_ONCE ? count - k : KEYS_AT_ONCE;
        for (int d = 0; d < HEAD_DIM; d += CHUNKS_AT_ONCE * LANES) {
            vec sums[KEYS_AT_ONCE][CHUNKS_AT_ONCE];
            for (int j = 0; j < KEYS_AT_ONCE; j++)
                for (int c = 0; c < CHUNKS_AT_ONCE; c++) sums[j][c] = all(0);
            for (int lane = 0; lane < num_lanes; lane++)
                for (int c = 0; c < CHUNKS_AT_ONCE; c++) {
                    vec row = load(lanes[lane] + d + c * LANES);
                    IN_REGISTER(row);
                    for (int j = 0; j < KEYS_AT_ONCE; j++) sums[j][c] += ((const float *)weights[k + j])[lane] * row;
                }
            for (int j = 0; j < num_rows; j++)
                for (int c = 0; c < CHUNKS_AT_ONCE; c++) {
                    float *row = rows + (k + j) * stride + d + c * LANES;
                    store(row, load(row) + sums[j][c]);
                }
        }
    }
}

INLINE void differentiate_block(const Segment *segment, int64_t first, int head, Rows queries, Rows keys, Rows values,
                                float scale, Rows out, const float *logsumexp, Rows grad_out, Rows grad_queries,
                                Rows grad_keys, Rows grad_values, const int width) {
    Lanes lanes, upstream;
    Wide sums, inner, one, factor, gradient[HEAD_DIM];
    Wide weights[TILE], slopes[TILE];
    Tile tile;
    int64_t position = 0;
    gather(segment, first, head, queries, scale, &lanes, width);
    gather(segment, first, head, grad_out, 1.0f, &upstream, width);
    for (int w = 0; w < width; w++) {
        sums[w] = inner[w] = all(0);
        one[w] = all(1);
        factor[w] = all(scale);
    }
    for (int lane = 0; lane < lanes.num_lanes; lane++) {
        const int64_t query = first + lane;
        const float *row = row_of(out, segment->start + query / REPEATS, head * REPEATS + query % REPEATS);
        vec products = all(0);
        for (int c = 0; c < CHUNKS; c++) products += load(row + c * LANES) * load(upstream.rows[lane] + c * LANES);
        ((float *)inner)[lane] = sum_of(products);
        ((float *)sums)[lane] = logsumexp[segment->start * REPEATS + query];
    }
    memset(gradient, 0, sizeof(gradient));
    while (next_tile(segment, &lanes, &position, &tile, width)) {
        const float *tile_keys = row_of(keys, tile.token, head), *tile_values = row_of(values, tile.token, head);
        multiply(lanes.by_dimension, tile_keys, keys.token, tile.count, weights, width);
        multiply(upstream.by_dimension, tile_values, values.token, tile.count, slopes, width);
        for (int k = 0; k < tile.count; k++)
            for (int w = 0; w < width; w++) {
                weights[k][w] = choose(tile.visible[w] > k, exp_of(weights[k][w] - sums[w]), all(0));
                slopes[k][w] = weights[k][w] * (slopes[k][w] - inner[w]);
            }
        accumulate(slopes, tile_keys, keys.token, tile.count, one, gradient, width);
        add_weighted(slopes, lanes.rows, lanes.num_lanes, row_of(grad_keys, tile.token, head), grad_keys.token, tile.count);
        add_weighted(weights, upstream.rows, lanes.num_lanes, row_of(grad_values, tile.token, head), grad_values.token,
                     tile.count);
    }
    scatter(segment, first, head, &lanes, gradient, factor, grad_queries, width);
}

int queries_per_block(void) { return QUERIES; }

/* logsumexp is [kv head][token][repeat]. */
void attention_forward(const Segment *segments, const Block *blocks, int64_t num_blocks, int num_kv_heads, int64_t num_tokens,
                       Rows queries, Rows keys, Rows values, float scale, Rows out, float *logsumexp, int num_threads) {
    (void)num_threads;
#pragma omp parallel for schedule(dynamic, 4) num_threads(num_threads)
    for (int64_t task = 0; task < num_blocks * num_kv_heads; task++) {
        const Block *block = &blocks[task % num_blocks];
        const int head = (int)(task / num_blocks);
        const Segment *segment = &segments[block->segment];
        float *sums = logsumexp + head * num_tokens * REPEATS;
#define ATTEND(width) attend_block(segment, block->first, head, queries, keys, values, scale, out, sums, width)
        WITH_WIDTH_FOR(segment->length * REPEATS - block->first, ATTEND);
    }
}

void attention_backward(const Segment *segments, const Block *blocks, const Task *tasks, int64_t num_tasks, int num_kv_heads,
                        int64_t num_tokens, Rows queries, Rows keys, Rows values, float scale, Rows out,
                        const float *logsumexp, Rows grad_out, Rows grad_queries, Rows grad_keys, Rows grad_values,
                        int num_threads) {
    (void)num_threads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads)
    for (int64_t number = 0; number < num_tasks * num_kv_heads; number++) {
        const Task *task = &tasks[number / num_kv_heads];
        const int head = (int)(number % num_kv_heads);
        Rows key_part = grad_keys, value_part = grad_values;
        key_part.data += task->part * key_part.part;
        value_part.data += task->part * value_part.part;
        for (int64_t token = task->start; token < task->stop; token++) {
            memset(row_of(key_part, token, head), 0, sizeof(float) * HEAD_DIM);
            memset(row_of(value_part, token, head), 0, sizeof(float) * HEAD_DIM);
        }
        const float *sums = logsumexp + head * num_tokens * REPEATS;
        for (int64_t i = task->first_block; i < task->last_block; i++) {
            const Segment *segment = &segments[blocks[i].segment];
#define DIFFERENTIATE(width)                                                                                            \
    differentiate_block(segment, blocks[i].first, head, queries, keys, values, scale, out, sums, grad_out, grad_queries, \
                        key_part, value_part, width)
            WITH_WIDTH_FOR(segment->length * REPEATS - blocks[i].first, DIFFERENTIATE);
        }
    }
}
