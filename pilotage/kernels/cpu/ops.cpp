// The operators as torch operations: checks, strides, threads. The arithmetic is in the headers.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "activation.h"
#include "attention.h"
#include "attention_wide.h"
#include "gemm.h"
#include "kept_memory.h"
#include "linear.h"
#include "screen.h"
#include "threads.h"

namespace pilotage {
namespace {

using at::Tensor;

template <typename T>
const T* pointer(const Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}

template <typename T>
T* writable(const Tensor& x) {
  return static_cast<T*>(x.mutable_data_ptr());
}

Tensor rows_contiguous(const Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

constexpr int64_t kFewRows = kMostRowsOfX;  // up to here the weight is multiplied as it lies, from there on in panels
constexpr int64_t kCachePeriod = 4096;      // bytes: rows that lie a multiple of it apart throw each other out of the nearest cache

// Rows of x that can be read to a multiple of 32 columns: x itself, or a copy with zeros behind each row. A few rows that meet
// the weight together are copied too where they lie badly.
template <typename T>
struct PaddedRows {
  const T* rows;
  int64_t stride;
  std::vector<T> copy;

  PaddedRows(const T* x, int64_t m, int64_t columns) : rows(x), stride((columns + 31) / 32 * 32) {
    if (m >= kTileRows && m <= kFewRows && stride * int64_t(sizeof(T)) % kCachePeriod == 0) stride += 32;
    if (stride == columns) return;
    copy.resize(m * stride);
    for (int64_t i = 0; i < m; ++i) std::memcpy(copy.data() + i * stride, x + i * columns, columns * sizeof(T));
    rows = copy.data();
  }
};

// How many of m rows are real: the last entry of `ends`, where there is one.
int64_t real_rows(int64_t m, const std::optional<Tensor>& ends) {
  if (!ends) return m;
  TORCH_CHECK(ends->scalar_type() == at::kInt && ends->numel() > 0, "ends must be int32");
  return std::clamp<int64_t>(pointer<int32_t>(*ends)[(ends->numel() - 1) * ends->stride(0)], 0, m);
}

// Calls `product(x, m, out)` for the first m rows of x, which are real, or, where `wanted` (a count, then as many row numbers)
// lists fewer, for a copy of those. Rows of `out` that are not computed are zero.
template <typename Product>
void for_wanted_rows(const Tensor& x, const std::optional<Tensor>& ends, const std::optional<Tensor>& wanted, Tensor& out, Product product) {
  const int64_t k = x.size(-1), n = out.size(-1), rows = x.numel() / k, m = real_rows(rows, ends);
  if (!wanted) return product(x, m, out);
  TORCH_CHECK(wanted->scalar_type() == at::kInt && wanted->is_contiguous() && wanted->numel() > 0, "wanted must be int32");
  const int32_t* list = pointer<int32_t>(*wanted);
  const int64_t count = list[0];
  if (count >= m) return product(x, m, out);
  TORCH_CHECK(count >= 0 && count < wanted->numel(), "wanted: more rows than are listed");
  const Tensor picked = at::empty({count, k}, x.options());
  Tensor found = at::empty({count, n}, out.options());
  const int64_t in = k * x.element_size(), result = n * out.element_size();
  const char* from = static_cast<const char*>(x.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK(list[1 + i] >= 0 && list[1 + i] < rows, "wanted: there is no row ", list[1 + i]);
    std::memcpy(static_cast<char*>(picked.mutable_data_ptr()) + i * in, from + list[1 + i] * in, in);
  }
  product(picked, count, found);
  std::memset(to, 0, rows * result);
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to + list[1 + i] * result, static_cast<const char*>(found.const_data_ptr()) + i * result, result);
  }
}

constexpr int64_t kLooksAhead = 256;  // up to here a panel takes little longer to fetch than to multiply
constexpr int64_t kWorthPicking = 16;  // from this share of all products on, computing all in order is as fast
constexpr int64_t kRowsInPart = 256;  // of x that meet a panel at least, so that laying it out stays cheap

template <typename T>
void run_linear(const Tensor& x, int64_t m, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& out) {
  const int64_t k = weight.size(1), n = weight.size(0);
  std::memset(writable<T>(out) + m * n, 0, (out.numel() - m * n) * sizeof(T));
  if (m == 0) return;
  const PaddedRows<T> padded(pointer<T>(x), m, k);
  const T* w = pointer<T>(weight);
  const T* b = bias ? pointer<T>(*bias) : nullptr;
  T* y = writable<T>(out);
  if constexpr (std::is_same_v<T, bf16>) {
    if (m > kFewRows) {
      const int64_t panels = (n + kPanelRows - 1) / kPanelRows;
      // A narrow weight has few panels, and the last ones would leave threads waiting: they get a part of the rows each.
      const int64_t parts = panels < 16 * omp_get_max_threads() ? std::max<int64_t>(1, m / kRowsInPart) : 1;
      share_blocks(panels * parts, m <= kLooksAhead, [&](int64_t at, int64_t after) {
        const int64_t first = at / parts * kPanelRows, rows = std::min<int64_t>(kPanelRows, n - first), part = at % parts;
        const int64_t from = part * m / parts, to = (part + 1) * m / parts;
        multiply_panel(padded.rows + from * padded.stride, to - from, padded.stride, w + first * k, rows, k, after < 0 ? nullptr : w + after / parts * kPanelRows * k,
                       [&](int64_t row, const f32x16* sums) { store_row(sums, b ? b + first : nullptr, rows, y + (from + row) * n + first); });
      });
      return;
    }
  }
  // Four blocks a thread at least: a narrow weight in few blocks would leave threads waiting.
  const int64_t share = n / (4 * omp_get_max_threads()), block = std::clamp<int64_t>((share + 15) / 16 * 16, 16, kWeightRowsAtATime);
  share_blocks((n + block - 1) / block, true, [&](int64_t at, int64_t after) {
    const int64_t first = at * block;
    linear_block<T>(padded.rows, w + first * k, b ? b + first : nullptr, y + first, m, std::min(block, n - first), k, padded.stride, n,
                    after < 0 ? nullptr : w + after * block * k);
  });
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const std::optional<Tensor>& ends, const std::optional<Tensor>& wanted) {
  TORCH_CHECK(x.dim() >= 1 && weight.dim() == 2 && x.size(-1) == weight.size(1), "linear: shapes do not fit");
  TORCH_CHECK(x.scalar_type() == weight.scalar_type() && (!bias || bias->scalar_type() == x.scalar_type()), "linear: dtypes differ");
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = weight.size(0);
  Tensor out = empty_result(shape, x.options());
  const Tensor x_flat = x.contiguous(), w_flat = weight.contiguous();
  const std::optional<Tensor> b_flat = bias ? std::optional<Tensor>(bias->contiguous()) : std::nullopt;
  TORCH_CHECK(x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kFloat, "linear: only bfloat16 and float32");
  for_wanted_rows(x_flat, ends, wanted, out, [&](const Tensor& rows, int64_t m, const Tensor& to) {
    if (x.scalar_type() == at::kBFloat16) {
      run_linear<bf16>(rows, m, w_flat, b_flat, to);
    } else {
      run_linear<float>(rows, m, w_flat, b_flat, to);
    }
  });
  return out;
}

// The first m rows of x times the weight, as `run_linear`, but only where a product can be its row's largest; -inf elsewhere.
void run_likely(const Tensor& x, int64_t m, const Tensor& weight, const Screen& screen, const Tensor& out) {
  const int64_t k = screen.k, n = screen.n;
  std::memset(writable<bf16>(out) + m * n, 0, (out.numel() - m * n) * sizeof(bf16));
  const PaddedRows<bf16> padded(pointer<bf16>(x), m, k);
  const bf16* w = pointer<bf16>(weight);
  bf16* const y = writable<bf16>(out);
  const std::vector<std::vector<int32_t>> found = likely_rows(padded.rows, m, padded.stride, screen);
  std::vector<std::pair<int64_t, int64_t>> parts;  // a row of x, and the first of sixteen products of it
  for (int64_t i = 0; i < m; ++i) {
    const int64_t count = int64_t(found[i].size());
    if (count == 0 || count > n / kWorthPicking) {  // not a number somewhere, or nothing stands out
      run_linear<bf16>(x.narrow(0, i, 1), 1, weight, std::nullopt, out.narrow(0, i, 1));
      continue;
    }
    constexpr int64_t kPart = int64_t(1) << 14;
    for (int64_t at = 0; at < n; at += kPart) parts.emplace_back(i, -at - 1);  // to be filled
  }
  const int64_t fills = int64_t(parts.size());
  share_blocks(fills, false, [&](int64_t part, int64_t) {
    const auto [row, at] = parts[part];
    const int64_t first = -at - 1;
    std::fill_n(reinterpret_cast<uint16_t*>(y) + row * n + first, std::min<int64_t>(int64_t(1) << 14, n - first), uint16_t(0xff80));
  });
  parts.clear();
  for (int64_t i = 0; i < m; ++i) {
    const int64_t count = int64_t(found[i].size());
    if (count > n / kWorthPicking) continue;
    for (int64_t at = 0; at < count; at += 16) parts.emplace_back(i, at);
  }
  share_blocks(int64_t(parts.size()), false, [&](int64_t part, int64_t) {
    const auto [row, at] = parts[part];
    const int count = int(std::min<int64_t>(16, int64_t(found[row].size()) - at));
    const bf16* lines[16];
    for (int i = 0; i < 16; ++i) lines[i] = w + int64_t(found[row][at + std::min(i, count - 1)]) * k;
    alignas(64) bf16 rounded[16];
    store16(rounded, dot_rows(padded.rows + row * padded.stride, lines, k));
    for (int i = 0; i < count; ++i) y[row * n + found[row][at + i]] = rounded[i];
  });
}

Tensor likely_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& ends, const Tensor& only, const Tensor& codes, const Tensor& leading,
                     const Tensor& scale, const Tensor& length, const Tensor& basis, const Tensor& bounds) {
  TORCH_CHECK(only.scalar_type() == at::kInt && only.numel() == 1, "only must be one int32");
  if (!*pointer<int32_t>(only)) return linear(x, weight, std::nullopt, ends, std::nullopt);
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1), "likely_linear: shapes do not fit");
  TORCH_CHECK(x.scalar_type() == at::kBFloat16 && weight.scalar_type() == at::kBFloat16 && weight.is_contiguous(), "likely_linear: only bfloat16");
  const int64_t n = weight.size(0), k = weight.size(1), panels = (n + kScreenPanel - 1) / kScreenPanel, principal = leading.size(1) * 2;
  TORCH_CHECK(codes.scalar_type() == at::kByte && codes.numel() == panels * (k - principal) * kScreenPanel && (k - principal) % 4 == 0 && codes.is_contiguous() &&
                  leading.scalar_type() == at::kBFloat16 && leading.size(0) == panels && leading.numel() == panels * principal * kScreenPanel && leading.is_contiguous() &&
                  scale.numel() == panels * kScreenPanel && length.numel() == panels * kScreenPanel && basis.numel() == (k + 63) / 64 * 64 * k && bounds.numel() == 4,
              "likely_linear: the screen is not this weight's");
  const float* b = pointer<float>(bounds);
  const Screen screen{pointer<uint8_t>(codes), pointer<bf16>(leading), pointer<float>(scale), pointer<float>(length), pointer<float>(basis), b[0], b[1], b[2], b[3], n, k, principal};
  Tensor out = empty_result({x.size(0), n}, x.options());
  run_likely(x.contiguous(), real_rows(x.size(0), ends), weight, screen, out);
  return out;
}

