// Blocks of work for the threads of a parallel region.
#pragma once

#include <omp.h>

#include <atomic>
#include <cstdint>

namespace pilotage {

// Calls `each(block, next)` for the blocks [0, count), which threads take as they get to them. With `looks_ahead` a thread
// takes its next block before it begins one, so that it can fetch what the next one reads; `next` is -1 where there is none.
template <typename Each>
void share_blocks(int64_t count, bool looks_ahead, Each each) {
  if (count <= 1) {
    if (count == 1) each(int64_t(0), int64_t(-1));
    return;
  }
  std::atomic<int64_t> taken{0};
#pragma omp parallel
  {
    const auto take = [&] {
      const int64_t block = taken.fetch_add(1, std::memory_order_relaxed);
      return block < count ? block : int64_t(-1);
    };
    for (int64_t block = take(); block >= 0;) {
      const int64_t next = looks_ahead ? take() : -1;
      each(block, next);
      block = looks_ahead ? next : take();
    }
  }
}

}  // namespace pilotage
