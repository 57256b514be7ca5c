// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/stored_checkpoint.h"

#include "base/parallel.h"
#include "base/system_error.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <fcntl.h>
#include <mutex>
#include <unistd.h>

namespace reshard::checkpoints {

namespace {

/// Reads a stored chunk.
class ChunkReader {
public:
  ChunkReader(const std::string &path, const StoredChunk &chunk) : path_(path), chunk_(chunk) {
    file_ = uninterrupted([&] { return ::open(path_.c_str(), O_RDONLY | O_CLOEXEC); });
  }
  ~ChunkReader() {
    if (file_ >= 0)
      ::close(file_);
  }
  ChunkReader(const ChunkReader &) = delete;
  ChunkReader &operator=(const ChunkReader &) = delete;

  /// Reads `bytes` bytes at byte `at` of the chunk.
  Status read(std::byte *to, uint64_t at, uint64_t bytes) const {
    for (uint64_t done = 0; done < bytes;) {
      const auto offset = static_cast<off_t>(chunk_.begin + at + done);
      const ssize_t some =
          file_ < 0 ? -1 : uninterrupted([&] { return ::pread(file_, to + done, bytes - done, offset); });
      if (some < 0)
        return systemError("read", path_);
      if (some == 0)
        return failed("'" + path_ + "' became shorter while it was read");
      done += static_cast<uint64_t>(some);
    }
    return {};
  }

private:
  const std::string path_;
  const StoredChunk &chunk_;
  int file_;
};

/// The first byte in which a replica differs from what it replicates; its size if there is none.
Result<uint64_t> firstDifference(const std::string &path, const StoredReplica &replica) {
  constexpr uint64_t kAtOnce = 256 << 10;
  const ChunkReader chunk(path + "/" + replica.of.file, replica.of), copy(path + "/" + replica.copy.file, replica.copy);
  std::vector<std::byte> one(kAtOnce), other(kAtOnce);
  for (uint64_t at = 0; at < replica.copy.bytes; at += kAtOnce) {
    const uint64_t bytes = std::min(kAtOnce, replica.copy.bytes - at);
    if (Status status = chunk.read(one.data(), at, bytes); !status.ok())
      return status;
    if (Status status = copy.read(other.data(), at, bytes); !status.ok())
      return status;
    if (std::memcmp(one.data(), other.data(), bytes) != 0)
      return at + static_cast<uint64_t>(
                      std::mismatch(one.begin(), one.begin() + static_cast<ptrdiff_t>(bytes), other.begin()).first -
                      one.begin());
  }
  return replica.copy.bytes;
}

} // namespace

Result<StoredReplicaResult> compareStoredReplicas(const std::string &path, const std::vector<StoredReplica> &replicas,
                                                  unsigned threads, const std::function<void(double)> &progress) {
  std::vector<std::string> differences(replicas.size());
  Status first;
  std::mutex mutex;
  parallelFor(
      replicas.size(), threads,
      [&](size_t i) {
        const auto &[tensor, of, copy] = replicas[i];
        const Result<uint64_t> at = firstDifference(path, replicas[i]);
        if (at.ok() && *at < copy.bytes)
          differences[i] = "'" + path + "': tensor '" + tensor + "': its part " + boxOf(of) + " in '" + copy.file +
                           "' differs from that in '" + of.file + "', first in byte " + std::to_string(*at) +
                           " of the part";
        const std::lock_guard lock(mutex);
        if (!at.ok() && first.ok())
          first = at.status();
      },
      progress);
  if (!first.ok())
    return first;
  StoredReplicaResult result;
  for (const StoredReplica &each : replicas)
    result.comparedBytes += each.copy.bytes;
  std::erase(differences, std::string());
  result.differences = std::move(differences);
  return result;
}

} // namespace reshard::checkpoints
