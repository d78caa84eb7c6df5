/* The three products of a head out of bfloat16 matrices, with float32 sums, for processors that multiply pairs of
 * bfloat16 numbers (AVX512-BF16). torch's products on a CPU round their sums to bfloat16.
 *
 * A pair is two numbers that follow each other along the sum, in 32 bits. The right operand is packed to panels of 64
 * columns, [pairs][64]; the left one is read as it lies, by two strides. Each sum runs in one order: neither threads nor
 * the place of a row change a digit. bfloat16.py says what the products are for.
 */
#include <stddef.h>
#include <stdint.h>

/* A head and one chunk; native.py has the same record. */
typedef struct {
    size_t words, rows, width;       /* V, C and H */
    const uint16_t *weight, *hidden; /* [words, width] and [rows, width], bfloat16 */
    float *chunk;                    /* [words, stride], of which `rows` columns count */
    size_t stride;
    uint32_t *work; /* rlloss_bf16_workspace pairs */
    int threads;
} head;

#if defined(__x86_64__) && defined(__GNUC__) && (__GNUC__ >= 11 || defined(__clang__))
#include <immintrin.h>
#include <omp.h>

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

/* Below this many numbers of a chunk threads cost more than they bring. */
#define SERIAL 32768

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
        for (size_t v = 0; v < VECTORS; v++) sums[i][v] = _mm512_setzero_ps();
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

/* Splits factor * row into its bfloat16 numbers and those of what rounding took; both as long as whole vectors. */
ALWAYS_INLINE void split_row(const float *row, const float *factor, size_t count, uint16_t *high, uint16_t *low) {
    for (size_t c = 0; c < count; c += LANES) {
        const __mmask16 mask = mask_of(count - c);
        const __m512 whole = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, row + c), _mm512_maskz_loadu_ps(mask, factor + c));
        const __m512i kept = rounded(whole);
        const __m512 rest = _mm512_sub_ps(whole, _mm512_castsi512_ps(_mm512_slli_epi32(kept, 16)));
        _mm256_storeu_si256((__m256i *)(high + c), _mm512_cvtepi32_epi16(kept));
        _mm256_storeu_si256((__m256i *)(low + c), (__m256i)_mm512_cvtneps_pbh(rest));
    }
}

