/* A decoder's layers for x86-64 CPUs with AVX512-BF16: products, norms, rotation, attention, activation.
 *
 * Products and attention take and give bfloat16; the residual stream, logits and all sums are float32. No number of a row depends on which other rows are computed with it, nor on
 * the number of threads: every sum runs over a row's own elements in an order that follows from their own indices.
 * Addresses and strides are in bytes. The structures are filled in by plan.py.
 */

#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#define SLOTS 16 /* slots whose scores are one vector */
#define MOST_DIM 256
#define OUTPUTS 32   /* outputs of a product whose weights lie together */
#define MOST_ROWS 12 /* rows for which a block of weights is read once */
#define AHEAD 32     /* pairs that are fetched before they are multiplied, so that products wait for memory alone */
#define AHEAD_SLOTS 64 /* likewise, slots before they are attended to */

typedef uint16_t bf16;

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

static inline __m512 widen(const bf16 *from) {
    __m256i half = _mm256_loadu_si256((const __m256i *)from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

static inline void narrow(bf16 *to, __m512 x) {
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(x));
}

/* exp(x) for x <= 88: 2^n times a polynomial of the rest, relative error below 2e-7. */
static inline __m512 exponential(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-104.0f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
    __m512 sum = _mm512_set1_ps(1.0f / 720);
    sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(1.0f / 120));
    sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(1.0f / 24));
    sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(1.0f / 6));
    sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(0.5f));
    sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(1.0f));
    sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(sum, n);
}

/* ---- Products, norm, activation: called by all threads of a team, which meet at the end ---- */

typedef struct {
    int64_t outputs, inputs;
    const __m512i *weight; /* [outputs / OUTPUTS, inputs / 2, OUTPUTS] pairs of bfloat16, rows of zeros at the end */
    const float *bias;     /* [outputs], or NULL */
} Weight;

/* sum[row] = weights of OUTPUTS outputs times x[row], from the first pair of inputs to the last. Meanwhile as many pairs
 * are fetched from `soon` on. */
static inline __attribute__((always_inline)) void dot(const __m512i *weight, const bf16 *x, int64_t inputs,
                                                      const __m512i *soon, __m512 sum[][2], const int rows) {
    for (int row = 0; row < rows; row++) sum[row][0] = sum[row][1] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < inputs / 2; pair++) {
        for (int half = 0; half < 2; half++) _mm_prefetch((const char *)(soon + 2 * pair + half), _MM_HINT_T0);
        __m512bh low = (__m512bh)_mm512_load_si512(weight + 2 * pair);
        __m512bh high = (__m512bh)_mm512_load_si512(weight + 2 * pair + 1);
        for (int row = 0; row < rows; row++) {
            __m512bh both = (__m512bh)_mm512_set1_epi32(((const int32_t *)(x + row * inputs))[pair]);
            sum[row][0] = _mm512_dpbf16_ps(sum[row][0], low, both);
            sum[row][1] = _mm512_dpbf16_ps(sum[row][1], high, both);
        }
    }
}

/* x / (1 + exp(-x)) */
static inline __m512 silu(__m512 x) {
    __m512 grown = exponential(_mm512_min_ps(_mm512_sub_ps(_mm512_setzero_ps(), x), _mm512_set1_ps(88.0f)));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), grown));
}

/* What a product gives. GATED: the first half of a block's outputs are gates of the second; silu(gate) * other is half
 * as many outputs, bfloat16. */
enum { HALF, GATED, SINGLE };

