// SPDX-License-Identifier: Apache-2.0
// Prints the estimate of a simulation, its lower bound and its activities.
#include "report/inspect/inspection.h"

#include "base/atomic_file.h"
#include "command/common.h"
#include "report/simulate/simulate.h"

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdio>
#include <functional>
#include <optional>
#include <utility>

namespace reshard::report {

using namespace command;

using Json = nlohmann::ordered_json;

namespace {

constexpr const char *kKinds[] = {"pack", "transmit", "unpack", "copy"};

/// Writes Chrome's trace format, which Perfetto reads: a process for each rank, a thread for each kind; times in
/// microseconds. The activities of a large plan are gigabytes of text, so it goes to the file piece by piece.
class TraceFile {
public:
  static Result<TraceFile> create(const std::string &path) {
    TraceFile trace;
    Result<AtomicFile> file = AtomicFile::create(path);
    if (!file.ok())
      return file.status();
    trace.file_ = std::move(*file);
    return trace;
  }

  void add(const Activity &a) {
    char line[256];
    std::snprintf(
        line, sizeof line,
        "%s{\"name\": \"%s %u round %u\", \"ph\": \"X\", \"pid\": %d, \"tid\": \"%s\", \"ts\": %.3f, \"dur\": "
        "%.3f, \"args\": {\"peer\": %d, \"step\": %u, \"bytes\": %llu}}",
        separator_, kKinds[static_cast<int>(a.kind)], a.message, a.round, a.rank, kKinds[static_cast<int>(a.kind)],
        a.begin * 1e6, (a.end - a.begin) * 1e6, a.peer, a.step, static_cast<unsigned long long>(a.bytes));
    text_ += line;
    separator_ = ",\n";
    if (text_.size() >= kBytes)
      write();
  }

  /// The first error of all writes.
  Status commit() {
    text_ += "\n]}\n";
    write();
    return status_.ok() ? file_.commit(written_) : status_;
  }

private:
  static constexpr size_t kBytes = 1 << 20; // written at a time

  void write() {
    if (status_.ok())
      status_ = file_.write(text_.data(), text_.size(), written_);
    written_ += text_.size();
    text_.clear();
  }

  AtomicFile file_;
  Status status_;
  uint64_t written_ = 0;
  std::string text_ = "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n";
  const char *separator_ = "";
};

/// "12.3 ms"
std::string time(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text,
                seconds < 1e-3 ? "%.1f us"
                : seconds < 1  ? "%.2f ms"
                               : "%.3f s",
                seconds < 1e-3 ? seconds * 1e6
                : seconds < 1  ? seconds * 1e3
                               : seconds);
  return text;
}

double ratio(double seconds, const LowerBound &bound) { return bound.seconds > 0 ? seconds / bound.seconds : 1; }

/// Adds the lower bound to the report of a simulation, if it is known.
void addLowerBound(Json &report, const std::optional<LowerBound> &bound, double seconds) {
  if (!bound)
    return;
  Json terms = Json::object();
  for (const LowerBoundTerm &term : bound->terms)
    terms[term.name] = term.seconds;
  report.update(
      {{"lower_bound", bound->seconds}, {"lower_bound_terms", std::move(terms)}, {"ratio", ratio(seconds, *bound)}});
}

void printLowerBound(const std::optional<LowerBound> &bound, double seconds) {
  if (!bound) {
    std::printf("lower bound  unknown: the plan was compiled for a topology with other nodes (options.topology)\n");
    return;
  }
  std::printf("lower bound  %s; this plan: %.3f x\n", time(bound->seconds).c_str(), ratio(seconds, *bound));
  for (const LowerBoundTerm &term : bound->terms)
    std::printf("  %-29s %s\n", term.name, time(term.seconds).c_str());
}

Status inspectPool(const Plan &plan, const InspectionOptions &options, uint32_t replicas) {
  if (!options.trace.empty())
    return invalid("--trace shows the activities of one run, but engine replicas pull at times of their own; "
                   "remove --trace");
  const Result<PoolSimulation> simulated = simulatePool(plan, *options.topology, replicas);
  if (!simulated.ok())
    return ofPlan(simulated.status());
  const PoolSimulation &pool = *simulated;
  if (options.format == "json") {
    Json result = {
        {"replicas", pool.replicas}, {"seconds", pool.seconds}, {"late_joiner", {{"seconds", pool.lateSeconds}}}};
    addLowerBound(result, pool.lowerBound, pool.seconds);
    addLowerBound(result["late_joiner"], pool.lateLowerBound, pool.lateSeconds);
    std::printf("%s\n", result.dump(2).c_str());
    return {};
  }
  std::printf("simulated    %s until %u engine %s the version: one reads from the sources, each other from the one "
              "before it\n",
              time(pool.seconds).c_str(), pool.replicas, pool.replicas == 1 ? "replica has" : "replicas have");
  printLowerBound(pool.lowerBound, pool.seconds);
  std::printf("late joiner  %s", time(pool.lateSeconds).c_str());
  if (pool.lateLowerBound)
    std::printf("; lower bound %s; this plan: %.3f x", time(pool.lateLowerBound->seconds).c_str(),
                ratio(pool.lateSeconds, *pool.lateLowerBound));
  std::printf("\n");
  return {};
}

} // namespace

