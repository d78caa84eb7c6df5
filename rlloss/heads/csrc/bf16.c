/* The three products of a head out of bfloat16 matrices, with float32 sums, for processors that multiply pairs of
 * bfloat16 numbers (AVX512-BF16). torch's products on a CPU round their sums to bfloat16.
 *
 * Each sum runs in one order: neither threads nor the place of a row change a digit. bfloat16.py says what the products
 * are for.
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
#include <omp.h>

#include "bf16_blocks.h"

/* Pairs of words whose numbers are summed up first, by one thread: the sums are the same for any number of them. */
#define GROUP 8

/* Below this many numbers of a chunk threads cost more than they bring. */
#define SERIAL 32768

int rlloss_bf16_available(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
}

static size_t padded(size_t rows) { return (rows + 2 * LANES - 1) / (2 * LANES) * (2 * LANES); }
static int team(const head *of) { return of->words * of->rows > SERIAL ? of->threads : 1; }

/* Pairs of memory for some words that are packed: of the weight, of the chunk, its rest, two sums of each group. */
static size_t packed_size(const head *of) {
    return DEPTH * (panels(of->width) * PANEL + 2 * of->rows) + 2 * DEPTH / GROUP * of->rows;
}

/* Pairs of memory that each of the products may use. */
size_t rlloss_bf16_workspace(const head *of) {
    const size_t project = panels(of->rows) * PANEL * (of->width / 2);
    const size_t weight = panels(of->width) * PANEL * ((of->rows + 1) / 2) + (size_t)of->threads * BAND * padded(of->rows);
    const size_t hidden = 2 * packed_size(of);
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

/* Some words that are packed, the weight's as the right operand and the chunk's as the left one. */
typedef struct {
    uint32_t *right, *left, *rest;
    float *sums; /* [groups, 2, rows], of the rounded numbers of each group, and of what rounding took */
    size_t word, pairs;
} packed;

/* Packs the words of a group that begins with the pair k. */
WITH_PAIRS static void pack_group(const head *of, packed to, size_t k) {
    const size_t rows = of->rows, word = to.word + 2 * k, words = smaller(of->words - word, 2 * GROUP);
    float *sums = to.sums + k / GROUP * 2 * rows;
    const joined left = {to.left + k * rows, to.rest ? to.rest + k * rows : NULL, sums, sums + rows};
    join_rows(of->chunk + word * of->stride, of->stride, words, rows, left);
    for (size_t i = 0; i < words; i += 2) {
        const uint16_t *row = of->weight + (word + i) * of->width;
        pack_rows(row, i + 1 < words ? row + of->width : NULL, of->width, to.right + (k + i / 2) * PANEL, DEPTH);
    }
}

WITH_PAIRS static void hidden_band(const head *of, size_t row, packed from, result out, float *sums) {
    const operand part = {from.left + row, from.rest ? from.rest + row : NULL, 1, of->rows};
    const size_t rows = smaller(of->rows - row, BAND / 2);
    for (size_t h = 0; h < of->width; h += PANEL) {
        const result to = {out.numbers + row * of->width + h, of->width, smaller(of->width - h, PANEL), out.first};
        multiply(rows, part, from.right + h * DEPTH, from.pairs, to);
    }
    for (size_t group = 0; group * GROUP < from.pairs; group++)
        for (size_t which = 0; which < 2; which++)
            for (size_t i = row; i < row + rows; i++)
                sums[which * of->rows + i] += from.sums[(2 * group + which) * of->rows + i];
}

/* Writes out = chunk^T weight, [rows, width], or adds it. Numbers of the chunk are rounded, or keep 16 bits; `sums`
 * [2, rows] grow by the rounded numbers of all words, and by what rounding took from them. */
void rlloss_bf16_add_hidden(const head *of, float *out, float *sums, int first, int both) {
    const size_t columns = panels(of->width) * PANEL;
#pragma omp parallel num_threads(team(of))
    for (size_t word = 0, turn = 0; word < of->words; word += 2 * DEPTH, turn ^= 1) {
        const result to = {out, of->width, of->width, first && word == 0};
        /* Two turns of memory: a thread may pack the next words while another still multiplies these. */
        uint32_t *right = of->work + turn * packed_size(of), *left = right + DEPTH * columns;
        uint32_t *rest = left + DEPTH * of->rows, *groups = rest + DEPTH * of->rows;
        const size_t pairs = (smaller(of->words - word, 2 * DEPTH) + 1) / 2;
        const packed words = {right, left, both ? rest : NULL, (float *)groups, word, pairs};
#pragma omp for
        for (size_t k = 0; k < pairs; k += GROUP) pack_group(of, words, k);
#pragma omp for nowait
        for (size_t row = 0; row < of->rows; row += BAND / 2) hidden_band(of, row, words, to, sums);
    }
}

#else

int rlloss_bf16_available(void) { return 0; }

#endif
