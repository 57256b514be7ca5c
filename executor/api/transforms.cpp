// SPDX-License-Identifier: Apache-2.0
#include "executor/api/transforms.h"

#include "schema/manifest.h"

#include <cerrno>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

namespace reshard {

using namespace schema;

namespace {

const Param &paramOf(const Plan &plan, const BufferRange &range) {
  return *plan.manifest().endpoints()->Get(range.endpoint())->params()->Get(range.param());
}

} // namespace

std::string transformOf(const Manifest &manifest, const Endpoint &endpoint, uint32_t meshRank,
                        const std::string &name) {
  for (uint32_t p = 0; p < (endpoint.params() ? endpoint.params()->size() : 0); ++p)
    if (const Param &param = *endpoint.params()->Get(p); transformed(param))
      for (const ParamInstance &instance : schema::instances(manifest, endpoint, p, meshRank))
        if (instance.name == name)
          return param.transform()->str();
  return {};
}

Status Transforms::bind(const Plan &plan, std::vector<LocalRank> &ranks, Transport &transport) {
  release();
  for (LocalRank &rank : ranks) {
    rank.transformed = 0;
    bool any = false;
    for (const BufferRange *range : *rank.segment->buffers())
      if (transformed(paramOf(plan, *range))) {
        any = true;
        rank.transformed += range->count() * stagedBytes(*range);
      }
    if (!any)
      continue;
    static std::byte nothing; // the address of params without bytes
    Result<std::byte *> memory = &nothing;
    if (rank.transformed > 0)
      memory = transport.allocate(rank.transformed);
    if (memory.ok() && !*memory)
      memory = allocate(rank.transformed, ranks.size() == 1 && plan.world() > 1);
    if (!memory.ok())
      return Status(memory.status())
          .withPrefix("cannot allocate " + std::to_string(rank.transformed) + " bytes for params with a transform: ");
    if (Status status = add(plan, rank, *memory, transport.stream()); !status.ok())
      return status;
  }
  return {};
}

Status Transforms::add(const Plan &plan, LocalRank &rank, std::byte *memory, void *stream) {
  for (uint32_t r = 0; r < rank.segment->buffers()->size(); ++r) {
    const BufferRange &range = *rank.segment->buffers()->Get(r);
    const Endpoint &endpoint = *plan.manifest().endpoints()->Get(range.endpoint());
    const Param &param = paramOf(plan, range);
    if (!transformed(param))
      continue;
    const auto found = byName_.find(param.transform()->str());
    const bool source = range.endpoint() == 0;
    if (found == byName_.end() || !(source ? found->second.prepare_send : found->second.finalize))
      return badBinding("rank " + std::to_string(rank.rank) + " param '" + param.name()->str() + "' needs " +
                        (source ? "prepare_send" : "finalize") + " of the transform '" + param.transform()->str() +
                        "', which is not set");
    std::vector<std::byte *> &table = tables_.emplace_back();
    for (ParamInstance &each : schema::instances(plan.manifest(), endpoint, range.param(), range.mesh_rank())) {
      const ParamInstance &instance = instances_.emplace_back(std::move(each));
      table.push_back(memory);
      (source ? sources_ : targets_)
          .push_back({{sizeof(reshard_transformed), param.transform()->c_str(), instance.name.c_str(), range.endpoint(),
                       rank.rank, dtypeName(param.dtype()), instance.shape.data(), instance.shape.size(), memory,
                       range.bytes(), stream},
                      found->second});
      memory += stagedBytes(range);
    }
    rank.memory[r] = table.data();
  }
  return {};
}

Status Transforms::prepare() const {
  for (const Converted &source : sources_)
    if (source.by.prepare_send(source.by.user, &source.param) != 0)
      return hookFailed("prepare_send", source);
  for (const Converted &target : targets_)
    if (target.by.prepare_receive && target.by.prepare_receive(target.by.user, &target.param) != 0)
      return hookFailed("prepare_receive", target);
  return {};
}

Status Transforms::finalize() const {
  for (const Converted &target : targets_)
    if (target.by.finalize(target.by.user, &target.param) != 0)
      return hookFailed("finalize", target);
  return {};
}

Status Transforms::hookFailed(const char *hook, const Converted &converted) {
  return failed(std::string(hook) + " of the transform '" + converted.param.transform + "' failed for param '" +
                converted.param.name + "' on rank " + std::to_string(converted.param.rank));
}

Result<std::byte *> Transforms::allocate(uint64_t bytes, bool shared) {
  int file = shared ? ::memfd_create("reshard-transforms", MFD_CLOEXEC) : -1;
  if (file >= 0 && ::ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    ::close(file);
    file = -1;
  }
  void *mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        (file >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS) | MAP_POPULATE, file, 0);
  if (mapped == MAP_FAILED) {
    Status status = failed(std::strerror(errno));
    if (file >= 0)
      ::close(file);
    return status;
  }
  mappings_.push_back({mapped, bytes, file});
  return static_cast<std::byte *>(mapped);
}

void Transforms::release() {
  for (const Mapping &mapping : mappings_) {
    ::munmap(mapping.memory, mapping.bytes);
    if (mapping.file >= 0)
      ::close(mapping.file);
  }
  mappings_.clear();
  sources_.clear();
  targets_.clear();
  tables_.clear();
  instances_.clear();
}

} // namespace reshard
