/* 8 numbers at a time, with AVX2 and FMA: pairs of bfloat16 are widened before they are multiplied. */

#define LANES 8
#define MOST_ROWS 4 /* rows for which a block of weights is read once: as many sums fit into registers */
#define MOST_HALVES 2 /* vectors of values that are weighted together, likewise */

typedef __m256 vec;
typedef __m256i pairs; /* of bfloat16 */
typedef struct {
    vec first, second;
} factors; /* pairs, as they are multiplied */
typedef __m256i mask;

/* Lanes from `first` on and before `end`. */
static inline mask lanes(int64_t first, int64_t end) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const int32_t from = first < 0 ? 0 : (int32_t)first, to = end < LANES ? (int32_t)end : LANES;
    return _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(from), lane),
                               _mm256_cmpgt_epi32(_mm256_set1_epi32(to), lane));
}

static inline vec load(const float *from) { return _mm256_loadu_ps(from); }
static inline vec load_lanes(mask which, const float *from) { return _mm256_maskload_ps(from, which); }
static inline void store(float *to, vec x) { _mm256_storeu_ps(to, x); }
static inline void store_first(float *to, vec x, int64_t count) { _mm256_maskstore_ps(to, lanes(0, count), x); }
static inline vec zero(void) { return _mm256_setzero_ps(); }
static inline vec all(float x) { return _mm256_set1_ps(x); }
static inline vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
static inline vec subtract(vec a, vec b) { return _mm256_sub_ps(a, b); }
static inline vec multiply(vec a, vec b) { return _mm256_mul_ps(a, b); }
static inline vec divide(vec a, vec b) { return _mm256_div_ps(a, b); }
static inline vec multiply_add(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline vec subtract_product(vec a, vec b, vec c) { return _mm256_fnmadd_ps(a, b, c); } /* c - a b */
static inline vec larger(vec a, vec b) { return _mm256_max_ps(a, b); }
static inline vec smaller(vec a, vec b) { return _mm256_min_ps(a, b); }
static inline vec larger_in(mask which, vec a, vec b) {
    return _mm256_blendv_ps(a, _mm256_max_ps(a, b), _mm256_castsi256_ps(which));
}
static inline vec only(mask which, vec x) { return _mm256_and_ps(_mm256_castsi256_ps(which), x); }
static inline vec nearest(vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

/* In two steps, because 2^n alone may be less than the least float that is normal. */
static inline vec times_power_of_two(vec x, vec n) {
    const __m256i bias = _mm256_set1_epi32(127), whole = _mm256_cvtps_epi32(n);
    const __m256i half = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, half);
    x = multiply(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
    return multiply(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}

static inline float sum_of(vec x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

static inline float largest_of(vec x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

static inline vec widen(const bf16 *from) {
    __m128i half = _mm_loadu_si128((const __m128i *)from);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

/* To the nearest bfloat16, ties to even; what is no number stays none. */
static inline __m128i narrowed(vec x) {
    __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i none = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, none), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

static inline void narrow(bf16 *to, vec x) { _mm_storeu_si128((__m128i *)to, narrowed(x)); }

static inline void narrow_first(bf16 *to, vec x, int64_t count) {
    bf16 whole[LANES];
    narrow(whole, x);
    if (count > 0) memcpy(to, whole, (size_t)(count < LANES ? count : LANES) * sizeof(bf16));
}

static inline factors factors_of(pairs x) {
    return (factors){_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)),
                     _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int32_t)0xFFFF0000)))};
}
static inline factors load_factors(const pairs *from) { return factors_of(_mm256_load_si256(from)); }
static inline factors same_factors(int32_t pair) { return factors_of(_mm256_set1_epi32(pair)); }

/* sum + both products of each pair. */
static inline vec add_products(vec sum, factors a, factors b) {
    return multiply_add(a.first, b.first, multiply_add(a.second, b.second, sum));
}

/* Each two elements as a complex number, turned by a cosine and a sine. */
static inline vec turned(vec x, vec turn) {
    vec crossed = multiply(_mm256_permute_ps(x, 0xB1), _mm256_movehdup_ps(turn));
    return _mm256_fmaddsub_ps(x, _mm256_moveldup_ps(turn), crossed);
}

/* The pairs from `offset` (bytes) on of LANES tokens: `to` [LANES pairs, LANES tokens]. */
static inline void transpose(const char *const from[LANES], int64_t offset, factors *to) {
    __m256i a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_si256((const __m256i *)(from[i] + offset));
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        to[i] = factors_of(_mm256_permute2x128_si256(a[i], a[i + 4], 0x20));
        to[i + 4] = factors_of(_mm256_permute2x128_si256(a[i], a[i + 4], 0x31));
    }
}

/* Two tokens' values, 2 * LANES elements of each, element by element; `other` NULL: zeros. In an order of its own. */
static inline void pair_values(const char *one, const char *other, factors to[2]) {
    __m256i a = _mm256_loadu_si256((const __m256i *)one);
    __m256i b = other ? _mm256_loadu_si256((const __m256i *)other) : _mm256_setzero_si256();
    to[0] = factors_of(_mm256_unpacklo_epi16(a, b));
    to[1] = factors_of(_mm256_unpackhi_epi16(a, b));
}

/* Sums of such pairs in the elements' order. */
static inline void narrow_values(bf16 *to, vec a, vec b) {
    narrow(to, _mm256_permute2f128_ps(a, b, 0x20));
    narrow(to + LANES, _mm256_permute2f128_ps(a, b, 0x31));
}
