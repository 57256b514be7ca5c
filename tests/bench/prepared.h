// SPDX-License-Identifier: Apache-2.0
// A plan on the threads transport with all memory touched before, and memcpy with the same number of threads for
// comparison.
#pragma once

#include "base/parallel.h"
#include "command/common.h"
#include "compiler/compile.h"
#include "executor/transports/transport.h"
#include "reshard/reshard.h"
#include "tests/lib/folder.h"
#include "tests/lib/times.h"
#include "tests/verify/bound.h"
#include "tools/run/memory.h"
#include "verify/proof/plan_verifier.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace reshard::bench {

[[noreturn]] inline void fail(const std::string &why) {
  std::fprintf(stderr, "benchmark: %s\n", why.c_str());
  std::exit(1);
}

/// One param of a rank and its memory.
struct Bound {
  uint32_t rank;
  schema::DType type;
  schema::ParamInstance instance;
  std::byte *memory;
  size_t bytes() const { return static_cast<size_t>(instance.bytes); }
};

/// A compiled job, with memory for both sides, bound and prepared.
class Prepared {
public:
  Prepared(const std::string &job, const std::vector<std::string> &overrides) {
    const tests::TemporaryFolder folder;
    const std::string path = folder / "plan.rplan";
    CompileOptions options;
    options.overrides = overrides;
    CompileResult result;
    Diagnostics diagnostics;
    if (!compileJob(RESHARD_SOURCE_DIR "/" + job, options, result, diagnostics) ||
        errorToBool(writePlan(result.module, *result.ranks, result.statistics, path).takeError()) ||
        !Plan::open(path, plan_).ok())
      fail(diagnostics.text());
    memory_ = std::make_unique<tools::Memory>(*plan_);
    for (uint32_t e : {0u, 1u})
      if (const Status status = memory_->allocate(e); !status.ok())
        fail(status.message());
    if (reshard_open(path.c_str(), nullptr, 0, nullptr, &executor_) != RESHARD_OK)
      fail(reshard_error(executor_));
    for (const verify::MeshRankMemory &rankMemory : memory_->rankMemories()) {
      const schema::Endpoint &endpoint = *plan_->manifest().endpoints()->Get(rankMemory.endpoint);
      const uint32_t rank = endpoint.ranks()->Get(rankMemory.meshRank);
      tests::forEachBound(*plan_, rankMemory, [&](const schema::ParamInstance &instance, std::byte *at) {
        if (reshard_bind(executor_, rankMemory.endpoint, rank, instance.name.c_str(), at,
                         static_cast<uint64_t>(instance.bytes)) != RESHARD_OK)
          fail(reshard_error(executor_));
        (rankMemory.endpoint == 0 ? sources : targets)
            .push_back({rank, schema::storageDtypeOf(*endpoint.params()->Get(instance.param)), instance, at});
      });
    }
    if (reshard_prepare(executor_) != RESHARD_OK)
      fail(reshard_error(executor_));
  }
  ~Prepared() { reshard_close(executor_); }
  Prepared(const Prepared &) = delete;
  Prepared &operator=(const Prepared &) = delete;

  /// Runs the plan; returns the seconds.
  double refit() {
    const double begin = command::now();
    if (reshard_run(executor_, 0, nullptr) != RESHARD_OK)
      fail(reshard_error(executor_));
    return command::now() - begin;
  }
  /// Bytes that a run moves.
  uint64_t bytes() const { return reshard_bytes(executor_); }

  const Plan &plan() const { return *plan_; }
  /// Returns the plan's messages, with sends and receives paired.
  verify::PairedPlan paired() const {
    verify::PairedPlan paired(*plan_);
    if (const Status status = paired.load(); !status.ok())
      fail(status.message());
    return paired;
  }
  /// Returns the memory of a buffer of a rank.
  std::byte *memory(uint32_t rank, uint32_t buffer) const {
    std::shared_ptr<const schema::Segment> segment;
    if (const Status status = plan_->segment(rank, segment); !status.ok())
      fail(status.message());
    const schema::BufferRange &run = *segment->buffers()->Get(static_cast<uint32_t>(bufferRangeOf(*segment, buffer)));
    for (const verify::MeshRankMemory &rankMemory : memory_->rankMemories())
      if (rankMemory.endpoint == run.endpoint() && rankMemory.meshRank == run.mesh_rank())
        return rankMemory.params[run.param()][buffer - run.first()];
    fail("buffer " + std::to_string(buffer) + " of rank " + std::to_string(rank) + " has no memory");
  }

  std::vector<Bound> sources, targets;

private:
  std::unique_ptr<Plan> plan_;
  std::unique_ptr<tools::Memory> memory_;
  reshard_executor *executor_ = nullptr;
};

/// The number of threads that the transport uses.
inline unsigned threads() { return std::max(1u, std::thread::hardware_concurrency()); }

/// memcpy of a number of bytes, 1 MiB at a time, between consecutive ranges of the source and the target memory. A side
/// that is exhausted starts again at its begin.
class Copy {
public:
  Copy(const std::vector<Bound> &from, const std::vector<Bound> &to, size_t bytes) {
    for (size_t source = 0, at = 0, target = 0, done = 0; bytes > 0;) {
      const size_t n = std::min({bytes, from[source].bytes() - at, to[target].bytes() - done, size_t{1} << 20});
      ranges_.push_back({to[target].memory + done, from[source].memory + at, n});
      bytes -= n;
      if ((at += n) == from[source].bytes()) {
        source = (source + 1) % from.size();
        at = 0;
      }
      if ((done += n) == to[target].bytes()) {
        target = (target + 1) % to.size();
        done = 0;
      }
    }
  }
  /// Runs the copies; returns the seconds.
  double run() const {
    const double begin = command::now();
    parallelFor(ranges_.size(), threads(),
                [&](size_t i) { std::memcpy(ranges_[i].to, ranges_[i].from, ranges_[i].bytes); });
    return command::now() - begin;
  }

private:
  struct Range {
    std::byte *to;
    const std::byte *from;
    size_t bytes;
  };
  std::vector<Range> ranges_;
};

inline size_t bytesOf(const std::vector<Bound> &params) {
  size_t bytes = 0;
  for (const Bound &param : params)
    bytes += param.bytes();
  return bytes;
}

using tests::median;

} // namespace reshard::bench
