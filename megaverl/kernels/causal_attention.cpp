// Causal attention of sequences in one packed row, in bfloat16 with sums in float32, on AVX512-BF16, and where there
// is AMX with the products on its tiles.
//
// Scores are computed transposed, [keys, queries]: a register holds sixteen queries of one head, so that maxima and
// sums of the softmax are of whole registers, and one key's row is what the next product reads. Queries of all heads
// that share a key head stand beside each other, four registers at a time. Forward is the online softmax of
// FlashAttention (arXiv 2205.14135, alg. 1), backward its alg. 4: scores are computed again from what forward left of
// each query.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "amx.hpp"

namespace {

constexpr int VECTORS = 4;                // registers of queries beside each other
constexpr int QUERIES = LANES * VECTORS;  // of a tile
constexpr int KEYS = 64;                  // of a tile

using pair = uint32_t;  // two bf16 that a product adds up, neighbours in its inner dimension

// c [rows, 16 NV] (+)= a [rows, pairs] b [pairs, 16 NV]
template <int NV, int MR = 16 / NV>
void multiply_registers(
    int rows, int pairs, const pair* a, int lda, const pair* b, int ldb, float* c, int ldc, bool add) {
  for (int row = 0; row < rows; row += MR, a += MR * lda, c += MR * ldc) {
    __m512 sums[MR][NV];
    for (int i = 0; i < MR; i++)
      for (int j = 0; j < NV; j++) sums[i][j] = add ? _mm512_loadu_ps(c + i * ldc + j * LANES) : _mm512_setzero_ps();
    for (int p = 0; p < pairs; p++) {
      __m512i right[NV];
      for (int j = 0; j < NV; j++) right[j] = _mm512_loadu_si512(b + p * ldb + j * LANES);
      for (int i = 0; i < MR; i++) {
        const __m512i left = _mm512_set1_epi32(a[i * lda + p]);
        for (int j = 0; j < NV; j++) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], (__m512bh)left, (__m512bh)right[j]);
      }
    }
    for (int i = 0; i < MR; i++)
      for (int j = 0; j < NV; j++) _mm512_storeu_ps(c + i * ldc + j * LANES, sums[i][j]);
  }
}

// c [rows, columns] (+)= a [rows, pairs] b [pairs, columns]; rows and columns multiples of 16
void multiply(bool tiles, int rows, int pairs, const pair* a, int lda, const pair* b, int ldb, int columns, float* c,
              int ldc, bool add) {
  if (const int whole = tiles ? pairs / TILE_PAIRS * TILE_PAIRS : 0) {
    multiply_tiles(rows, whole, a, lda, b, ldb, columns, c, ldc, add);
    if (whole == pairs) return;
    a += whole, b += (size_t)whole * ldb, pairs -= whole, add = true;
  }
  int j = 0;
  for (; j + 4 * LANES <= columns; j += 4 * LANES)
    multiply_registers<4>(rows, pairs, a, lda, b + j, ldb, c + j, ldc, add);
  for (; j + 2 * LANES <= columns; j += 2 * LANES)
    multiply_registers<2>(rows, pairs, a, lda, b + j, ldb, c + j, ldc, add);
  for (; j + LANES <= columns; j += LANES)
    multiply_registers<1>(rows, pairs, a, lda, b + j, ldb, c + j, ldc, add);
}

struct Matrix {  // bf16 [tokens, heads, head_dim], the last dimension without gaps
  bf16* data;
  int64_t token_stride, head_stride;
  bf16* at(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};

struct Segment {  // tokens that attend to themselves and to those of a shared beginning, all of them before
  int64_t beginning, common, start, count;
  int64_t token(int64_t key) const { return key < common ? beginning + key : start + key - common; }
};

struct Job {
  int64_t tiles;  // whether products are AMX's
  int64_t head_dim, heads, kv_heads, tokens;
  float scale;
  Matrix query, key, value, output, output_grad, query_grad;
  float* statistics;          // [2, heads, tokens]: of each query, its scaled maximum (base 2), 1 / sum
  float *key_grad, *value_grad;  // [tokens, kv_heads, head_dim]
};

constexpr int round_up(int64_t n, int to) { return (n + to - 1) / to * to; }

// Keys or values of a segment: as they are, and transposed.
struct Packed {
  int dim, length;
  std::vector<pair> rows, columns;  // [length, dim / 2], [dim, length / 2]

