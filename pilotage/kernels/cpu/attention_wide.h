// Attention of many bf16 rows at once, what prefill needs: both products are products with panels, as in gemm.h.
//
// A tile of up to 128 rows takes a block of 64 keys: keys and values are laid out as panels in the second-level cache, and
// six rows at a time meet them. The weights of the softmax are rounded to bf16 before they meet the values, and their total
// is that of the rounded ones. A row's result does not depend on the rows beside it.
#pragma once

#include <type_traits>

#include "attention.h"
#include "gemm.h"

namespace pilotage {

constexpr int64_t kRowsInWideTile = 128;
constexpr int64_t kFewestWideRows = 16;  // below, laying out costs more than it gains

// Key pairs side by side: panel of channels [c, c + 64) at `panel + c * kKeysAtATime`.
inline void lay_out_values(const bf16* const* values, int n, int64_t h, bf16* panel) {
  for (int pair = 0; pair < kKeysAtATime / 2; ++pair) {
    const bf16* first = 2 * pair < n ? values[2 * pair] : nullptr;
    const bf16* second = 2 * pair + 1 < n ? values[2 * pair + 1] : nullptr;
    for (int64_t c = 0; c < (h + kPanelRows - 1) / kPanelRows * kPanelRows; c += 16) {
      const int channels = int(std::clamp<int64_t>(h - c, 0, 16));
      const u32x16 low = first && channels ? bits_of_16(first + c, channels) : u32x16{};
      const u32x16 high = second && channels ? bits_of_16(second + c, channels) : u32x16{};
      const u32x16 both = low | (high << 16);
      const int64_t group = c / kPanelRows;
      std::memcpy(panel + group * kPanelRows * kKeysAtATime + pair * 2 * kPanelRows + 2 * (c % kPanelRows), &both, 64);
    }
  }
}

inline f32x16 softcap16(f32x16 x, float cap) {
  const f32x16 scaled = x * (1.0f / cap);
  const i32x16 sign = (i32x16)scaled & int32_t(0x80000000);
  const f32x16 small = exp16(-2.0f * (f32x16)((i32x16)scaled & int32_t(0x7fffffff)));
  return cap * (f32x16)((i32x16)((1.0f - small) / (1.0f + small)) ^ sign);
}

// What MR rows of a tile, from `row` on, make of a block.
template <int MR>
inline void wide_rows(const bf16* q, int64_t row, int64_t group, int64_t h_keys, int64_t h_padded, const bf16* key_panel, const bf16* value_panel, int64_t low,
                      int n, const Tile& tile, const Options& options, const State& state) {
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  alignas(64) bf16 weights[2 * MR * kKeysAtATime];  // of the rows, and room for what is fetched ahead
  Sums products = {};
  multiply_tile<MR>(q + row * h_padded, h_padded, key_panel, h_keys, products);
  f32x16 before = {}, after = {}, totals = {};
  for (int r = 0; r < MR; ++r) {
    const int64_t position = tile.position + (row + r) / group;
    const int64_t from = std::max<int64_t>(options.window ? position - options.window + 1 - low : 0, 0);
    const int64_t to = std::min<int64_t>(position + 1 - low, n);
    f32x16 x[4], most = splat(state.top[row + r]);
    for (int j = 0; j < 4; ++j) x[j] = products[r][j] * options.scale;
    if (options.softcap > 0) {
      for (int j = 0; j < 4; ++j) x[j] = softcap16(x[j], options.softcap);
    }
    if (from > 0 || to < kKeysAtATime) {
      for (int j = 0; j < 4; ++j) {
        const i32x16 seen = (lane + 16 * j >= int(from)) & (lane + 16 * j < int(std::max<int64_t>(to, 0)));
        x[j] = (f32x16)(((i32x16)x[j] & seen) | ((i32x16)splat(kMasked) & ~seen));
      }
    }
    for (int j = 0; j < 4; ++j) most = x[j] > most ? x[j] : most;
    before[r] = state.top[row + r];
    const float top = max_lanes(most);
    after[r] = top;
    // A row that has seen nothing yet has this maximum too, and every key that it does not see would weigh 1.
    const f32x16 below = splat(top == kMasked ? 0.0f : top);
    f32x16 sum = {};
    for (int j = 0; j < 4; ++j) {
      store16(weights + r * kKeysAtATime + 16 * j, exp16(x[j] - below));
      sum += load16(weights + r * kKeysAtATime + 16 * j);
    }
    totals[r] = sum_lanes(sum);
  }
  const f32x16 shrink = exp16(before - after);
  for (int r = 0; r < MR; ++r) {
    state.top[row + r] = after[r];
    state.total[row + r] = state.total[row + r] * shrink[r] + totals[r];
  }
  for (int64_t c = 0; c < h_padded; c += kPanelRows) {
    Sums sums;
    float* at = state.sum + row * h_padded + c;
    for (int r = 0; r < MR; ++r) {
      for (int j = 0; j < 4; ++j) sums[r][j] = load16(at + r * h_padded + 16 * j) * shrink[r];
    }
    multiply_tile<MR>(weights, kKeysAtATime, value_panel + c * kKeysAtATime, kKeysAtATime, sums);
    for (int r = 0; r < MR; ++r) {
      for (int j = 0; j < 4; ++j) store16(at + r * h_padded + 16 * j, sums[r][j]);
    }
  }
}

// As `attend`, for rows of which there are many; `q` and `state.sum` have rows of `h_padded`, a multiple of 64.
inline void attend_wide(const bf16* q, int64_t rows, int64_t group, int64_t h, int64_t h_padded, const Keys<bf16>& keys, const Tile& tile, const Options& options,
                        State state) {
  const int64_t h_keys = (h + 31) / 32 * 32;
  bf16* key_panel = own_memory<bf16, 3>(h_keys * kPanelRows);
  bf16* value_panel = own_memory<bf16, 4>(h_padded * kKeysAtATime);
  const bf16* key[kKeysAtATime];
  const bf16* value[kKeysAtATime];
  for (int64_t first = tile.low / kKeysAtATime * kKeysAtATime; first < tile.high; first += kKeysAtATime) {
    const int64_t low = std::max(first, tile.low), high = std::min(first + kKeysAtATime, tile.high);
    const int n = int(high - low);
    keys.block(tile.kv_head, low, n, key, value);
    lay_out_rows(key, n, h, key_panel);
    lay_out_values(value, n, h, value_panel);
    for_tiles(rows, [&](int64_t row, int count) {
      const int64_t last_position = tile.position + (row + count - 1) / group, first_position = tile.position + row / group;
      if (last_position < low || (options.window && first_position - options.window + 1 >= high)) return;
      const auto run = [&](auto each) {
        wide_rows<decltype(each)::value>(q, row, group, h_keys, h_padded, key_panel, value_panel, low, n, tile, options, state);
      };
      switch (count) {
        case 6: return run(std::integral_constant<int, 6>{});
        case 5: return run(std::integral_constant<int, 5>{});
        case 4: return run(std::integral_constant<int, 4>{});
        case 3: return run(std::integral_constant<int, 3>{});
        case 2: return run(std::integral_constant<int, 2>{});
        default: return run(std::integral_constant<int, 1>{});
      }
    });
  }
}

}  // namespace pilotage
