// SPDX-License-Identifier: Apache-2.0
#include "executor/transports/overflows.h"

#include "executor/interfaces/device.h"
#include "schema/manifest.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <span>

namespace reshard {

using namespace schema;

namespace {

constexpr size_t kNamedParams = 8; // params that an error names

std::span<std::byte> bytesOf(std::vector<uint32_t> &numbers) {
  return {reinterpret_cast<std::byte *>(numbers.data()), numbers.size() * sizeof(uint32_t)};
}

/// Whether contiguous elements have one that a cast writes for a value beyond the range. An infinity or NaN of the
/// source counts too: this is for the error text only.
bool anyNotFinite(kernels::NumberFormat format, const std::byte *memory, uint64_t bytes) {
  const kernels::Encoding e = kernels::encoding(format);
  const uint64_t item = kernels::itemBytes(format);
  for (uint64_t at = 0; at + item <= bytes; at += item) {
    uint32_t code = 0;
    std::memcpy(&code, memory + at, item);
    if ((code & (e.sign() - 1)) > e.maxFinite)
      return true;
  }
  return false;
}

/// Appends the names of the instances of a buffer range that have such an element; the name of the param if none has.
void addNames(const Plan &plan, const LocalRank &rank, size_t range, Transport &transport,
              std::vector<std::string> &names) {
  const BufferRange &of = *rank.segment->buffers()->Get(static_cast<uint32_t>(range));
  const Endpoint &endpoint = *plan.manifest().endpoints()->Get(of.endpoint());
  const std::string where =
      endpoint.role()->str() + " " + meshRankText(endpoint, endpoint.ranks()->Get(of.mesh_rank())) + " param '";
  const size_t before = names.size();
  const std::vector<ParamInstance> all = instances(plan.manifest(), endpoint, of.param(), of.mesh_rank());
  for (size_t i = 0; i < all.size() && names.size() <= kNamedParams; ++i) {
    const std::byte *memory = rank.memory[range][i];
    const auto bytes = static_cast<uint64_t>(all[i].bytes);
    std::vector<std::byte> copy;
    if (Device *device = transport.device(); device && memory) {
      copy.resize(bytes);
      if (!device->copy(copy.data(), memory, bytes).ok())
        continue;
      memory = copy.data();
    }
    if (memory && anyNotFinite(rank.forms[range].stored, memory, bytes))
      names.push_back(where + all[i].name + "'");
  }
  if (names.size() == before)
    names.push_back(where + endpoint.params()->Get(of.param())->name()->str() + "'");
}

} // namespace

Status watchOverflows(std::vector<LocalRank> &ranks, Transport &transport) {
  for (LocalRank &rank : ranks) {
    const auto watched = [](const kernels::StorageForm &form) {
      return form.kind == kernels::StorageForm::Kind::cast && form.overflow == reshard::OverflowRule::error &&
             kernels::mayOverflow(form.sent, form.stored);
    };
    if (std::none_of(rank.forms.begin(), rank.forms.end(), watched))
      continue;
    const uint64_t bytes = rank.forms.size() * sizeof(uint32_t);
    const Result<std::byte *> allocated = transport.allocate(bytes);
    if (!allocated.ok())
      return Status(allocated.status())
          .withPrefix("cannot allocate " + std::to_string(bytes) + " bytes to watch casts: ");
    rank.overflowed = std::make_shared<std::vector<uint32_t>>(rank.forms.size());
    rank.overflowedOnDevice = *allocated;
    for (size_t i = 0; i < rank.forms.size(); ++i)
      if (watched(rank.forms[i]))
        rank.forms[i].overflowed =
            (*allocated ? reinterpret_cast<uint32_t *>(*allocated) : rank.overflowed->data()) + i;
  }
  return {};
}

Status clearOverflows(const std::vector<LocalRank> &ranks, Transport &transport) {
  for (const LocalRank &rank : ranks) {
    if (!rank.overflowed)
      continue;
    std::fill(rank.overflowed->begin(), rank.overflowed->end(), 0);
    if (rank.overflowedOnDevice)
      if (Status status = transport.device()->copy(rank.overflowedOnDevice, bytesOf(*rank.overflowed).data(),
                                                   bytesOf(*rank.overflowed).size());
          !status.ok())
        return status;
  }
  return {};
}

Status checkOverflows(const Plan &plan, const std::vector<LocalRank> &ranks, Transport &transport) {
  std::vector<std::string> names;
  const kernels::StorageForm *first = nullptr;
  for (const LocalRank &rank : ranks) {
    if (!rank.overflowed)
      continue;
    const std::span<std::byte> bytes = bytesOf(*rank.overflowed);
    if (rank.overflowedOnDevice)
      if (Status status = transport.device()->copy(bytes.data(), rank.overflowedOnDevice, bytes.size()); !status.ok())
        return status;
    for (size_t i = 0; i < rank.overflowed->size() && names.size() <= kNamedParams; ++i)
      if ((*rank.overflowed)[i] != 0) {
        first = first ? first : &rank.forms[i];
        addNames(plan, rank, i, transport, names);
      }
  }
  if (names.empty())
    return {};
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kNamedParams); ++i)
    text += (i > 0 ? ", " : "") + names[i];
  char largest[32];
  std::snprintf(largest, sizeof largest, "%.9g", static_cast<double>(kernels::largest(first->stored)));
  const bool infinity = first->stored != kernels::NumberFormat::fp8_e4m3;
  return failed(text + (names.size() > kNamedParams ? " and more" : "") +
                ": found a value beyond the largest of the dtype, " + largest +
                "; expected a dtype that holds it, or 'convert: saturate' (the largest value)" +
                (infinity ? " or 'convert: inf' (infinite)" : "") +
                " in the target of the job; of reshard-convert, --convert=saturate" + (infinity ? " or inf" : ""));
}

} // namespace reshard