  void load(const Matrix& from, const Segment& segment, int64_t head, int head_dim, bool rowwise, bool columnwise) {
    const int64_t real = segment.common + segment.count;
    dim = head_dim, length = round_up(real, LANES);
    rows.assign((size_t)length * dim / 2, 0);
    for (int64_t key = 0; key < real; key++)
      std::memcpy(&rows[key * dim / 2], from.at(segment.token(key), head), dim * sizeof(bf16));
    if (!columnwise) return;
    columns.resize((size_t)length * dim / 2);
    const bf16* source = reinterpret_cast<const bf16*>(rows.data());
    bf16* target = reinterpret_cast<bf16*>(columns.data());
    for (int key = 0; key < length; key += LANES)
      for (int n = 0; n < dim; n++)
        for (int i = 0; i < LANES; i++) target[(size_t)n * length + key + i] = source[(size_t)(key + i) * dim + n];
  }
};

// Which queries a tile's lanes are: vector v has sixteen of one head, in a row.
struct Lanes {
  int64_t head[VECTORS], first[VECTORS];  // first: in the segment's own part
  int count[VECTORS];
  int vectors, limit, full;  // keys that the last lane sees, and keys that every lane sees
  __m512i position[VECTORS];

  Lanes(const Segment& segment, int64_t kv_head, int64_t group, int64_t at) {
    const int64_t blocks = (segment.count + LANES - 1) / LANES;
    vectors = (int)std::min<int64_t>(VECTORS, blocks * group - at);
    for (int v = 0; v < VECTORS; v++) {
      const int64_t index = at + std::min(v, vectors - 1);
      head[v] = kv_head * group + index % group;
      first[v] = index / group * LANES;
      count[v] = v < vectors ? (int)std::min<int64_t>(LANES, segment.count - first[v]) : 0;
      position[v] = _mm512_add_epi32(_mm512_set1_epi32((int)(segment.common + first[v])),
                                     _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    }
    full = (int)(segment.common + first[0] + 1);
    limit = (int)(segment.common + first[vectors - 1] + count[vectors - 1]);
  }

  // out [dim / 2, QUERIES]: a query's row in each lane
  void transpose(const Matrix& from, const Segment& segment, int dim, pair* out) const {
    for (int v = 0; v < VECTORS; v++)
      for (int lane = 0; lane < LANES; lane++) {
        pair* column = out + v * LANES + lane;
        if (lane < count[v]) {
          const bf16* row = from.at(segment.start + first[v] + lane, head[v]);
          for (int p = 0; p < dim / 2; p++) std::memcpy(column + p * QUERIES, row + 2 * p, sizeof(pair));
        } else {
          for (int p = 0; p < dim / 2; p++) column[p * QUERIES] = 0;
        }
      }
  }

  // out [QUERIES / 2, dim]: pairs of neighbouring queries
  void pair_up(const Matrix& from, const Segment& segment, int dim, pair* out) const {
    for (int v = 0; v < VECTORS; v++)
      for (int lane = 0; lane < LANES; lane += 2, out += dim) {
        const bf16* rows = from.at(segment.start + first[v] + lane, head[v]);
        for (int n = 0; n < dim; n += LANES) {
          const __m256i none = _mm256_setzero_si256();
          const __m256i even = lane < count[v] ? _mm256_loadu_si256((const __m256i*)(rows + n)) : none;
          const __m256i odd =
              lane + 1 < count[v] ? _mm256_loadu_si256((const __m256i*)(rows + from.token_stride + n)) : none;
          _mm512_storeu_si512(out + n, interleave(_mm512_inserti64x4(_mm512_castsi256_si512(even), odd, 1)));
        }
      }
  }

  // The transposed tile [dim, QUERIES], times a factor per query, into the queries' rows.
  void store(const Matrix& to, const Segment& segment, int dim, const float* tile, const __m512* factors) const {
    alignas(64) pair rows[LANES];
    for (int v = 0; v < vectors; v++)
      for (int n = 0; n < dim; n += 2 * LANES) {
        alignas(64) pair block[LANES][LANES];  // [pair of columns, lane]
        const int pairs = std::min(LANES, (dim - n) / 2);
        for (int p = 0; p < pairs; p++) {
          const float* source = tile + (size_t)(n + 2 * p) * QUERIES + v * LANES;
          const __m512 a = _mm512_mul_ps(_mm512_loadu_ps(source), factors[v]);
          const __m512 b = _mm512_mul_ps(_mm512_loadu_ps(source + QUERIES), factors[v]);
          _mm512_store_si512(block[p], interleave(round_two(a, b)));
        }
        for (int lane = 0; lane < count[v]; lane++) {
          for (int p = 0; p < pairs; p++) rows[p] = block[p][lane];
          std::memcpy(to.at(segment.start + first[v] + lane, head[v]) + n, rows, pairs * sizeof(pair));
        }
      }
  }

  // Statistics of the queries: which = 0 or 1.
  float* statistics(const Job& job, const Segment& segment, int which, int v) const {
    return job.statistics + (which * job.heads + head[v]) * job.tokens + segment.start + first[v];
  }
  __mmask16 mask(int v) const { return (__mmask16)((1u << count[v]) - 1); }
  __mmask16 seen(int key, int v) const { return _mm512_cmple_epi32_mask(_mm512_set1_epi32(key), position[v]); }
};

void forward(const Job& job, const Segment& segment, int64_t kv_head) {
  const int dim = (int)job.head_dim;
  const int64_t group = job.heads / job.kv_heads, columns = (segment.count + LANES - 1) / LANES * group;
  thread_local Packed keys, values;
  keys.load(job.key, segment, kv_head, dim, true, false);
  values.load(job.value, segment, kv_head, dim, false, true);
  thread_local std::vector<pair> queries;
  thread_local std::vector<float> sums;
  queries.resize((size_t)dim / 2 * QUERIES), sums.resize((size_t)dim * QUERIES);
  alignas(64) static thread_local float scores[KEYS * QUERIES];
  alignas(64) static thread_local pair weights[KEYS / 2 * QUERIES];
  const __m512 factor = _mm512_set1_ps(job.scale * LOG2_E);

  for (int64_t at = 0; at < columns; at += VECTORS) {
    const Lanes lanes(segment, kv_head, group, at);
    lanes.transpose(job.query, segment, dim, queries.data());
    __m512 most[VECTORS], total[VECTORS];
    for (int v = 0; v < VECTORS; v++) most[v] = _mm512_set1_ps(-INFINITY), total[v] = _mm512_setzero_ps();
    for (int key = 0; key < lanes.limit; key += KEYS) {
      const int rows = std::min(KEYS, round_up(lanes.limit - key, LANES));
      const pair* key_rows = &keys.rows[(size_t)key * dim / 2];
      multiply(job.tiles, rows, dim / 2, key_rows, dim / 2, queries.data(), QUERIES, QUERIES, scores, QUERIES, false);
      const bool masked = key + rows > lanes.full;
      __m512 highest[VECTORS];
      for (int v = 0; v < VECTORS; v++) highest[v] = most[v];
      for (int row = 0; row < rows; row++)
        for (int v = 0; v < VECTORS; v++) {
          float* place = scores + row * QUERIES + v * LANES;
          __m512 score = _mm512_mul_ps(_mm512_load_ps(place), factor);
          if (masked) score = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), lanes.seen(key + row, v), score);
          _mm512_store_ps(place, score);
          highest[v] = _mm512_max_ps(highest[v], score);
        }
      __m512 shrink[VECTORS];
      for (int v = 0; v < VECTORS; v++) {
        shrink[v] = exp2(_mm512_sub_ps(most[v], highest[v]));
        most[v] = highest[v];
        total[v] = _mm512_mul_ps(total[v], shrink[v]);
      }
      for (int row = 0; row < rows; row += 2)
        for (int v = 0; v < VECTORS; v++) {
          const float* place = scores + row * QUERIES + v * LANES;
          const __m512 a = exp2(_mm512_sub_ps(_mm512_load_ps(place), most[v]));
          const __m512 b = exp2(_mm512_sub_ps(_mm512_load_ps(place + QUERIES), most[v]));
          total[v] = _mm512_add_ps(total[v], _mm512_add_ps(a, b));
          _mm512_store_si512(weights + row / 2 * QUERIES + v * LANES, interleave(round_two(a, b)));
        }
      if (key)
        for (int n = 0; n < dim; n++)
          for (int v = 0; v < VECTORS; v++) {
            float* x = sums.data() + (size_t)n * QUERIES + v * LANES;
            _mm512_storeu_ps(x, _mm512_mul_ps(_mm512_loadu_ps(x), shrink[v]));
          }
      multiply(job.tiles, dim, rows / 2, &values.columns[key / 2], values.length / 2, weights, QUERIES, QUERIES, sums.data(),
               QUERIES, key > 0);
    }
    for (int v = 0; v < VECTORS; v++) {
      total[v] = _mm512_div_ps(_mm512_set1_ps(1.0f), total[v]);
      _mm512_mask_storeu_ps(lanes.statistics(job, segment, 0, v), lanes.mask(v), most[v]);
      _mm512_mask_storeu_ps(lanes.statistics(job, segment, 1, v), lanes.mask(v), total[v]);
    }
    lanes.store(job.output, segment, dim, sums.data(), total);
  }
}

