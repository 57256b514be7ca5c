// A plan, or a rank of one, with all memory on one GPU, through the C API. Values are synthesised and checked on the
// host.
#pragma once

#include "executor/device.h"
#include "executor/reshard.h"
#include "tools/synthesize.h"

#include <memory>
#include <string>
#include <vector>

namespace reshard::gpu {

/// Throws std::runtime_error where something fails.
class PlanOnGpu {
public:
  /// transport: "threads", all ranks on the GPU; "nccl", a world of one that sends itself all that it copies.
  PlanOnGpu(const std::string &path, const char *transport)
      : PlanOnGpu(path, transport, nullptr, nullptr, kJoinSeconds) {}
  /// This rank alone, over "nccl", on the thread's device; the others are found by a file.
  PlanOnGpu(const std::string &path, uint32_t rank, const std::string &idFile, double joinSeconds)
      : PlanOnGpu(path, "nccl", &rank, idFile.c_str(), joinSeconds) {}

  /// One hook for all names of the plan.
  void setHook(reshard_hook hook, void *user);
  void prepare();
  /// New sources; targets that no value stands in.
  void fill(uint64_t seed);
  void run();
  /// Elements of the targets that are wrong after a run; adds the bytes that were looked at to `checked`.
  uint64_t mismatches(uint64_t seed, uint64_t &checked);

  reshard_executor *executor() const { return executor_.get(); }
  Device &device() { return *device_; }

  /// One instance of a param.
  struct Piece {
    uint32_t endpoint;
    std::string name;
    std::byte *host, *there;
    uint64_t bytes;
  };
  const std::vector<Piece> &pieces() const { return pieces_; }
  /// Whether these bytes, which stand in the host's memory of the targets, are right.
  uint64_t mismatchesOnHost(uint64_t seed, uint64_t &checked) const;

private:
  static constexpr double kJoinSeconds = 60;
  PlanOnGpu(const std::string &path, const char *transport, const uint32_t *rank, const char *idFile,
            double joinSeconds);
  struct Close {
    void operator()(reshard_executor *executor) const { reshard_close(executor); }
  };

  std::unique_ptr<Plan> plan_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<reshard_executor, Close> executor_;
  std::vector<tools::MeshRankMemory> rankMemories_; // of the host
  std::vector<std::unique_ptr<std::byte[]>> memory_;
  std::vector<Piece> pieces_;
};

/// Ends in an exception where a text is not empty.
void need(const std::string &error);

/// The parts of the test, each a command of main.cpp.
void testConsumer(const std::string &path);
void testRefresh(const std::string &path);
void testEnqueue(const std::string &path);
void testRefusals(const std::string &path);
void testRanks(const std::string &path);
/// Prints what it measures; false where a target is missed.
bool bench(const std::string &path);

} // namespace reshard::gpu
