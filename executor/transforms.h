// Transforms (schema/plan.fbs): params that the caller does not bind. What moves stands in memory of the rank's arena;
// hooks of the caller's fill it on a source and take it over on a target.
#pragma once

#include "executor/reshard.h"
#include "executor/transport.h"

#include <deque>
#include <map>

namespace reshard {

/// The transform of a param of a place, by the name of an instance; "" where there is none.
std::string transformOf(const schema::Manifest &manifest, const schema::Endpoint &endpoint, uint32_t meshRank,
                        const std::string &name);

/// Of all ranks of a process.
class Transforms {
public:
  Transforms() = default;
  Transforms(const Transforms &) = delete;
  Transforms &operator=(const Transforms &) = delete;
  ~Transforms() { release(); }

  /// Sets the hooks of a name; before bind().
  void set(const std::string &name, const reshard_transform &transform) { byName_[name] = transform; }

  /// Gives the params of `ranks` that have a transform their memory: the device's where the transport has one. May be
  /// called again. An error text, empty on success; `missing` says that a hook is not set.
  std::string bind(const Plan &plan, std::vector<LocalRank> &ranks, Transport &transport, bool &missing);

  /// What comes ahead of all else in a run: prepare_send of the sources, prepare_receive of the targets. Allocates
  /// nothing but on failure.
  std::string prepare() const;
  /// What comes when all bytes are there.
  std::string finalize() const;

private:
  /// An instance of a param.
  struct Converted {
    reshard_transformed param;
    reshard_transform by;
  };
  std::string add(const Plan &plan, LocalRank &rank, std::byte *memory, void *stream, bool &missing);
  /// Host memory; `shared` with other processes of the host, where that can be: they copy out of it
  /// (executor/local_peers.h).
  std::string allocate(uint64_t bytes, bool shared, std::byte *&memory);
  void release();
  static std::string failed(const char *hook, const Converted &converted);

  struct Mapping {
    void *memory;
    uint64_t bytes;
    int file; // -1: none
  };
  std::map<std::string, reshard_transform> byName_;
  std::deque<schema::ParamInstance> instances_; // unmoved: the caller sees their names and shapes
  std::deque<std::vector<std::byte *>> tables_; // of runs
  std::vector<Converted> sources_, targets_;    // in the order of ranks, then of params
  std::vector<Mapping> mappings_;
};

} // namespace reshard