void add_rows(float* to, const Job& job, const Segment& segment, int64_t kv_head, const float* from) {
  const int dim = (int)job.head_dim;
  for (int64_t key = 0; key < segment.common + segment.count; key++) {
    float* row = to + (segment.token(key) * job.kv_heads + kv_head) * dim;
    for (int n = 0; n < dim; n++) row[n] += from[key * dim + n];
  }
}

void backward(const Job& job, const Segment& segment, int64_t kv_head) {
  const int dim = (int)job.head_dim;
  const int64_t group = job.heads / job.kv_heads, columns = (segment.count + LANES - 1) / LANES * group;
  thread_local Packed keys, values;
  keys.load(job.key, segment, kv_head, dim, true, true);
  values.load(job.value, segment, kv_head, dim, true, false);
  thread_local std::vector<pair> buffers;
  thread_local std::vector<float> query_grad, key_grad, value_grad;
  const size_t block = (size_t)dim / 2 * QUERIES;
  buffers.resize(4 * block);
  pair *query = buffers.data(), *grad = query + block, *query_pairs = grad + block, *grad_pairs = query_pairs + block;
  query_grad.resize((size_t)dim * QUERIES);
  key_grad.assign((size_t)keys.length * dim, 0.0f), value_grad.assign((size_t)keys.length * dim, 0.0f);
  alignas(64) static thread_local float scores[KEYS * QUERIES], weight_grads[KEYS * QUERIES];
  alignas(64) static thread_local bf16 weights[KEYS * QUERIES], score_grads[KEYS * QUERIES];
  alignas(64) static thread_local pair score_grad_pairs[KEYS / 2 * QUERIES];
  const __m512 factor = _mm512_set1_ps(job.scale * LOG2_E), scale = _mm512_set1_ps(job.scale);
  const __m512 ones[VECTORS] = {_mm512_set1_ps(1), _mm512_set1_ps(1), _mm512_set1_ps(1), _mm512_set1_ps(1)};

  for (int64_t at = 0; at < columns; at += VECTORS) {
    const Lanes lanes(segment, kv_head, group, at);
    lanes.transpose(job.query, segment, dim, query);
    lanes.transpose(job.output_grad, segment, dim, grad);
    lanes.pair_up(job.query, segment, dim, query_pairs);
    lanes.pair_up(job.output_grad, segment, dim, grad_pairs);
    __m512 most[VECTORS], inverse[VECTORS], mean[VECTORS];  // mean: sum(output * output_grad), of weights' gradients
    for (int v = 0; v < VECTORS; v++) {
      most[v] = _mm512_maskz_loadu_ps(lanes.mask(v), lanes.statistics(job, segment, 0, v));
      inverse[v] = _mm512_maskz_loadu_ps(lanes.mask(v), lanes.statistics(job, segment, 1, v));
      alignas(64) float means[LANES] = {};
      for (int lane = 0; lane < lanes.count[v]; lane++) {
        const int64_t token = segment.start + lanes.first[v] + lane;
        const bf16 *x = job.output.at(token, lanes.head[v]), *y = job.output_grad.at(token, lanes.head[v]);
        __m512 sum = _mm512_setzero_ps();
        for (int n = 0; n < dim; n += 2 * LANES) {
          const __mmask32 mask = dim - n < 2 * LANES ? 0xffff : 0xffffffff;
          sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_maskz_loadu_epi16(mask, x + n),
                                 (__m512bh)_mm512_maskz_loadu_epi16(mask, y + n));
        }
        means[lane] = _mm512_reduce_add_ps(sum);
      }
      mean[v] = _mm512_load_ps(means);
    }
    for (int key = 0; key < lanes.limit; key += KEYS) {
      const int rows = std::min(KEYS, round_up(lanes.limit - key, LANES));
      const size_t first = (size_t)key * dim;
      multiply(job.tiles, rows, dim / 2, &keys.rows[first / 2], dim / 2, query, QUERIES, QUERIES, scores, QUERIES, false);
      multiply(job.tiles, rows, dim / 2, &values.rows[first / 2], dim / 2, grad, QUERIES, QUERIES, weight_grads, QUERIES, false);
      const bool masked = key + rows > lanes.full;
      for (int row = 0; row < rows; row += 2)
        for (int v = 0; v < VECTORS; v++) {
          __m512 weight[2], score_grad[2];
          for (int i = 0; i < 2; i++) {
            const int place = (row + i) * QUERIES + v * LANES;
            const __m512 score = _mm512_load_ps(scores + place);
            weight[i] = _mm512_mul_ps(exp2(_mm512_fmsub_ps(score, factor, most[v])), inverse[v]);
            if (masked) weight[i] = _mm512_maskz_mov_ps(lanes.seen(key + row + i, v), weight[i]);
            const __m512 centred = _mm512_sub_ps(_mm512_load_ps(weight_grads + place), mean[v]);
            score_grad[i] = _mm512_mul_ps(_mm512_mul_ps(weight[i], scale), centred);
          }
          const __m512i w = round_two(weight[0], weight[1]), g = round_two(score_grad[0], score_grad[1]);
          const int place = row * QUERIES + v * LANES;
          _mm256_store_si256((__m256i*)(weights + place), _mm512_castsi512_si256(w));
          _mm256_store_si256((__m256i*)(weights + place + QUERIES), _mm512_extracti64x4_epi64(w, 1));
          _mm256_store_si256((__m256i*)(score_grads + place), _mm512_castsi512_si256(g));
          _mm256_store_si256((__m256i*)(score_grads + place + QUERIES), _mm512_extracti64x4_epi64(g, 1));
          _mm512_store_si512(score_grad_pairs + row / 2 * QUERIES + v * LANES, interleave(g));
        }
      constexpr int PAIRS = QUERIES / 2;
      multiply(job.tiles, rows, PAIRS, (const pair*)weights, PAIRS, grad_pairs, dim, dim, &value_grad[first], dim, true);
      multiply(job.tiles, rows, PAIRS, (const pair*)score_grads, PAIRS, query_pairs, dim, dim, &key_grad[first], dim, true);
      multiply(job.tiles, dim, rows / 2, &keys.columns[key / 2], keys.length / 2, score_grad_pairs, QUERIES, QUERIES,
               query_grad.data(), QUERIES, key > 0);
    }
    lanes.store(job.query_grad, segment, dim, query_grad.data(), ones);
  }
  add_rows(job.key_grad, job, segment, kv_head, key_grad.data());
  add_rows(job.value_grad, job, segment, kv_head, value_grad.data());
}

}  // namespace

extern "C" int prepare_tiles() { return request_tiles(); }

// Forward: fills output and statistics. Backward: query_grad, and adds to key_grad and value_grad.
extern "C" void causal_attention(
    const Job* job, const Segment* segments, int64_t num_segments, int64_t kv_head, int backwards) {
  const Tiles tiles(job->tiles);
  for (int64_t i = 0; i < num_segments; i++)
    if (segments[i].count) backwards ? backward(*job, segments[i], kv_head) : forward(*job, segments[i], kv_head);
}
