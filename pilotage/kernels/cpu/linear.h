// A few rows times a weight matrix as Hugging Face stores it, [out, in]: what decoding spends its time on.
//
// The weight is read once, in order, by all threads; the rows of x stay in the first-level cache. Sums are fp32.
#pragma once

#include <algorithm>
#include <vector>

#include "vec.h"

namespace pilotage {

constexpr int kWeightRowsAtATime = 64;  // what a thread takes at a time; every tile's row count divides it

// out[m, n] for MR rows of x and `rows_w` <= 16 / MR rows of the weight: sixteen sums, reduced together.
template <typename T, int MR>
inline void linear_tile(const T* x, const T* w, const T* bias, T* out, int rows_w, int64_t k, int64_t k_padded, int64_t out_stride) {
  constexpr int NR = 16 / MR;
  f32x16 sum[16] = {};
  const T* weight[NR];
  for (int n = 0; n < NR; ++n) weight[n] = w + std::min(n, rows_w - 1) * k;
  const int64_t whole = k / 32 * 32;
  for (int64_t i = 0; i < whole; i += 32) {
    Pack<T> part[NR];
    for (int n = 0; n < NR; ++n) {
      __builtin_prefetch(weight[n] + i + NR * k);
      part[n] = Pack<T>::load(weight[n] + i);
    }
    for (int m = 0; m < MR; ++m) {
      const Pack<T> row = Pack<T>::load(x + m * k_padded + i);
      for (int n = 0; n < NR; ++n) sum[m * NR + n] = dot(sum[m * NR + n], part[n], row);
    }
  }
  if (whole < k) {
    for (int n = 0; n < NR; ++n) {
      const Pack<T> part = load_first(weight[n] + whole, int(k - whole));
      for (int m = 0; m < MR; ++m) {
        sum[m * NR + n] = dot(sum[m * NR + n], part, Pack<T>::load(x + m * k_padded + whole));
      }
    }
  }
  const f32x16 total = sum_lanes_of_16(sum);
  for (int m = 0; m < MR; ++m) {
    for (int n = 0; n < std::min(NR, rows_w); ++n) {
      from_float(total[m * NR + n] + (bias ? to_float(bias[n]) : 0.0f), out[m * out_stride + n]);
    }
  }
}

template <typename T, int MR>
void linear_rows(const T* x, const T* w, const T* bias, T* out, int64_t rows_w, int64_t k, int64_t k_padded, int64_t out_stride) {
  constexpr int NR = 16 / MR;
  for (int64_t n = 0; n < rows_w; n += NR) {
    linear_tile<T, MR>(x, w + n * k, bias ? bias + n : nullptr, out + n, int(std::min<int64_t>(NR, rows_w - n)), k, k_padded, out_stride);
  }
}

template <typename T>
void linear_block(const T* x, const T* w, const T* bias, T* out, int64_t m, int64_t rows_w, int64_t k, int64_t k_padded, int64_t out_stride) {
  int64_t i = 0;
  for (; m - i >= 8; i += 8) linear_rows<T, 8>(x + i * k_padded, w, bias, out + i * out_stride, rows_w, k, k_padded, out_stride);
  if (m - i >= 4) {
    linear_rows<T, 4>(x + i * k_padded, w, bias, out + i * out_stride, rows_w, k, k_padded, out_stride);
    i += 4;
  }
  if (m - i >= 2) {
    linear_rows<T, 2>(x + i * k_padded, w, bias, out + i * out_stride, rows_w, k, k_padded, out_stride);
    i += 2;
  }
  if (m - i >= 1) linear_rows<T, 1>(x + i * k_padded, w, bias, out + i * out_stride, rows_w, k, k_padded, out_stride);
}

}  // namespace pilotage
