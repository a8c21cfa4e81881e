// Memory of large results, kept for the next result of about that size: on fresh pages, writing the logits of 64 requests
// takes longer than computing them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <cstdlib>
#include <mutex>
#include <vector>

namespace pilotage {

constexpr size_t kLargeBytes = size_t(1) << 20;
constexpr size_t kMostKeptBytes = size_t(256) << 20;

class KeptMemory {
 public:
  static KeptMemory& instance() {
    static KeptMemory* const one = new KeptMemory;  // never destroyed: tensors may outlive everything else
    return *one;
  }

  // The smallest free block that is large enough and at most twice as large, or a new one.
  void* take(size_t bytes, size_t* size) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      size_t best = free_.size();
      for (size_t i = 0; i < free_.size(); ++i) {
        const size_t here = free_[i].second;
        if (here >= bytes && here <= 2 * bytes && (best == free_.size() || here < free_[best].second)) best = i;
      }
      if (best < free_.size()) {
        const auto [at, held] = free_[best];
        free_.erase(free_.begin() + best);
        kept_ -= held;
        *size = held;
        return at;
      }
    }
    constexpr size_t kPage = size_t(2) << 20;
    *size = (bytes + kPage - 1) / kPage * kPage;
    void* at = std::aligned_alloc(kPage, *size);
#if defined(MADV_HUGEPAGE)
    if (at) madvise(at, *size, MADV_HUGEPAGE);
#endif
    return at;
  }

  void give(void* at, size_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.emplace_back(at, size);
    kept_ += size;
    while (kept_ > kMostKeptBytes) {  // the oldest first
      std::free(free_.front().first);
      kept_ -= free_.front().second;
      free_.erase(free_.begin());
    }
  }

 private:
  std::mutex mutex_;
  std::vector<std::pair<void*, size_t>> free_;
  size_t kept_ = 0;
};

// As at::empty on the CPU.
inline at::Tensor empty_result(at::IntArrayRef shape, const at::TensorOptions& options) {
  size_t bytes = options.dtype().itemsize();
  for (const int64_t size : shape) bytes *= size;
  if (bytes < kLargeBytes) return at::empty(shape, options);
  size_t size = 0;
  void* const at = KeptMemory::instance().take(bytes, &size);
  TORCH_CHECK(at, "no memory for a result of ", bytes, " bytes");
  return at::from_blob(at, shape, [size](void* mine) { KeptMemory::instance().give(mine, size); }, options);
}

}  // namespace pilotage
