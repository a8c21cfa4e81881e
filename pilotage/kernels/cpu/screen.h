// Which rows of a large weight can have the largest product with x: found on an 8-bit copy, with bounds that hold.
//
// The copy is made in another basis, the same for every row: the first columns hold the few directions in which the rows
// are long, in bf16, and the rest is rotated at random, so that no column stands out and eight bits hold it well. With
// w = w' + e and x = x' + d, primes for what is stored, w x = w' x' + w' d + e x, and neither of the last two exceeds the
// product of the lengths (Cauchy-Schwarz). A row whose upper bound lies below the best lower bound is out. What is left is
// a handful, whose products are then computed from the weight itself.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "gemm.h"
#include "linear.h"
#include "threads.h"

namespace pilotage {

constexpr int kScreenPanel = 64;   // rows of the weight that lie together
constexpr int kScreenTile = 6;     // rows of x that meet a panel together
constexpr int64_t kScreenBlock = 8;  // panels that a thread takes at a time: long enough to be a stream

// The copy of a weight [n, k]; see `pilotage.functional.screen` for how it is made.
struct Screen {
  const uint8_t* codes;    // [panels][(k - principal) / 4][64][4], 128 more than the code
  const bf16* leading;     // [panels][principal / 2][64][2]
  const float* scale;      // [panels][64], of the codes of a row
  const float* length;     // [panels][64], of a row of codes times its scale
  const float* basis;      // [k / 64 rounded up][k][64]: a column block after another
  float code_error;        // at most this times its scale is lost of a row by the codes
  float leading_length;    // no row's leading part is longer
  float leading_error;     // nor loses more to bf16
  float longest;           // no row is longer
  int64_t n, k, principal;

  int64_t panels() const { return (n + kScreenPanel - 1) / kScreenPanel; }
  int64_t coded() const { return k - principal; }
};

// A row of x in the basis, and what its bounds are made of: a product is off by at most
// scale * per_scale + length * per_length + always.
struct ScreenedRow {
  float step = 0, per_scale = 0, per_length = 0, always = 0;
  int32_t shift = 0;
  bool finite = false;
};

inline f32x16 to_float16(i32x16 x) { return __builtin_convertvector(x, f32x16); }

// sum + four products of unsigned and signed bytes in each lane.
inline i32x16 dot_bytes(i32x16 sum, const uint8_t* w, i32x16 x) {
#if defined(__AVX512VNNI__)
  return (i32x16)_mm512_dpbusd_epi32((__m512i)sum, _mm512_loadu_si512(w), (__m512i)x);
#else
  const int8_t* signed_bytes = reinterpret_cast<const int8_t*>(&x);
  for (int lane = 0; lane < 16; ++lane) {
    for (int i = 0; i < 4; ++i) sum[lane] += int32_t(w[4 * lane + i]) * signed_bytes[4 * lane + i];
  }
  return sum;
#endif
}

// x [m, k] times the basis: out [m, blocks * 64].
inline void to_basis(const bf16* x, int64_t m, int64_t stride, const Screen& screen, float* out) {
  const int64_t blocks = (screen.k + 63) / 64, width = blocks * 64;
  share_blocks(blocks, false, [&](int64_t block, int64_t) {
    const float* columns = screen.basis + block * screen.k * 64;
    for (int64_t first = 0; first < m; first += 4) {
      const int rows = int(std::min<int64_t>(4, m - first));
      f32x16 sum[4][4] = {};
      for (int64_t i = 0; i < screen.k; ++i) {
        f32x16 part[4];
        for (int j = 0; j < 4; ++j) part[j] = load16(columns + i * 64 + 16 * j);
        for (int r = 0; r < 4; ++r) {
          const f32x16 here = splat(to_float(x[(first + std::min(r, rows - 1)) * stride + i]));
          for (int j = 0; j < 4; ++j) sum[r][j] += here * part[j];
        }
      }
      for (int r = 0; r < rows; ++r) {
        for (int j = 0; j < 4; ++j) store16(out + (first + r) * width + block * 64 + 16 * j, sum[r][j]);
      }
    }
  });
}

// Stores a row of x that is in the basis, and says what that loses.
inline ScreenedRow store_screened(const float* x, const Screen& screen, bf16* leading, int8_t* codes) {
  ScreenedRow row;
  double kept = 0, lost = 0, rest = 0, rest_lost = 0;
  for (int64_t i = 0; i < screen.k; ++i) (i < screen.principal ? kept : rest) += double(x[i]) * x[i];
  if (!std::isfinite(kept + rest)) return row;
  for (int64_t i = 0; i < screen.principal; ++i) {
    from_float(x[i], leading[i]);
    const double off = double(x[i]) - to_float(leading[i]);
    lost += off * off;
  }
  float most = 0;
  for (int64_t i = screen.principal; i < screen.k; ++i) most = std::max(most, std::abs(x[i]));
  row.step = most / 127;
  const float inverse = most > 0 ? 127 / most : 0;
  for (int64_t i = screen.principal; i < screen.k; ++i) {
    const float code = std::nearbyint(std::isfinite(inverse) ? x[i] * inverse : 0.0f);
    codes[i - screen.principal] = int8_t(std::clamp(code, -127.0f, 127.0f));
    const double off = double(x[i]) - double(codes[i - screen.principal]) * row.step;
    rest_lost += off * off, row.shift -= 128 * codes[i - screen.principal];
  }
  // Sums in fp32, here, in the basis and in the product itself, err by far less than this.
  const double rounding = 8.0 * screen.k * std::ldexp(1.0, -24) * std::sqrt(kept + rest) * screen.longest;
  constexpr double kSafe = 1.001;  // for the lengths themselves, which are rounded
  row.per_scale = float(kSafe * std::sqrt(rest) * screen.code_error);
  row.per_length = float(kSafe * std::sqrt(rest_lost));
  row.always = float(kSafe * (std::sqrt(lost) * screen.leading_length + std::sqrt(kept) * screen.leading_error) + rounding);
  row.finite = std::isfinite(row.always) && std::isfinite(row.per_scale) && std::isfinite(row.per_length);
  return row;
}

// What may be the largest product of a row of x: of what was seen so far the best lower bound, and everything that reached it.
struct Likely {
  float reached = -std::numeric_limits<float>::infinity();
  std::vector<std::pair<int32_t, float>> rows;  // of the weight, with the upper bound of each

