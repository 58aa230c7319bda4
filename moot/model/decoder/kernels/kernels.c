/* A decoder's layers for x86-64 CPUs: products, norms, rotation, attention, activation. What a vector is and can do is in
 * avx512.h and avx2.h, of which the compiler's flags choose one.
 *
 * Products and attention take and give bfloat16; the residual stream, logits and all sums are float32. No number of a row depends on which other rows are computed with it, nor on
 * the number of threads: every sum runs over a row's own elements in an order that follows from their own indices.
 * Addresses and strides are in bytes. The structures are filled in by library.py.
 */

#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#define MOST_DIM 256
#define AHEAD 4096 /* bytes of weights that are fetched before they are multiplied: products wait for memory alone */
#define AHEAD_SLOTS 64 /* likewise, slots before they are attended to */
#define LINE 64 /* bytes that memory gives at once */

typedef uint16_t bf16;

#ifdef __AVX512BF16__
#include "avx512.h"
#else
#include "avx2.h"
#endif

#define OUTPUTS (2 * LANES) /* outputs of a product whose weights lie together */
#define SLOTS LANES         /* slots whose scores are one vector */

typedef struct {
    int64_t base, layer, kv, head, slot;                     /* committed tokens */
    int64_t length;                                          /* how many */
    int64_t tree, tree_layer, tree_kv, tree_head, tree_node; /* a tree's pending tokens; tree 0: they lie in slots */
} Segment;

typedef struct {
    int64_t segment, position, node; /* node: index among the segment's pending tokens */
    int64_t path;                    /* a tree's: where the nodes from its root to the row begin in `paths` */
} Row;

typedef struct {
    int64_t segment, first, count; /* neighbouring rows of one segment whose scores are computed together */
} Block;

typedef struct {
    int64_t rows, blocks, threads;
    int64_t query_heads, kv_heads, dim;
    int64_t scratch_floats, most_queries; /* scratch of one thread; queries of a block at most */
    const Segment *segments;
    const Row *row;
    const Block *block;
    const int64_t *paths;
    const float *turns; /* [rows, dim]: cosine and sine of each pair */
    bf16 *queries;      /* [rows, query_heads, dim] */
    bf16 *mixed;        /* [rows, query_heads, dim] */
    float *scratch;
} Plan;

/* exp(x) for x <= 88: 2^n times a polynomial of the rest, relative error below 2e-7. */
static inline vec exponential(vec x) {
    x = larger(x, all(-104.0f));
    vec n = nearest(multiply(x, all(1.44269504f)));
    vec r = subtract_product(n, all(0.693145752f), x);
    r = subtract_product(n, all(1.42860677e-6f), r);
    vec sum = all(1.0f / 720);
    sum = multiply_add(sum, r, all(1.0f / 120));
    sum = multiply_add(sum, r, all(1.0f / 24));
    sum = multiply_add(sum, r, all(1.0f / 6));
    sum = multiply_add(sum, r, all(0.5f));
    sum = multiply_add(sum, r, all(1.0f));
    sum = multiply_add(sum, r, all(1.0f));
    return times_power_of_two(sum, n);
}

/* ---- Products, norm, activation: called by all threads of a team, which meet at the end ---- */

typedef struct {
    int64_t outputs, inputs;
    const pairs *weight; /* [outputs / OUTPUTS, inputs / 2, OUTPUTS] pairs of bfloat16, rows of zeros at the end */
    const float *bias;     /* [outputs], or NULL */
} Weight;

/* sum[row] = weights of OUTPUTS outputs times x[row], from the first pair of inputs to the last. Meanwhile as many pairs
 * are fetched from `soon` on. */
static inline __attribute__((always_inline)) void dot(const pairs *weight, const bf16 *x, int64_t inputs,
                                                      const pairs *soon, vec sum[][2], const int rows) {
    for (int row = 0; row < rows; row++) sum[row][0] = sum[row][1] = zero();
    for (int64_t pair = 0; pair < inputs / 2; pair++) {
        for (size_t byte = 0; byte < 2 * sizeof(pairs); byte += LINE)
            _mm_prefetch((const char *)(soon + 2 * pair) + byte, _MM_HINT_T0);
        factors low = load_factors(weight + 2 * pair), high = load_factors(weight + 2 * pair + 1);
        for (int row = 0; row < rows; row++) {
            factors both = same_factors(((const int32_t *)(x + row * inputs))[pair]);
            sum[row][0] = add_products(sum[row][0], low, both);
            sum[row][1] = add_products(sum[row][1], high, both);
        }
    }
}