// activation(x gate^T) * (x up^T) for `rows` <= 64 rows of both weights, gate first; `next` gate rows follow.
void gated_block(const PaddedRows<bf16>& x, int64_t m, const bf16* gate, const bf16* up, const bf16* gate_bias, const bf16* up_bias, int64_t rows,
                 int64_t k, Activation activation, bf16* to, int64_t to_stride, const bf16* next) {
  bf16* gates = own_memory<bf16, 2>(2 * m * kPanelRows);
  bf16* ups = gates + m * kPanelRows;
  if (m > kFewRows) {
    for (const auto& [w, bias, kept, after] : {std::tuple(gate, gate_bias, gates, up), std::tuple(up, up_bias, ups, next)}) {
      multiply_panel(x.rows, m, x.stride, w, rows, k, m <= kLooksAhead ? after : nullptr, [&](int64_t row, const f32x16* sums) { store_row(sums, bias, rows, kept + row * kPanelRows); });
    }
  } else {
    linear_block<bf16>(x.rows, gate, gate_bias, gates, m, rows, k, x.stride, kPanelRows, up);
    linear_block<bf16>(x.rows, up, up_bias, ups, m, rows, k, x.stride, kPanelRows, next);
  }
  for (int64_t row = 0; row < m; ++row) {
    bf16* line = gates + row * kPanelRows;
    for (int64_t i = 0; i < rows; i += 16) store16(line + i, gated16(load16(line + i), load16(ups + row * kPanelRows + i), activation));
    std::memcpy(to + row * to_stride, line, rows * sizeof(bf16));
  }
}

