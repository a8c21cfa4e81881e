// A few rows times a weight matrix as Hugging Face stores it, [out, in]: what decoding spends its time on.
//
// The weight is read once, in order, by all threads; the rows of x stay in the first-level cache. Sums are fp32.
#pragma once

#include <algorithm>

#include "vec.h"

namespace pilotage {

constexpr int kWeightRowsAtATime = 128;  // what a thread takes at a time; every tile's row count divides it

constexpr int64_t kPrefetch = 4096;  // elements ahead in the weight: far enough for memory, near enough for the cache

// out[m, n] for MR rows of x and `rows_w` <= 16 / MR rows of the weight: sixteen sums, reduced together. Each sum adds
// its products in the same order whatever MR is.
template <typename T, int MR>
inline void linear_tile(const T* x, const T* w, const T* bias, T* out, int rows_w, int64_t k, int64_t k_padded, int64_t out_stride) {
  constexpr int NR = 16 / MR;
  f32x16 sum[16] = {};
  const T* weight[NR];
  for (int n = 0; n < NR; ++n) weight[n] = w + std::min(n, rows_w - 1) * k;
  const int64_t whole = k / 32 * 32;
  const auto step = [&](int n, int64_t i) {
    __builtin_prefetch(weight[n] + i + kPrefetch);
    const Pack<T> part = Pack<T>::load(weight[n] + i);
    for (int m = 0; m < MR; ++m) sum[m * NR + n] = dot(sum[m * NR + n], part, Pack<T>::load(x + m * k_padded + i));
  };
  if constexpr (MR <= 2) {  // bound by memory: one row after another is the order that it likes
    for (int n = 0; n < NR; ++n) {
      for (int64_t i = 0; i < whole; i += 32) step(n, i);
    }
  } else {  // bound by arithmetic: all sums at once, in registers
    for (int64_t i = 0; i < whole; i += 32) {
      for (int n = 0; n < NR; ++n) step(n, i);
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
  f32x16 total = sum_lanes_of_16(sum);
  if (bias) {
    for (int m = 0; m < MR; ++m) {
      for (int n = 0; n < std::min(NR, rows_w); ++n) total[m * NR + n] += to_float(bias[n]);
    }
  }
  alignas(64) T rounded[16];
  store16(rounded, total);
  if (rows_w >= NR) {
    for (int m = 0; m < MR; ++m) std::memcpy(out + m * out_stride, rounded + m * NR, NR * sizeof(T));
  } else {
    for (int m = 0; m < MR; ++m) std::memcpy(out + m * out_stride, rounded + m * NR, rows_w * sizeof(T));
  }
}

template <typename T, int MR>
void linear_rows(const T* x, const T* w, const T* bias, T* out, int64_t rows_w, int64_t k, int64_t k_padded, int64_t out_stride) {
  constexpr int NR = 16 / MR;
  for (int64_t n = 0; n < rows_w; n += NR) {
    linear_tile<T, MR>(x, w + n * k, bias ? bias + n : nullptr, out + n, int(std::min<int64_t>(NR, rows_w - n)), k, k_padded, out_stride);
  }
}

// One block of the weight's rows. The results are collected before they are written: rows of `out` often lie a multiple
// of the cache's period apart, and would throw each other out.
template <typename T>
void linear_block(const T* x, const T* w, const T* bias, T* out, int64_t m, int64_t rows_w, int64_t k, int64_t k_padded, int64_t out_stride) {
  constexpr int kTogether = 8;
  alignas(64) T kept[kTogether * kWeightRowsAtATime];
  for (int64_t done = 0; done < m;) {
    const int64_t left = m - done, together = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
    const T* rows = x + done * k_padded;
    switch (together) {
      case 8: linear_rows<T, 8>(rows, w, bias, kept, rows_w, k, k_padded, kWeightRowsAtATime); break;
      case 4: linear_rows<T, 4>(rows, w, bias, kept, rows_w, k, k_padded, kWeightRowsAtATime); break;
      case 2: linear_rows<T, 2>(rows, w, bias, kept, rows_w, k, k_padded, kWeightRowsAtATime); break;
      default: linear_rows<T, 1>(rows, w, bias, kept, rows_w, k, k_padded, kWeightRowsAtATime);
    }
    for (int64_t i = 0; i < together; ++i) {
      std::memcpy(out + (done + i) * out_stride, kept + i * kWeightRowsAtATime, rows_w * sizeof(T));
    }
    done += together;
  }
}

}  // namespace pilotage
