// SPDX-License-Identifier: Apache-2.0
// The reports of reshard-inspect. They print on stdout; an answer that is no is a `negative` error.
#pragma once

#include "base/status.h"
#include "base/topology.h"

#include <optional>
#include <string>

namespace reshard {
class Plan;
}

namespace reshard::report {

struct InspectionOptions {
  std::string plan, param, explain, format = "text";
  std::string output; // where to write the page of format html
  int64_t rank = -1;  // -1: no rank
  bool verify = false;
  std::optional<Topology> topology; // to simulate on
  uint32_t replicas = 0;            // engine replicas to simulate; 0: those of the plan
  std::string trace;                // where to write the simulation's activities
  double timeout = 0;               // 0: none
};

/// A plan that cannot be read is a wrong plan: `failed` becomes `badPlan`, and other errors stay.
inline Status ofPlan(const Status &status) {
  return !status.ok() && status.kind() == ErrorKind::failed ? badPlan(status.message()) : status;
}

/// Prints the report about a plan that the options select. `failed`: a file cannot be written.
Status inspect(const InspectionOptions &options);

/// Simulates the plan on options.topology, prints the estimate and the lower bound, and writes options.trace.
Status inspectSimulation(const Plan &plan, const InspectionOptions &options);

/// Prints where each part of a target param comes from, and why from there. `wanted`: PARAM or PARAM@RANK; without a
/// rank, the first one that has the param.
Status explain(const Plan &plan, const std::string &wanted);

enum class FileKind { plan, checkpoint, unknown };

/// Guesses the kind of a file by its first bytes. A file that cannot be opened, or is too short to tell, counts as a
/// plan, so that the plan loader reports it.
FileKind fileKindOf(const std::string &path);

/// Prints the rows of storage_formats.def by number on stdout, as a JSON array.
void listFormats();

/// Prints the tensors and objects of a checkpoint as text or JSON. `glob`: only those whose names match, with all their
/// chunks; empty: all.
Status inspectCheckpoint(const std::string &path, const std::string &glob, bool json);

} // namespace reshard::report