Tensor mlp(const Tensor& x, const Tensor& gate_up, const Tensor& down, const std::optional<Tensor>& gate_up_bias, const std::optional<Tensor>& down_bias,
           int64_t activation, const std::optional<Tensor>& ends, const std::optional<Tensor>& wanted) {
  TORCH_CHECK(x.dim() >= 1 && gate_up.dim() == 2 && down.dim() == 2 && x.size(-1) == gate_up.size(1), "mlp: shapes do not fit");
  TORCH_CHECK(gate_up.size(0) == 2 * down.size(1) && activation >= 0 && activation <= 3, "mlp: shapes do not fit");
  for (const Tensor* tensor : {&x, &gate_up, &down}) TORCH_CHECK(tensor->scalar_type() == at::kBFloat16, "mlp: only bfloat16");
  const Tensor x_flat = x.contiguous(), first = gate_up.contiguous(), second = down.contiguous();
  const std::optional<Tensor> first_bias = gate_up_bias ? std::optional<Tensor>(gate_up_bias->contiguous()) : std::nullopt;
  const std::optional<Tensor> second_bias = down_bias ? std::optional<Tensor>(down_bias->contiguous()) : std::nullopt;
  const int64_t k = first.size(1), f = second.size(1);
  const bf16* w = pointer<bf16>(first);
  const bf16* b = first_bias ? pointer<bf16>(*first_bias) : nullptr;
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = second.size(0);
  Tensor out = empty_result(shape, x.options());
  for_wanted_rows(x_flat, ends, wanted, out, [&](const Tensor& given, int64_t m, const Tensor& to) {
    const Tensor hidden = empty_result({m, f}, x.options());
    const PaddedRows<bf16> rows(pointer<bf16>(given), m, k);
    share_blocks(m ? (f + kPanelRows - 1) / kPanelRows : 0, m <= kLooksAhead, [&](int64_t panel, int64_t after) {
      const int64_t at = panel * kPanelRows;
      gated_block(rows, m, w + at * k, w + (f + at) * k, b ? b + at : nullptr, b ? b + f + at : nullptr, std::min<int64_t>(kPanelRows, f - at), k,
                  Activation(activation), writable<bf16>(hidden) + at, f, after < 0 ? nullptr : w + after * kPanelRows * k);
    });
    run_linear<bf16>(hidden, m, second, second_bias, to);
  });
  return out;
}