/* x / (1 + exp(-x)) */
static inline vec silu(vec x) {
    return divide(x, add(all(1.0f), exponential(smaller(subtract(zero(), x), all(88.0f)))));
}

/* What a product gives. GATED: the first half of a block's outputs are gates of the second; silu(gate) * other is half
 * as many outputs, bfloat16. */
enum { HALF, GATED, SINGLE };

static inline __attribute__((always_inline)) void product_tile(const Weight *by, int64_t block, const bf16 *x,
                                                               const pairs *soon, void *out, int gives,
                                                               const int rows) {
    vec sum[MOST_ROWS][2];
    dot(by->weight + block * by->inputs, x, by->inputs, soon, sum, rows);
    const int64_t first = block * OUTPUTS, left = by->outputs - first;
    for (int row = 0; row < rows; row++) {
        vec a = sum[row][0], b = sum[row][1];
        if (by->bias) {
            a = add(a, load_lanes(lanes(0, left), by->bias + first));
            b = add(b, load_lanes(lanes(0, left - LANES), by->bias + first + LANES));
        }
        if (gives == GATED) {
            narrow((bf16 *)out + row * (by->outputs / 2) + first / 2, multiply(silu(a), b));
        } else if (gives == SINGLE) {
            float *to = (float *)out + row * by->outputs + first;
            store_first(to, a, left);
            store_first(to + LANES, b, left - LANES);
        } else {
            bf16 *to = (bf16 *)out + row * by->outputs + first;
            narrow_first(to, a, left);
            narrow_first(to + LANES, b, left - LANES);
        }
    }
}

static void product(const Weight *by, const bf16 *x, void *out, int64_t rows, int gives) {
    const int64_t blocks = (by->outputs + OUTPUTS - 1) / OUTPUTS;
    const int64_t row_bytes = gives == GATED ? by->outputs : by->outputs * (gives == SINGLE ? 4 : 2);
    const int64_t tiles = (rows + MOST_ROWS - 1) / MOST_ROWS, per_tile = (rows + tiles - 1) / tiles;
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; block++) {
        const pairs *weight = by->weight + block * by->inputs, *next = weight + by->inputs;
        for (int64_t row = 0; row < rows; row += per_tile) {
            const bf16 *from = x + row * by->inputs;
            char *to = (char *)out + row * row_bytes;
            /* The first tile waits for memory, further ones multiply: the second fetches the next block meanwhile. */
            const pairs *soon = row == 0 ? weight + AHEAD / sizeof(pairs) : row == per_tile ? next : weight;
            switch (rows - row < per_tile ? rows - row : per_tile) {
#define TILE(count) case count: product_tile(by, block, from, soon, to, gives, count); break;
                TILE(1) TILE(2) TILE(3) TILE(4)
#if MOST_ROWS > 4
                TILE(5) TILE(6) TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#endif
#undef TILE
            }
        }
    }
}

typedef struct {
    const float *scale; /* [width] */
    float epsilon;
} Norm;

/* hidden += delta, unless delta is NULL; out = hidden / sqrt(mean(hidden^2) + epsilon) * scale. */
static void norm(const Norm *by, float *all_hidden, const float *all_delta, bf16 *all_out, int64_t rows,
                 int64_t width) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        float *hidden = all_hidden + row * width;
        const float *delta = all_delta ? all_delta + row * width : 0;
        bf16 *out = all_out + row * width;
        vec squares = zero();
        for (int64_t i = 0; i < width; i += LANES) {
            vec x = load(hidden + i);
            if (delta) store(hidden + i, x = add(x, load(delta + i)));
            squares = multiply_add(x, x, squares);
        }
        float mean = sum_of(squares) / (float)width;
        vec factor = all(1.0f / sqrtf(mean + by->epsilon));
        for (int64_t i = 0; i < width; i += LANES)
            narrow(out + i, multiply(multiply(load(hidden + i), factor), load(by->scale + i)));
    }
}

/* ---- Attention ---- */

static inline const char *token(const Plan *plan, const Segment *of, const Row *row, int64_t layer, int64_t kv,
                                int64_t head, int64_t position) {
    if (!of->tree || position < of->length)
        return (const char *)(of->base + layer * of->layer + kv * of->kv + head * of->head + position * of->slot);
    int64_t node = plan->paths[row->path + position - of->length];
    return (const char *)(of->tree + layer * of->tree_layer + kv * of->tree_kv + head * of->tree_head +
                          node * of->tree_node);
}

