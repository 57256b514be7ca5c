// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/plan_on_gpu.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <thread>

namespace reshard::gpu {

void need(const Status &status) {
  if (!status.ok())
    throw std::runtime_error(status.message());
}

PlanOnGpu::PlanOnGpu(const std::string &path, const char *transport, const uint32_t *rank, const char *rendezvous,
                     double joinSeconds) {
  need(Plan::open(path, plan_));
  device_ = need(openDevice("cuda", -1));
  reshard_options options = RESHARD_OPTIONS_INITIALIZER;
  options.transport = transport;
  options.device = "cuda";
  options.join_seconds = joinSeconds;
  options.no_local_shortcut = 1;
  options.rendezvous = rendezvous;
  reshard_executor *executor = nullptr;
  const reshard_status status = reshard_open(path.c_str(), rank, rank ? 1 : 0, &options, &executor);
  executor_.reset(executor);
  if (status != RESHARD_OK)
    throw std::runtime_error(reshard_error(executor));
  const schema::Manifest &manifest = plan_->manifest();
  for (uint32_t e = 0; e < manifest.endpoints()->size(); ++e) {
    const schema::Endpoint &endpoint = *manifest.endpoints()->Get(e);
    for (uint32_t p = 0; p < endpoint.ranks()->size(); ++p) {
      if (rank && endpoint.ranks()->Get(p) != *rank)
        continue;
      verify::MeshRankMemory &rankMemory = rankMemories_.emplace_back();
      rankMemory.endpoint = e;
      rankMemory.meshRank = p;
      for (uint32_t number = 0; number < (endpoint.params() ? endpoint.params()->size() : 0); ++number) {
        auto &instances = rankMemory.params.emplace_back(
            schema::instanceCount(endpoint, *endpoint.params()->Get(number), p), nullptr);
        if (!schema::bindable(*endpoint.params()->Get(number)))
          continue; // a quantized view has no memory of its own
        for (const schema::ParamInstance &instance : schema::instances(manifest, endpoint, number, p)) {
          const auto bytes = static_cast<uint64_t>(instance.bytes);
          memory_.push_back(std::make_unique<std::byte[]>(bytes + 1));
          instances[instance.instance] = memory_.back().get();
          // A param may have any address that its dtype allows; here an odd multiple of 16.
          std::byte *const onDevice = need(device_->allocate(bytes + 16)) + 16;
          bindings_.push_back({e, instance.name, memory_.back().get(), onDevice, bytes});
          if (reshard_bind(executor_.get(), e, endpoint.ranks()->Get(p), instance.name.c_str(), onDevice, bytes) !=
              RESHARD_OK)
            throw std::runtime_error(reshard_error(executor_.get()));
        }
      }
    }
  }
}

void PlanOnGpu::setHook(reshard_hook hook, void *user) {
  for (const schema::Endpoint *endpoint : *plan_->manifest().endpoints())
    for (uint32_t p = 0; p < (endpoint->params() ? endpoint->params()->size() : 0); ++p)
      if (const auto *name = endpoint->params()->Get(p)->refresh();
          name && name->size() > 0 && reshard_set_hook(executor_.get(), name->c_str(), hook, user) != RESHARD_OK)
        throw std::runtime_error(reshard_error(executor_.get()));
}

void PlanOnGpu::prepare() {
  if (reshard_prepare(executor_.get()) != RESHARD_OK)
    throw std::runtime_error(reshard_error(executor_.get()));
}

void PlanOnGpu::fill(uint64_t seed) {
  for (const verify::MeshRankMemory &rankMemory : rankMemories_)
    if (rankMemory.endpoint == 0)
      verify::synthesize(*plan_, rankMemory, seed, std::thread::hardware_concurrency());
  for (const Binding &binding : bindings_) {
    if (binding.endpoint > 0)
      std::memset(binding.host, 0xE7, binding.bytes);
    if (binding.bytes > 0)
      need(device_->copy(binding.onDevice, binding.host, binding.bytes));
  }
}

void PlanOnGpu::run() {
  if (reshard_run(executor_.get(), 60, nullptr) != RESHARD_OK)
    throw std::runtime_error(reshard_error(executor_.get()));
}

uint64_t PlanOnGpu::mismatches(uint64_t seed, uint64_t &checked) {
  for (const Binding &binding : bindings_)
    if (binding.endpoint > 0 && binding.bytes > 0)
      need(device_->copy(binding.host, binding.onDevice, binding.bytes));
  return mismatchesOnHost(seed, checked);
}

uint64_t PlanOnGpu::mismatchesOnHost(uint64_t seed, uint64_t &checked) const {
  uint64_t wrong = 0;
  for (const verify::MeshRankMemory &rankMemory : rankMemories_)
    if (rankMemory.endpoint > 0) {
      const verify::CheckResult result = verify::check(*plan_, rankMemory, seed, std::thread::hardware_concurrency());
      wrong += result.mismatches;
      checked += result.checkedBytes;
    }
  return wrong;
}

} // namespace reshard::gpu
