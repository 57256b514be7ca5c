#include "analysis/report/difference.h"

#include "analysis/flatbuffer_vectors.h"
#include "analysis/report/storage_forms.h"
#include "executor/load.h"
#include "support/expression.h"
#include "support/nearest.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <set>
#include <vector>

namespace reshard::analysis {

using Json = nlohmann::ordered_json;

namespace {

using namespace schema;

constexpr const char *kName = "reshard-diff";

/// The numbers of one plan that reports show and --fail-on may use. Returns an error text, empty on success.
std::string numbers(const Plan &plan, std::map<std::string, double> &result) {
  const Manifest &m = plan.manifest();
  std::map<QuantizedBy, double> quantized; // instances of target params, all endpoints
  for (uint32_t e = 0; e < m.endpoints()->size(); ++e) {
    const QuantizedCounts counts = countQuantized(m, e);
    for (const auto &[by, formats] : counts.params)
      for (const auto &[format, count] : formats)
        quantized[by] += static_cast<double>(count);
  }
  uint64_t staged = 0;
  if (std::string error = peakStagedBytes(plan, staged); !error.empty())
    return error;
  result = {{"world", m.world()},
            {"rounds", m.rounds()},
            {"messages", static_cast<double>(m.messages())},
            {"transfers", static_cast<double>(m.transfers())},
            {"descriptors", static_cast<double>(m.descriptors())},
            {"target_bytes", static_cast<double>(m.bytes_target())},
            {"local_bytes", static_cast<double>(m.bytes_local())},
            {"remote_bytes", static_cast<double>(m.bytes_remote())},
            {"storage_bytes", static_cast<double>(m.bytes_storage())},
            {"staging_limit", static_cast<double>(m.staging_limit())},
            {"arena_bytes", static_cast<double>(m.arena_bytes())}, // of the rank with the largest arena
            {"quantized_on_arrival", quantized[QuantizedBy::arrival]},
            {"quantized_staged", quantized[QuantizedBy::staged]},
            {"quantized_by_sender", quantized[QuantizedBy::sender]},
            {"quantized_passthrough", quantized[QuantizedBy::passthrough]},
            {"staged_bytes", static_cast<double>(staged)},
            {"plan_bytes", static_cast<double>(plan.container().bytes())}};
  return {};
}

std::string describe(const Endpoint &endpoint, const Sharding &sharding) {
  std::string text = "(";
  for (uint32_t axis : orEmpty(sharding.axes()))
    text += endpoint.axes()->Get(axis)->name()->str() + ",";
  text += ")";
  for (uint32_t first : *sharding.first())
    text += std::to_string(first) + ";";
  for (const IndexBlock *run : orEmpty(sharding.blocks()))
    for (int64_t field : {run->from(), run->to(), run->length(), run->count(), run->from_step(), run->to_step()})
      text += std::to_string(field) + " ";
  return text;
}

/// Params of all endpoints by "role name", each with a text of all that determines its contents. The text of a
/// quantized view belongs to the param behind it.
std::map<std::string, std::string> params(const Plan &plan) {
  std::map<std::string, std::string> result;
  const Manifest &m = plan.manifest();
  for (const Endpoint *endpoint : *m.endpoints())
    for (const Param *param : orEmpty(endpoint->params())) {
      std::string text = dtypeName(param->dtype());
      const Param *named = param;
      for (const QuantizedView *view = param->view(); view; view = named->view()) {
        named = endpoint->params()->Get(view->codes());
        text +=
            std::string(" ") + EnumNameViewKind(view->kind()) + " " + EnumNameQuantization(view->format()) +
            (view->staged() ? " staged" : "") +
            (scaleLayoutOf(*view) == reshard::ScaleLayout::plain ? "" : std::string(" ") + name(scaleLayoutOf(*view)));
      }
      if (param->storage_dtype())
        text += std::string(" stored ") + dtypeName(*param->storage_dtype());
      for (const Extent *extent : orEmpty(param->shape()))
        for (int64_t length : *extent->at())
          text += " " + std::to_string(length);
      for (const Presence *rule : orEmpty(param->presence())) {
        text += " at " + endpoint->axes()->Get(rule->axis())->name()->str();
        for (uint64_t coordinate : orEmpty(rule->coordinates()))
          text += " " + std::to_string(coordinate);
      }
      for (uint32_t sharding : orEmpty(param->instances()))
        text += " for " + describe(*endpoint, *endpoint->shardings()->Get(sharding));
      if (param->refresh() && param->refresh()->size() > 0)
        text += " refresh " + param->refresh()->str();
      if (transformed(*param))
        text += " transform " + param->transform()->str();
      for (const Part *part : orEmpty(param->parts())) {
        text += part->pattern() < 0
                    ? " zeros"
                    : " holds " + m.tensor_patterns()->Get(static_cast<uint32_t>(part->pattern()))->name()->str();
        for (const PartDimension *dimension : orEmpty(part->dimensions()))
          text += " " + std::to_string(dimension->param()) +
                  describe(*endpoint, *endpoint->shardings()->Get(dimension->sharding()));
      }
      result[endpoint->role()->str() + " " + named->name()->str()] += text;
    }
  return result;
}

std::string number(double value) {
  char text[40];
  if (value == static_cast<double>(static_cast<int64_t>(value)))
    std::snprintf(text, sizeof text, "%lld", static_cast<long long>(value));
  else
    std::snprintf(text, sizeof text, "%.4f", value);
  return text;
}

} // namespace

bool holds(const std::string &expression, const std::map<std::string, double> &names, std::string &error) {
  size_t at = 0;
  auto fail = [&](const std::string &message) {
    error = message + " at character " + std::to_string(at + 1);
    return false;
  };
  const auto parsed = ParsedExpression::parse(expression, ParsedExpression::Numbers::fractions, at);
  if (!parsed.ok())
    return fail(parsed.status().message());
  for (const auto &[name, offset] : parsed->names())
    if (!names.contains(std::string(name))) {
      std::vector<std::string> known;
      for (const auto &[each, ignored] : names)
        known.push_back(each);
      at = offset;
      return fail("unknown name '" + std::string(name) + "'" + suggestion(name, known));
    }
  if (!parsed->isCondition())
    return fail("expected a comparison, found a number");
  const auto value =
      parsed->evaluate<double>([&](std::string_view name) { return std::optional(names.at(std::string(name))); }, at);
  return value.ok() ? **value != 0 : fail(value.status().message());
}

int difference(const DifferenceOptions &options) {
  std::unique_ptr<Plan> before, after;
  for (const auto &[path, plan] : {std::make_pair(&options.before, &before), std::make_pair(&options.after, &after)})
    if (const std::string error = Plan::open(*path, *plan); !error.empty()) {
      printError(kName, error);
      return kUsage;
    }
  const bool equal = before->digest() == after->digest();

  std::map<std::string, double> a, b;
  for (const auto &[plan, result] : {std::make_pair(before.get(), &a), std::make_pair(after.get(), &b)})
    if (const std::string error = numbers(*plan, *result); !error.empty()) {
      printError(kName, error);
      return kUsage;
    }
  std::map<std::string, double> names;
  std::vector<std::string> added, removed, changed;
  std::vector<uint32_t> ranks;
  if (!equal) { // equal digests mean equal plans
    for (const Plan *plan : {before.get(), after.get()})
      for (uint32_t rank = 0; rank < plan->world(); ++rank) {
        const Segment *segment = nullptr;
        if (const std::string error = plan->segment(rank, segment); !error.empty()) {
          printError(kName, error);
          return kUsage;
        }
      }
    const auto pa = params(*before), pb = params(*after);
    for (const auto &[name, facts] : pb) {
      const auto at = pa.find(name);
      if (at == pa.end())
        added.push_back(name);
      else if (at->second != facts)
        changed.push_back(name);
    }
    for (const auto &[name, facts] : pa)
      if (!pb.count(name))
        removed.push_back(name);
    for (uint32_t rank = 0; rank < std::max(before->world(), after->world()); ++rank)
      if (rank >= before->world() || rank >= after->world() ||
          before->container().segmentDigest(rank) != after->container().segmentDigest(rank))
        ranks.push_back(rank);
  }
  for (const auto &[name, value] : b) {
    names[name] = value;
    names[name + "_before"] = a.at(name);
    names[name + "_delta"] = value - a.at(name);
    names[name + "_ratio"] = a.at(name) > 0 ? value / a.at(name) : value > 0 ? 1e9 : 1;
  }
  names["differ"] = !equal;
  names["params_added"] = static_cast<double>(added.size());
  names["params_removed"] = static_cast<double>(removed.size());
  names["params_changed"] = static_cast<double>(changed.size());
  names["ranks_changed"] = static_cast<double>(ranks.size());

  bool failed = !equal;
  if (!options.failOn.empty()) {
    std::string error;
    failed = holds(options.failOn, names, error);
    if (!error.empty()) {
      printError(kName, "--fail-on: " + error);
      return kUsage;
    }
  }

  if (options.format == "json") {
    Json measures = Json::object();
    for (const auto &[name, value] : b)
      measures[name] = {{"before", a.at(name)}, {"after", value}};
    std::printf("%s\n", Json{{"equal", equal},
                             {"digest", {{"before", before->digest()}, {"after", after->digest()}}},
                             {"numbers", measures},
                             {"params", {{"added", added}, {"removed", removed}, {"changed", changed}}},
                             {"ranks_changed", ranks},
                             {"failed", failed}}
                            .dump(2)
                            .c_str());
  } else if (equal) {
    std::printf("the plans are equal: %s\n", before->digest().c_str());
  } else {
    const bool markdown = options.format == "markdown";
    if (markdown)
      std::printf("| | before | after |\n|---|---:|---:|\n| digest | `%s` | `%s` |\n", before->digest().c_str(),
                  after->digest().c_str());
    else
      std::printf("%-16s %32s %32s\n", "digest", before->digest().c_str(), after->digest().c_str());
    for (const auto &[name, value] : b)
      if (value != a.at(name))
        std::printf(markdown ? "| %s | %s | %s |\n" : "%-16s %32s %32s\n", name.c_str(), number(a.at(name)).c_str(),
                    number(value).c_str());
    std::printf(markdown ? "\n%zu of %u ranks have another segment.\n\n" : "%zu of %u ranks have another segment\n",
                ranks.size(), std::max(before->world(), after->world()));
    for (const auto &[title, list] :
         {std::make_pair("added", &added), std::make_pair("removed", &removed), std::make_pair("changed", &changed)})
      for (const std::string &name : *list)
        std::printf(markdown ? "- %s `%s`\n" : "%s: %s\n", title, name.c_str());
  }
  return failed ? kNegative : kDone;
}

} // namespace reshard::analysis
