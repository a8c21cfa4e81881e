// Attention of packed query tokens to the keys of their own request, paged or packed.
//
// A tile is some consecutive tokens of one request times the query heads that share a key head. It reads exactly the keys
// that its tokens may see, in blocks at fixed positions, with a running maximum and sum in fp32. How a row is computed
// does not depend on what else is in the batch or on the number of threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "vec.h"

namespace pilotage {

constexpr int kKeysAtATime = 64;
constexpr int kRowsInTile = 32;
constexpr int kKeysInSplit = 512;  // a request with a single tile is split along its keys, so that threads share it
constexpr float kMasked = -1e30f;

template <typename T>
struct Keys {
  const T* k;
  const T* v;
  int64_t k_page, k_head, k_slot;  // strides in elements
  int64_t v_page, v_head, v_slot;
  const int32_t* table;  // page numbers of the request; null: the keys lie one after another from page 0
  int64_t block_size;

  // Where keys and values [first, first + n) of a head lie.
  void block(int64_t head, int64_t first, int n, const T** key, const T** value) const {
    for (int s = 0; s < n;) {
      const int64_t at = first + s;
      const int64_t page = table ? table[at / block_size] : 0, slot = table ? at % block_size : at;
      const T* from_k = k + page * k_page + head * k_head + slot * k_slot;
      const T* from_v = v + page * v_page + head * v_head + slot * v_slot;
      for (const int end = table ? int(std::min<int64_t>(n, s + block_size - slot)) : n; s < end; ++s) {
        key[s] = from_k, value[s] = from_v;
        from_k += k_slot, from_v += v_slot;
      }
    }
  }
};

constexpr int kLine = 64;  // bytes that are fetched together

// Rows that are read next. Pages lie anywhere, so the processor does not see them coming. Held by value: with a pointer to
// the rows in their place the fetches were seen to do nothing (GCC 12, twice the time).
struct Next {
  const void* row[kKeysAtATime];
  int count = 0;

