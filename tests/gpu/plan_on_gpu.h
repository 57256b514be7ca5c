// SPDX-License-Identifier: Apache-2.0
// All ranks of a plan, or one of them, with all memory on one GPU, through the C API. Values are synthesized and
// checked on the host.
#pragma once

#include "executor/interfaces/device.h"
#include "reshard/reshard.h"
#include "verify/check/check.h"

#include <memory>
#include <string>
#include <vector>

namespace reshard::gpu {

/// Throws std::runtime_error if something fails.
class PlanOnGpu {
public:
  /// transport: "threads", all ranks on the GPU; "nccl", one rank that sends all its copies to itself.
  PlanOnGpu(const std::string &path, const char *transport)
      : PlanOnGpu(path, transport, nullptr, nullptr, kJoinSeconds) {}
  /// One rank, over "nccl", on the thread's current device; the ranks find each other through `rendezvous`, a URL.
  PlanOnGpu(const std::string &path, uint32_t rank, const std::string &rendezvous, double joinSeconds)
      : PlanOnGpu(path, "nccl", &rank, rendezvous.c_str(), joinSeconds) {}

  /// Sets one hook for all hook names of the plan.
  void setHook(reshard_hook hook, void *user);
  void prepare();
  /// Writes new source values, and bytes that no element has to the targets.
  void fill(uint64_t seed);
  void run();
  /// Returns the number of wrong target elements after a run; adds the number of checked bytes to `checked`.
  uint64_t mismatches(uint64_t seed, uint64_t &checked);

  reshard_executor *executor() const { return executor_.get(); }
  Device &device() { return *device_; }

  /// A bound instance of a param: its address on the host and on the device.
  struct Binding {
    uint32_t endpoint;
    std::string name;
    std::byte *host, *onDevice;
    uint64_t bytes;
  };
  const std::vector<Binding> &bindings() const { return bindings_; }
  /// As mismatches, for target bytes that are already in host memory.
  uint64_t mismatchesOnHost(uint64_t seed, uint64_t &checked) const;

private:
  static constexpr double kJoinSeconds = 60;
  PlanOnGpu(const std::string &path, const char *transport, const uint32_t *rank, const char *rendezvous,
            double joinSeconds);
  struct Close {
    void operator()(reshard_executor *executor) const { reshard_close(executor); }
  };

  std::unique_ptr<Plan> plan_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<reshard_executor, Close> executor_;
  std::vector<verify::MeshRankMemory> rankMemories_; // host memory
  std::vector<std::unique_ptr<std::byte[]>> memory_;
  std::vector<Binding> bindings_;
};

/// Throws an exception with the text if it is not empty.
void need(const Status &status);
template <class T> T need(Result<T> result) {
  need(result.status());
  return std::move(*result);
}

/// The parts of the test, one for each command of main.cpp.
void testConsumer(const std::string &path);
void testRefresh(const std::string &path);
void testEnqueue(const std::string &path);
void testRefusals(const std::string &path);
void testDigests(const std::string &path);
void testRanks(const std::string &path);
/// Prints the measurements; returns false if a target is missed.
bool bench(const std::string &path);

} // namespace reshard::gpu