/* One head of a row: normalised by `norm` where there is one, scaled, turned to its position. */
static inline void turn_head(const bf16 *from, const float *turns, const float *norm, float epsilon, float scale,
                             bf16 *to, int64_t dim) {
    vec factor = all(scale);
    if (norm) {
        vec squares = zero();
        for (int64_t i = 0; i < dim; i += LANES) squares = multiply_add(widen(from + i), widen(from + i), squares);
        factor = all(1.0f / sqrtf(sum_of(squares) / (float)dim + epsilon));
    }
    for (int64_t i = 0; i < dim; i += LANES) {
        vec x = multiply(widen(from + i), factor);
        if (norm) x = multiply(x, load(norm + i));
        narrow(to + i, turned(x, load(turns + i)));
    }
}

/* Keys of SLOTS tokens, pair of elements by pair of elements: `to` [dim / 2, SLOTS]. */
static inline void pack_keys(const char *const from[SLOTS], factors *to, int64_t dim) {
    for (int64_t pair = 0; pair < dim / 2; pair += LANES) transpose(from, 4 * pair, to + pair);
}

/* Scores of one query with SLOTS packed keys. */
static inline vec scores(const bf16 *query, const factors *keys, int64_t dim) {
    const int32_t *pair = (const int32_t *)query;
    vec a = zero(), b = a, c = a, d = a;
    for (int64_t i = 0; i < dim / 2; i += 4) {
        a = add_products(a, keys[i], same_factors(pair[i]));
        b = add_products(b, keys[i + 1], same_factors(pair[i + 1]));
        c = add_products(c, keys[i + 2], same_factors(pair[i + 2]));
        d = add_products(d, keys[i + 3], same_factors(pair[i + 3]));
    }
    return add(add(a, b), add(c, d));
}

/* Weights of the slots first..end, not normalised, bfloat16, from scores; both begin at the block of `first`.
 * Returns 1 / their sum. Blocks are whole: what lies outside first..end gets zero. */
static float weigh(const float *score, bf16 *weight, int64_t first, int64_t end) {
    int64_t start = first / SLOTS * SLOTS;
    vec most = all(-INFINITY), sum = zero();
    for (int64_t block = start; block < end; block += SLOTS)
        most = larger_in(lanes(first - block, end - block), most, load(score + block - start));
    vec highest = all(largest_of(most));
    for (int64_t block = start; block < end; block += SLOTS) {
        vec grown = exponential(subtract(load(score + block - start), highest));
        grown = only(lanes(first - block, end - block), grown);
        sum = add(sum, grown);
        narrow(weight + block - start, grown);
    }
    return 1.0f / sum_of(sum);
}

/* Weighted sums of values for `count` queries of one row over LANES * `halves` elements from `offset` (bytes) on. */
static inline __attribute__((always_inline)) void mix(const Plan *plan, const Segment *of, const Row *row,
                                                      int64_t layer, int64_t head, int64_t first, int64_t end,
                                                      const bf16 *weight, int64_t stride, const float *inverse,
                                                      int64_t offset, bf16 *out, const int count, const int halves) {
    vec sum[4 * MOST_HALVES];
    for (int i = 0; i < count * halves; i++) sum[i] = zero();
    int64_t start = first / SLOTS * SLOTS, whole = of->tree && of->length < end ? of->length / 2 * 2 : end / 2 * 2;
    const char *base = token(plan, of, row, layer, 1, head, 0) + offset;
    factors values[MOST_HALVES];
    for (int64_t slot = start; slot < end; slot += 2) {
        const char *one, *other;
        if (slot < whole) {
            one = base + slot * of->slot, other = one + of->slot;
            const char *soon = one + AHEAD_SLOTS * of->slot;
            for (int byte = 0; byte < 2 * LANES * halves; byte += LINE) {
                _mm_prefetch(soon + byte, _MM_HINT_T0);
                _mm_prefetch(soon + of->slot + byte, _MM_HINT_T0);
            }
        } else {
            one = token(plan, of, row, layer, 1, head, slot) + offset;
            other = slot + 1 < end ? token(plan, of, row, layer, 1, head, slot + 1) + offset : 0;
        }
        for (int i = 0; i < halves; i += 2)
            pair_values(one + 2 * LANES * i, other ? other + 2 * LANES * i : 0, values + i);
        for (int j = 0; j < count; j++) {
            int32_t pair;
            memcpy(&pair, weight + j * stride + slot - start, sizeof pair);
            factors both = same_factors(pair);
            for (int i = 0; i < halves; i++)
                sum[j * halves + i] = add_products(sum[j * halves + i], values[i], both);
        }
    }
    for (int j = 0; j < count; j++) {
        vec factor = all(inverse[j]);
        for (int i = 0; i < halves; i += 2)
            narrow_values(out + j * plan->dim + offset / 2 + LANES * i, multiply(sum[j * halves + i], factor),
                          multiply(sum[j * halves + i + 1], factor));
    }
}

