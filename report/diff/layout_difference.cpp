// SPDX-License-Identifier: Apache-2.0
#include "report/diff/layout_difference.h"

#include <algorithm>
#include <memory>
#include <vector>

namespace reshard::report {

using namespace schema;

namespace {

/// A table as bytes: those of equal tables are equal.
template <class Table> std::string packed(const Table &table) {
  flatbuffers::FlatBufferBuilder builder;
  builder.Finish(Table::TableType::Pack(builder, &table));
  return {reinterpret_cast<const char *>(builder.GetBufferPointer()), builder.GetSize()};
}

/// The first element in which two lists of tables differ, as `what` and its name.
template <class Table>
std::string difference(const std::vector<std::unique_ptr<Table>> &plan, const std::vector<std::unique_ptr<Table>> &job,
                       const std::string &what) {
  for (size_t i = 0; i < std::min(plan.size(), job.size()); ++i)
    if (packed(*plan[i]) != packed(*job[i]))
      return what + " '" + plan[i]->name + "' of the plan differs from '" + job[i]->name + "' of the job";
  if (plan.size() != job.size())
    return "the plan has " + std::to_string(plan.size()) + " " + what + "s, the job " + std::to_string(job.size());
  return "";
}

} // namespace

std::string layoutDifference(const Manifest &plan, const Manifest &job) {
  ManifestT mine, wanted;
  plan.UnPackTo(&mine);
  job.UnPackTo(&wanted);
  if (mine.world != wanted.world)
    return "the plan has a world of " + std::to_string(mine.world) + ", the job of " + std::to_string(wanted.world);
  if (mine.endpoints.size() != wanted.endpoints.size())
    return "the plan has " + std::to_string(mine.endpoints.size()) + " endpoints, the job " +
           std::to_string(wanted.endpoints.size());
  if (std::string found = difference(mine.variables, wanted.variables, "index variable"); !found.empty())
    return found;
  if (std::string found = difference(mine.tensor_patterns, wanted.tensor_patterns, "tensor"); !found.empty())
    return found;
  for (size_t e = 0; e < mine.endpoints.size(); ++e) {
    EndpointT &a = *mine.endpoints[e], &b = *wanted.endpoints[e];
    for (EndpointT *each : {&a, &b}) {
      each->layout.clear();
      each->epochs.clear();
      each->replicas = 0;
      for (const auto &param : each->params)
        param->origin.clear();
    }
    if (std::string found = difference(a.params, b.params, a.role + " param"); !found.empty())
      return found;
    if (packed(a) != packed(b))
      return a.ranks != b.ranks ? "the " + a.role + " has other ranks"
                                : "the " + a.role + " has other axes, shardings or storage";
  }
  return "";
}

} // namespace reshard::report
