// SPDX-License-Identifier: Apache-2.0
#include "executor/launch.h"

#include "executor/channel.h"
#include "support/atomic_file.h"

#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>
#include <unistd.h>

namespace reshard {

namespace {

std::optional<uint32_t> number(const char *name) {
  const char *text = name ? std::getenv(name) : nullptr;
  uint32_t value = 0;
  if (!text || std::from_chars(text, text + std::strlen(text), value).ptr != text + std::strlen(text) || !*text)
    return {};
  return value;
}

} // namespace

Launch findLaunch() {
  // All values must be of one launcher, since one launcher may have started another: the innermost first. torchrun is
  // recognized by TORCHELASTIC_RUN_ID, since other launchers set RANK, too.
  struct Names {
    const char *rank, *size, *localRank;
    bool mpi;
    const char *known = nullptr; // a variable that must be set as well
  };
  constexpr Names kLaunchers[] = {{"RANK", "WORLD_SIZE", "LOCAL_RANK", false, "TORCHELASTIC_RUN_ID"},
                                  {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", true},
                                  {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", true},
                                  {"RANK", "WORLD_SIZE", "LOCAL_RANK", false},
                                  {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", false}};
  for (const Names &names : kLaunchers)
    if (const std::optional<uint32_t> rank = number(names.rank); rank && (!names.known || std::getenv(names.known)))
      return {rank, number(names.size), number(names.localRank), names.mpi};
  return {};
}

Status broadcastByFile(const std::string &path, uint32_t rank, std::byte *data, size_t bytes,
                       const Deadline &deadline) {
  std::error_code error;
  if (rank == 0) {
    if (std::filesystem::exists(path, error))
      return failed("'" + path + "' already exists, expected a new file for each launch");
    return writeFile(path, {reinterpret_cast<const char *>(data), bytes});
  }
  while (!std::filesystem::exists(path, error)) {
    if (passed(deadline))
      return timedOut("timed out waiting for '" + path + "', which rank 0 writes");
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char *>(data), static_cast<std::streamsize>(bytes));
  if (!file || file.peek() != std::ifstream::traits_type::eof())
    return failed("'" + path + "' does not have " + std::to_string(bytes) +
                  " bytes, expected the file that rank 0 of this launch writes");
  return {};
}

namespace {

/// Waits for request 0 of a channel.
Status waitFor(Channel &channel, uint32_t peer, const Deadline &deadline) {
  while (true) {
    const Result<bool> done = channel.test(0);
    if (!done.ok() || *done)
      return done.status();
    if (passed(deadline))
      return timedOut("timed out waiting for rank " + std::to_string(peer) + " to join");
    std::this_thread::yield();
  }
}

} // namespace

Status broadcastByChannel(Channel &channel, std::byte *data, size_t bytes, const Deadline &deadline) {
  channel.reserve(1);
  const bool sends = channel.rank() == 0;
  // Rank 0 sends to one rank after the other: no faster broadcast is needed, since all wait for each other next.
  for (uint32_t peer = sends ? 1 : 0; peer < (sends ? channel.size() : 1); ++peer) {
    Status status = sends ? channel.send(0, peer, 0, data, bytes) : channel.receive(0, peer, 0, data, bytes);
    if (status.ok())
      status = waitFor(channel, peer, deadline);
    if (!status.ok()) {
      channel.abandon();
      return status;
    }
  }
  return {};
}

} // namespace reshard
