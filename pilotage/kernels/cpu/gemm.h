// Rows times a weight matrix as Hugging Face stores it, [out, in], from a hundred rows to thousands: what prefill spends its
// time on.
//
// A thread takes 64 rows of the weight and lays them out as a panel in its second-level cache, pairs of k of the 64 side by
// side. The panel then meets all rows of x, six at a time: 24 sums in registers, each pair of x broadcast. Laying out costs
// as much as five rows of x, so it needs no memory beside the weight and is never stale. Each sum adds its products in
// the order of k, whatever the number of rows.
#pragma once

#include <algorithm>
#include <memory>

#include "vec.h"

namespace pilotage {

constexpr int kPanelRows = 64;     // rows of the weight in a panel
constexpr int kRowsAtATime = 6;    // rows of x that meet a panel together
constexpr int64_t kPanelK = 2048;  // k in a panel: 256 KiB; the sums of a longer k are kept in between

// Pairs of k of sixteen rows, side by side.
  inline void transpose16(u32x16* line) {
#if defined(__AVX512F__)
    __m512i a[16], b[16];
    for (int i = 0; i < 8; ++i) {
      a[2 * i] = _mm512_unpacklo_epi32((__m512i)line[2 * i], (__m512i)line[2 * i + 1]);
      a[2 * i + 1] = _mm512_unpackhi_epi32((__m512i)line[2 * i], (__m512i)line[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 2; ++j) {
        b[4 * i + 2 * j] = _mm512_unpacklo_epi64(a[4 * i + j], a[4 * i + 2 + j]);
        b[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(a[4 * i + j], a[4 * i + 2 + j]);
      }
    }
    for (int j = 0; j < 4; ++j) {  // b[4 i + j]: in each quarter q, column 4 q + j of lines 4 i .. 4 i + 3
      const __m512i low0 = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x88), high0 = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xdd);
      const __m512i low1 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88), high1 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xdd);
      line[j] = (u32x16)_mm512_shuffle_i32x4(low0, low1, 0x88);
      line[8 + j] = (u32x16)_mm512_shuffle_i32x4(low0, low1, 0xdd);
      line[4 + j] = (u32x16)_mm512_shuffle_i32x4(high0, high1, 0x88);
      line[12 + j] = (u32x16)_mm512_shuffle_i32x4(high0, high1, 0xdd);
    }
#else
    u32x16 out[16];
    for (int i = 0; i < 16; ++i) {
      for (int j = 0; j < 16; ++j) out[j][i] = line[i][j];
    }
    std::copy(out, out + 16, line);
#endif
  }

// A panel: [k / 2][64] pairs.
struct Panel {
  static constexpr int64_t kAhead = 8192, kAheadInRow = 256;  // elements, fetched before they are needed

  static constexpr int64_t size(int64_t k) { return (k + 31) / 32 * 32 * kPanelRows; }

  // Lays out columns [0, k) of `rows` <= 64 rows that are `stride` apart; what is missing up to 64 rows and a multiple of
  // 32 columns becomes zero.
  static void lay_out(const bf16* w, int64_t stride, int64_t rows, int64_t k, bf16* panel) {
    uint32_t* to = reinterpret_cast<uint32_t*>(panel);
    // Fetched in the order of memory where that is possible: rows read side by side do not look like a stream to the
    // processor.
    const bf16* ahead = w + kAhead;
    for (int64_t group = 0; group < kPanelRows; group += 16) {
      const int64_t here = std::clamp<int64_t>(rows - group, 0, 16);
      const bf16* from = w + group * stride;
      for (int64_t i = 0; i < k; i += 32) {
        const int columns = int(std::min<int64_t>(32, k - i));
        u32x16 line[16] = {};
        if (here == 16 && columns == 32) {
          for (int r = 0; r < 16; ++r) {
            __builtin_prefetch(stride == k ? ahead : from + r * stride + i + kAheadInRow, 0, 2);
            ahead += 32;
            line[r] = Pack<bf16>::load(from + r * stride + i).bits;
          }
        } else {
          for (int64_t r = 0; r < here; ++r) line[r] = load_first(from + r * stride + i, columns).bits;
        }
        transpose16(line);
        for (int pair = 0; pair < 16; ++pair) std::memcpy(to + (i / 2 + pair) * kPanelRows + group, &line[pair], 64);
      }
    }
  }
};

// A panel of `n` <= 64 rows wherever they lie.
inline void lay_out_rows(const bf16* const* rows, int n, int64_t k, bf16* panel) {
  uint32_t* to = reinterpret_cast<uint32_t*>(panel);
  for (int64_t i = 0; i < k; i += 32) {
    const int columns = int(std::min<int64_t>(32, k - i));
    for (int group = 0; group < kPanelRows; group += 16) {
      u32x16 line[16] = {};
      for (int r = 0; r < std::min(16, n - group); ++r) {
        line[r] = columns == 32 ? Pack<bf16>::load(rows[group + r] + i).bits : load_first(rows[group + r] + i, columns).bits;
      }
      transpose16(line);
      for (int pair = 0; pair < 16; ++pair) std::memcpy(to + (i / 2 + pair) * kPanelRows + group, &line[pair], 64);
    }
  }
}

using Sums = f32x16[kRowsAtATime][kPanelRows / 16];

// Rows of a weight that are needed next, fetched into the second-level cache while something is multiplied.
struct Ahead {
  const bf16* row = nullptr;
  int64_t stride = 0, columns = 0, rows = 0;
  int lines = 0;   // with every 32 columns of a product
  int64_t at = 0;  // column in the row

