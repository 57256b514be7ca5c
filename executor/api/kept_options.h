// SPDX-License-Identifier: Apache-2.0
// The options of reshard_open, which reshard_replace uses again: with copies of the texts, without the caller's
// objects.
#pragma once

#include "reshard/reshard.h"

#include <deque>
#include <string>

namespace reshard {

class KeptOptions {
public:
  KeptOptions() = default;
  KeptOptions(const KeptOptions &) = delete;
  KeptOptions &operator=(const KeptOptions &) = delete;

  /// `options` has the library's size.
  void keep(const reshard_options &options) {
    options_ = options;
    for (const char **text :
         {&options_.transport, &options_.device, &options_.rendezvous, &options_.job, &options_.secret})
      if (*text)
        *text = texts_.emplace_back(*text).c_str();
    options_.store = nullptr; // valid only during reshard_open
    options_.communicator = nullptr;
  }
  const reshard_options &get() const { return options_; }

private:
  reshard_options options_ = RESHARD_OPTIONS_INITIALIZER;
  std::deque<std::string> texts_; // a deque, since the options have pointers to them
};

} // namespace reshard
