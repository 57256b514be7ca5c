// SPDX-License-Identifier: Apache-2.0
#include "report/page/page.h"

#include "executor/load/load.h"
#include "report/page/page_text.h"
#include "schema/flatbuffer_vectors.h"

#include <nlohmann/json.hpp>

#include <algorithm>

namespace reshard::report {

using Json = nlohmann::ordered_json;

namespace {

using namespace schema;

Json endpointsOf(const Manifest &manifest) {
  Json endpoints = Json::array();
  for (const Endpoint *endpoint : *manifest.endpoints()) {
    Json axes = Json::array();
    for (const Axis *axis : orEmpty(endpoint->axes()))
      axes.push_back({axis->name()->str(), axis->size()});
    endpoints.push_back({{"role", endpoint->role()->str()},
                         {"layout", endpoint->layout() ? endpoint->layout()->str() : ""},
                         {"storage", endpoint->storage()},
                         {"axes", axes},
                         {"ranks", endpoint->ranks()->size()},
                         {"replicas", endpoint->replicas()}});
  }
  return endpoints;
}

Result<Json> dataOf(const Plan &plan, const std::optional<Topology> &topology) {
  const Manifest &manifest = plan.manifest();
  // Whole nodes, if the plan or the topology says how many ranks a node has.
  const auto upTo = [](uint32_t n, uint32_t by) { return (n + by - 1) / by; };
  const uint32_t node =
      std::max<uint32_t>(topology ? static_cast<uint32_t>(topology->ranksPerNode) : manifest.ranks_per_node(), 1);
  const uint32_t group = plan.world() <= kPageRanks ? 1 : node * upTo(upTo(plan.world(), node), kPageRanks);
  Json data = {{"model", manifest.model() ? manifest.model()->str() : ""},
               {"digest", plan.digest()},
               {"compiler", manifest.compiler() ? manifest.compiler()->str() : ""},
               {"world", plan.world()},
               {"group", group},
               {"node", node},
               {"transfers", manifest.transfers()},
               {"messages", manifest.messages()},
               {"rounds", manifest.rounds()},
               {"staging", manifest.staging_limit()},
               {"bytes",
                {{"target", manifest.bytes_target()},
                 {"local", manifest.bytes_local()},
                 {"remote", manifest.bytes_remote()},
                 {"storage", manifest.bytes_storage()}}},
               {"endpoints", endpointsOf(manifest)}};
  Result<Json> traffic = trafficOf(plan, group);
  Result<Json> tensors = traffic.ok() ? tensorsOf(plan) : traffic;
  Result<Json> time = !tensors.ok() ? tensors : topology ? timesOf(plan, *topology, group) : Result<Json>(Json());
  if (!time.ok())
    return time;
  data.update(*traffic);
  data["tensors"] = std::move(*tensors);
  data["time"] = std::move(*time);
  return data;
}

/// Replaces the only occurrence of a mark.
void insert(std::string &page, std::string_view mark, std::string_view text) {
  page.replace(page.find(mark), mark.size(), text);
}

} // namespace

Result<std::string> pageOf(const Plan &plan, const std::optional<Topology> &topology) {
  const Result<Json> made = dataOf(plan, topology);
  if (!made.ok())
    return made.status();
  std::string data = made->dump();
  for (size_t at = data.find('<'); at != std::string::npos; at = data.find('<', at))
    data.replace(at, 1, "\\u003c"); // the same text in JSON, and no tag
  std::string page(kPageText);
  insert(page, "\"STYLE\"", kPageStyle);
  insert(page, "\"SCRIPT\"", kPageScript);
  insert(page, "\"DATA\"", data);
  return page;
}

} // namespace reshard::report