  void fetch() {
    for (int line = 0; line < lines && rows > 0; ++line) {
      __builtin_prefetch(row + at, 0, 2);
      at += 32;
      if (at >= columns) at = 0, row += stride, --rows;
    }
  }
};

// sums += MR rows of x, `stride` apart, times a panel of `k` (a multiple of 32) columns.
template <int MR>
inline void multiply_tile(const bf16* x, int64_t stride, const bf16* panel, int64_t k, Sums& sums, Ahead* ahead = nullptr) {
  f32x16 acc[MR][4];
  for (int m = 0; m < MR; ++m) {
    for (int j = 0; j < 4; ++j) acc[m][j] = sums[m][j];
  }
  for (int64_t i = 0; i < k; i += 32) {
    for (int m = 0; m < MR; ++m) __builtin_prefetch(x + (MR + m) * stride + i);  // of the next tile
    if (ahead) ahead->fetch();
    for (int64_t at = i; at < i + 32; at += 2) {
      Pack<bf16> w[4];
      for (int j = 0; j < 4; ++j) w[j] = Pack<bf16>::load(panel + at * kPanelRows + 32 * j);
      for (int m = 0; m < MR; ++m) {
        uint32_t pair;
        std::memcpy(&pair, x + m * stride + at, 4);
        const Pack<bf16> both{u32x16{} + pair};
        for (int j = 0; j < 4; ++j) acc[m][j] = dot(acc[m][j], w[j], both);
      }
    }
  }
  for (int m = 0; m < MR; ++m) {
    for (int j = 0; j < 4; ++j) sums[m][j] = acc[m][j];
  }
}

inline void multiply_tile(int rows, const bf16* x, int64_t stride, const bf16* panel, int64_t k, Sums& sums, Ahead* ahead) {
  switch (rows) {
    case 6: return multiply_tile<6>(x, stride, panel, k, sums, ahead);
    case 5: return multiply_tile<5>(x, stride, panel, k, sums, ahead);
    case 4: return multiply_tile<4>(x, stride, panel, k, sums, ahead);
    case 3: return multiply_tile<3>(x, stride, panel, k, sums, ahead);
    case 2: return multiply_tile<2>(x, stride, panel, k, sums, ahead);
    default: return multiply_tile<1>(x, stride, panel, k, sums, ahead);
  }
}

// Calls `each(first, rows)` for tiles of nearly equal height.
template <typename Each>
inline void for_tiles(int64_t m, Each each) {
  const int64_t tiles = (m + kRowsAtATime - 1) / kRowsAtATime;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t first = t * m / tiles;
    each(first, int((t + 1) * m / tiles - first));
  }
}

// Memory of a thread's own, kept between calls.
template <typename T, int Which>
inline T* own_memory(int64_t count) {
  thread_local std::unique_ptr<T[]> kept;
  thread_local int64_t held = 0;
  if (held < count + 64) {
    kept.reset(new T[count + 64]);
    held = count + 64;
  }
  const uintptr_t at = reinterpret_cast<uintptr_t>(kept.get());
  return reinterpret_cast<T*>((at + 63) / 64 * 64);
}

// The product of x [m, k_padded] with `rows` <= 64 rows of the weight; `store(row, sums)` gets the 64 sums of each row of x.
// `next`: the rows of a weight of the same k that this thread takes next, or null.
template <typename Store>
inline void multiply_panel(const bf16* x, int64_t m, int64_t k_padded, const bf16* w, int64_t rows, int64_t k, const bf16* next, Store store) {
  bf16* panel = own_memory<bf16, 0>(Panel::size(std::min(k, kPanelK)));
  float* kept = k > kPanelK ? own_memory<float, 1>(m * kPanelRows) : nullptr;
  const int64_t tiles = (m + kRowsAtATime - 1) / kRowsAtATime;
  for (int64_t i = 0; i < k; i += kPanelK) {
    const int64_t columns = std::min(kPanelK, k - i), after = i + columns;
    Panel::lay_out(w + i, k, rows, columns, panel);
    Ahead ahead;
    if (after < k || next) {
      const bf16* from = after < k ? w + after : next;
      ahead = {from, k, std::min(kPanelK, after < k ? k - after : k), rows, int((kPanelRows + tiles - 1) / tiles)};
    }
    for_tiles(m, [&](int64_t first, int count) {
      Sums sums = {};
      if (i) std::memcpy(sums, kept + first * kPanelRows, count * sizeof(sums[0]));
      multiply_tile(count, x + first * k_padded + i, k_padded, panel, (columns + 31) / 32 * 32, sums, &ahead);
      if (after < k) {
        std::memcpy(kept + first * kPanelRows, sums, count * sizeof(sums[0]));
      } else {
        for (int r = 0; r < count; ++r) store(first + r, sums[r]);
      }
    });
  }
}

// Writes `count` <= 64 sums, with their bias, as bf16.
inline void store_row(const f32x16* sums, const bf16* bias, int64_t count, bf16* to) {
  if (count == kPanelRows && !bias) {
    for (int j = 0; j < 4; ++j) store16(to + 16 * j, sums[j]);
    return;
  }
  alignas(64) bf16 rounded[kPanelRows];
  for (int j = 0; j < 4; ++j) {
    f32x16 x = sums[j];
    if (bias && 16 * j < count) {
      bf16 part[16] = {};
      std::memcpy(part, bias + 16 * j, std::min<int64_t>(16, count - 16 * j) * sizeof(bf16));
      x += load16(part);
    }
    store16(rounded + 16 * j, x);
  }
  std::memcpy(to, rounded, count * sizeof(bf16));
}

}  // namespace pilotage
