// Where a rank gathers what it quantises when all of a block is there: rows of blocks of its params, in the arena, as
// many at a time as fit.
#pragma once

#include "compiler/interner.h"
#include "ir/ir.h"

#include <map>
#include <string>
#include <tuple>
#include <vector>

namespace reshard {

/// Whole rows of blocks of one instance of a face.
struct Band {
  unsigned endpoint = 0;
  int32_t place = 0;
  uint32_t instance = 0;      // over all params of the place
  int64_t begin = 0, end = 0; // bytes of the instance
  uint32_t phase = 0;         // of the rank's generation: what is in one is there at one time
  int64_t offset = 0;         // in the arena
};

class Bands {
public:
  explicit Bands(const ir::Layout &layout);

  /// Plans all ranks. `remote`: bytes that move between ranks, for which staging must be left. An error text, empty on
  /// success: one row of blocks does not fit the staging limit.
  std::string plan(int64_t remote);

  /// The rank that writes to an instance of a face, or of the largest magnitudes for it: its own, and in files one for
  /// each instance; -1 where anyone may.
  int32_t writer(unsigned endpoint, int32_t place, uint32_t instance) const;
  /// Whether one rank must write to an instance though others could, or rows of blocks of it are gathered.
  bool gathers(unsigned endpoint, int32_t place, uint32_t instance) const {
    return find(endpoint, place, instance, 0) ||
           (layout_.endpoints[endpoint].storage && writer(endpoint, place, instance) >= 0);
  }
  /// The param of an instance of a place.
  unsigned paramOf(unsigned endpoint, int32_t place, uint32_t instance) const;
  /// The band of a byte of an instance; null where it is not gathered.
  const Band *find(unsigned endpoint, int32_t place, uint32_t instance, int64_t offset) const;
  /// In which phase values of a param may come, where they are not gathered.
  uint32_t phaseOf(const ir::Param &param) const;

  /// Of a rank, in order of phases; bytes of the arena that they take.
  const std::vector<Band> &of(int32_t rank) const { return bands_[rank]; }
  int64_t bytes(int32_t rank) const { return bytes_[rank]; }

private:
  struct Rows {
    Band all;           // of the instance
    int64_t row = 0;    // bytes of a row of blocks
    int64_t matrix = 0; // bytes of a matrix, whose last row may be shorter
    bool later = false; // not in the first phase
    std::string name;
  };
  std::vector<std::vector<Rows>> rows() const;
  void planRank(int32_t rank, std::vector<Rows> &rows, int64_t limit);

  const ir::Layout &layout_;
  std::vector<std::vector<std::vector<uint32_t>>> firsts_; // by endpoint and place: the first instance of each param
  std::vector<std::vector<Band>> bands_;                   // by rank
  std::vector<int64_t> bytes_;
  std::map<std::tuple<unsigned, int32_t, uint32_t>, std::vector<Band>> byInstance_;
};

/// Appends a descriptor in parts, each of one instance and, where that is gathered, within one band. Shapes of parts
/// are interned.
void cutByBands(const ir::Descriptor &descriptor, const Bands &bands, Interner<ir::Shape> &shapes,
                std::vector<ir::Descriptor> &parts);

} // namespace reshard
