#include "executor/launch.h"

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
  // Of one launcher all, since one that launched the launcher may have left its own.
  struct Names {
    const char *rank, *size, *localRank;
  };
  constexpr Names kLaunchers[] = {{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
                                  {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},
                                  {"RANK", "WORLD_SIZE", "LOCAL_RANK"},
                                  {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"}};
  for (const Names &names : kLaunchers)
    if (const std::optional<uint32_t> rank = number(names.rank))
      return {rank, number(names.size), number(names.localRank)};
  return {};
}

std::string shareByFile(const std::string &path, uint32_t rank, std::byte *data, size_t bytes, const Deadline &deadline, bool &timedOut) {
  std::error_code error;
  if (rank == 0) {
    if (std::filesystem::exists(path, error))
      return "'" + path + "' is there already, expected a new file for each launch";
    const std::string temporary = path + ".partial-" + std::to_string(getpid());
    std::ofstream file(temporary, std::ios::binary);
    file.write(reinterpret_cast<const char *>(data), static_cast<std::streamsize>(bytes));
    file.close();
    if (!file)
      return "cannot write '" + temporary + "': " + std::strerror(errno);
    std::filesystem::rename(temporary, path, error);
    return error ? "cannot write '" + path + "': " + error.message() : std::string();
  }
  while (!std::filesystem::exists(path, error)) {
    if (passed(deadline)) {
      timedOut = true;
      return "the deadline passed without '" + path + "', which rank 0 writes";
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char *>(data), static_cast<std::streamsize>(bytes));
  if (!file || file.peek() != std::ifstream::traits_type::eof())
    return "'" + path + "' is not of " + std::to_string(bytes) + " bytes, expected what rank 0 of this launch writes";
  return {};
}

} // namespace reshard
