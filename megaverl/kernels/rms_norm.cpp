// Root-mean-square norms of rows, and their gradients, each in one pass over memory.

#include <cmath>

#include "avx512.hpp"

namespace {

// y = x weight / rms(x), and 1 / rms of each row; all without gaps but x, whose rows are `stride` apart
template <class T>
void forward(const T* x, const float* weight, T* y, float* inverses, int64_t rows, int64_t width, int64_t stride,
             float eps) {
  for (int64_t row = 0; row < rows; row++, x += stride, y += width) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t n = 0; n < width; n += LANES) {
      const __m512 value = load(x + n, mask_of(width - n));
      squares = _mm512_fmadd_ps(value, value, squares);
    }
    const float inverse = 1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / (float)width + eps);
    inverses[row] = inverse;
    for (int64_t n = 0; n < width; n += LANES) {
      const __mmask16 mask = mask_of(width - n);
      const __m512 normed = _mm512_mul_ps(load(x + n, mask), _mm512_set1_ps(inverse));
      store(y + n, mask, _mm512_mul_ps(normed, load(weight + n, mask)));
    }
  }
}

// Of one row, with n = x / rms and h = grad * weight: (h - n mean(h n)) / rms; weight_grad += grad * n.
template <class T>
void backward(const T* x, const float* weight, const float* inverses, const T* grad, T* x_grad, float* weight_grad,
              int64_t rows, int64_t width, int64_t stride) {
  for (int64_t row = 0; row < rows; row++, x += stride, grad += width, x_grad += width) {
    const __m512 inverse = _mm512_set1_ps(inverses[row]);
    __m512 products = _mm512_setzero_ps();
    for (int64_t n = 0; n < width; n += LANES) {
      const __mmask16 mask = mask_of(width - n);
      const __m512 product = _mm512_mul_ps(load(grad + n, mask), _mm512_mul_ps(load(x + n, mask), inverse));
      products = _mm512_fmadd_ps(product, load(weight + n, mask), products);
      store(weight_grad + n, mask, _mm512_add_ps(load(weight_grad + n, mask), product));
    }
    const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(products) / (float)width);
    for (int64_t n = 0; n < width; n += LANES) {
      const __mmask16 mask = mask_of(width - n);
      const __m512 normed = _mm512_mul_ps(load(x + n, mask), inverse);
      const __m512 weighted = _mm512_mul_ps(load(grad + n, mask), load(weight + n, mask));
      store(x_grad + n, mask, _mm512_mul_ps(_mm512_fnmadd_ps(normed, mean, weighted), inverse));
    }
  }
}

}  // namespace

extern "C" {

void rms_norm_float(const float* x, const float* weight, float* y, float* inverses, int64_t rows, int64_t width,
                    int64_t stride, float eps) {
  forward(x, weight, y, inverses, rows, width, stride, eps);
}
void rms_norm_bfloat16(const bf16* x, const float* weight, bf16* y, float* inverses, int64_t rows, int64_t width,
                       int64_t stride, float eps) {
  forward(x, weight, y, inverses, rows, width, stride, eps);
}
void rms_norm_grad_float(const float* x, const float* weight, const float* inverses, const float* grad, float* x_grad,
                         float* weight_grad, int64_t rows, int64_t width, int64_t stride) {
  backward(x, weight, inverses, grad, x_grad, weight_grad, rows, width, stride);
}
void rms_norm_grad_bfloat16(const bf16* x, const float* weight, const float* inverses, const bf16* grad, bf16* x_grad,
                            float* weight_grad, int64_t rows, int64_t width, int64_t stride) {
  backward(x, weight, inverses, grad, x_grad, weight_grad, rows, width, stride);
}
}