/* Rounds two rows, the second perhaps NULL, and joins them to pairs. */
ALWAYS_INLINE void join_rows(const float *even, const float *odd, size_t count, uint32_t *to) {
    for (size_t c = 0; c < count; c += LANES) {
        const __mmask16 mask = mask_of(count - c);
        const __m512i low = rounded(_mm512_maskz_loadu_ps(mask, even + c));
        const __m512i high = odd ? rounded(_mm512_maskz_loadu_ps(mask, odd + c)) : _mm512_setzero_si512();
        _mm512_mask_storeu_epi32(to + c, mask, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
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
            if (rounds) numbers = _mm512_castsi512_ps(_mm512_slli_epi32(rounded(numbers), 16));
            _mm512_mask_storeu_ps(at, mask, numbers);
        }
}

int rlloss_bf16_available(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
}

static size_t padded(size_t rows) { return (rows + 2 * LANES - 1) / (2 * LANES) * (2 * LANES); }
static int team(const head *of) { return of->words * of->rows > SERIAL ? of->threads : 1; }

/* Pairs of memory that each of the products may use. */
size_t rlloss_bf16_workspace(const head *of) {
    const size_t project = panels(of->rows) * PANEL * (of->width / 2);
    const size_t weight = panels(of->width) * PANEL * ((of->rows + 1) / 2) + (size_t)of->threads * BAND * padded(of->rows);
    const size_t hidden = 2 * DEPTH * (panels(of->width) * PANEL + of->rows);
    return larger(project, larger(weight, hidden));
}

/* The loops over threads are in functions for every processor: not all compilers give what they outline a target. */

WITH_PAIRS static void project_band(const head *of, size_t word, const float *bias, int rounds) {
    const size_t rows = smaller(of->words - word, BAND), pairs = of->width / 2;
    for (size_t c = 0; c < of->rows; c += PANEL) {
        result to = {of->chunk + word * of->stride + c, of->stride, smaller(of->rows - c, PANEL), 1};
        for (size_t k = 0; k < pairs; k += DEPTH, to.first = 0) {
            const operand left = {(const uint32_t *)of->weight + word * pairs + k, NULL, pairs, 1};
            multiply(rows, left, of->work + c * pairs + k * PANEL, smaller(pairs - k, DEPTH), to);
        }
        if (bias || rounds) finish(to, rows, bias ? bias + word : NULL, rounds);
    }
}

/* Writes chunk = weight hidden^T + bias [words], rounded to bfloat16 or not; the width is even. */
void rlloss_bf16_project(const head *of, const float *bias, int rounds) {
    const size_t pairs = of->width / 2;
#pragma omp parallel num_threads(team(of))
    {
#pragma omp for
        for (size_t c = 0; c < of->rows; c += PANEL)
            pack_transposed((const uint32_t *)of->hidden + c * pairs, of->rows - c, pairs, of->work + c * pairs);
#pragma omp for schedule(dynamic)
        for (size_t word = 0; word < of->words; word += BAND) project_band(of, word, bias, rounds);
    }
}

/* Packs two rows of hidden states, of the pair k. */
WITH_PAIRS static void pack_hidden(const head *of, size_t k) {
    const uint16_t *even = of->hidden + 2 * k * of->width;
    const uint16_t *odd = 2 * k + 1 < of->rows ? even + of->width : NULL;
    pack_rows(even, odd, of->width, of->work + k * PANEL, (of->rows + 1) / 2);
}

WITH_PAIRS static void weight_band(const head *of, size_t word, const float *factor, result out, uint16_t *high) {
    const size_t rows = smaller(of->words - word, BAND), pairs = (of->rows + 1) / 2, line = padded(of->rows);
    uint16_t *low = high + BAND * line;
    for (size_t i = 0; i < rows; i++)
        split_row(of->chunk + (word + i) * of->stride, factor, of->rows, high + i * line, low + i * line);
    for (size_t c = 0; c < of->width; c += PANEL) {
        result to = {out.numbers + word * of->width + c, of->width, smaller(of->width - c, PANEL), out.first};
        for (size_t k = 0; k < pairs; k += DEPTH, to.first = 0) {
            const operand left = {(uint32_t *)high + k, (uint32_t *)low + k, line / 2, 1};
            multiply(rows, left, of->work + c * pairs + k * PANEL, smaller(pairs - k, DEPTH), to);
        }
    }
}

/* Writes out = (chunk * factor [rows]) hidden, [words, width], or adds it; numbers of the chunk keep 16 bits. */
void rlloss_bf16_add_weight(const head *of, const float *factor, float *out, int first) {
    const size_t pairs = (of->rows + 1) / 2;
    const result to = {out, of->width, of->width, first};
    uint32_t *bands = of->work + panels(of->width) * PANEL * pairs;
#pragma omp parallel num_threads(team(of))
    {
        uint16_t *mine = (uint16_t *)(bands + (size_t)omp_get_thread_num() * BAND * padded(of->rows));
#pragma omp for
        for (size_t k = 0; k < pairs; k++) pack_hidden(of, k);
#pragma omp for schedule(dynamic)
        for (size_t word = 0; word < of->words; word += BAND) weight_band(of, word, factor, to, mine);
    }
}

/* Packs two words, the weight's as the right operand and the chunk's as the left one. */
WITH_PAIRS static void pack_words(const head *of, size_t word, uint32_t *right, uint32_t *left) {
    const int both = word + 1 < of->words;
    const uint16_t *row = of->weight + word * of->width;
    const float *numbers = of->chunk + word * of->stride;
    pack_rows(row, both ? row + of->width : NULL, of->width, right, DEPTH);
    join_rows(numbers, both ? numbers + of->stride : NULL, of->rows, left);
}

WITH_PAIRS static void hidden_band(const head *of, size_t row, const uint32_t *right, const uint32_t *left, size_t pairs,
                                   result out) {
    const operand part = {left + row, NULL, 1, of->rows};
    for (size_t h = 0; h < of->width; h += PANEL) {
        const result to = {out.numbers + row * of->width + h, of->width, smaller(of->width - h, PANEL), out.first};
        multiply(smaller(of->rows - row, BAND / 2), part, right + h * DEPTH, pairs, to);
    }
}

/* Writes out = chunk^T weight, [rows, width], or adds it; numbers of the chunk are rounded. */
void rlloss_bf16_add_hidden(const head *of, float *out, int first) {
    const size_t columns = panels(of->width) * PANEL, size = DEPTH * (columns + of->rows);
#pragma omp parallel num_threads(team(of))
    for (size_t word = 0, turn = 0; word < of->words; word += 2 * DEPTH, turn ^= 1) {
        const size_t pairs = (smaller(of->words - word, 2 * DEPTH) + 1) / 2;
        const result to = {out, of->width, of->width, first && word == 0};
        /* Two turns of memory: a thread may pack the next words while another still multiplies these. */
        uint32_t *right = of->work + turn * size, *left = right + DEPTH * columns;
#pragma omp for
        for (size_t k = 0; k < pairs; k++) pack_words(of, word + 2 * k, right + k * PANEL, left + k * of->rows);
#pragma omp for nowait
        for (size_t row = 0; row < of->rows; row += BAND / 2) hidden_band(of, row, right, left, pairs, to);
    }
}

#else

int rlloss_bf16_available(void) { return 0; }

#endif