// The first largest of n numbers; the first NaN, if there is one, counts as the largest, as in torch.
template <typename T>
int64_t argmax_of(const T* x, int64_t n) {
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  f32x16 most = splat(-INFINITY);
  i32x16 at = lane - 16, none = {};  // -16 + lane: nothing above -inf yet
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const f32x16 here = load16(x + i);
    const i32x16 more = here > most;
    at = ((lane + int32_t(i)) & more) | (at & ~more);
    most = here > most ? here : most;
    none |= here != here;
  }
  float top = -INFINITY;
  int64_t where = -1;
  bool nan = false;
  for (int j = 0; j < 16; ++j) {
    nan |= none[j] != 0;
    if (at[j] >= 0 && (where < 0 || most[j] > top || (most[j] == top && at[j] < where))) top = most[j], where = at[j];
  }
  for (; i < n; ++i) {
    const float here = to_float(x[i]);
    nan |= std::isnan(here);
    if (here > top) top = here, where = i;
  }
  if (nan) {
    for (int64_t j = 0; j < n; ++j) {
      if (std::isnan(to_float(x[j]))) return j;
    }
  }
  return std::max<int64_t>(where, 0);
}

Tensor argmax(const Tensor& x_any) {
  TORCH_CHECK(x_any.dim() == 2 && x_any.size(1) > 0 && x_any.size(1) < (int64_t(1) << 31), "argmax: rows are wanted");
  const Tensor x = rows_contiguous(x_any);
  Tensor out = at::empty({x.size(0)}, x.options().dtype(at::kLong));
#pragma omp parallel for schedule(dynamic, 1) if (x.size(0) > 1)
  for (int64_t row = 0; row < x.size(0); ++row) {
    const int64_t at = row * x.stride(0);
    writable<int64_t>(out)[row] = x.scalar_type() == at::kBFloat16 ? argmax_of(pointer<bf16>(x) + at, x.size(1)) : argmax_of(pointer<float>(x) + at, x.size(1));
  }
  return out;
}

