// SPDX-License-Identifier: Apache-2.0
// Bounds the memory of copies that several threads make.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace reshard::verify {

constexpr uint64_t kMaxCopies = uint64_t{1} << 30; // bytes, where nobody states a bound

/// Bounds the bytes of copies that are in memory at a time. A copy that is larger than the bound is made alone.
class CopyRoom {
public:
  explicit CopyRoom(uint64_t most) : most_(most) {}

  /// Calls work() with room for so many bytes, after waiting for calls that have it.
  template <class Work> void with(uint64_t bytes, const Work &work) {
    bytes = std::min(bytes, most_);
    {
      std::unique_lock lock(mutex_);
      released_.wait(lock, [&] { return bytes <= most_ - used_; });
      used_ += bytes;
    }
    struct Release {
      CopyRoom &room;
      uint64_t bytes;
      ~Release() {
        {
          const std::lock_guard lock(room.mutex_);
          room.used_ -= bytes;
        }
        room.released_.notify_all();
      }
    } const release{*this, bytes};
    work();
  }

private:
  const uint64_t most_;
  uint64_t used_ = 0;
  std::mutex mutex_;
  std::condition_variable released_;
};

} // namespace reshard::verify
