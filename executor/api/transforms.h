// SPDX-License-Identifier: Apache-2.0
// Transforms (schema/plan.fbs): params that the caller does not bind. Their bytes are in the rank's arena: hooks of the
// caller write them on a source and read them on a target.
#pragma once

#include "executor/transports/transport.h"
#include "reshard/reshard.h"

#include <deque>
#include <map>

namespace reshard {

/// The transform of the param of a mesh rank that has an instance of this name; "" if there is none.
std::string transformOf(const schema::Manifest &manifest, const schema::Endpoint &endpoint, uint32_t meshRank,
                        const std::string &name);

/// The transforms of all ranks of a process.
class Transforms {
public:
  Transforms() = default;
  Transforms(const Transforms &) = delete;
  Transforms &operator=(const Transforms &) = delete;
  ~Transforms() { release(); }

  /// Sets the hooks of a name; before bind().
  void set(const std::string &name, const reshard_transform &transform) { byName_[name] = transform; }

  /// Allocates the memory of the params of `ranks` that have a transform, on the transport's device if it has one. May
  /// be called again. A hook that is not set is an error of kind badBinding.
  Status bind(const Plan &plan, std::vector<LocalRank> &ranks, Transport &transport);

  /// Frees that memory; the hooks stay set.
  void release();

  /// Calls the hooks at the begin of a run: prepare_send of the sources, prepare_receive of the targets. Allocates only
  /// for an error text.
  Status prepare() const;
  /// Calls the hooks `finalize` of the targets, after the last byte.
  Status finalize() const;

private:
  /// An instance of a param.
  struct Converted {
    reshard_transformed param;
    reshard_transform by;
  };
  Status add(const Plan &plan, LocalRank &rank, std::byte *memory, void *stream);
  /// Allocates host memory; if `shared`, as a shared mapping if possible, so that local peers can copy out of it
  /// (executor/transports/local_peers.h).
  Result<std::byte *> allocate(uint64_t bytes, bool shared);
  static Status hookFailed(const char *hook, const Converted &converted);

  struct Mapping {
    void *memory;
    uint64_t bytes;
    int file; // -1: none
  };
  std::map<std::string, reshard_transform> byName_;
  std::deque<schema::ParamInstance> instances_; // a deque, since hooks get pointers to names and shapes
  std::deque<std::vector<std::byte *>> tables_; // by BufferRange: the memory of each instance
  std::vector<Converted> sources_, targets_;    // in the order of ranks, then of params
  std::vector<Mapping> mappings_;
};

} // namespace reshard