struct Request {
  int64_t first, count, length;  // its first token in the batch, its tokens, and its keys
};

template <typename T>
void run_attention(const Tensor& q, const Tensor& out, const std::vector<Request>& requests, const std::vector<Keys<T>>& keys, int64_t kv_heads, const Options& options) {
  const int64_t heads = q.size(1), h = q.size(2), group = heads / kv_heads, h_padded = (h + kPanelRows - 1) / kPanelRows * kPanelRows;
  int64_t max_rows = 0;
  TORCH_CHECK(group <= kRowsInTile, "attention: more than ", kRowsInTile, " query heads share a key head");
  std::vector<Tile> tiles;
  std::vector<std::pair<int64_t, int64_t>> split;  // first tile and count of those that must be merged
  int64_t states = 0;
  for (int64_t r = 0; r < int64_t(requests.size()); ++r) {
    const Request& request = requests[r];
    const bool wide = std::is_same_v<T, bf16> && request.count * group >= kFewestWideRows;
    const int64_t tokens_in_tile = (wide ? kRowsInWideTile : kRowsInTile) / group;
    max_rows = std::max(max_rows, std::min(request.count, tokens_in_tile) * group);
    const bool single = request.count <= tokens_in_tile;
    for (int64_t head = 0; head < kv_heads; ++head) {
      for (int64_t done = 0; done < request.count; done += tokens_in_tile) {
        const int64_t n = std::min(tokens_in_tile, request.count - done);
        const int64_t position = request.length - request.count + done;
        const int64_t low = options.window ? std::max<int64_t>(0, position - options.window + 1) : 0, high = position + n;
        Tile tile{request.first + done, n, position, r, head, low, high, -1, wide};
        if (single && low / kKeysInSplit != (high - 1) / kKeysInSplit) {
          const int64_t first_tile = int64_t(tiles.size());
          for (int64_t at = low / kKeysInSplit * kKeysInSplit; at < high; at += kKeysInSplit) {
            tile.low = std::max(at, low);
            tile.high = std::min(at + kKeysInSplit, high);
            tile.state = states++;
            tiles.push_back(tile);
          }
          split.emplace_back(first_tile, int64_t(tiles.size()) - first_tile);
        } else {
          tiles.push_back(tile);
        }
      }
    }
  }
  const int64_t padded_rows = max_rows + 8, state_size = padded_rows * (h_padded + 2);
  std::vector<float> kept(states * state_size);
  const auto state_at = [&](float* base) { return State{base, base + padded_rows, base + 2 * padded_rows}; };
  const auto finish = [&](const Tile& tile, const State& state) {
    for (int64_t row = 0; row < tile.num_tokens * group; ++row) {
      const int64_t head = tile.kv_head * group + row % group;
      float total = state.total[row], scale = 1.0f;
      if (options.sinks) {
        const float top = std::max(state.top[row], options.sinks[head]);
        scale = std::exp(state.top[row] - top);
        total = total * scale + std::exp(options.sinks[head] - top);
      }
      scale = total == 0 ? 0.0f : scale / total;
      T* to = writable<T>(out) + ((tile.token + row / group) * heads + head) * h;
      int64_t i = 0;
      for (; i + 16 <= h; i += 16) store16(to + i, load16(state.sum + row * h_padded + i) * scale);
      for (; i < h; ++i) from_float(state.sum[row * h_padded + i] * scale, to[i]);
    }
  };
  const T* q_base = pointer<T>(q);
  const int64_t q_token = q.stride(0), q_head = q.stride(1);
  share_blocks(int64_t(tiles.size()), true, [&](int64_t t, int64_t next) {
    const Tile& tile = tiles[t];
    const State state = state_at(tile.state < 0 ? own_memory<float, 5>(state_size) : kept.data() + tile.state * state_size);
    T* const rows = own_memory<T, 6>(padded_rows * h_padded);
    const int64_t num_rows = tile.num_tokens * group, filled = std::min(padded_rows, num_rows + 8);
    std::fill(state.top, state.top + filled, kMasked);
    std::fill(state.total, state.total + filled, 0.0f);
    std::fill(state.sum, state.sum + filled * h_padded, 0.0f);
    std::memset(static_cast<void*>(rows), 0, filled * h_padded * sizeof(T));
    for (int64_t row = 0; row < num_rows; ++row) {
      const T* from = q_base + (tile.token + row / group) * q_token + (tile.kv_head * group + row % group) * q_head;
      std::memcpy(rows + row * h_padded, from, h * sizeof(T));
    }
    if constexpr (std::is_same_v<T, bf16>) {
      if (tile.wide) attend_wide(rows, num_rows, group, h, h_padded, keys[tile.request], tile, options, state);
    }
    if (!tile.wide) {
      const Tile* after = next < 0 || tiles[next].wide ? nullptr : &tiles[next];
      attend<T>(rows, num_rows, group, h, h_padded, keys[tile.request], tile, options, state, after, after ? &keys[after->request] : nullptr);
    }
    if (tile.state < 0) finish(tile, state);
  });
  for (const auto& [first, count] : split) {
    const State whole = state_at(kept.data() + tiles[first].state * state_size);
    for (int64_t part = first + 1; part < first + count; ++part) {
      const State other = state_at(kept.data() + tiles[part].state * state_size);
      for (int64_t row = 0; row < tiles[first].num_tokens * group; ++row) {
        const float top = std::max(whole.top[row], other.top[row]);
        const float a = std::exp(whole.top[row] - top), b = std::exp(other.top[row] - top);
        whole.top[row] = top;
        whole.total[row] = whole.total[row] * a + other.total[row] * b;
        for (int64_t i = 0; i < h_padded; i += 16) {
          float* sum = whole.sum + row * h_padded + i;
          store16(sum, load16(sum) * a + load16(other.sum + row * h_padded + i) * b);
        }
      }
    }
    finish(tiles[first], whole);
  }
}