  // Products are rounded to bf16 and the first of the largest wins: what lies less than a step of bf16 below may be as large.
  static float bar(float reached) { return reached - std::abs(reached) * 0.0078125f; }
};

template <int MR>
inline void screen_tile(const Screen& screen, int64_t panel, const bf16* leading, const int8_t* codes, int64_t codes_stride, const ScreenedRow* rows,
                        Likely* likely, int ahead_lines, const char* ahead) {
  const int64_t groups = screen.coded() / 4;
  f32x16 lead[MR][4] = {};
  const bf16* w = screen.leading + panel * screen.principal * kScreenPanel;
  for (int64_t i = 0; i < screen.principal; i += 2) {
    Pack<bf16> part[4];
    for (int j = 0; j < 4; ++j) part[j] = Pack<bf16>::load(w + i * kScreenPanel + 32 * j);
    for (int r = 0; r < MR; ++r) {
      uint32_t pair;
      std::memcpy(&pair, leading + r * screen.principal + i, 4);
      const Pack<bf16> both{u32x16{} + pair};
      for (int j = 0; j < 4; ++j) lead[r][j] = dot(lead[r][j], part[j], both);
    }
  }
  i32x16 sum[MR][4];
  for (int r = 0; r < MR; ++r) {
    for (int j = 0; j < 4; ++j) sum[r][j] = i32x16{} + rows[r].shift;
  }
  const uint8_t* c = screen.codes + panel * groups * 4 * kScreenPanel;
  for (int64_t i = 0; i < groups; ++i) {
    // Every second line: a core can ask for only so many at a time, and in a stream the processor sees the others coming.
    for (int line = 0; line < ahead_lines; line += 2) __builtin_prefetch(ahead + (i * ahead_lines + line) * 64, 0, 2);
    for (int r = 0; r < MR; ++r) {
      int32_t four;
      std::memcpy(&four, codes + r * codes_stride + 4 * i, 4);
      const i32x16 all = i32x16{} + four;
      for (int j = 0; j < 4; ++j) sum[r][j] = dot_bytes(sum[r][j], c + i * 4 * kScreenPanel + 64 * j, all);
    }
  }
  const int64_t first = panel * kScreenPanel;
  for (int r = 0; r < MR; ++r) {
    for (int j = 0; j < 4; ++j) {
      const f32x16 scale = load16(screen.scale + first + 16 * j);
      const f32x16 about = lead[r][j] + to_float16(sum[r][j]) * scale * rows[r].step;
      const f32x16 off = scale * rows[r].per_scale + load16(screen.length + first + 16 * j) * rows[r].per_length + rows[r].always;
      const f32x16 high = about + off, low = about - off;
      const i32x16 in = high >= splat(Likely::bar(likely[r].reached));
#if defined(__AVX512F__)
      if (!_mm512_test_epi32_mask((__m512i)in, (__m512i)in)) continue;
#endif
      for (int lane = 0; lane < 16; ++lane) {
        const int64_t row = first + 16 * j + lane;
        if (!in[lane] || row >= screen.n) continue;
        likely[r].reached = std::max(likely[r].reached, low[lane]);
        likely[r].rows.emplace_back(int32_t(row), high[lane]);
      }
    }
  }
}

inline void screen_panel(const Screen& screen, int64_t panel, bool last, int64_t m, const bf16* leading, const int8_t* codes, const ScreenedRow* rows, Likely* likely) {
  const int64_t tiles = (m + kScreenTile - 1) / kScreenTile, bytes = screen.coded() * kScreenPanel, stride = screen.coded();
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t first = t * m / tiles;
    const int count = int((t + 1) * m / tiles - first);
    // The next panel is fetched while this one is multiplied, a share with every tile.
    const int lines = last ? 0 : int((4 + tiles - 1) / tiles);
    const char* ahead = reinterpret_cast<const char*>(screen.codes) + (panel + 1) * bytes + t * lines * stride / 4 * 64;
    const auto run = [&](auto height) {
      screen_tile<decltype(height)::value>(screen, panel, leading + first * screen.principal, codes + first * stride, stride, rows + first, likely + first,
                                           t * lines < 4 ? lines : 0, ahead);
    };
    switch (count) {
      case 6: run(std::integral_constant<int, 6>{}); break;
      case 5: run(std::integral_constant<int, 5>{}); break;
      case 4: run(std::integral_constant<int, 4>{}); break;
      case 3: run(std::integral_constant<int, 3>{}); break;
      case 2: run(std::integral_constant<int, 2>{}); break;
      default: run(std::integral_constant<int, 1>{});
    }
  }
}

