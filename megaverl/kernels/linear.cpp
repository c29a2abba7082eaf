// Products of a few rows with a weight that is read once and as it lies, on AMX's tiles.
//
// The transposed product: a tile of sixteen of the weight's rows is the left factor and needs no packing; what the rows
// are multiplied by it is packed instead, which is little, and the sums are transposed back.

#include <algorithm>
#include <vector>

#include "amx.hpp"

namespace {

constexpr int BLOCK = 2 * LANES;    // rows, and outputs, of two by two tiles
constexpr int INNER = 2 * TILE_PAIRS;  // bf16 of a tile's row

constexpr int FIRST_LINES = 512;  // of the weight, on their way while the rows are packed

using pair = uint32_t;

struct Job {
  const bf16 *input, *weight, *bias;  // [rows, inner], [outputs, inner] without gaps, [outputs] or null
  bf16* output;                       // [rows, outputs] without gaps
  int64_t rows, inner, outputs, row_stride;  // row_stride: of the input
};

// Sixteen rows of sixteen pairs, transposed, into columns of `to`, whose rows are BLOCK apart.
void pack(const Job& job, int64_t row, int64_t at, pair* to) {
  __m512i block[LANES];
  for (int i = 0; i < LANES; i++) {
    const __mmask16 mask = row + i < job.rows ? 0xffff : 0;
    block[i] = _mm512_maskz_loadu_epi32(mask, job.input + (row + i) * job.row_stride + at);
  }
  transpose(block);
  for (int i = 0; i < LANES; i++) _mm512_storeu_si512(to + i * BLOCK, block[i]);
}

// Two tiles of sums, [outputs, rows], into the rows of the output.
void store(const Job& job, int64_t row, int64_t output, const float* sums, const float* below) {
  const bool both = output + LANES < job.outputs;
  __m512i first[LANES], second[LANES];
  for (int i = 0; i < LANES; i++) {
    first[i] = _mm512_load_si512(sums + i * LANES);
    second[i] = _mm512_load_si512(below + i * LANES);
  }
  transpose(first);
  transpose(second);
  const __m512 none = _mm512_setzero_ps();
  const __m512 bias[2] = {job.bias ? load(job.bias + output, 0xffff) : none,
                          job.bias && both ? load(job.bias + output + LANES, 0xffff) : none};
  for (int i = 0; i < LANES && row + i < job.rows; i++) {
    const __m512i rounded =
        round_two(_mm512_add_ps((__m512)first[i], bias[0]), _mm512_add_ps((__m512)second[i], bias[1]));
    _mm512_mask_storeu_epi16(job.output + (row + i) * job.outputs + output, both ? 0xffffffff : 0xffff, rounded);
  }
}

// The weights of an output's block lie in a row, and the next block behind them.
void fetch(const Job& job, int64_t output, int64_t first, int64_t count) {
  if (output >= job.outputs) return;
  const char* place = (const char*)(job.weight + output * job.inner);
  for (int64_t line = first; line < first + count; line++) _mm_prefetch(place + line * 64, _MM_HINT_T1);
}

WITH_TILES void multiply(const Job& job, const pair* packed) {
  alignas(64) float sums[4][LANES * LANES];
  const int64_t stride = job.inner * sizeof(bf16);
  for (int64_t output = 0; output < job.outputs; output += BLOCK) {
    const bool both = output + LANES < job.outputs;
    for (int64_t row = 0; row < job.rows; row += BLOCK) {
      const bf16* weight = job.weight + output * job.inner;
      const pair* right = packed + row * job.inner / 2;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t at = 0; at < job.inner; at += INNER, right += TILE_PAIRS * BLOCK) {
        if (row == 0) fetch(job, output + BLOCK, at, BLOCK);
        _tile_loadd(4, weight + at, stride);
        _tile_loadd(6, right, BLOCK * sizeof(pair));
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, right + LANES, BLOCK * sizeof(pair));
        _tile_dpbf16ps(1, 4, 7);
        if (!both) continue;
        _tile_loadd(5, weight + LANES * job.inner + at, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, sums[0], LANES * sizeof(float));
      _tile_stored(1, sums[1], LANES * sizeof(float));
      _tile_stored(2, sums[2], LANES * sizeof(float));
      _tile_stored(3, sums[3], LANES * sizeof(float));
      store(job, row, output, sums[0], sums[2]);
      store(job, row + LANES, output, sums[1], sums[3]);
    }
  }
}

}  // namespace

// output = input weight^T + bias; `inner` a multiple of 32, `outputs` of 16.
extern "C" void linear(const bf16* input, const bf16* weight, const bf16* bias, bf16* output, int64_t rows,
                       int64_t inner, int64_t outputs, int64_t row_stride) {
  const Job job{input, weight, bias, output, rows, inner, outputs, row_stride};
  const Tiles tiles(true);
  static thread_local std::vector<pair> packed;
  const int64_t block_size = inner / 2 * BLOCK;
  fetch(job, 0, 0, std::min<int64_t>(inner, FIRST_LINES));
  packed.resize((rows + BLOCK - 1) / BLOCK * block_size);
  for (int64_t row = 0; row < rows; row += LANES) {
    pair* to = packed.data() + row / BLOCK * block_size + row % BLOCK;
    for (int64_t at = 0; at < inner; at += INNER, to += TILE_PAIRS * BLOCK) pack(job, row, at, to);
  }
  multiply(job, packed.data());
}
