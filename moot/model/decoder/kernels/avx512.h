/* 16 numbers at a time, with the instructions of AVX512-BF16. */

#define LANES 16
#define MOST_ROWS 12 /* rows for which a block of weights is read once: as many sums fit into registers */
#define MOST_HALVES 4 /* vectors of values that are weighted together, likewise */

typedef __m512 vec;
typedef __m512i pairs; /* of bfloat16 */
typedef __m512bh factors; /* pairs, as they are multiplied */
typedef __mmask16 mask;

/* Lanes from `first` on and before `end`. */
static inline mask lanes(int64_t first, int64_t end) {
    mask found = 0xFFFF;
    if (first > 0) found &= (mask)(0xFFFF << first);
    if (end < LANES) found &= end > 0 ? (mask)(0xFFFF >> (LANES - end)) : 0;
    return found;
}

static inline vec load(const float *from) { return _mm512_loadu_ps(from); }
static inline vec load_lanes(mask which, const float *from) { return _mm512_maskz_loadu_ps(which, from); }
static inline void store(float *to, vec x) { _mm512_storeu_ps(to, x); }
static inline void store_first(float *to, vec x, int64_t count) { _mm512_mask_storeu_ps(to, lanes(0, count), x); }
static inline vec zero(void) { return _mm512_setzero_ps(); }
static inline vec all(float x) { return _mm512_set1_ps(x); }
static inline vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
static inline vec subtract(vec a, vec b) { return _mm512_sub_ps(a, b); }
static inline vec multiply(vec a, vec b) { return _mm512_mul_ps(a, b); }
static inline vec divide(vec a, vec b) { return _mm512_div_ps(a, b); }
static inline vec multiply_add(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline vec subtract_product(vec a, vec b, vec c) { return _mm512_fnmadd_ps(a, b, c); } /* c - a b */
static inline vec larger(vec a, vec b) { return _mm512_max_ps(a, b); }
static inline vec smaller(vec a, vec b) { return _mm512_min_ps(a, b); }
static inline vec larger_in(mask which, vec a, vec b) { return _mm512_mask_max_ps(a, which, a, b); }
static inline vec only(mask which, vec x) { return _mm512_maskz_mov_ps(which, x); }
static inline vec nearest(vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }
static inline vec times_power_of_two(vec x, vec n) { return _mm512_scalef_ps(x, n); }
static inline float sum_of(vec x) { return _mm512_reduce_add_ps(x); }
static inline float largest_of(vec x) { return _mm512_reduce_max_ps(x); }

static inline vec widen(const bf16 *from) {
    __m256i half = _mm256_loadu_si256((const __m256i *)from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

static inline void narrow(bf16 *to, vec x) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(x)); }

static inline void narrow_first(bf16 *to, vec x, int64_t count) {
    _mm256_mask_storeu_epi16(to, lanes(0, count), (__m256i)_mm512_cvtneps_pbh(x));
}

static inline factors load_factors(const pairs *from) { return (factors)_mm512_load_si512(from); }
static inline factors factors_of(pairs x) { return (factors)x; }
static inline factors same_factors(int32_t pair) { return (factors)_mm512_set1_epi32(pair); }

/* sum + both products of each pair. */
static inline vec add_products(vec sum, factors a, factors b) { return _mm512_dpbf16_ps(sum, a, b); }

/* Each two elements as a complex number, turned by a cosine and a sine. */
static inline vec turned(vec x, vec turn) {
    vec crossed = multiply(_mm512_permute_ps(x, 0xB1), _mm512_movehdup_ps(turn));
    return _mm512_fmaddsub_ps(x, _mm512_moveldup_ps(turn), crossed);
}

/* The pairs from `offset` (bytes) on of LANES tokens: `to` [LANES pairs, LANES tokens]. */
static inline void transpose(const char *const from[LANES], int64_t offset, factors *to) {
    __m512i a[16], b[16], *out = (__m512i *)to;
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from[i] + offset);
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
    for (int i = 0; i < 4; i++) {
        out[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
        out[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xDD);
        out[i + 4] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88);
        out[i + 12] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xDD);
    }
}

/* Two tokens' values, 2 * LANES elements of each, element by element; `other` NULL: zeros. In an order of its own. */
static inline void pair_values(const char *one, const char *other, factors to[2]) {
    __m512i a = _mm512_loadu_si512(one), b = other ? _mm512_loadu_si512(other) : _mm512_setzero_si512();
    to[0] = (factors)_mm512_unpacklo_epi16(a, b);
    to[1] = (factors)_mm512_unpackhi_epi16(a, b);
}

/* Sums of such pairs in the elements' order. */
static inline void narrow_values(bf16 *to, vec a, vec b) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    narrow(to, _mm512_permutex2var_ps(a, low, b));
    narrow(to + LANES, _mm512_permutex2var_ps(a, high, b));
}