// For each of m rows of x, `stride` apart, the rows of the weight that can have the largest product, ascending; for a row
// that is not finite, none.
inline std::vector<std::vector<int32_t>> likely_rows(const bf16* x, int64_t m, int64_t stride, const Screen& screen) {
  const int64_t width = (screen.k + 63) / 64 * 64;
  std::vector<float> turned(m * width);
  to_basis(x, m, stride, screen, turned.data());
  std::vector<bf16> leading(m * screen.principal);
  std::vector<int8_t> codes(m * screen.coded());
  std::vector<ScreenedRow> rows(m);
  for (int64_t i = 0; i < m; ++i) rows[i] = store_screened(turned.data() + i * width, screen, leading.data() + i * screen.principal, codes.data() + i * screen.coded());
  std::vector<std::vector<Likely>> of_thread(omp_get_max_threads(), std::vector<Likely>(m));
  const int64_t panels = screen.panels();
  share_blocks((panels + kScreenBlock - 1) / kScreenBlock, false, [&](int64_t block, int64_t) {
    Likely* const mine = of_thread[omp_get_thread_num()].data();
    const int64_t end = std::min(panels, (block + 1) * kScreenBlock);
    for (int64_t panel = block * kScreenBlock; panel < end; ++panel) screen_panel(screen, panel, panel + 1 == end, m, leading.data(), codes.data(), rows.data(), mine);
  });
  std::vector<std::vector<int32_t>> found(m);
  for (int64_t i = 0; i < m; ++i) {
    if (!rows[i].finite) continue;
    float reached = -std::numeric_limits<float>::infinity();
    for (const auto& likely : of_thread) reached = std::max(reached, likely[i].reached);
    for (const auto& likely : of_thread) {
      for (const auto& [row, high] : likely[i].rows) {
        if (high >= Likely::bar(reached)) found[i].push_back(row);
      }
    }
    std::sort(found[i].begin(), found[i].end());
  }
  return found;
}

// The products of x with sixteen rows of a weight wherever they lie, summed as `linear_tile` sums them.
inline f32x16 dot_rows(const bf16* x, const bf16* const* rows, int64_t k) {
  f32x16 sum[16] = {};
  const int64_t whole = k / 32 * 32;
  for (int n = 0; n < 16; ++n) {
    for (int64_t i = 0; i < whole; i += 32) sum[n] = dot(sum[n], Pack<bf16>::load(rows[n] + i), Pack<bf16>::load(x + i));
    if (whole < k) sum[n] = dot(sum[n], load_first(rows[n] + whole, int(k - whole)), Pack<bf16>::load(x + whole));
  }
  return sum_lanes_of_16(sum);
}

}  // namespace pilotage