static void mix_queries(const Plan *plan, const Segment *of, const Row *row, int64_t layer, int64_t head,
                        int64_t first, int64_t end, const bf16 *weight, int64_t stride, const float *inverse,
                        bf16 *out, int64_t count) {
#define MIX(queries, halves)                                                                                      \
    mix(plan, of, row, layer, head, first, end, weight + done * stride, stride, inverse + done, offset,           \
        out + done * plan->dim, queries, halves)
    for (int64_t offset = 0; offset < 2 * plan->dim;) {
        const int wide = MOST_HALVES == 4 && plan->dim - offset / 2 >= 4 * LANES;
        for (int64_t done = 0; done < count;) {
            int64_t left = count - done, taken = left >= 4 ? 4 : left;
            if (wide && taken == 4) MIX(4, MOST_HALVES);
            else if (wide && taken == 3) MIX(3, MOST_HALVES);
            else if (wide && taken == 2) MIX(2, MOST_HALVES);
            else if (wide) MIX(1, MOST_HALVES);
            else if (taken == 4) MIX(4, 2);
            else if (taken == 3) MIX(3, 2);
            else if (taken == 2) MIX(2, 2);
            else MIX(1, 2);
            done += taken;
        }
        offset += 2 * LANES * (wide ? MOST_HALVES : 2);
    }
#undef MIX
}

static void attend_block(const Plan *plan, const Block *block, int64_t layer, int64_t head, int64_t window,
                         float *scratch) {
    const Segment *of = plan->segments + block->segment;
    const Row *rows = plan->row + block->first;
    const int64_t group = plan->query_heads / plan->kv_heads, dim = plan->dim, count = block->count;
    int64_t first[count], end[count], lowest = INT64_MAX, highest = 0;
    for (int64_t i = 0; i < count; i++) {
        end[i] = rows[i].position + 1;
        first[i] = window > 0 && end[i] > window ? end[i] - window : 0;
        if (first[i] < lowest) lowest = first[i];
        if (end[i] > highest) highest = end[i];
    }
    const int64_t start = lowest / SLOTS * SLOTS, stride = (highest - start + SLOTS - 1) / SLOTS * SLOTS;
    float *score = scratch;
    bf16 *weight = (bf16 *)(scratch + plan->most_queries * stride);
    factors packed[MOST_DIM / 2];
    const char *keys[SLOTS];
    const bf16 *queries = plan->queries + (block->first * plan->query_heads + head * group) * dim;
    const int64_t next = plan->query_heads * dim;
    /* What all rows have in common, then of a tree what each row has alone. */
    const int64_t common = of->tree ? of->length / SLOTS * SLOTS : highest;
    for (int64_t slot = start; slot < common; slot += SLOTS) {
        const char *base = token(plan, of, rows, layer, 0, head, 0);
        for (int i = 0; i < SLOTS; i++) {
            keys[i] = base + (slot + i) * of->slot;
            for (int64_t line = 0; line < 2 * dim; line += LINE)
                _mm_prefetch(keys[i] + AHEAD_SLOTS * of->slot + line, _MM_HINT_T0);
        }
        pack_keys(keys, packed, dim);
        for (int64_t row = 0; row < count; row++)
            for (int64_t j = 0; j < group; j++)
                store(score + (row * group + j) * stride + slot - start,
                      scores(queries + row * next + j * dim, packed, dim));
    }
    for (int64_t row = 0; row < count; row++) {
        int64_t slot = first[row] / SLOTS * SLOTS > common ? first[row] / SLOTS * SLOTS : common;
        for (; slot < end[row]; slot += SLOTS) {
            for (int i = 0; i < SLOTS; i++) {
                int64_t position = slot + i < end[row] ? slot + i : end[row] - 1;
                keys[i] = token(plan, of, rows + row, layer, 0, head, position);
            }
            pack_keys(keys, packed, dim);
            for (int64_t j = 0; j < group; j++)
                store(score + (row * group + j) * stride + slot - start,
                      scores(queries + row * next + j * dim, packed, dim));
        }
        float inverse[group];
        int64_t skipped = first[row] / SLOTS * SLOTS - start;
        for (int64_t j = 0; j < group; j++) {
            int64_t at = (row * group + j) * stride + skipped;
            inverse[j] = weigh(score + at, weight + at, first[row], end[row]);
        }
        mix_queries(plan, of, rows + row, layer, head, first[row], end[row], weight + row * group * stride + skipped,
                    stride, inverse, plan->mixed + (block->first + row) * next + head * group * dim, group);
    }
}

