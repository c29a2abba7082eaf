// silu(gate) * up and its gradient, each in one pass over memory.

#include "avx512.hpp"

namespace {

__m512 sigmoid(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(one, _mm512_add_ps(one, exp2(_mm512_mul_ps(x, _mm512_set1_ps(-LOG2_E)))));
}

// joined [rows, 2 width] -> output [rows, width]
template <class T>
void forward(const T* joined, T* output, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; row++, joined += 2 * width, output += width)
    for (int64_t n = 0; n < width; n += LANES) {
      const __mmask16 mask = mask_of(width - n);
      const __m512 gate = load(joined + n, mask), up = load(joined + width + n, mask);
      store(output + n, mask, _mm512_mul_ps(_mm512_mul_ps(gate, sigmoid(gate)), up));
    }
}

// joined, joined_grad [rows, 2 width]; grad [rows, width]
template <class T>
void backward(const T* joined, const T* grad, T* joined_grad, int64_t rows, int64_t width) {
  const __m512 one = _mm512_set1_ps(1.0f);
  for (int64_t row = 0; row < rows; row++, joined += 2 * width, joined_grad += 2 * width, grad += width)
    for (int64_t n = 0; n < width; n += LANES) {
      const __mmask16 mask = mask_of(width - n);
      const __m512 gate = load(joined + n, mask), up = load(joined + width + n, mask), by_output = load(grad + n, mask);
      const __m512 share = sigmoid(gate), silu = _mm512_mul_ps(gate, share);
      // silu' = share + silu (1 - share)
      const __m512 slope = _mm512_fmadd_ps(silu, _mm512_sub_ps(one, share), share);
      store(joined_grad + n, mask, _mm512_mul_ps(_mm512_mul_ps(by_output, up), slope));
      store(joined_grad + width + n, mask, _mm512_mul_ps(by_output, silu));
    }
}

}  // namespace

extern "C" {

void gated_silu_float(const float* joined, float* output, int64_t rows, int64_t width) {
  forward(joined, output, rows, width);
}
void gated_silu_bfloat16(const bf16* joined, bf16* output, int64_t rows, int64_t width) {
  forward(joined, output, rows, width);
}
void gated_silu_grad_float(const float* joined, const float* grad, float* joined_grad, int64_t rows, int64_t width) {
  backward(joined, grad, joined_grad, rows, width);
}
void gated_silu_grad_bfloat16(const bf16* joined, const bf16* grad, bf16* joined_grad, int64_t rows, int64_t width) {
  backward(joined, grad, joined_grad, rows, width);
}
}