std::vector<Request> requests_of(const Tensor& query_start_loc, const std::optional<Tensor>& seq_lens) {
  TORCH_CHECK(query_start_loc.scalar_type() == at::kInt, "query_start_loc must be int32");
  const Tensor starts = query_start_loc.contiguous();
  const int32_t* start = pointer<int32_t>(starts);
  const Tensor lengths = seq_lens ? seq_lens->contiguous() : Tensor();
  TORCH_CHECK(!seq_lens || lengths.scalar_type() == at::kInt, "seq_lens must be int32");
  std::vector<Request> out;
  for (int64_t r = 0; r + 1 < starts.numel(); ++r) {
    const int64_t count = start[r + 1] - start[r];
    out.push_back({start[r], count, seq_lens ? int64_t(pointer<int32_t>(lengths)[r]) : count});
  }
  return out;
}

template <typename T>
void attention_on(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& block_table, const std::vector<Request>& requests, const Options& options, Tensor& out) {
  std::vector<Keys<T>> keys;
  const bool paged = block_table.has_value();
  const Tensor table = paged ? block_table->contiguous() : Tensor();
  for (size_t r = 0; r < requests.size(); ++r) {
    if (paged) {
      keys.push_back({pointer<T>(k), pointer<T>(v), k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1), v.stride(2),
                      pointer<int32_t>(table) + r * table.size(1), k.size(2)});
    } else {
      keys.push_back({pointer<T>(k) + requests[r].first * k.stride(0), pointer<T>(v) + requests[r].first * v.stride(0), 0, k.stride(1),
                      k.stride(0), 0, v.stride(1), v.stride(0), nullptr, 0});
    }
  }
  run_attention<T>(q, out, requests, keys, k.size(1), options);
}

