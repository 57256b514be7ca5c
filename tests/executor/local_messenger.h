// SPDX-License-Identifier: Apache-2.0
// A messenger between threads of one process, for tests of pull mode. A test can delay, freeze, cut off or kill a
// messenger while other threads use it.
#pragma once

#include "executor/interfaces/messenger.h"

#include <memory>

namespace reshard::tests {

/// Makes messengers that reach each other. Any thread may call it. The messengers may outlive it.
class LocalNetwork {
public:
  LocalNetwork();
  /// Messengers with equal `host` can read each other's memory.
  std::unique_ptr<Messenger> open(const std::string &host = "host");

  /// The following name a messenger by its address; one that is closed is ignored.
  /// Its connections end, and all its calls fail, as if its process had been killed.
  void kill(const std::string &address);
  /// It sends and receives nothing, as if its process had got SIGSTOP; its peers do not notice. Its memory stays
  /// readable.
  void freeze(const std::string &address, bool frozen = true);
  /// Its connections end, at both sides, and connecting to it or from it fails, until the cut is taken back.
  void cut(const std::string &address, bool isCut = true);
  /// What is sent to it from now on arrives this much later.
  void delay(const std::string &address, double seconds);
  /// Bytes that its peers have read, or that it has sent as data.
  uint64_t served(const std::string &address);

  struct State;

private:
  std::shared_ptr<State> state_;
};

} // namespace reshard::tests
