// SPDX-License-Identifier: Apache-2.0
// The table of the transports: what each of them needs and can do on a device. The executor, the commands, and their
// help and error texts ask it, and compare no names. docs/api.md has the same table for users, which a test compares.
#pragma once

#include "base/status.h"
#include "base/text.h"

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace reshard {

/// A transport on a device.
struct TransportTraits {
  const char *name;
  const char *device; // the device that has the bound memory
  const char *about;  // for help texts, after the name
  /// Each process has one rank, and a backend connects them: libreshard_NAME.so (executor/interfaces/module.cpp). Else
  /// one process has all ranks of the plan.
  bool processes = false;
  /// The processes can find each other through a rendezvous of the caller.
  bool rendezvous = false;
  /// They have no other way.
  bool needsRendezvous = false;
  /// Pull mode. The backend opens messengers too.
  bool pull = false;
  /// Can replace the plan between runs.
  bool replace = false;
  /// How the loader's error begins if the library that the backend needs is missing, and what to do then.
  const char *library = nullptr;
  const char *fix = nullptr;
  /// Called before the backend is loaded.
  Status (*beforeLoading)() = nullptr;

  /// Whether a launcher alone connects the processes: each of them joins before it can tell the others of a failure.
  bool launched() const { return processes && !rendezvous; }
  /// Whether prepare records the run, with its hooks, and the run replays it on a stream, also of the caller or in the
  /// caller's graph.
  bool recorded() const { return std::string_view(device) != "cpu"; }
};

/// Loads the UCX of the variable RESHARD_UCX_ROOT, if it is set.
Status loadOtherUcx();

/// All rows; those of one name differ in what depends on the device. The first is the default.
std::span<const TransportTraits> transports();

/// The row of a transport on a device; an empty device: its first row. Null: there is none.
const TransportTraits *findTransport(std::string_view name, std::string_view device = {});

/// Selects rows of the table: a member such as &TransportTraits::pull, or a function.
using WhichTransports = std::function<bool(const TransportTraits &)>;

/// The names, or the devices, of the rows for which `which` holds, in the order of the table, each once.
std::vector<std::string> transportNames(const WhichTransports &which = [](const TransportTraits &) { return true; });
std::vector<std::string> transportDevices(const WhichTransports &which = [](const TransportTraits &) { return true; });

} // namespace reshard
