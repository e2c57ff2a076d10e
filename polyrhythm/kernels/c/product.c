/* x W^T for few rows x and weights that are read once from memory, followed by one more operation in the same pass.

   Weights are packed as [block of COLUMNS outputs][input][COLUMNS], so that memory is read in one stream. While the rows
   meet one block, the next one is fetched into the cache. Every number is one chain of multiplications and additions in the
   order of the inputs: its bits depend on neither the other rows nor the number of threads. Compiled with the numbers of the
   operations PLAIN, SILU, TIMES and PLUS. */

#include "vectors.h"

#define COLUMNS (2 * LANES)
/* MANY or FEW rows are taken at a time: as many as have their sums in registers. */
#if LANES == 16
#define MANY 12
#define FEW 8
#else
#define MANY 6
#define FEW 4
#endif
#define LINE 16 /* numbers in a cache line */
#define ROWS 240 /* rows that meet a block before the next one */
#define INPUTS 192 /* of a block at a time: they stay in the nearest cache while the rows pass */

int columns_per_block(void) { return COLUMNS; }
int most_rows_at_once(void) { return MANY; }

/* Past the caches, where that can be said: what is packed is read much later. `to` is aligned to a vector. */
static inline void store_for_later(float *to, vec value) {
#if LANES == 16 && !defined(__clang__)
    __builtin_ia32_movntps512(to, value);
#elif LANES == 8 && !defined(__clang__)
    __builtin_ia32_movntps256(to, value);
#else
    store(to, value);
#endif
}

static inline void finish_stores(void) {
#if LANES >= 8 && !defined(__clang__)
    __builtin_ia32_sfence();
#endif
}

/* LANES rows and columns of the weights, or as many as there are; what is missing is zero. */
static void pack_square(const float *from, int64_t num_inputs, int64_t rows_left, int64_t columns_left, float *to) {
    vec square[LANES];
    for (int row = 0; row < LANES; row++) {
        square[row] = all(0);
        if (row < rows_left && columns_left >= LANES)
            square[row] = load(from + row * num_inputs);
        else if (row < rows_left)
            memcpy(&square[row], from + row * num_inputs, sizeof(float) * columns_left);
    }
    transpose_square(square);
    for (int i = 0; i < LANES && i < columns_left; i++) store_for_later(to + i * COLUMNS, square[i]);
}

/* [num_outputs][num_inputs] to the packed order, at an address that is a multiple of 64; columns beyond num_outputs are zero. */
void pack(const float *weights, int64_t num_outputs, int64_t num_inputs, float *packed, int num_threads) {
    (void)num_threads;
#pragma omp parallel for num_threads(num_threads)
    for (int64_t block = 0; block < (num_outputs + COLUMNS - 1) / COLUMNS; block++) {
        float *to = packed + block * COLUMNS * num_inputs;
        const int64_t rows_left = num_outputs - block * COLUMNS;
        for (int64_t start = 0; start < num_inputs; start += LANES)
            for (int first = 0; first < COLUMNS; first += LANES)
                pack_square(weights + (block * COLUMNS + first) * num_inputs + start, num_inputs, rows_left - first,
                            num_inputs - start, to + start * COLUMNS + first);
        finish_stores();
    }
}

typedef struct {
    const float *packed, *bias, *other; /* `other` has the shape of the output */
    int64_t num_inputs, num_outputs;
    int operation;
    float *out;
} Product;

static inline vec finish(const Product *product, vec value, int64_t place, int64_t column) {
    if (product->bias) value += load(product->bias + column);
    switch (product->operation) {
        case SILU: return value * sigmoid(value);
        case TIMES: return value * load(product->other + place);
        case PLUS: return value + load(product->other + place);
        default: return value; /* PLAIN */
    }
}

/* The last block may have fewer columns than vectors have lanes. */
static void finish_partly(const Product *product, vec value, int64_t place, int64_t column, int64_t count) {
    float bias[LANES] = {0}, other[LANES] = {0}, result[LANES];
    for (int64_t i = 0; i < count; i++) {
        if (product->bias) bias[i] = product->bias[column + i];
        if (product->other) other[i] = product->other[place + i];
    }
    const Product padded = {.bias = product->bias ? bias : 0, .other = other, .operation = product->operation};
    store(result, finish(&padded, value, 0, 0));
    memcpy(product->out + place, result, sizeof(float) * count);
}

/* `rows` rows, given as [input][rows], against some inputs of a block; the sums so far are kept in `sums`. Meanwhile `lines`
   of what comes next are asked for. */
