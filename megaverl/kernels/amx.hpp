// Products of bf16 matrices on AMX's tiles: sixteen rows of 64 bytes each, on processors that have them.

#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "avx512.hpp"

constexpr int TILE_PAIRS = 16;  // of a tile's inner dimension, two bf16 each

// Have Linux let this process use tiles; whether it does.
inline bool request_tiles() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

#define WITH_TILES __attribute__((target("amx-tile,amx-bf16")))

// While one lives, if wanted, the thread's tiles have sixteen rows of 64 bytes; then what another library gave them.
class Tiles {
 public:
  WITH_TILES explicit Tiles(bool wanted) : wanted(wanted) {
    if (!wanted) return;
    _tile_storeconfig((void*)before);
    alignas(64) static constexpr Config ours;  // in memory: a compiler may not see that all of it is read
    _tile_loadconfig(&ours);
  }
  WITH_TILES ~Tiles() {
    if (!wanted) return;
    if (before[0])
      _tile_loadconfig((void*)before);
    else
      _tile_release();
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

 private:
  struct Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  const bool wanted;
  alignas(64) volatile char before[sizeof(Config)];
};

// c [rows, columns] (+)= a [rows, pairs] b [pairs, columns]; rows and columns multiples of 16, pairs of TILE_PAIRS.
WITH_TILES inline void multiply_tiles(int rows, int pairs, const uint32_t* a, int lda, const uint32_t* b, int ldb,
                                      int columns, float* c, int ldc, bool add) {
  for (int i = 0; i < rows; i += 2 * LANES)
    for (int j = 0; j < columns; j += 2 * LANES) {
      const bool low = i + LANES < rows, right = j + LANES < columns;  // two by two tiles, or what is left
      float *at = c + (size_t)i * ldc + j, *below = at + (size_t)LANES * ldc;
      if (add) {
        _tile_loadd(0, at, ldc * 4);
        if (right) _tile_loadd(1, at + LANES, ldc * 4);
        if (low) _tile_loadd(2, below, ldc * 4);
        if (low && right) _tile_loadd(3, below + LANES, ldc * 4);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int p = 0; p < pairs; p += TILE_PAIRS) {
        const uint32_t *left = a + (size_t)i * lda + p, *top = b + (size_t)p * ldb + j;
        _tile_loadd(4, left, lda * 4);
        _tile_loadd(6, top, ldb * 4);
        _tile_dpbf16ps(0, 4, 6);
        if (right) {
          _tile_loadd(7, top + LANES, ldb * 4);
          _tile_dpbf16ps(1, 4, 7);
        }
        if (low) {
          _tile_loadd(5, left + (size_t)LANES * lda, lda * 4);
          _tile_dpbf16ps(2, 5, 6);
          if (right) _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, at, ldc * 4);
      if (right) _tile_stored(1, at + LANES, ldc * 4);
      if (low) _tile_stored(2, below, ldc * 4);
      if (low && right) _tile_stored(3, below + LANES, ldc * 4);
    }
}