Status inspectSimulation(const Plan &plan, const InspectionOptions &options) {
  if (const uint32_t planned = plan.manifest().endpoints()->Get(1)->replicas(); planned > 0)
    return inspectPool(plan, options, options.replicas > 0 ? options.replicas : planned);
  if (options.replicas > 0)
    return invalid("--replicas: the target of '" + options.plan + "' has no engine replicas (key 'replicas')");
  std::optional<TraceFile> trace;
  if (!options.trace.empty()) {
    Result<TraceFile> created = TraceFile::create(options.trace);
    if (!created.ok())
      return created.status();
    trace = std::move(*created);
  }
  const Result<Simulation> simulated = [&] {
    ProgressLine progress("simulate"); // removed before the report
    std::function<void(const Activity &)> visit;
    if (trace)
      visit = [&](const Activity &activity) { trace->add(activity); };
    return simulate(plan, *options.topology, [&](double fraction) { progress.at(fraction); }, visit);
  }();
  if (!simulated.ok())
    return ofPlan(simulated.status());
  const Simulation &simulation = *simulated;
  if (Status status = trace ? trace->commit() : Status(); !status.ok())
    return status;
  if (options.format == "json") {
    Json secondsByKind = Json::object();
    for (int kind = 0; kind < 4; ++kind)
      secondsByKind[kKinds[kind]] = simulation.secondsByKind[kind];
    Json result = {{"seconds", simulation.seconds},
                   {"seconds_by_kind", secondsByKind},
                   {"busiest_rank", {{"rank", simulation.busiestRank}, {"seconds", simulation.rankBusy}}},
                   {"busiest_nic", {{"nic", simulation.busiestNic}, {"seconds", simulation.nicBusy}}}};
    addLowerBound(result, simulation.lowerBound, simulation.seconds);
    std::printf("%s\n", result.dump(2).c_str());
    return {};
  }
  std::printf("simulated    %s\n", time(simulation.seconds).c_str());
  printLowerBound(simulation.lowerBound, simulation.seconds);
  std::printf("busiest      rank %lld, in use for %s", static_cast<long long>(simulation.busiestRank),
              time(simulation.rankBusy).c_str());
  if (simulation.busiestNic >= 0)
    std::printf("; NIC %lld, in use for %s", static_cast<long long>(simulation.busiestNic),
                time(simulation.nicBusy).c_str());
  std::printf("\nactivities  ");
  for (int kind = 0; kind < 4; ++kind)
    std::printf(" %s %s%s", kKinds[kind], time(simulation.secondsByKind[kind]).c_str(),
                kind < 3 ? "," : " (each of its busiest rank)\n");
  return {};
}

} // namespace reshard::report