static inline __attribute__((always_inline)) void multiply(const float *weights, int64_t num_inputs, const float *inputs,
                                                           int is_first, vec *kept, const float *next, int64_t lines,
                                                           const int rows) {
    vec sums[MANY][2];
    for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++) sums[r][half] = is_first ? all(0) : kept[2 * r + half];
    for (int64_t i = 0; i < num_inputs; i++) {
        vec left = load(weights + i * COLUMNS), right = load(weights + i * COLUMNS + LANES);
        IN_REGISTER(left);
        IN_REGISTER(right);
        if (i < lines) __builtin_prefetch(next + i * LINE, 0, 2);
        for (int r = 0; r < rows; r++) {
            sums[r][0] += left * inputs[i * rows + r];
            sums[r][1] += right * inputs[i * rows + r];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++) kept[2 * r + half] = sums[r][half];
}

/* How many of the rows that are left to take at once. */
static inline int rows_at_once(int64_t left) { return left > 2 * FEW || (left > FEW && left <= MANY) ? MANY : FEW; }

/* Rows `stride` apart to a panel of [input][count]; rows beyond the last are zero. */
static void pack_rows(const float *rows, int64_t num_rows, int64_t num_inputs, int64_t stride, int count, float *panel) {
    for (int r = 0; r < count; r++)
        for (int64_t i = 0; i < num_inputs; i++) panel[i * count + r] = r < num_rows ? rows[r * stride + i] : 0.0f;
}

/* Some rows, in panels, against one block of outputs. */
static void multiply_block(const Product *product, int64_t block, const float *panels, int64_t first_row, int64_t num_rows,
                           const float *end) {
    vec sums[(ROWS + MANY) * 2];
    const int64_t num_inputs = product->num_inputs;
    const float *weights = product->packed + block * COLUMNS * num_inputs;
    for (int64_t start = 0; start < num_inputs; start += INPUTS) {
        const int64_t count = num_inputs - start < INPUTS ? num_inputs - start : INPUTS;
        const float *now = weights + start * COLUMNS, *next = now + count * COLUMNS;
        const float *stop = end - next < count * COLUMNS ? end : next + count * COLUMNS; /* of what is asked for */
        for (int64_t row = 0; row < num_rows;) {
            const int rows = rows_at_once(num_rows - row);
            const float *panel = panels + row * num_inputs + start * rows;
            int64_t lines = (stop - next) / LINE;
            lines = lines < count ? lines : count;
            if (rows == MANY)
                multiply(now, count, panel, start == 0, sums + 2 * row, next, lines, MANY);
            else
                multiply(now, count, panel, start == 0, sums + 2 * row, next, lines, FEW);
            next += lines * LINE;
            row += rows;
        }
    }
    for (int64_t row = 0; row < num_rows; row++)
        for (int half = 0; half < 2; half++) {
            const int64_t column = block * COLUMNS + half * LANES, left_over = product->num_outputs - column;
            const int64_t place = (first_row + row) * product->num_outputs + column;
            if (left_over >= LANES)
                store(product->out + place, finish(product, sums[2 * row + half], place, column));
            else if (left_over > 0)
                finish_partly(product, sums[2 * row + half], place, column, left_over);
        }
}

/* `panels` has room for num_rows + most_rows_at_once() rows. */
void product(const float *rows, int64_t num_rows, int64_t stride, const float *packed, const float *bias, const float *other,
             int64_t num_inputs, int64_t num_outputs, int operation, float *panels, float *out, int num_threads) {
    const Product work = {packed, bias, other, num_inputs, num_outputs, operation, out};
    const int64_t num_blocks = (num_outputs + COLUMNS - 1) / COLUMNS;
    const float *end = packed + num_blocks * COLUMNS * num_inputs;
    (void)num_threads;
#pragma omp parallel num_threads(num_threads)
    for (int64_t first = 0; first < num_rows; first += ROWS) {
        const int64_t count = num_rows - first < ROWS ? num_rows - first : ROWS;
#pragma omp for schedule(dynamic, 1)
        for (int64_t panel = 0; panel < (count + FEW - 1) / FEW; panel++) {
            int64_t row = 0, number = 0;
            for (; number < panel && row < count; number++) row += rows_at_once(count - row);
            if (row < count)
                pack_rows(rows + (first + row) * stride, count - row, num_inputs, stride, rows_at_once(count - row),
                          panels + row * num_inputs);
        }
#pragma omp for schedule(static)
        for (int64_t block = 0; block < num_blocks; block++) multiply_block(&work, block, panels, first, count, end);
    }
}