/* Scales of a normalisation of each head [query_heads + kv_heads, dim], or NULL; factor of the queries; slots that a
 * row sees, its own included, or 0 for all. */
typedef struct {
    const float *head_scale;
    float head_epsilon, query_scale;
    int64_t window;
} Attention;

/* Turn the rows' queries and keys, store keys and values where their tokens lie, attend: into plan->mixed.
 *
 * projected [rows, (query_heads + 2 kv_heads) dim]. */
static void attend(const Plan *plan, const Attention *how, int64_t layer, const bf16 *projected) {
    const int64_t dim = plan->dim, turned = plan->query_heads + plan->kv_heads;
    const int64_t tasks = plan->blocks * plan->kv_heads;
    const float *scale = how->head_scale;
#pragma omp for schedule(static)
    for (int64_t index = 0; index < plan->rows; index++) {
        const Row *row = plan->row + index;
        const Segment *of = plan->segments + row->segment;
        const bf16 *from = projected + index * (turned + plan->kv_heads) * dim;
        const float *turns = plan->turns + index * dim;
        for (int64_t head = 0; head < plan->query_heads; head++)
            turn_head(from + head * dim, turns, scale ? scale + head * dim : 0, how->head_epsilon, how->query_scale,
                      plan->queries + (index * plan->query_heads + head) * dim, dim);
        for (int64_t head = 0; head < plan->kv_heads; head++) {
            int64_t place = plan->query_heads + head;
            bf16 *key = (bf16 *)token(plan, of, row, layer, 0, head, row->position);
            bf16 *value = (bf16 *)token(plan, of, row, layer, 1, head, row->position);
            turn_head(from + place * dim, turns, scale ? scale + place * dim : 0, how->head_epsilon, 1.0f, key, dim);
            memcpy(value, from + (turned + head) * dim, (size_t)dim * sizeof(bf16));
        }
    }
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks; task++)
        attend_block(plan, plan->block + task / plan->kv_heads, layer, task % plan->kv_heads, how->window,
                     plan->scratch + omp_get_thread_num() * plan->scratch_floats);
}

/* ---- What is called from Python ---- */

typedef struct {
    Norm before_attention, before_mlp;
    Weight queries_keys_values, attended, gate_up, down;
    Attention attention;
} Layer;

/* Of a step. */
typedef struct {
    int64_t rows, width;
    float *hidden, *delta; /* [rows, width] */
    bf16 *normed, *projected, *active;
} Rows;

/* hidden is the residual stream before layer number `index`, and after it; `normed` what the layer's first norm makes
 * of it, and afterwards what `next` does: the following layer's first norm, or the last one. */
void moot_layer(const Plan *plan, const Layer *layer, int64_t index, const Norm *next, const Rows *of) {
#pragma omp parallel num_threads(plan->threads)
    {
        product(&layer->queries_keys_values, of->normed, of->projected, of->rows, HALF);
        attend(plan, &layer->attention, index, of->projected);
        product(&layer->attended, plan->mixed, of->delta, of->rows, SINGLE);
        norm(&layer->before_mlp, of->hidden, of->delta, of->normed, of->rows, of->width);
        product(&layer->gate_up, of->normed, of->active, of->rows, GATED);
        product(&layer->down, of->active, of->delta, of->rows, SINGLE);
        norm(next, of->hidden, of->delta, of->normed, of->rows, of->width);
    }
}

void moot_norm(const Norm *by, float *hidden, const float *delta, bf16 *out, int64_t rows, int64_t width,
               int threads) {
#pragma omp parallel num_threads(threads) if (rows > 16)
    norm(by, hidden, delta, out, rows, width);
}

void moot_product(const Weight *by, const bf16 *x, void *out, int64_t rows, int gives, int threads) {
#pragma omp parallel num_threads(threads)
    product(by, x, out, rows, gives);
}

void moot_attend(const Plan *plan, const Attention *how, int64_t layer, const bf16 *projected) {
#pragma omp parallel num_threads(plan->threads)
    attend(plan, how, layer, projected);
}

/* Outputs of a product whose weights lie together. */
int moot_outputs(void) { return OUTPUTS; }