static inline __attribute__((always_inline)) void product_tile(const Weight *by, int64_t block, const bf16 *x,
                                                               const __m512i *soon, void *out, int gives,
                                                               const int rows) {
    __m512 sum[MOST_ROWS][2];
    dot(by->weight + block * by->inputs, x, by->inputs, soon, sum, rows);
    const int64_t first = block * OUTPUTS, left = by->outputs - first;
    const __mmask16 low = left >= 16 ? 0xFFFF : (__mmask16)((1 << left) - 1);
    const __mmask16 high = left >= 32 ? 0xFFFF : left > 16 ? (__mmask16)((1 << (left - 16)) - 1) : 0;
    for (int row = 0; row < rows; row++) {
        __m512 a = sum[row][0], b = sum[row][1];
        if (by->bias) {
            a = _mm512_add_ps(a, _mm512_maskz_loadu_ps(low, by->bias + first));
            b = _mm512_add_ps(b, _mm512_maskz_loadu_ps(high, by->bias + first + 16));
        }
        if (gives == GATED) {
            narrow((bf16 *)out + row * (by->outputs / 2) + first / 2, _mm512_mul_ps(silu(a), b));
        } else if (gives == SINGLE) {
            float *to = (float *)out + row * by->outputs + first;
            _mm512_mask_storeu_ps(to, low, a);
            _mm512_mask_storeu_ps(to + 16, high, b);
        } else {
            bf16 *to = (bf16 *)out + row * by->outputs + first;
            _mm256_mask_storeu_epi16(to, low, (__m256i)_mm512_cvtneps_pbh(a));
            _mm256_mask_storeu_epi16(to + 16, high, (__m256i)_mm512_cvtneps_pbh(b));
        }
    }
}

static void product(const Weight *by, const bf16 *x, void *out, int64_t rows, int gives) {
    const int64_t blocks = (by->outputs + OUTPUTS - 1) / OUTPUTS;
    const int64_t row_bytes = gives == GATED ? by->outputs : by->outputs * (gives == SINGLE ? 4 : 2);
    const int64_t tiles = (rows + MOST_ROWS - 1) / MOST_ROWS, per_tile = (rows + tiles - 1) / tiles;
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; block++) {
        const __m512i *weight = by->weight + block * by->inputs, *next = weight + by->inputs;
        for (int64_t row = 0; row < rows; row += per_tile) {
            const bf16 *from = x + row * by->inputs;
            char *to = (char *)out + row * row_bytes;
            /* The first tile waits for memory, further ones multiply: the second fetches the next block meanwhile. */
            const __m512i *soon = row == 0 ? weight + 2 * AHEAD : row == per_tile ? next : weight;
            switch (rows - row < per_tile ? rows - row : per_tile) {
#define TILE(count) case count: product_tile(by, block, from, soon, to, gives, count); break;
                TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
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
        __m512 squares = _mm512_setzero_ps();
        for (int64_t i = 0; i < width; i += 16) {
            __m512 x = _mm512_loadu_ps(hidden + i);
            if (delta) _mm512_storeu_ps(hidden + i, x = _mm512_add_ps(x, _mm512_loadu_ps(delta + i)));
            squares = _mm512_fmadd_ps(x, x, squares);
        }
        float mean = _mm512_reduce_add_ps(squares) / (float)width;
        __m512 factor = _mm512_set1_ps(1.0f / sqrtf(mean + by->epsilon));
        for (int64_t i = 0; i < width; i += 16)
            narrow(out + i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(hidden + i), factor),
                                          _mm512_loadu_ps(by->scale + i)));
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
    __m512 factor = _mm512_set1_ps(scale);
    if (norm) {
        __m512 squares = _mm512_setzero_ps();
        for (int64_t i = 0; i < dim; i += 16) squares = _mm512_fmadd_ps(widen(from + i), widen(from + i), squares);
        factor = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)dim + epsilon));
    }
    for (int64_t i = 0; i < dim; i += 16) {
        __m512 x = _mm512_mul_ps(widen(from + i), factor), turn = _mm512_loadu_ps(turns + i);
        if (norm) x = _mm512_mul_ps(x, _mm512_loadu_ps(norm + i));
        __m512 crossed = _mm512_mul_ps(_mm512_permute_ps(x, 0xB1), _mm512_movehdup_ps(turn));
        narrow(to + i, _mm512_fmaddsub_ps(x, _mm512_moveldup_ps(turn), crossed));
    }
}

