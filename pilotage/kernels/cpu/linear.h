// A few rows times a weight matrix as Hugging Face stores it, [out, in]: what decoding spends its time on.
//
// The weight is read once, in order, by all threads; the rows of x stay in the first-level cache. Sums are fp32.
#pragma once

#include <algorithm>
#include <type_traits>

#include "vec.h"

namespace pilotage {

constexpr int kWeightRowsAtATime = 128;  // what a thread takes at a time; every tile's row count divides it

// Elements ahead in the weight, fetched into the second-level cache in the order in which they lie there: rows read side by
// side do not look like a stream to the processor.
constexpr int64_t kPrefetch = 8192;

// out[m, n] for MR rows of x and `rows_w` <= 16 / MR rows of the weight: sixteen sums, reduced together. Each sum adds
// its products in the same order whatever MR is. With every 32 columns LINES lines from `ahead` on are fetched.
template <typename T, int MR, int LINES = 0>
inline void linear_tile(const T* x, const T* w, const T* bias, T* out, int rows_w, int64_t k, int64_t k_padded, int64_t out_stride, const T* ahead = nullptr) {
  constexpr int NR = MR == 3 ? 4 : 16 / MR;
  f32x16 sum[16] = {};
  const T* weight[NR];
  for (int n = 0; n < NR; ++n) weight[n] = w + std::min(n, rows_w - 1) * k;
  const int64_t whole = k / 32 * 32;
  const auto step = [&](int n, int64_t i) {
    const Pack<T> part = Pack<T>::load(weight[n] + i);
    for (int m = 0; m < MR; ++m) sum[m * NR + n] = dot(sum[m * NR + n], part, Pack<T>::load(x + m * k_padded + i));
  };
  if constexpr (MR <= 2) {  // one row after another: a stream that the processor sees by itself
    for (int n = 0; n < NR; ++n) {
      for (int64_t i = 0; i < whole; i += 32) step(n, i);
    }
  } else {  // all sums at once, in registers
    for (int64_t i = 0; i < whole; i += 32) {
      for (int n = 0; n < NR; ++n) {
        if (n < LINES) __builtin_prefetch(ahead + i * LINES + n * 32, 0, 2);
        step(n, i);
      }
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

// `rows_w` rows of the weight, a few at a time, with all rows of x, at most 16: what a weight's row is worth is done while
// it is in the first-level cache. `next` follows the block in time; it is fetched at the block's end.
template <typename T>
void linear_rows(const T* x, const T* w, const T* bias, T* out, int64_t m, int64_t rows_w, int64_t k, int64_t k_padded, int64_t out_stride, const T* next) {
  const int64_t together = m == 1 ? 16 : m == 2 ? 8 : 4;
  for (int64_t n = 0; n < rows_w; n += together) {
    const int count = int(std::min(together, rows_w - n));
    const T* b = bias ? bias + n : nullptr;
    if (m == 1) {
      linear_tile<T, 1>(x, w + n * k, b, out + n, count, k, k_padded, out_stride);
    } else if (m == 2) {
      linear_tile<T, 2>(x, w + n * k, b, out + n, count, k, k_padded, out_stride);
    } else {
      const int64_t at = n * k + kPrefetch;
      const T* ahead = at < rows_w * k || !next ? w + at : next + (at - rows_w * k);
      if (m == 3) {
        linear_tile<T, 3, 4>(x, w + n * k, b, out + n, count, k, k_padded, out_stride, ahead);
        continue;
      }
      // The memory works while the sums do: what is fetched ahead is divided among the passes over these rows.
      const int64_t passes = (m + 3) / 4, lines = passes == 1 ? 4 : passes == 2 ? 2 : 1;
      for (int64_t pass = 0; pass < passes; ++pass) {
        // The last four rows may overlap those before; what is computed twice comes out the same.
        const int64_t first = std::min(4 * pass, m - 4);
        const T* part = ahead + pass * lines * k;
        const auto tile = [&](auto fetched) {
          linear_tile<T, 4, decltype(fetched)::value>(x + first * k_padded, w + n * k, b, out + first * out_stride + n, count, k, k_padded, out_stride, part);
        };
        switch (lines) {
          case 4: tile(std::integral_constant<int, 4>{}); break;
          case 2: tile(std::integral_constant<int, 2>{}); break;
          default: tile(std::integral_constant<int, 1>{});
        }
      }
    }
  }
}

// One block of the weight's rows. The results are collected before they are written: rows of `out` often lie a multiple
// of the cache's period apart, and would throw each other out.
template <typename T>
void linear_block(const T* x, const T* w, const T* bias, T* out, int64_t m, int64_t rows_w, int64_t k, int64_t k_padded, int64_t out_stride,
                  const T* next = nullptr) {
  constexpr int64_t kTogether = 16;
  alignas(64) T kept[kTogether * kWeightRowsAtATime];
  for (int64_t done = 0; done < m; done += kTogether) {
    const int64_t rows = std::min(kTogether, m - done);
    linear_rows<T>(x + done * k_padded, w, bias, kept, rows, rows_w, k, k_padded, kWeightRowsAtATime, next);
    for (int64_t i = 0; i < rows; ++i) {
      std::memcpy(out + (done + i) * out_stride, kept + i * kWeightRowsAtATime, rows_w * sizeof(T));
    }
  }
}

}  // namespace pilotage
