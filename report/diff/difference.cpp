// SPDX-License-Identifier: Apache-2.0
// Compares the numbers, params, formats and segments of two plans, prints what differs as a table or JSON, and
// evaluates the condition of --fail-on. Also compares the layouts of a plan with those of its job.
#include "report/diff/difference.h"

#include "base/expression.h"
#include "base/text.h"
#include "executor/load/load.h"
#include "report/inspect/quantized_forms.h"
#include "schema/flatbuffer_vectors.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <set>
#include <vector>

namespace reshard::report {

using Json = nlohmann::ordered_json;

namespace {

using namespace schema;

/// The numbers of one plan that reports show and --fail-on may use.
Result<std::map<std::string, double>> numbers(const Plan &plan) {
  const Manifest &m = plan.manifest();
  std::map<QuantizedBy, double> quantized; // instances of target params, all endpoints
  for (uint32_t e = 0; e < m.endpoints()->size(); ++e) {
    const QuantizedCounts counts = countQuantized(m, e);
    for (const auto &[by, formats] : counts.params)
      for (const auto &[format, count] : formats)
        quantized[by] += static_cast<double>(count);
  }
  const Result<uint64_t> staged = peakStagedBytes(plan);
  if (!staged.ok())
    return staged.status();
  return std::map<std::string, double>{
      {"world", m.world()},
      {"replicas", m.endpoints()->Get(m.endpoints()->size() - 1)->replicas()}, // engine replicas of a pool
      {"rounds", m.rounds()},
      {"messages", static_cast<double>(m.messages())},
      {"transfers", static_cast<double>(m.transfers())},
      {"descriptors", static_cast<double>(m.descriptors())},
      {"target_bytes", static_cast<double>(m.bytes_target())},
      {"local_bytes", static_cast<double>(m.bytes_local())},
      {"remote_bytes", static_cast<double>(m.bytes_remote())},
      {"storage_bytes", static_cast<double>(m.bytes_storage())},
      {"staging_limit", static_cast<double>(m.staging_limit())},
      {"arena_bytes", static_cast<double>(m.arena_bytes())}, // the largest of a rank
      {"quantized_on_arrival", quantized[QuantizedBy::arrival]},
      {"quantized_staged", quantized[QuantizedBy::staged]},
      {"quantized_by_sender", quantized[QuantizedBy::sender]},
      {"quantized_passthrough", quantized[QuantizedBy::passthrough]},
      {"staged_bytes", static_cast<double>(*staged)},
      {"plan_bytes", static_cast<double>(plan.container().bytes())}};
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
        text += std::string(" stored ") + dtypeName(*param->storage_dtype()) + " " +
                kOverflowRuleNames[static_cast<size_t>(param->overflow())];
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

/// Whether a number of numbers() is a size in bytes.
bool isSize(const std::string &name) { return name.ends_with("_bytes") || name == "staging_limit"; }

std::string number(double value) {
  char text[40];
  if (value == static_cast<double>(static_cast<int64_t>(value)))
    std::snprintf(text, sizeof text, "%lld", static_cast<long long>(value));
  else
    std::snprintf(text, sizeof text, "%.4f", value);
  return text;
}

/// A number of numbers() for people.
std::string shown(const std::string &name, double value) { return isSize(name) ? humanBytes(value) : number(value); }

/// "+1.0 KiB (+100.0 %)"
std::string changeOf(const std::string &name, double before, double after) {
  const double delta = after - before;
  std::string text = (delta < 0 ? "-" : "+") + shown(name, std::abs(delta));
  if (before != 0) {
    char percent[40];
    std::snprintf(percent, sizeof percent, " (%+.1f %%)", delta / before * 100);
    text += percent;
  }
  return text;
}

/// The operands of the outermost `or` of a valid expression.
std::vector<std::string> alternatives(const std::string &expression) {
  std::vector<std::string> found(1);
  int depth = 0;
  const auto isWord = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; };
  for (size_t at = 0; at < expression.size(); ++at) {
    depth += (expression[at] == '(') - (expression[at] == ')');
    const bool begins = at == 0 || !isWord(expression[at - 1]);
    if (depth == 0 && begins && expression.compare(at, 2, "or") == 0 &&
        (at + 2 == expression.size() || !isWord(expression[at + 2]))) {
      found.emplace_back();
      ++at;
    } else {
      found.back() += expression[at];
    }
  }
  for (std::string &each : found) {
    each.erase(0, each.find_first_not_of(" \t\n"));
    each.erase(each.find_last_not_of(" \t\n") + 1);
  }
  return found;
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
      known.reserve(names.size());
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

std::vector<HeldCondition> heldConditions(const std::string &expression, const std::map<std::string, double> &names) {
  std::vector<HeldCondition> held;
  std::string error;
  if (!holds(expression, names, error))
    return held;
  std::vector<std::string> texts;
  for (const std::string &each : alternatives(expression))
    if (holds(each, names, error))
      texts.push_back(each);
  if (texts.empty()) // an operand of `or` that is no comparison
    texts.push_back(expression);
  for (std::string &text : texts) {
    size_t at = 0;
    const auto parsed = ParsedExpression::parse(text, ParsedExpression::Numbers::fractions, at);
    std::map<std::string, double> values;
    for (const auto &[name, offset] : parsed->names())
      values[std::string(name)] = names.at(std::string(name));
    held.push_back({std::move(text), std::move(values)});
  }
  return held;
}

namespace {

/// What differs between two plans.
struct PlanDifference {
  const Plan &before, &after;
  std::map<std::string, double> numbersBefore, numbersAfter;          // by name
  std::vector<std::string> added, removed, changed;                   // params
  std::map<std::string, std::pair<std::string, std::string>> formats; // differing formats of storage, by role
  std::vector<uint32_t> ranks;                                        // with differing segments
  bool equal = false;
  uint32_t world() const { return std::max(before.world(), after.world()); }
};

void compareParams(PlanDifference &difference) {
  const auto before = params(difference.before), after = params(difference.after);
  for (const auto &[name, facts] : after) {
    const auto at = before.find(name);
    if (at == before.end())
      difference.added.push_back(name);
    else if (at->second != facts)
      difference.changed.push_back(name);
  }
  for (const auto &[name, facts] : before)
    if (!after.count(name))
      difference.removed.push_back(name);
}

void compareFormats(PlanDifference &difference) {
  for (const Endpoint *before : *difference.before.manifest().endpoints())
    for (const Endpoint *after : *difference.after.manifest().endpoints())
      if (before->role()->str() == after->role()->str() && before->storage() && after->storage() &&
          before->format() != after->format())
        difference.formats[before->role()->str()] = {name(formatOf(*before)), name(formatOf(*after))};
}

/// Loads all segments, so that a damaged plan is an error, and compares their digests.
Status compareSegments(PlanDifference &difference) {
  for (const Plan *plan : {&difference.before, &difference.after})
    for (uint32_t rank = 0; rank < plan->world(); ++rank) {
      std::shared_ptr<const Segment> segment;
      if (Status status = plan->segment(rank, segment); !status.ok())
        return status;
    }
  for (uint32_t rank = 0; rank < difference.world(); ++rank)
    if (rank >= difference.before.world() || rank >= difference.after.world() ||
        difference.before.container().segmentDigest(rank) != difference.after.container().segmentDigest(rank))
      difference.ranks.push_back(rank);
  return {};
}

Result<PlanDifference> compare(const Plan &before, const Plan &after) {
  const auto numbersBefore = numbers(before), numbersAfter = numbersBefore.ok() ? numbers(after) : numbersBefore;
  if (!numbersAfter.ok())
    return numbersAfter.status();
  PlanDifference difference{.before = before,
                            .after = after,
                            .numbersBefore = *numbersBefore,
                            .numbersAfter = *numbersAfter,
                            .added = {},
                            .removed = {},
                            .changed = {},
                            .formats = {},
                            .ranks = {},
                            .equal = before.digest() == after.digest()};
  if (!difference.equal) { // equal digests mean equal plans
    if (Status status = compareSegments(difference); !status.ok())
      return status;
    compareParams(difference);
    compareFormats(difference);
  }
  return difference;
}

/// The names that --fail-on may use.
std::map<std::string, double> namesOf(const PlanDifference &difference) {
  std::map<std::string, double> names;
  for (const auto &[name, value] : difference.numbersAfter) {
    const double before = difference.numbersBefore.at(name);
    names[name] = value;
    names[name + "_before"] = before;
    names[name + "_delta"] = value - before;
    names[name + "_ratio"] = before > 0 ? value / before : value > 0 ? 1e9 : 1;
  }
  names["differ"] = !difference.equal;
  names["params_added"] = static_cast<double>(difference.added.size());
  names["params_removed"] = static_cast<double>(difference.removed.size());
  names["params_changed"] = static_cast<double>(difference.changed.size());
  names["ranks_changed"] = static_cast<double>(difference.ranks.size());
  return names;
}

void printJson(const PlanDifference &difference, bool failed, const std::vector<HeldCondition> &held) {
  Json measures = Json::object(), formats = Json::object(), conditions = Json::array();
  for (const HeldCondition &each : held)
    conditions.push_back({{"condition", each.text}, {"values", each.values}});
  for (const auto &[role, change] : difference.formats)
    formats[role] = {{"before", change.first}, {"after", change.second}};
  for (const auto &[name, value] : difference.numbersAfter)
    measures[name] = {{"before", difference.numbersBefore.at(name)}, {"after", value}};
  std::printf(
      "%s\n",
      Json{{"equal", difference.equal},
           {"digest", {{"before", difference.before.digest()}, {"after", difference.after.digest()}}},
           {"numbers", measures},
           {"params", {{"added", difference.added}, {"removed", difference.removed}, {"changed", difference.changed}}},
           {"formats", formats},
           {"ranks_changed", difference.ranks},
           {"failed", failed},
           {"held", conditions}}
          .dump(2)
          .c_str());
}

void printTable(const PlanDifference &difference, bool markdown) {
  const std::string before = difference.before.digest(), after = difference.after.digest();
  if (markdown)
    std::printf("| | before | after | change |\n|---|---:|---:|---:|\n| digest | `%s` | `%s` | |\n", before.c_str(),
                after.c_str());
  else
    std::printf("%-21s %32s %32s\n", "digest", before.c_str(), after.c_str());
  for (const auto &[name, value] : difference.numbersAfter)
    if (const double old = difference.numbersBefore.at(name); value != old)
      std::printf(markdown ? "| %s | %s | %s | %s |\n" : "%-21s %32s %32s  %s\n", name.c_str(),
                  shown(name, old).c_str(), shown(name, value).c_str(), changeOf(name, old, value).c_str());
  for (const auto &[role, change] : difference.formats)
    std::printf(markdown ? "| format of the %s | %s | %s | |\n" : "format of %-11s %32s %32s\n", role.c_str(),
                change.first.c_str(), change.second.c_str());
  std::printf(markdown ? "\nThe segments of %zu of %u ranks differ.\n\n" : "the segments of %zu of %u ranks differ\n",
              difference.ranks.size(), difference.world());
  for (const auto &[title, list] :
       {std::make_pair("added", &difference.added), std::make_pair("removed", &difference.removed),
        std::make_pair("changed", &difference.changed)})
    for (const std::string &name : *list)
      std::printf(markdown ? "- %s `%s`\n" : "%s: %s\n", title, name.c_str());
}

void printHeld(const std::vector<HeldCondition> &held, bool markdown) {
  for (const HeldCondition &each : held) {
    std::string values;
    for (const auto &[name, value] : each.values)
      values += (values.empty() ? "" : ", ") + name + " = " + number(value);
    std::printf(markdown ? "\n**Failed:** `%s`%s\n" : "failed: %s%s\n", each.text.c_str(),
                values.empty() ? "" : (": " + values).c_str());
  }
}

/// A table as bytes: those of equal tables are equal.
template <class Table> std::string packed(const Table &table) {
  flatbuffers::FlatBufferBuilder builder;
  builder.Finish(Table::TableType::Pack(builder, &table));
  return {reinterpret_cast<const char *>(builder.GetBufferPointer()), builder.GetSize()};
}

/// The first element in which two lists of tables differ, as `what` and its name.
template <class Table>
std::string firstDifference(const std::vector<std::unique_ptr<Table>> &plan,
                            const std::vector<std::unique_ptr<Table>> &job, const std::string &what) {
  for (size_t i = 0; i < std::min(plan.size(), job.size()); ++i)
    if (packed(*plan[i]) != packed(*job[i]))
      return what + " '" + plan[i]->name + "' of the plan differs from '" + job[i]->name + "' of the job";
  if (plan.size() != job.size())
    return "the plan has " + std::to_string(plan.size()) + " " + what + "s, the job " + std::to_string(job.size());
  return "";
}

} // namespace

Result<bool> difference(const DifferenceOptions &options) {
  std::unique_ptr<Plan> before, after;
  if (Status status = Plan::open(options.before, before); !status.ok())
    return status;
  if (Status status = Plan::open(options.after, after); !status.ok())
    return status;
  const Result<PlanDifference> compared = compare(*before, *after);
  if (!compared.ok())
    return compared.status();
  const PlanDifference &difference = *compared;
  bool failed = !difference.equal;
  std::vector<HeldCondition> held; // the conditions of --fail-on that hold
  if (!options.failOn.empty()) {
    std::string error;
    failed = holds(options.failOn, namesOf(difference), error);
    if (!error.empty())
      return invalid("--fail-on: " + error);
    held = heldConditions(options.failOn, namesOf(difference));
  }
  if (options.format == "json")
    printJson(difference, failed, held);
  else if (difference.equal)
    std::printf("the plans are equal: %s\n", before->digest().c_str());
  else
    printTable(difference, options.format == "markdown");
  if (options.format != "json")
    printHeld(held, options.format == "markdown");
  return failed;
}

std::string layoutDifference(const Manifest &plan, const Manifest &job) {
  ManifestT mine, wanted;
  plan.UnPackTo(&mine);
  job.UnPackTo(&wanted);
  if (mine.world != wanted.world)
    return "the plan has a world of " + std::to_string(mine.world) + ", the job of " + std::to_string(wanted.world);
  if (mine.endpoints.size() != wanted.endpoints.size())
    return "the plan has " + std::to_string(mine.endpoints.size()) + " endpoints, the job " +
           std::to_string(wanted.endpoints.size());
  if (std::string found = firstDifference(mine.variables, wanted.variables, "index variable"); !found.empty())
    return found;
  if (std::string found = firstDifference(mine.tensor_patterns, wanted.tensor_patterns, "tensor"); !found.empty())
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
    if (std::string found = firstDifference(a.params, b.params, a.role + " param"); !found.empty())
      return found;
    if (packed(a) != packed(b))
      return a.ranks != b.ranks ? "the " + a.role + " has other ranks"
                                : "the " + a.role + " has other axes, shardings or storage";
  }
  return "";
}

} // namespace reshard::report