Tensor attention(const Tensor& q_any, const Tensor& k_any, const Tensor& v_any, const std::optional<Tensor>& block_table, const Tensor& query_start_loc,
                 const std::optional<Tensor>& seq_lens, double scale, std::optional<int64_t> window, std::optional<double> softcap, const std::optional<Tensor>& sinks) {
  const Tensor q = rows_contiguous(q_any), k = rows_contiguous(k_any), v = rows_contiguous(v_any);
  TORCH_CHECK(q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type(), "attention: dtypes differ");
  TORCH_CHECK(q.size(1) % k.size(1) == 0 && q.size(2) == k.size(-1) && q.size(2) == v.size(-1), "attention: shapes do not fit");
  TORCH_CHECK(!block_table || block_table->scalar_type() == at::kInt, "block_table must be int32");
  const Tensor sinks_fp32 = sinks ? sinks->to(at::kFloat).contiguous() : Tensor();
  const Options options{float(scale), float(softcap.value_or(0)), window.value_or(0), sinks ? pointer<float>(sinks_fp32) : nullptr};
  Tensor out = at::empty(q.sizes(), q.options());
  const std::vector<Request> requests = requests_of(query_start_loc, seq_lens);
  const int64_t used = requests.empty() ? 0 : requests.back().first + requests.back().count;
  if (used < q.size(0)) out.narrow(0, used, q.size(0) - used).zero_();
  if (q.scalar_type() == at::kBFloat16) {
    attention_on<bf16>(q, k, v, block_table, requests, options, out);
  } else {
    TORCH_CHECK(q.scalar_type() == at::kFloat, "attention: only bfloat16 and float32");
    attention_on<float>(q, k, v, block_table, requests, options, out);
  }
  return out;
}

