/* Blocks of the products in bf16.c: rows of a left operand times a panel of a right one, and how operands are packed.
 *
 * A pair is two bfloat16 numbers that follow each other along the sum, in 32 bits. The right operand is packed to panels
 * of 64 columns, [pairs][64]; the left one is read as it lies, by two strides.
 */
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#define WITH_PAIRS __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define ALWAYS_INLINE static inline __attribute__((always_inline)) WITH_PAIRS

/* Rows and vectors of columns whose sums are held in registers. */
#define ROWS 6
#define VECTORS 4
#define LANES 16
#define PANEL (VECTORS * LANES)

/* Pairs that are summed up at once: those of a panel stay in the first cache. */
#define DEPTH 128

/* Rows of the left operand that a thread takes at once: they stay in the second cache. */
#define BAND 96

/* The left operand: pairs, and perhaps what rounding took from them, at `row * i + pair * k`. */
typedef struct {
    const uint32_t *pairs, *rest;
    size_t row, pair;
} operand;

/* Sums [rows, columns] to write or, unless they are the first, to add to. */
typedef struct {
    float *numbers;
    size_t stride, columns;
    int first;
} result;

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }
static size_t larger(size_t a, size_t b) { return a > b ? a : b; }
static size_t panels(size_t columns) { return (columns + PANEL - 1) / PANEL; }

ALWAYS_INLINE __mmask16 mask_of(size_t count) { return count >= LANES ? 0xffff : (__mmask16)((1u << count) - 1); }

/* Multiplies a few rows with a panel. */
ALWAYS_INLINE void multiply_rows(const size_t rows, operand left, const uint32_t *panel, size_t pairs, result to) {
    __m512 sums[ROWS][VECTORS];
    __mmask16 mask[VECTORS];
#pragma GCC unroll 4
    for (size_t v = 0; v < VECTORS; v++) mask[v] = to.columns > v * LANES ? mask_of(to.columns - v * LANES) : 0;
#pragma GCC unroll 6
    for (size_t i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (size_t v = 0; v < VECTORS; v++) {
            sums[i][v] = _mm512_setzero_ps();
            if (!to.first) _mm_prefetch((const char *)(to.numbers + i * to.stride + v * LANES), _MM_HINT_T0);
        }
    for (size_t k = 0; k < pairs; k++) {
        __m512bh right[VECTORS];
#pragma GCC unroll 4
        for (size_t v = 0; v < VECTORS; v++)
            right[v] = (__m512bh)_mm512_loadu_si512(panel + k * PANEL + v * LANES);
#pragma GCC unroll 6
        for (size_t i = 0; i < rows; i++) {
            const size_t at = i * left.row + k * left.pair;
            const __m512bh pair = (__m512bh)_mm512_set1_epi32((int)left.pairs[at]);
#pragma GCC unroll 4
            for (size_t v = 0; v < VECTORS; v++) sums[i][v] = _mm512_dpbf16_ps(sums[i][v], pair, right[v]);
            if (left.rest) {
                const __m512bh rest = (__m512bh)_mm512_set1_epi32((int)left.rest[at]);
#pragma GCC unroll 4
                for (size_t v = 0; v < VECTORS; v++) sums[i][v] = _mm512_dpbf16_ps(sums[i][v], rest, right[v]);
            }
        }
    }
#pragma GCC unroll 6
    for (size_t i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (size_t v = 0; v < VECTORS; v++) {
            float *at = to.numbers + i * to.stride + v * LANES;
            /* Added at last: a long sum that begins with a large number loses the digits of small ones. */
            if (!to.first) sums[i][v] = _mm512_add_ps(sums[i][v], _mm512_maskz_loadu_ps(mask[v], at));
            _mm512_mask_storeu_ps(at, mask[v], sums[i][v]);
        }
}

/* Multiplies a band of rows with a panel. */
ALWAYS_INLINE void multiply_band(size_t rows, operand left, const uint32_t *panel, size_t pairs, result to) {
    size_t i = 0;
    for (; i + ROWS <= rows; i += ROWS) {
        multiply_rows(ROWS, left, panel, pairs, to);
        left.pairs += ROWS * left.row;
        if (left.rest) left.rest += ROWS * left.row;
        to.numbers += ROWS * to.stride;
    }
    switch (rows - i) {
    case 5: multiply_rows(5, left, panel, pairs, to); break;
    case 4: multiply_rows(4, left, panel, pairs, to); break;
    case 3: multiply_rows(3, left, panel, pairs, to); break;
    case 2: multiply_rows(2, left, panel, pairs, to); break;
    case 1: multiply_rows(1, left, panel, pairs, to); break;
    default: break;
    }
}

WITH_PAIRS static void multiply(size_t rows, operand left, const uint32_t *panel, size_t pairs, result to) {
    if (left.rest) multiply_band(rows, left, panel, pairs, to);
    else multiply_band(rows, (operand){left.pairs, NULL, left.row, left.pair}, panel, pairs, to);
}

/* Packs two rows `[columns]` that follow each other along the sum, the second perhaps NULL, into one row of panels
 * that hold `depth` pairs each. */
ALWAYS_INLINE void pack_rows(const uint16_t *even, const uint16_t *odd, size_t columns, uint32_t *to, size_t depth) {
    for (size_t c = 0; c < panels(columns) * PANEL; c += LANES) {
        const __mmask16 mask = columns > c ? mask_of(columns - c) : 0;
        const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, even + c));
        const __m512i high = odd ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, odd + c)) : _mm512_setzero_si512();
        const __m512i pairs = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
        _mm512_storeu_si512(to + c / PANEL * depth * PANEL + c % PANEL, pairs);
    }
}