  template <typename T>
  void set(const T* const* rows, int n) {
    for (int s = 0; s < n; ++s) row[s] = rows[s];
    count = n;
  }
  // Fetches bytes [from, to) of row s, where there is one.
  void fetch(int s, int64_t from, int64_t to) const {
    if (s >= count) return;
    for (int64_t at = from; at < to; at += kLine) __builtin_prefetch(static_cast<const char*>(row[s]) + at, 0, 2);
  }
};

struct Options {
  float scale, softcap;  // softcap 0: none
  int64_t window;        // 0: none
  const float* sinks;    // by query head, or null
};

struct Tile {
  int64_t token, num_tokens;  // first token (row of q) and count
  int64_t position;           // of the first token in its request
  int64_t request, kv_head;
  int64_t low, high;      // keys to read
  int64_t state;          // index of its partial state, or -1: it writes the result itself
  bool wide;              // see attention_wide.h
};

// Running softmax of a tile's rows: row = token * group + query head of the group.
struct State {
  float* top;    // [rows]
  float* total;  // [rows]
  float* sum;    // [rows, h_padded]
};

template <typename T, int MR>
inline void logits_of(const T* q, int64_t h, int64_t h_padded, const T* const* keys, int n, float scale, float* logits, const Next& next) {
  constexpr int NR = 16 / MR;
  const int64_t whole = h / 32 * 32;
  for (int s = 0; s < n; s += NR) {
    const T* key[NR];
    for (int j = 0; j < NR; ++j) {
      key[j] = keys[std::min(s + j, n - 1)];
      next.fetch(s + j, 0, h * int64_t(sizeof(T)));
    }
    f32x16 sum[16] = {};
    for (int64_t i = 0; i < whole; i += 32) {
      Pack<T> k[NR];
      for (int j = 0; j < NR; ++j) k[j] = Pack<T>::load(key[j] + i);
      for (int m = 0; m < MR; ++m) {
        const Pack<T> row = Pack<T>::load(q + m * h_padded + i);
        for (int j = 0; j < NR; ++j) sum[m * NR + j] = dot(sum[m * NR + j], k[j], row);
      }
    }
    if (whole < h) {
      for (int j = 0; j < NR; ++j) {
        const Pack<T> k = load_first(key[j] + whole, int(h - whole));
        for (int m = 0; m < MR; ++m) sum[m * NR + j] = dot(sum[m * NR + j], k, Pack<T>::load(q + m * h_padded + whole));
      }
    }
    const f32x16 total = sum_lanes_of_16(sum) * scale;
    for (int m = 0; m < MR; ++m) {
      for (int j = 0; j < NR && s + j < n; ++j) logits[m * kKeysAtATime + s + j] = total[m * NR + j];
    }
  }
}

template <typename T>
inline f32x16 load_first_16(const T* p, int n) {
  T padded[16] = {};
  std::memcpy(padded, p, n * sizeof(T));
  return load16(padded);
}

// sum = sum * shrink + weights x values, for MR rows and VR vectors of 16 channels from channel h0. A block is summed by
// itself first: fp32 loses less in two short sums than in one long one.
template <typename T, int MR, int VR>
inline void add_values(const float* weights, const T* const* values, int n, int64_t h0, int channels, const float* shrink, float* sum, int64_t h_padded, const Next& next) {
  f32x16 acc[MR][VR];
  for (int m = 0; m < MR; ++m) {
    for (int c = 0; c < VR; ++c) acc[m][c] = f32x16{};
  }
  if (channels == 16 * VR) {
    for (int s = 0; s < n; ++s) {
      next.fetch(s, h0 * int64_t(sizeof(T)), (h0 + 16 * VR) * int64_t(sizeof(T)));
      f32x16 v[VR];
      for (int c = 0; c < VR; ++c) v[c] = load16(values[s] + h0 + 16 * c);
      for (int m = 0; m < MR; ++m) {
        const f32x16 w = splat(weights[m * kKeysAtATime + s]);
        for (int c = 0; c < VR; ++c) acc[m][c] += w * v[c];
      }
    }
  } else {
    for (int s = 0; s < n; ++s) {
      const f32x16 v = load_first_16(values[s] + h0, channels);
      for (int m = 0; m < MR; ++m) acc[m][0] += splat(weights[m * kKeysAtATime + s]) * v;
    }
  }
  for (int s = n; s < next.count; ++s) next.fetch(s, h0 * int64_t(sizeof(T)), (h0 + 16 * VR) * int64_t(sizeof(T)));
  for (int m = 0; m < MR; ++m) {
    for (int c = 0; c < VR; ++c) {
      float* at = sum + m * h_padded + h0 + 16 * c;
      store16(at, load16(at) * shrink[m] + acc[m][c]);
    }
  }
}

template <typename T, int MR>
inline void add_block(const float* weights, const T* const* values, int n, int64_t h, const float* shrink, float* sum, int64_t h_padded, const Next& next) {
  constexpr int VR = MR == 8 ? 2 : 4;
  int64_t h0 = 0;
  for (; h - h0 >= 16 * VR; h0 += 16 * VR) add_values<T, MR, VR>(weights, values, n, h0, 16 * VR, shrink, sum, h_padded, next);
  for (; h - h0 > 0; h0 += 16) add_values<T, MR, 1>(weights, values, n, h0, int(std::min<int64_t>(16, h - h0)), shrink, sum, h_padded, next);
}

// How many rows are computed together; the tile's rows are padded to a multiple of it.
inline int rows_together(int64_t rows) { return rows > 4 ? 8 : rows > 2 ? 4 : int(rows); }

// Finds the block of a tile's keys that starts at or before `first`; returns how many it has, from `low` on.
template <typename T>
inline int block_of(const Keys<T>& keys, const Tile& tile, int64_t first, const T** key, const T** value, int64_t& low) {
  low = std::max(first, tile.low);
  const int n = int(std::min(first + kKeysAtATime, tile.high) - low);
  keys.block(tile.kv_head, low, n, key, value);
  return n;
}

// `after` and `keys_after`: the tile that this thread takes next, or null.
template <typename T, int MR>
void attend(const T* q, int64_t rows, int64_t group, int64_t h, int64_t h_padded, const Keys<T>& keys, const Tile& tile, const Options& options, State state,
            const Tile* after, const Keys<T>* keys_after) {
  const T* key[kKeysAtATime];
  const T* value[kKeysAtATime];
  alignas(64) float logits[(kRowsInTile + 8) * kKeysAtATime];
  float shrink[kRowsInTile + 8];
  for (int64_t first = tile.low / kKeysAtATime * kKeysAtATime; first < tile.high; first += kKeysAtATime) {
    int64_t low, unused;
    const int n = block_of(keys, tile, first, key, value, low), n_padded = (n + 15) / 16 * 16;
    // The values are fetched while their keys are multiplied, the keys of the next block while the values are.
    Next values, keys_next;
    values.set(value, n);
    const T* key_next[kKeysAtATime];
    const T* value_next[kKeysAtATime];
    if (first + kKeysAtATime < tile.high) {
      keys_next.set(key_next, block_of(keys, tile, first + kKeysAtATime, key_next, value_next, unused));
    } else if (after) {
      keys_next.set(key_next, block_of(*keys_after, *after, after->low / kKeysAtATime * kKeysAtATime, key_next, value_next, unused));
    }
    for (int64_t row = 0; row < rows; row += MR) {
      if (row) values.count = keys_next.count = 0;
      logits_of<T, MR>(q + row * h_padded, h, h_padded, key, n, options.scale, logits + row * kKeysAtATime, values);
      for (int64_t r = row; r < row + MR; ++r) {
        float* line = logits + r * kKeysAtATime;
        shrink[r] = 1.0f;
        const int64_t position = tile.position + r / group;
        // What this row sees of the block: an interval.
        const int64_t from = std::max<int64_t>(options.window ? position - options.window + 1 - low : 0, 0);
        const int64_t to = r < rows ? std::min<int64_t>(position + 1 - low, n) : 0;
        if (from >= to) {
          std::fill(line, line + n_padded, 0.0f);
          continue;
        }
        if (options.softcap > 0) {
          for (int64_t s = from; s < to; ++s) line[s] = options.softcap * std::tanh(line[s] / options.softcap);
        }
        std::fill(line, line + from, kMasked);
        std::fill(line + to, line + n_padded, kMasked);
        float top = state.top[r];
        f32x16 most = splat(top);
        for (int s = 0; s < n_padded; s += 16) {
          const f32x16 x = load16(line + s);
          most = x > most ? x : most;
        }
        top = max_lanes(most);
        shrink[r] = std::exp(state.top[r] - top);
        state.top[r] = top;
        f32x16 total = {};
        for (int s = 0; s < n_padded; s += 16) {
          const f32x16 weight = exp16(load16(line + s) - top);
          store16(line + s, weight);
          total += weight;
        }
        state.total[r] = state.total[r] * shrink[r] + sum_lanes(total);
      }
      add_block<T, MR>(logits + row * kKeysAtATime, value, n, h, shrink + row, state.sum + row * h_padded, h_padded, keys_next);
    }
  }
}

template <typename T>
void attend(const T* q, int64_t rows, int64_t group, int64_t h, int64_t h_padded, const Keys<T>& keys, const Tile& tile, const Options& options, State state,
            const Tile* after, const Keys<T>* keys_after) {
  switch (rows_together(rows)) {
    case 8: return attend<T, 8>(q, rows, group, h, h_padded, keys, tile, options, state, after, keys_after);
    case 4: return attend<T, 4>(q, rows, group, h, h_padded, keys, tile, options, state, after, keys_after);
    case 2: return attend<T, 2>(q, rows, group, h, h_padded, keys, tile, options, state, after, keys_after);
    default: return attend<T, 1>(q, rows, group, h, h_padded, keys, tile, options, state, after, keys_after);
  }
}

}  // namespace pilotage
