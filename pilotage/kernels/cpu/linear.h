// A few rows times a weight matrix as Hugging Face stores it, [out, in]: what decoding spends its time on.
//
// The weight is read once, in order, by all threads; the rows of x stay in the near caches. Sums are fp32.
#pragma once

#include <algorithm>
#include <type_traits>

#include "vec.h"

namespace pilotage {

constexpr int kWeightRowsAtATime = 128;  // what a thread takes at a time; every tile's row count divides it

// Elements ahead in the weight at least, fetched into the second-level cache in the order in which they lie there: rows read
// side by side do not look like a stream to the processor.
constexpr int64_t kPrefetch = 8192;

constexpr int kTileRows = 4;             // rows of x, and of the weight, whose sixteen sums are in registers
constexpr int64_t kColumnsInRun = 2048;  // of longer rows what is needed again would be out of the near caches by then
constexpr int64_t kMostRowsOfX = 96;     // of more, panels (gemm.h) are as fast

// Writes sixteen sums: of MR rows of x and `rows_w` <= 16 / MR of the weight.
template <typename T, int MR>
inline void store_tile(f32x16* sum, const T* bias, T* out, int rows_w, int64_t out_stride) {
  constexpr int NR = MR == 3 ? 4 : 16 / MR;
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

// out[m, n] for MR <= 3 rows of x and `rows_w` <= 16 / MR rows of the weight: sixteen sums, reduced together. Each sum adds
// its products in the same order whatever MR is, and as `add_run` does. Of MR = 3 four lines from `ahead` on are fetched
// with every 32 columns.
template <typename T, int MR>
inline void linear_tile(const T* x, int64_t x_stride, const T* w, const T* bias, T* out, int rows_w, int64_t k, int64_t out_stride, const T* ahead = nullptr) {
  constexpr int NR = MR == 3 ? 4 : 16 / MR;
  f32x16 sum[16] = {};
  const T* weight[NR];
  for (int n = 0; n < NR; ++n) weight[n] = w + std::min(n, rows_w - 1) * k;
  const int64_t whole = k / 32 * 32;
  const auto step = [&](int n, int64_t i) {
    const Pack<T> part = Pack<T>::load(weight[n] + i);
    for (int m = 0; m < MR; ++m) sum[m * NR + n] = dot(sum[m * NR + n], part, Pack<T>::load(x + m * x_stride + i));
  };
  if constexpr (MR <= 2) {  // one row after another: a stream that the processor sees by itself
    for (int n = 0; n < NR; ++n) {
      for (int64_t i = 0; i < whole; i += 32) step(n, i);
    }
  } else {  // all sums at once, in registers
    for (int64_t i = 0; i < whole; i += 32) {
      for (int n = 0; n < NR; ++n) {
        __builtin_prefetch(ahead + i * NR + n * 32, 0, 2);
        step(n, i);
      }
    }
  }
  if (whole < k) {
    for (int n = 0; n < NR; ++n) {
      const Pack<T> part = load_first(weight[n] + whole, int(k - whole));
      for (int m = 0; m < MR; ++m) {
        sum[m * NR + n] = dot(sum[m * NR + n], part, Pack<T>::load(x + m * x_stride + whole));
      }
    }
  }
  store_tile<T, MR>(sum, bias, out, rows_w, out_stride);
}

// A run of columns of a tile: four rows of x, four of the weight. Between runs its sixteen sums lie in `kept`.
template <typename T>
struct Run {
  const T* weight[kTileRows];
  int64_t columns;  // a multiple of 32
  bool first, last;
};

// With every 32 columns LINES lines from `ahead` on are fetched. The sums are touched one by one and by nothing that is called:
// the compiler would take them out of their registers.
template <typename T, int LINES>
inline void add_run(const T* x, int64_t x_stride, const Run<T>& run, f32x16* kept, const T* bias, T* out, int rows_w, int64_t out_stride, const T* ahead) {
  constexpr int kSums = kTileRows * kTileRows;
  f32x16 sum[kSums];
  for (int i = 0; i < kSums; ++i) sum[i] = run.first ? f32x16{} : kept[i];
  for (int64_t i = 0; i < run.columns; i += 32) {
    for (int n = 0; n < kTileRows; ++n) {
      if (n < LINES) __builtin_prefetch(ahead + i * LINES + n * 32, 0, 2);
      const Pack<T> part = Pack<T>::load(run.weight[n] + i);
      for (int m = 0; m < kTileRows; ++m) sum[m * kTileRows + n] = dot(sum[m * kTileRows + n], part, Pack<T>::load(x + m * x_stride + i));
    }
  }
  if (run.last) {
    store_tile<T, kTileRows>(sum, bias, out, rows_w, out_stride);
  } else {
    for (int i = 0; i < kSums; ++i) kept[i] = sum[i];
  }
}

// Four rows of the weight with 4 to 96 rows of x. The memory works while the sums do: what is fetched from `ahead` on, as much
// as these rows are, is divided among the passes over them.
template <typename T>
inline void linear_group(const T* x, int64_t x_stride, const T* w, const T* bias, T* out, int64_t m, int rows_w, int64_t k, int64_t out_stride, const T* ahead) {
  alignas(64) f32x16 kept[kMostRowsOfX / kTileRows][kTileRows * kTileRows];
  const int passes = int((m + kTileRows - 1) / kTileRows);
  const auto add = [&](const Run<T>& run, int64_t i) {
    for (int pass = 0; pass < passes; ++pass) {
      // The last rows of x may overlap those before; what is computed twice comes out the same.
      const int64_t row = std::min<int64_t>(kTileRows * pass, m - kTileRows);
      const int lines = (pass + 1) * kTileRows / passes - pass * kTileRows / passes;
      const auto part = [&](auto fetched) {
        add_run<T, decltype(fetched)::value>(x + row * x_stride + i, x_stride, run, kept[pass], bias, out + row * out_stride, rows_w, out_stride, ahead);
      };
      switch (lines) {
        case 4: part(std::integral_constant<int, 4>{}); break;
        case 2: part(std::integral_constant<int, 2>{}); break;
        case 1: part(std::integral_constant<int, 1>{}); break;
        default: part(std::integral_constant<int, 0>{});
      }
      ahead += lines * run.columns;
    }
  };
  const auto row_of_weight = [&](int n) { return w + std::min(n, rows_w - 1) * k; };
  const int64_t whole = k / 32 * 32;
  for (int64_t i = 0; i < whole; i += kColumnsInRun) {
    Run<T> run{{}, std::min(kColumnsInRun, whole - i), i == 0, whole == k && i + kColumnsInRun >= k};
    for (int n = 0; n < kTileRows; ++n) run.weight[n] = row_of_weight(n) + i;
    add(run, i);
  }
  if (whole < k) {  // a run of its own, with zeros behind it
    alignas(64) T rest[kTileRows][32] = {};
    Run<T> run{{}, 32, whole == 0, true};
    for (int n = 0; n < kTileRows; ++n) {
      std::memcpy(rest[n], row_of_weight(n) + whole, (k - whole) * sizeof(T));
      run.weight[n] = rest[n];
    }
    add(run, whole);
  }
}

// `rows_w` rows of the weight, a few at a time, with all rows of x, at most 96: what a weight's row is worth is done while
// it is in the near caches. `next` follows the block in time; it is fetched at the block's end.
template <typename T>
void linear_rows(const T* x, int64_t x_stride, const T* w, const T* bias, T* out, int64_t m, int64_t rows_w, int64_t k, int64_t out_stride, const T* next) {
  const int64_t together = m == 1 ? 16 : m == 2 ? 8 : kTileRows;
  for (int64_t n = 0; n < rows_w; n += together) {
    const int count = int(std::min(together, rows_w - n));
    const T* b = bias ? bias + n : nullptr;
    const int64_t at = n * k + std::max(kPrefetch, together * k);
    const T* ahead = at < rows_w * k || !next ? w + at : next + (at - rows_w * k);
    switch (m) {
      case 1: linear_tile<T, 1>(x, x_stride, w + n * k, b, out + n, count, k, out_stride); break;
      case 2: linear_tile<T, 2>(x, x_stride, w + n * k, b, out + n, count, k, out_stride); break;
      case 3: linear_tile<T, 3>(x, x_stride, w + n * k, b, out + n, count, k, out_stride, ahead); break;
      default: linear_group<T>(x, x_stride, w + n * k, b, out + n, m, count, k, out_stride, ahead);
    }
  }
}

// One block of the weight's rows. The results are collected before they are written: rows of `out` often lie a multiple
// of the cache's period apart, and would throw each other out.
template <typename T>
void linear_block(const T* x, const T* w, const T* bias, T* out, int64_t m, int64_t rows_w, int64_t k, int64_t x_stride, int64_t out_stride,
                  const T* next = nullptr) {
  alignas(64) T kept[kMostRowsOfX * kWeightRowsAtATime];
  for (int64_t done = 0; done < m; done += kMostRowsOfX) {
    const int64_t rows = std::min(kMostRowsOfX, m - done);
    linear_rows<T>(x + done * x_stride, x_stride, w, bias, kept, rows, rows_w, k, kWeightRowsAtATime, next);
    for (int64_t i = 0; i < rows; ++i) {
      std::memcpy(out + (done + i) * out_stride, kept + i * kWeightRowsAtATime, rows_w * sizeof(T));
    }
  }
}

}  // namespace pilotage