/* Packs rows [columns, 2 * pairs], whose own numbers follow each other along the sum, to one panel. */
static void pack_transposed(const uint32_t *rows, size_t columns, size_t pairs, uint32_t *to) {
    for (size_t k = 0; k < pairs; k++)
        for (size_t c = 0; c < PANEL; c++) to[k * PANEL + c] = c < columns ? rows[c * pairs + k] : 0;
}

ALWAYS_INLINE __m512i rounded(__m512 numbers) {
    return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(numbers));
}

ALWAYS_INLINE __m512 widened(__m512i numbers) { return _mm512_castsi512_ps(_mm512_slli_epi32(numbers, 16)); }

/* Splits factor * row into its bfloat16 numbers and those of what rounding took; both as long as whole vectors. */
ALWAYS_INLINE void split_row(const float *row, const float *factor, size_t count, uint16_t *high, uint16_t *low) {
    for (size_t c = 0; c < count; c += LANES) {
        const __mmask16 mask = mask_of(count - c);
        const __m512 whole = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, row + c), _mm512_maskz_loadu_ps(mask, factor + c));
        const __m512i kept = rounded(whole);
        const __m512 rest = _mm512_sub_ps(whole, widened(kept));
        _mm256_storeu_si256((__m256i *)(high + c), _mm512_cvtepi32_epi16(kept));
        _mm256_storeu_si256((__m256i *)(low + c), (__m256i)_mm512_cvtneps_pbh(rest));
    }
}

/* Where rows that are joined to pairs go, [pairs, count] and [count]. */
typedef struct {
    uint32_t *pairs, *rest; /* rounded, and perhaps what rounding took */
    float *kept, *lost;     /* sums of the rounded numbers, and of what rounding took */
} joined;

/* Rounds rows, and joins each two that follow each other to pairs; after an odd number of them come zeros. */
ALWAYS_INLINE void join_rows(const float *numbers, size_t stride, size_t rows, size_t count, joined to) {
    for (size_t c = 0; c < count; c += LANES) {
        const __mmask16 mask = mask_of(count - c);
        __m512 kept = _mm512_setzero_ps(), lost = kept;
        for (size_t row = 0; row < rows; row += 2) {
            const float *at = numbers + row * stride + c;
            const __m512 even = _mm512_maskz_loadu_ps(mask, at);
            const __m512 odd = row + 1 < rows ? _mm512_maskz_loadu_ps(mask, at + stride) : _mm512_setzero_ps();
            const __m512i low = rounded(even), high = rounded(odd);
            const __m512 less = _mm512_sub_ps(even, widened(low)), less_too = _mm512_sub_ps(odd, widened(high));
            const size_t place = row / 2 * count + c;
            _mm512_mask_storeu_epi32(to.pairs + place, mask, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
            if (to.rest) {
                const __m512i rest = _mm512_or_si512(rounded(less), _mm512_slli_epi32(rounded(less_too), 16));
                _mm512_mask_storeu_epi32(to.rest + place, mask, rest);
            }
            kept = _mm512_add_ps(kept, _mm512_add_ps(widened(low), widened(high)));
            lost = _mm512_add_ps(lost, _mm512_add_ps(less, less_too));
        }
        _mm512_mask_storeu_ps(to.kept + c, mask, kept);
        _mm512_mask_storeu_ps(to.lost + c, mask, lost);
    }
}

/* Adds a bias to each row, and rounds it to bfloat16. */
ALWAYS_INLINE void finish(result to, size_t rows, const float *bias, int rounds) {
    for (size_t i = 0; i < rows; i++)
        for (size_t c = 0; c < to.columns; c += LANES) {
            const __mmask16 mask = mask_of(to.columns - c);
            float *at = to.numbers + i * to.stride + c;
            __m512 numbers = _mm512_maskz_loadu_ps(mask, at);
            if (bias) numbers = _mm512_add_ps(numbers, _mm512_set1_ps(bias[i]));
            if (rounds) numbers = widened(rounded(numbers));
            _mm512_mask_storeu_ps(at, mask, numbers);
        }
}
