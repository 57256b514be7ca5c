// SPDX-License-Identifier: Apache-2.0
// The C API for C++: RAII handles, and exceptions with the full error text. Header only. Arguments and the order of
// calls are those of reshard.h and reshard_plan.h.
#pragma once

#include "reshard.h"
#include "reshard_plan.h"

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace reshard {

/// A failed call: its status and error text.
class Error : public std::runtime_error {
public:
  Error(reshard_status status, const std::string &text) : std::runtime_error(text), status_(status) {}
  reshard_status status() const { return status_; }

private:
  reshard_status status_;
};

/// An opened plan file. Thread-safe. Returned pointers are valid until it is destroyed.
class PlanFile {
public:
  explicit PlanFile(const std::string &path) {
    reshard_plan *plan = nullptr;
    const reshard_status status = reshard_plan_open(path.c_str(), &plan);
    plan_.reset(plan);
    if (status != RESHARD_OK)
      throw Error(status, reshard_plan_error(plan));
  }

  reshard_summary summary() const {
    reshard_summary summary = RESHARD_SUMMARY_INITIALIZER;
    reshard_plan_summary(plan_.get(), &summary);
    return summary;
  }

  /// 0 is the source.
  reshard_endpoint endpoint(uint32_t number) const {
    reshard_endpoint endpoint = RESHARD_ENDPOINT_INITIALIZER;
    if (reshard_plan_endpoint(plan_.get(), number, &endpoint) != RESHARD_OK)
      throw Error(RESHARD_INVALID, "there is no endpoint " + std::to_string(number) + ", the plan has " +
                                       std::to_string(summary().endpoints));
    return endpoint;
  }

  /// The params that a rank of an endpoint holds: a world rank, or the number of a file.
  std::span<const reshard_param> params(uint32_t endpointNumber, uint32_t rank) const {
    const reshard_param *params = nullptr;
    size_t count = 0;
    if (const reshard_status status =
            reshard_plan_params(plan_.get(), endpointNumber, rank, sizeof(reshard_param), &params, &count);
        status != RESHARD_OK)
      throw Error(status, status == RESHARD_FAILED
                              ? "out of memory"
                              : std::string(endpoint(endpointNumber).role) + " has no rank " + std::to_string(rank));
    return {params, count};
  }

private:
  struct Close {
    void operator()(reshard_plan *plan) const { reshard_plan_close(plan); }
  };
  std::unique_ptr<reshard_plan, Close> plan_;
};

/// The caller's hooks of a transform; an exception from one fails the run. Params of a source need prepareSend, params
/// of a target finalize.
struct Transform {
  std::function<void(const reshard_transformed &param)> prepareSend, prepareReceive, finalize;
};

/// An executor of the ranks of this process. Not thread-safe.
class Executor {
public:
  /// `ranks`: world ranks; empty: every rank of the plan, or with a transport between
  /// processes this process's own, if the launcher or env:// states it.
  explicit Executor(const std::string &path, const reshard_options &options = RESHARD_OPTIONS_INITIALIZER,
                    const std::vector<uint32_t> &ranks = {}) {
    reshard_executor *executor = nullptr;
    const reshard_status status =
        reshard_open(path.c_str(), ranks.empty() ? nullptr : ranks.data(), ranks.size(), &options, &executor);
    executor_.reset(executor);
    check(status);
  }

  /// Replaces the plan between runs (reshard_replace). `ranks` empty: every rank of the plan, or the present
  /// one of a process that has one. `rendezvous` empty: the store that is open.
  void replace(const std::string &path, const std::vector<uint32_t> &ranks = {}, const std::string &rendezvous = {}) {
    check(reshard_replace(executor_.get(), path.c_str(), ranks.empty() ? nullptr : ranks.data(), ranks.size(),
                          rendezvous.empty() ? nullptr : rendezvous.c_str()));
  }

  std::span<const uint32_t> ranks() const {
    size_t count = 0;
    const uint32_t *ranks = reshard_ranks(executor_.get(), &count);
    return {ranks, count};
  }

  /// The digest of the plan that was opened (reshard_opened_digest).
  std::string openedDigest() const { return reshard_opened_digest(executor_.get()); }

  /// Binds memory, which must stay valid and in place until this executor is destroyed.
  void bind(uint32_t endpoint, uint32_t rank, const std::string &param, void *pointer, uint64_t bytes) {
    check(reshard_bind(executor_.get(), endpoint, rank, param.c_str(), pointer, bytes));
  }

  /// Sets a hook that is called after each run, with the rank; an exception from it fails the run.
  void setHook(const std::string &name, std::function<void(uint32_t rank)> hook) {
    auto call = [](void *user, const char *, uint32_t rank) noexcept -> int {
      try {
        (*static_cast<std::function<void(uint32_t)> *>(user))(rank);
        return 0;
      } catch (...) {
        return 1; // no exception crosses the C API
      }
    };
    check(reshard_set_hook(executor_.get(), name.c_str(), call, &hooks_.emplace_back(std::move(hook))));
  }

  /// Sets the hooks of params that the plan marks `transform: name` (reshard_transform).
  void setTransform(const std::string &name, Transform transform) {
    Transform &stored = transforms_.emplace_back(std::move(transform));
    reshard_transform calls = RESHARD_TRANSFORM_INITIALIZER;
    calls.prepare_send = stored.prepareSend ? called<&Transform::prepareSend> : nullptr;
    calls.prepare_receive = stored.prepareReceive ? called<&Transform::prepareReceive> : nullptr;
    calls.finalize = stored.finalize ? called<&Transform::finalize> : nullptr;
    calls.user = &stored;
    check(reshard_set_transform(executor_.get(), name.c_str(), &calls));
  }

  void prepare() { check(reshard_prepare(executor_.get())); }

  /// Before prepare, in place of it: the processes that wait for this one fail with the reason.
  void fail(const std::string &reason) { check(reshard_fail(executor_.get(), reason.c_str())); }

  /// Moves every byte; returns when all have arrived. 0 seconds: no deadline. With `check`, compares the targets with
  /// the source by digests (reshard_run): a mismatch is an Error with RESHARD_FAILED.
  void run(double timeoutSeconds = 0, const reshard_check *check = nullptr) {
    this->check(reshard_run(executor_.get(), timeoutSeconds, check));
  }
  /// The digests of the tensors of an endpoint (reshard_digest), valid until the next call.
  std::span<const reshard_tensor_digest> digest(uint32_t endpoint, bool allowUndigested = false,
                                                double timeoutSeconds = 0) {
    const reshard_tensor_digest *digests = nullptr;
    size_t count = 0;
    check(reshard_digest(executor_.get(), endpoint, allowUndigested, timeoutSeconds, sizeof(reshard_tensor_digest),
                         &digests, &count));
    return {digests, count};
  }
  /// The params without a digest in the last digest(), checked run() or checked pull().
  std::vector<std::string> undigested() const {
    size_t count = 0;
    const char *const *names = reshard_undigested(executor_.get(), &count);
    return {names, names + count};
  }

  /// Enqueues a refit on a cudaStream_t, or adds it to the graph that is being captured there, and returns.
  void enqueue(void *stream) { check(reshard_enqueue(executor_.get(), stream)); }

  /// The least `value` of all processes. Every process of the run must call it.
  int64_t allReduceMin(int64_t value) {
    int64_t result = 0;
    check(reshard_all_reduce_min(executor_.get(), value, &result));
    return result;
  }

  /// Pull mode, of a source: offers the bound memory as `version`. It must not change until release(). A checked pull
  /// needs a version with `digests`.
  void publish(uint64_t version, bool digests = false) { check(reshard_publish(executor_.get(), version, digests)); }
  /// Waits until nothing reads the published version, at most until the deadline. In every case the bound memory is
  /// the caller's afterwards. 0 seconds: no deadline.
  void release(double timeoutSeconds = 0) { check(reshard_release(executor_.get(), timeoutSeconds)); }
  /// Pull mode, of a target: pulls a version of at least `minVersion` and returns it. 0 seconds: no deadline. With
  /// `check`, compares the memory with the version by digests (reshard_pull): a mismatch is an Error with
  /// RESHARD_FAILED.
  uint64_t pull(uint64_t minVersion = 0, double timeoutSeconds = 0, const reshard_check *check = nullptr) {
    uint64_t version = 0;
    this->check(reshard_pull(executor_.get(), minVersion, timeoutSeconds, check, &version));
    return version;
  }
  /// The replicas that have pulled, in ascending order.
  std::vector<reshard_replica> replicas() const {
    std::vector<reshard_replica> found;
    size_t count = 0;
    do { // more may have joined since the last call
      found.resize(count);
      check(reshard_replicas(executor_.get(), found.data(), sizeof(reshard_replica), found.size(), &count));
    } while (count > found.size());
    found.resize(count);
    return found;
  }

  reshard_state state() const { return reshard_target_state(executor_.get()); }
  uint64_t version() const { return reshard_version(executor_.get()); }
  /// The number of completed pulls that have written the memory (reshard_pulls).
  uint64_t pulls() const { return reshard_pulls(executor_.get()); }
  uint64_t bytes() const { return reshard_bytes(executor_.get()); }
  uint64_t bytesBy(reshard_method method) const { return reshard_bytes_by(executor_.get(), method); }
  /// The C handle, for functions that this wrapper lacks.
  reshard_executor *handle() const { return executor_.get(); }

private:
  struct Close {
    void operator()(reshard_executor *executor) const { reshard_close(executor); }
  };

  void check(reshard_status status) const {
    if (status != RESHARD_OK)
      throw Error(status, reshard_error(executor_.get()));
  }

  template <std::function<void(const reshard_transformed &)> Transform::*Hook>
  static int called(void *user, const reshard_transformed *param) noexcept {
    try {
      (static_cast<Transform *>(user)->*Hook)(*param);
      return 0;
    } catch (...) {
      return 1; // no exception crosses the C API
    }
  }

  std::list<std::function<void(uint32_t)>> hooks_; // a list, since the executor has pointers to them
  std::list<Transform> transforms_;                // likewise
  std::unique_ptr<reshard_executor, Close> executor_;
};

} // namespace reshard
