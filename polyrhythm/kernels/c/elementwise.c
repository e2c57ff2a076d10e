/* What stands between matrix products, in one pass over memory each, forward and backward: RMS norm, SwiGLU, softmax.

   Lengths of rows are multiples of LANES. A number's bits depend on neither its place nor the number of threads. Compiled with
   ROWS_PER_PART. */

#include "vectors.h"

void rms_norm(const float *inputs, const float *weight, float epsilon, int64_t num_rows, int64_t size, float *outputs,
              float *inverse, int num_threads) {
    (void)num_threads;
#pragma omp parallel for num_threads(num_threads)
    for (int64_t row = 0; row < num_rows; row++) {
        const float *x = inputs + row * size;
        vec squares = all(0);
        for (int64_t i = 0; i < size; i += LANES) squares += load(x + i) * load(x + i);
        const float scale = 1.0f / sqrtf(sum_of(squares) / (float)size + epsilon);
        inverse[row] = scale;
        for (int64_t i = 0; i < size; i += LANES) store(outputs + row * size + i, load(x + i) * scale * load(weight + i));
    }
}

/* The weight's gradient comes in parts, one for every ROWS_PER_PART rows: [parts][size]. */
void rms_norm_backward(const float *upstream, const float *inputs, const float *weight, const float *inverse, int64_t num_rows,
                       int64_t size, float *gradient, float *weight_gradients, int num_threads) {
    (void)num_threads;
#pragma omp parallel for num_threads(num_threads)
    for (int64_t part = 0; part < (num_rows + ROWS_PER_PART - 1) / ROWS_PER_PART; part++) {
        float *of_weight = weight_gradients + part * size;
        const int64_t first = part * ROWS_PER_PART, end = first + ROWS_PER_PART;
        memset(of_weight, 0, sizeof(float) * size);
        for (int64_t row = first; row < (end < num_rows ? end : num_rows); row++) {
            const float *x = inputs + row * size, *up = upstream + row * size;
            const float scale = inverse[row];
            vec products = all(0);
            for (int64_t i = 0; i < size; i += LANES) products += load(up + i) * load(weight + i) * load(x + i);
            const float shared = sum_of(products) * scale * scale / (float)size;
            for (int64_t i = 0; i < size; i += LANES) {
                const vec u = load(up + i), v = load(x + i);
                store(gradient + row * size + i, (u * load(weight + i) - v * shared) * scale);
                store(of_weight + i, load(of_weight + i) + u * v * scale);
            }
        }
    }
}

void swiglu(const float *gate, const float *up, int64_t count, float *outputs, int num_threads) {
    (void)num_threads;
#pragma omp parallel for num_threads(num_threads)
    for (int64_t i = 0; i < count / LANES; i++) {
        const vec g = load(gate + i * LANES);
        store(outputs + i * LANES, g * sigmoid(g) * load(up + i * LANES));
    }
}

void swiglu_backward(const float *upstream, const float *gate, const float *up, int64_t count, float *gate_gradient,
                     float *up_gradient, int num_threads) {
    (void)num_threads;
#pragma omp parallel for num_threads(num_threads)
    for (int64_t i = 0; i < count / LANES; i++) {
        const vec u = load(upstream + i * LANES), g = load(gate + i * LANES), s = sigmoid(g);
        store(up_gradient + i * LANES, u * g * s);
        store(gate_gradient + i * LANES, u * load(up + i * LANES) * s * (1.0f + g * (1.0f - s)));
    }
}

#define IN_A_SUM (32 * LANES)

/* Of every row: the largest logit; the sum of exponentials of the distances to it; the sum of those times the distances. */
void softmax_statistics(const float *logits, int64_t num_rows, int64_t size, float *largest, float *total, float *expected,
                        int num_threads) {
    (void)num_threads;
#pragma omp parallel for num_threads(num_threads)
    for (int64_t row = 0; row < num_rows; row++) {
        const float *x = logits + row * size;
        vec best = all(-3e38f); /* finite, so that a distance to it is a number or infinite */
        for (int64_t i = 0; i < size; i += LANES) best = larger(load(x + i), best);
        float top = best[0];
        for (int i = 1; i < LANES; i++) top = best[i] > top ? best[i] : top;
        vec sum = all(0), weighted = all(0);
        for (int64_t first = 0; first < size; first += IN_A_SUM) { /* sums of sums round less */
            vec part = all(0), weighted_part = all(0);
            const int64_t end = first + IN_A_SUM < size ? first + IN_A_SUM : size;
            for (int64_t i = first; i < end; i += LANES) {
                const vec distance = larger(all(-86.0f), load(x + i) - top), e = exp_of(distance);
                part += e;
                weighted_part += e * distance;
            }
            sum += part;
            weighted += weighted_part;
        }
        largest[row] = top;
        total[row] = sum_of(sum);
        expected[row] = sum_of(weighted);
    }
}

/* Logits become exponentials of their distances to what is largest in their row. */
void softmax_exponentials(float *logits, const float *largest, int64_t num_rows, int64_t size, int num_threads) {
    (void)num_threads;
#pragma omp parallel for num_threads(num_threads)
    for (int64_t row = 0; row < num_rows; row++) {
        float *x = logits + row * size;
        for (int64_t i = 0; i < size; i += LANES) store(x + i, exp_of(load(x + i) - largest[row]));
    }
}
