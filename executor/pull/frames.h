// SPDX-License-Identifier: Apache-2.0
// The frames of pull mode. A client opens a connection with a hello that has the server's token, and the server answers
// with a welcome; it closes a connection whose first frame is another one. It drops a frame whose numbers do not fit.
#pragma once

#include "executor/interfaces/messenger.h"

#include <initializer_list>

namespace reshard::pull {

/// Word 0 of a frame, and the words after it.
enum class FrameKind : uint64_t {
  // Between every client and its server.
  hello = 1, // token of the server, world rank of the client, kProtocol
  welcome,   // token of the server
  ping,
  pong, // nothing

  // Between a rank that reads bytes and its server. The lease begins with the first fetch of a version.
  fetch, // version, message, begin, end, slot, 1 if the client can read the server's memory, incarnation of the version
  data,  // version, message, begin, end, slot, the address of the bytes (0: they follow as data), lease
  gone,  // version, message, begin, end, slot: the version is not served, or no longer
  askSender, // as gone: only the sender of the message can serve the range
  confirm,   // version, lease: are all bytes that the client has read so far those of the version?
  confirmed, // version, 1 if they are
  leave,     // version: the lease ends

  // From a target rank to a source rank; the answer has the same first three words.
  askDigests, // version, its incarnation, a number of the client; text: at most kDigests buckets, of 4 bytes each
  digests,    // and a DigestsAnswer; text: the source's partial digest of each bucket, three numbers of 8 bytes

  // Between source ranks and the coordinator, which is the server of the source's mesh rank 0.
  coordinator, // token of the coordinator; its address as text
  published,   // version (0: none), token of the source rank, incarnation of its process

  // Between a target rank and the coordinator.
  begin,        // least version, call, failed assignment, milliseconds until its deadline
  assign,       // assignment, version, parent, call, incarnation of the version
  waiting,      // newest version, rank that has not published it
  complete,     // assignment
  committed,    // assignment, version
  repeat,       // assignment
  resume,       // the last assignment that was committed: the rank has connected again
  replaced,     // another process has begun as this rank
  parentFailed, // parent

  // Between every client and the coordinator.
  list,   // nothing
  listed, // number of replicas, index of the first in the text; the text has at most kListed of them
};

/// The answer to askDigests.
enum class DigestsAnswer : uint64_t {
  given,
  without,      // the version was published without digests
  otherVersion, // the process has published another one since, or never the one that was asked for
};

constexpr uint64_t kProtocol = 5;
/// The most bytes of one fetch, and the most fetches of one client that one server has not answered.
constexpr uint64_t kRangeBytes = uint64_t{4} << 20;
constexpr uint32_t kWindow = 4;
/// A replica in the text of `listed`: four numbers of 4, 4, 8 and 1 bytes.
constexpr size_t kListedBytes = 17, kListed = kMaxFrameText / kListedBytes;
/// The bytes of a partial digest in the text of `digests`, and the most that one frame has.
constexpr size_t kDigestBytes = 24, kDigests = kMaxFrameText / kDigestBytes;

inline Frame makeFrame(FrameKind kind, std::initializer_list<uint64_t> words = {}) {
  Frame frame;
  frame.words[0] = static_cast<uint64_t>(kind);
  size_t at = 1;
  for (const uint64_t word : words)
    frame.words[at++] = word;
  return frame;
}
inline FrameKind kindOf(const Frame &frame) { return static_cast<FrameKind>(frame.words[0]); }

} // namespace reshard::pull
