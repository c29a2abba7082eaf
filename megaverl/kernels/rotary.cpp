// Rotary embeddings, and their gradients, in one pass over memory.

#include "avx512.hpp"

namespace {

struct Job {
  int64_t tokens, per_angle, heads, dim, rotated;  // per_angle: neighbouring tokens of one position; rotated <= dim
  int64_t token_stride, head_stride;               // of the input; the output has no gaps
};

// Turns (a, b), the halves of what is rotated: (a cos - b sin, b cos + a sin); or back, which is its gradient.
// cosines, sines [tokens / per_angle, rotated]: of the first half, and of the second.
template <class T>
void rotate(const Job& job, const T* input, const T* cosines, const T* sines, T* output, bool back) {
  const int64_t half = job.rotated / 2;
  for (int64_t token = 0; token < job.tokens; token++) {
    const T *cosine = cosines + token / job.per_angle * job.rotated, *sine = sines + (cosine - cosines);
    for (int64_t head = 0; head < job.heads; head++, output += job.dim) {
      const T* from = input + token * job.token_stride + head * job.head_stride;
      for (int64_t n = 0; n < half; n += LANES) {
        const __mmask16 mask = mask_of(half - n);
        const __m512 a = load(from + n, mask), b = load(from + half + n, mask);
        const __m512 cos_a = load(cosine + n, mask), cos_b = load(cosine + half + n, mask);
        const __m512 sin_a = load(sine + n, mask), sin_b = load(sine + half + n, mask);
        const __m512 turned_a = _mm512_mul_ps(b, back ? sin_b : sin_a), turned_b = _mm512_mul_ps(a, back ? sin_a : sin_b);
        store(output + n, mask, back ? _mm512_fmadd_ps(a, cos_a, turned_a) : _mm512_fmsub_ps(a, cos_a, turned_a));
        store(output + half + n, mask, back ? _mm512_fmsub_ps(b, cos_b, turned_b) : _mm512_fmadd_ps(b, cos_b, turned_b));
      }
      for (int64_t n = job.rotated; n < job.dim; n++) output[n] = from[n];
    }
  }
}

}  // namespace

extern "C" {

void rotate_float(const Job* job, const float* input, const float* cosines, const float* sines, float* output, int back) {
  rotate(*job, input, cosines, sines, output, back);
}
void rotate_bfloat16(const Job* job, const bf16* input, const bf16* cosines, const bf16* sines, bf16* output, int back) {
  rotate(*job, input, cosines, sines, output, back);
}
}
