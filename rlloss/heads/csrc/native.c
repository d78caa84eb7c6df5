/* The passes over a tile of float32 logits [words, rows] that torch needs several operators for, in one pass over memory:
 * E = exp(z - shift), its sum over words, and that of E * (z - shift).
 *
 * Sums are kept apart for strips of words, so that neither the number of threads nor the width of a tile changes a
 * digit. native.py says what the arguments are. No Python header is needed: ctypes calls the functions.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__gnu_linux__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* Rows that a strip is walked over with: their shifts and sums stay in the first cache. */
#define BLOCK 512

/* Rows at once: the last ones of a block are filled up to as many, or they would be computed by other instructions,
 * and a row's digits would depend on its place. */
#define LANES 16

/* Words whose sum is formed first. */
#define GROUP 16

/* Below this many numbers threads cost more than they bring. */
#define SERIAL 32768

/* What native.py expects of the arguments; a library that was built from an older source has another number. */
int rlloss_native_version(void) { return 3; }

/* exp(q) within 1.3 units in the last place; infinite from 88.4 on, 0 below -87 (no subnormal numbers); NaN for NaN. */
ALWAYS_INLINE float exponential(float q) {
    const float capped = q > 88.7f ? 88.7f : q;
    /* 1.5 * 2^23 + 127: the last bits of the sum are round(q / log 2) + 127, an exponent as it is stored. */
    const float magic = 12583039.0f;
    const float sum = capped * 1.44269504f + magic;
    const float power = sum - magic;
    /* log 2 in two parts, the first of so few bits that its product is exact. */
    const float r = (capped - power * 0.693145752f) - power * 1.42860677e-06f;
    /* Minimax polynomial on |r| <= log(2) / 2, relative error 3e-9; the first two coefficients are held at 1. */
    float p = 0.001381459847514279f * r + 0.008368716887340272f;
    p = p * r + 0.0416683880488284f;
    p = p * r + 0.16666520631627266f;
    p = p * r + 0.499999934477791f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    uint32_t bits;
    float scale;
    memcpy(&bits, &sum, sizeof bits);
    bits <<= 23;
    memcpy(&scale, &bits, sizeof scale);
    return q < -87.0f ? 0.0f : p * scale;
}

/* Words of a strip, and where its results go. */
typedef struct {
    size_t words, rows;
    const float *shift;
    float *sums, *weighted;
} strip;

ALWAYS_INLINE void sum_lanes(float *logits, const float *less, float *total, float *weighted, int keep, int weigh) {
    for (int lane = 0; lane < LANES; lane++) {
        const float q = logits[lane] - less[lane], e = exponential(q);
        if (keep) logits[lane] = e;
        total[lane] += e;
        /* 0 and not NaN for a word of probability 0, whose q may be -inf. */
        if (weigh) weighted[lane] += q < -87.0f ? 0.0f : e * q;
    }
}

/* Adds a block's part to its total, and begins a new one. */
ALWAYS_INLINE void add_lanes(float *total, float *part) {
    for (int c = 0; c < BLOCK; c++) {
        total[c] += part[c];
        part[c] = 0.0f;
    }
}

ALWAYS_INLINE void sum_words(float *logits, const strip *to, int keep, int weigh) {
    for (size_t first = 0; first < to->rows; first += BLOCK) {
        const size_t count = to->rows - first < BLOCK ? to->rows - first : BLOCK;
        const size_t whole = count / LANES * LANES, rest = (count - whole) * sizeof(float);
        _Alignas(64) float less[BLOCK] = {0}, total[BLOCK] = {0}, weighted[BLOCK] = {0}, last[LANES] = {0};
        _Alignas(64) float part[BLOCK] = {0}, weighted_part[BLOCK] = {0};
        memcpy(less, to->shift + first, count * sizeof *less);
        for (size_t word = 0; word < to->words; word++) {
            float *row = logits + word * to->rows + first;
            for (size_t c = 0; c < whole; c += LANES)
                sum_lanes(row + c, less + c, part + c, weighted_part + c, keep, weigh);
            if (rest) {
                memcpy(last, row + whole, rest);
                sum_lanes(last, less + whole, part + whole, weighted_part + whole, keep, weigh);
                if (keep) memcpy(row + whole, last, rest);
            }
            /* Few numbers at a time: a long sum loses the last digits of a small number. */
            if ((word + 1) % GROUP == 0 || word + 1 == to->words) {
                add_lanes(total, part);
                if (weigh) add_lanes(weighted, weighted_part);
            }
        }
        memcpy(to->sums + first, total, count * sizeof *total);
        if (weigh) memcpy(to->weighted + first, weighted, count * sizeof *weighted);
    }
}

/* Loops of their own for each wish, so that none is asked for within one. */
FOR_EACH_PROCESSOR
void rlloss_sum_strip(float *logits, const strip *to, int keep) {
    if (to->weighted && keep) sum_words(logits, to, 1, 1);
    else if (to->weighted) sum_words(logits, to, 0, 1);
    else if (keep) sum_words(logits, to, 1, 0);
    else sum_words(logits, to, 0, 0);
}

/* Replaces logits by E where they are kept; writes the sums of E, and of E * (z - shift) unless there is no place for
 * them, of each strip of `height` words. */
void rlloss_exp_sums(float *logits, size_t words, size_t rows, const float *shift, float *sums, float *weighted,
                     size_t height, int keep, int threads) {
    const size_t strips = (words + height - 1) / height;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1 && words * rows > SERIAL)
    for (size_t s = 0; s < strips; s++) {
        const size_t start = s * height, count = words - start < height ? words - start : height;
        const strip to = {count, rows, shift, sums + s * rows, weighted ? weighted + s * rows : weighted};
        rlloss_sum_strip(logits + start * rows, &to, keep);
    }
}