/* Keys of 16 tokens, pair of elements by pair of elements: `to` [dim / 2, 16] of two bfloat16 each. */
static inline void pack_keys(const char *const from[SLOTS], __m512i *to, int64_t dim) {
    for (int64_t part = 0; part < dim / 32; part++) {
        __m512i a[16], b[16];
        for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from[i] + 64 * part);
        for (int i = 0; i < 16; i += 2) {
            b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
            b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
        }
        for (int i = 0; i < 16; i += 4) {
            a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
            a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
            a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
            a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
        }
        for (int i = 0; i < 4; i++) {
            b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
            b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xDD);
            b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
            b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xDD);
        }
        __m512i *out = to + 16 * part;
        for (int i = 0; i < 4; i++) {
            out[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
            out[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xDD);
            out[i + 4] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88);
            out[i + 12] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xDD);
        }
    }
}

/* Scores of one query with 16 packed keys. */
static inline __m512 scores(const bf16 *query, const __m512i *keys, int64_t dim) {
    const int32_t *pairs = (const int32_t *)query;
    __m512 a = _mm512_setzero_ps(), b = a, c = a, d = a;
    for (int64_t i = 0; i < dim / 2; i += 4) {
        a = _mm512_dpbf16_ps(a, (__m512bh)keys[i], (__m512bh)_mm512_set1_epi32(pairs[i]));
        b = _mm512_dpbf16_ps(b, (__m512bh)keys[i + 1], (__m512bh)_mm512_set1_epi32(pairs[i + 1]));
        c = _mm512_dpbf16_ps(c, (__m512bh)keys[i + 2], (__m512bh)_mm512_set1_epi32(pairs[i + 2]));
        d = _mm512_dpbf16_ps(d, (__m512bh)keys[i + 3], (__m512bh)_mm512_set1_epi32(pairs[i + 3]));
    }
    return _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d));
}

static inline __mmask16 seen(int64_t block, int64_t first, int64_t end) {
    __mmask16 mask = 0xFFFF;
    if (block < first) mask &= (__mmask16)(0xFFFF << (first - block));
    if (block + SLOTS > end) mask &= (__mmask16)(0xFFFF >> (block + SLOTS - end));
    return mask;
}

/* Weights of the slots first..end, not normalised, bfloat16, from scores; both begin at the block of `first`.
 * Returns 1 / their sum. Blocks are whole: what lies outside first..end gets zero. */
static float weigh(const float *score, bf16 *weight, int64_t first, int64_t end) {
    int64_t start = first / SLOTS * SLOTS;
    __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t block = start; block < end; block += SLOTS)
        most = _mm512_mask_max_ps(most, seen(block, first, end), most, _mm512_loadu_ps(score + block - start));
    __m512 highest = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    for (int64_t block = start; block < end; block += SLOTS) {
        __m512 grown = exponential(_mm512_sub_ps(_mm512_loadu_ps(score + block - start), highest));
        grown = _mm512_maskz_mov_ps(seen(block, first, end), grown);
        sum = _mm512_add_ps(sum, grown);
        narrow(weight + block - start, grown);
    }
    return 1.0f / _mm512_reduce_add_ps(sum);
}

/* Of two tokens' values 32 * `halves` / 2 elements, pair by pair: what dpbf16 multiplies with their weights. */
static inline __attribute__((always_inline)) void pair_values(const char *one, const char *other, __m512i *to,
                                                              const int halves) {
    for (int i = 0; i < halves; i += 2) {
        __m512i a = _mm512_loadu_si512(one + 32 * i);
        __m512i b = other ? _mm512_loadu_si512(other + 32 * i) : _mm512_setzero_si512();
        to[i] = _mm512_unpacklo_epi16(a, b);
        to[i + 1] = _mm512_unpackhi_epi16(a, b);
    }
}

