#include "tools/simulation.h"

#include "tools/simulate.h"

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdio>

namespace reshard::tools {

using Json = nlohmann::ordered_json;

namespace {

constexpr const char *kName = "reshard-inspect";
constexpr const char *kStages[] = {"pack", "wire", "unpack", "copy"};

/// Chrome's trace format, which Perfetto reads: a process for each rank, a thread for each kind; times in microseconds.
std::string traceOf(const Simulation &simulation) {
  std::string text = "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n";
  for (const Activity &a : simulation.activities) {
    char line[256];
    std::snprintf(line, sizeof line,
                  "{\"name\": \"%s %u round %u\", \"ph\": \"X\", \"pid\": %d, \"tid\": \"%s\", \"ts\": %.3f, \"dur\": "
                  "%.3f, \"args\": {\"peer\": %d, \"bytes\": %llu}}%s\n",
                  kStages[static_cast<int>(a.kind)], a.message, a.round, a.rank, kStages[static_cast<int>(a.kind)],
                  a.begin * 1e6, (a.end - a.begin) * 1e6, a.peer, static_cast<unsigned long long>(a.bytes),
                  &a == &simulation.activities.back() ? "" : ",");
    text += line;
  }
  return text + "]}\n";
}

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

} // namespace

int inspectSimulation(const Plan &plan, const InspectionOptions &options) {
  Simulation simulation;
  if (const std::string error = simulate(plan, *options.topology, !options.trace.empty(), simulation); !error.empty()) {
    complain(kName, error);
    return kUsage;
  }
  if (!options.trace.empty())
    if (const std::string error = writeFile(options.trace, traceOf(simulation)); !error.empty()) {
      complain(kName, error);
      return kFailure;
    }
  const double ratio = simulation.floorSeconds > 0 ? simulation.seconds / simulation.floorSeconds : 1;
  if (options.format == "json") {
    Json terms = Json::object(), stages = Json::object();
    for (const FloorTerm &term : simulation.floor)
      terms[term.name] = term.seconds;
    for (int kind = 0; kind < 4; ++kind)
      stages[kStages[kind]] = simulation.stages[kind];
    Json result = {{"seconds", simulation.seconds},
                   {"stages", stages},
                   {"busiest_rank", {{"rank", simulation.busiestRank}, {"seconds", simulation.rankBusy}}},
                   {"busiest_nic", {{"nic", simulation.busiestNic}, {"seconds", simulation.nicBusy}}}};
    if (!simulation.floor.empty())
      result.update({{"floor", simulation.floorSeconds}, {"floor_terms", terms}, {"ratio", ratio}});
    std::printf("%s\n", result.dump(2).c_str());
    return kDone;
  }
  std::printf("simulated  %s\n", time(simulation.seconds).c_str());
  if (simulation.floor.empty()) {
    std::printf("floor      unknown: the plan was compiled for other nodes (options.topology)\n");
  } else {
    std::printf("floor      %s, of which the plan takes %.3f times\n", time(simulation.floorSeconds).c_str(), ratio);
    for (const FloorTerm &term : simulation.floor)
      std::printf("  %-26s %s\n", term.name, time(term.seconds).c_str());
  }
  std::printf("busiest    rank %lld, in use for %s", static_cast<long long>(simulation.busiestRank),
              time(simulation.rankBusy).c_str());
  if (simulation.busiestNic >= 0)
    std::printf("; NIC %lld, in use for %s", static_cast<long long>(simulation.busiestNic),
                time(simulation.nicBusy).c_str());
  std::printf("\nstages    ");
  for (int kind = 0; kind < 4; ++kind)
    std::printf(" %s %s%s", kStages[kind], time(simulation.stages[kind]).c_str(),
                kind < 3 ? "," : " (of the rank that spends most on each)\n");
  return kDone;
}

} // namespace reshard::tools
