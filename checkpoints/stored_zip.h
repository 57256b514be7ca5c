// SPDX-License-Identifier: Apache-2.0
// The members of a zip archive without compression, as torch.save writes it.
#pragma once

#include "base/input_file.h"
#include "base/status.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace reshard::analysis {

class StoredZip {
public:
  struct Member {
    std::string_view name;
    uint64_t header = 0, bytes = 0; // where its local header begins; of its data
  };

  /// Reads the directory. Refuses archives with compression or encryption, members that lie outside the archive, and
  /// repeated names. `where` begins the errors.
  static Result<StoredZip> read(FilePart &archive, const std::string &where);

  /// By name.
  const std::vector<Member> &members() const { return members_; }
  /// Null if there is none.
  const Member *find(std::string_view name) const;
  /// Where the data of a member begins in the archive, from its local header.
  static Result<uint64_t> dataAt(FilePart &archive, const Member &member, const std::string &where);

private:
  std::vector<char> directory_; // the names are parts of it
  std::vector<Member> members_;
};

} // namespace reshard::analysis