/* Weighted sums of values for `count` queries of one row over 16 * `halves` elements from `offset` (bytes) on. */
static inline __attribute__((always_inline)) void mix(const Plan *plan, const Segment *of, const Row *row,
                                                      int64_t layer, int64_t head, int64_t first, int64_t end,
                                                      const bf16 *weight, int64_t stride, const float *inverse,
                                                      int64_t offset, bf16 *out, const int count, const int halves) {
    __m512 sum[16];
    for (int i = 0; i < count * halves; i++) sum[i] = _mm512_setzero_ps();
    int64_t start = first / SLOTS * SLOTS, whole = of->tree && of->length < end ? of->length / 2 * 2 : end / 2 * 2;
    const char *base = token(plan, of, row, layer, 1, head, 0) + offset;
    __m512i values[4];
    for (int64_t slot = start; slot < end; slot += 2) {
        if (slot < whole) {
            const char *soon = base + (slot + AHEAD_SLOTS) * of->slot;
            for (int i = 0; i < halves; i += 2) {
                _mm_prefetch(soon + 32 * i, _MM_HINT_T0);
                _mm_prefetch(soon + of->slot + 32 * i, _MM_HINT_T0);
            }
            pair_values(base + slot * of->slot, base + (slot + 1) * of->slot, values, halves);
        } else {
            const char *other = slot + 1 < end ? token(plan, of, row, layer, 1, head, slot + 1) + offset : 0;
            pair_values(token(plan, of, row, layer, 1, head, slot) + offset, other, values, halves);
        }
        for (int j = 0; j < count; j++) {
            int32_t pair;
            memcpy(&pair, weight + j * stride + slot - start, sizeof pair);
            __m512i both = _mm512_set1_epi32(pair);
            for (int i = 0; i < halves; i++)
                sum[j * halves + i] = _mm512_dpbf16_ps(sum[j * halves + i], (__m512bh)values[i], (__m512bh)both);
        }
    }
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int j = 0; j < count; j++) {
        __m512 factor = _mm512_set1_ps(inverse[j]);
        for (int i = 0; i < halves; i += 2) {
            __m512 a = _mm512_mul_ps(sum[j * halves + i], factor), b = _mm512_mul_ps(sum[j * halves + i + 1], factor);
            bf16 *to = out + j * plan->dim + offset / 2 + 16 * i;
            narrow(to, _mm512_permutex2var_ps(a, low, b));
            narrow(to + 16, _mm512_permutex2var_ps(a, high, b));
        }
    }
}

static void mix_queries(const Plan *plan, const Segment *of, const Row *row, int64_t layer, int64_t head,
                        int64_t first, int64_t end, const bf16 *weight, int64_t stride, const float *inverse,
                        bf16 *out, int64_t count) {
#define MIX(queries, halves)                                                                                      \
    mix(plan, of, row, layer, head, first, end, weight + done * stride, stride, inverse + done, offset,           \
        out + done * plan->dim, queries, halves)
    for (int64_t offset = 0; offset < 2 * plan->dim;) {
        int wide = 2 * plan->dim - offset >= 128;
        for (int64_t done = 0; done < count;) {
            int64_t left = count - done, taken = left >= 4 ? 4 : left;
            if (wide && taken == 4) MIX(4, 4);
            else if (wide && taken == 3) MIX(3, 4);
            else if (wide && taken == 2) MIX(2, 4);
            else if (wide) MIX(1, 4);
            else if (taken == 4) MIX(4, 2);
            else if (taken == 3) MIX(3, 2);
            else if (taken == 2) MIX(2, 2);
            else MIX(1, 2);
            done += taken;
        }
        offset += wide ? 128 : 64;
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
    __m512i packed[MOST_DIM / 2];
    const char *keys[SLOTS];
    const bf16 *queries = plan->queries + (block->first * plan->query_heads + head * group) * dim;
    const int64_t next = plan->query_heads * dim;
    /* What all rows have in common, then of a tree what each row has alone. */
    const int64_t common = of->tree ? of->length / SLOTS * SLOTS : highest;
    for (int64_t slot = start; slot < common; slot += SLOTS) {
        const char *base = token(plan, of, rows, layer, 0, head, 0);
        for (int i = 0; i < SLOTS; i++) {
            keys[i] = base + (slot + i) * of->slot;
            for (int64_t line = 0; line < 2 * dim; line += 64)
                _mm_prefetch(keys[i] + AHEAD_SLOTS * of->slot + line, _MM_HINT_T0);
        }
        pack_keys(keys, packed, dim);
        for (int64_t row = 0; row < count; row++)
            for (int64_t j = 0; j < group; j++)
                _mm512_storeu_ps(score + (row * group + j) * stride + slot - start,
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
                _mm512_storeu_ps(score + (row * group + j) * stride + slot - start,
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