Tensor packed_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& query_start_loc, double scale, std::optional<int64_t> window,
                        std::optional<double> softcap, const std::optional<Tensor>& sinks) {
  return attention(q, k, v, std::nullopt, query_start_loc, std::nullopt, scale, window, softcap, sinks);
}

Tensor paged_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_table, const Tensor& query_start_loc, const Tensor& seq_lens,
                       double scale, std::optional<int64_t> window, std::optional<double> softcap, const std::optional<Tensor>& sinks) {
  return attention(q, k_cache, v_cache, block_table, query_start_loc, seq_lens, scale, window, softcap, sinks);
}

void write_kv(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k_any, const Tensor& v_any, const Tensor& slot_mapping) {
  TORCH_CHECK(slot_mapping.scalar_type() == at::kLong, "slot_mapping must be int64");
  TORCH_CHECK(k_cache.scalar_type() == k_any.scalar_type() && v_cache.scalar_type() == v_any.scalar_type(), "write_kv: dtypes differ");
  TORCH_CHECK(k_cache.stride(-1) == 1 && v_cache.stride(-1) == 1, "write_kv: a head's channels must lie together");
  const Tensor slots = slot_mapping.contiguous();
  const int64_t block_size = k_cache.size(2), tokens = slots.numel(), heads = k_any.size(1);
  const int64_t* slot = pointer<int64_t>(slots);
  for (const auto& [cache, any] : {std::pair<const Tensor&, const Tensor&>(k_cache, k_any), {v_cache, v_any}}) {
    const Tensor rows = rows_contiguous(any);
    const int64_t size = cache.element_size(), bytes = rows.size(2) * size;
    char* to = static_cast<char*>(cache.mutable_data_ptr());
    const char* from = static_cast<const char*>(rows.const_data_ptr());
    for (int64_t t = 0; t < tokens; ++t) {
      if (slot[t] < 0) continue;
      const int64_t at = slot[t] / block_size * cache.stride(0) + slot[t] % block_size * cache.stride(2);
      for (int64_t head = 0; head < heads; ++head) {
        std::memcpy(to + (at + head * cache.stride(1)) * size, from + (t * rows.stride(0) + head * rows.stride(1)) * size, bytes);
      }
    }
  }
}

}  // namespace
}  // namespace pilotage

TORCH_LIBRARY_FRAGMENT(pilotage, m) {
  m.def("native_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? ends, Tensor? wanted) -> Tensor");
  m.def("native_likely_linear(Tensor x, Tensor weight, Tensor? ends, Tensor only, Tensor codes, Tensor leading, Tensor scale, Tensor length, Tensor basis, Tensor bounds) -> Tensor");
  m.def("native_mlp(Tensor x, Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias, int activation, Tensor? ends, Tensor? wanted) -> Tensor");
  m.def("native_argmax(Tensor x) -> Tensor");
  m.def("native_packed_attention(Tensor q, Tensor k, Tensor v, Tensor query_start_loc, float scale, int? window, float? softcap, Tensor? sinks) -> Tensor");
  m.def("native_paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor query_start_loc, Tensor seq_lens, float scale, int? window, float? softcap, Tensor? sinks) -> Tensor");
  m.def("native_write_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor slot_mapping) -> ()");
}

TORCH_LIBRARY_IMPL(pilotage, CPU, m) {
  m.impl("native_linear", TORCH_FN(pilotage::linear));
  m.impl("native_likely_linear", TORCH_FN(pilotage::likely_linear));
  m.impl("native_mlp", TORCH_FN(pilotage::mlp));
  m.impl("native_argmax", TORCH_FN(pilotage::argmax));
  m.impl("native_packed_attention", TORCH_FN(pilotage::packed_attention));
  m.impl("native_paged_attention", TORCH_FN(pilotage::paged_attention));
  m.impl("native_write_kv", TORCH_FN(pilotage::write_kv));
}
