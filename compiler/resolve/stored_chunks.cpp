// SPDX-License-Identifier: Apache-2.0
// Groups the instances of a source param by the chunks of their stored tensors, and makes one param for each group: its
// shardings have a coordinate for each chunk.
#include "compiler/resolve/steps.h"

#include "base/text.h"
#include "compiler/resolve/flat_part.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

namespace reshard {

using ir::IndexMap;

namespace {

constexpr const char *kAxis = "stored_chunk";

/// One param of the endpoint: the chunks of its instances.
class ChunkedParam {
public:
  ChunkedParam(EndpointContext &context, const ir::Layout &layout, const ir::Param &param)
      : context_(context), endpoint_(context.endpoint()), layout_(layout), param_(param) {
    for (unsigned sharding : param.instances)
      sizes_.push_back(positionCount(endpoint_.shardings[sharding].at[0]));
  }

  /// `tensors`: the stored tensor of each instance. Appends params that together are this one.
  void split(const std::vector<const FileTensor *> &tensors, std::vector<ir::Param> &out) {
    std::map<std::vector<FileChunk>, int, Less> numbers;
    for (const FileTensor *tensor : tensors)
      kinds_.push_back(numbers.try_emplace(tensor->chunks, static_cast<int>(numbers.size())).first->second);
    kindChunks_.resize(numbers.size());
    for (const auto &[chunks, number] : numbers)
      kindChunks_[number] = &chunks;
    std::vector<std::vector<int64_t>> chosen;
    split(0, chosen, kinds_, out);
  }

private:
  struct Less {
    bool operator()(const std::vector<FileChunk> &a, const std::vector<FileChunk> &b) const {
      return std::lexicographical_compare(a.begin(), a.end(), b.begin(), b.end(),
                                          [](const FileChunk &x, const FileChunk &y) {
                                            return std::tie(x.offsets, x.lengths) < std::tie(y.offsets, y.lengths);
                                          });
    }
  };

  /// Splits the instances with the values `chosen` of the variables before `variable` into product sets with the same
  /// chunks. `kinds`: the kind of each of these instances, which does not depend on the chosen values.
  void split(size_t variable, std::vector<std::vector<int64_t>> &chosen, const std::vector<int> &kinds,
             std::vector<ir::Param> &out) {
    if (variable == sizes_.size()) {
      out.push_back(paramFor(chosen, *kindChunks_[kinds[0]]));
      return;
    }
    const size_t each = kinds.size() / static_cast<size_t>(sizes_[variable]);
    std::map<std::vector<int>, std::vector<int64_t>> groups; // kinds of the rest -> values
    for (size_t value = 0; value < static_cast<size_t>(sizes_[variable]); ++value)
      groups[{kinds.begin() + value * each, kinds.begin() + (value + 1) * each}].push_back(static_cast<int64_t>(value));
    for (auto &[rest, values] : groups) {
      chosen.push_back(values);
      split(variable + 1, chosen, rest, out);
      chosen.pop_back();
    }
  }

  /// The param with the instance numbers `chosen` of each variable, in these chunks.
  ir::Param paramFor(const std::vector<std::vector<int64_t>> &chosen, const std::vector<FileChunk> &chunks) {
    ir::Param result = param_;
    for (size_t v = 0; v < chosen.size(); ++v)
      result.instances[v] = chosenInstances(result.instances[v], chosen[v]);
    for (size_t d = 0; d < result.shape.size(); ++d)
      result.shape[d] = extent(result.shape[d].at[0], chunks, d);
    result.parts.clear();
    for (ir::Part part : param_.parts) {
      const bool several = sumsPositions(part) && chunks.size() > 1;
      for (size_t i = 0; i < part.dimensions.size(); ++i) {
        ir::PartDimension &dimension = part.dimensions[i];
        if (dimension.param < 0)
          dimension.sharding = instancesOf(part, i, result);
        else if (!several)
          dimension.sharding = cut(dimension.sharding, chunks, dimension.param, part.pattern < 0);
      }
      if (several)
        addFlat(part, chunks, result.parts);
      else
        result.parts.push_back(std::move(part));
    }
    if (chunks.size() < static_cast<size_t>(meshRanks())) {
      ir::Presence &presence = result.presence.emplace_back();
      presence.axis = chunkAxis();
      presence.coordinates.resize(chunks.size());
      std::iota(presence.coordinates.begin(), presence.coordinates.end(), 0);
    }
    return result;
  }

  int64_t meshRanks() const { return endpoint_.meshRanks(); }
  unsigned chunkAxis() const { return static_cast<unsigned>(endpoint_.axes.size() - 1); }

  /// The sharding value -> instance for some of the instances, numbered again.
  unsigned chosenInstances(unsigned sharding, const std::vector<int64_t> &chosen) {
    IndexMap positions;
    for (const int64_t at : chosen)
      positions.push_back({at, 0, 1, 1, 0, 0});
    positions = dense(ir::normalize(std::move(positions)));
    return context_.intern({{}, {compose(endpoint_.shardings[sharding].at[0], positions)}});
  }

  /// The sharding of dimension i of a part that is an index variable of the param's name.
  unsigned instancesOf(const ir::Part &part, size_t i, const ir::Param &result) const {
    if (part.pattern < 0) // padding has the name's variables in the order of the name
      return result.instances[i];
    const unsigned variable = layout_.tensorPatterns[part.pattern].variables[i];
    for (size_t v = 0; v < result.variables.size(); ++v)
      if (result.variables[v] == variable)
        return result.instances[v];
    return part.dimensions[i].sharding;
  }

  static bool whole(int64_t length, const std::vector<FileChunk> &chunks, size_t d) {
    return std::all_of(chunks.begin(), chunks.end(),
                       [&](const FileChunk &chunk) { return chunk.lengths[d] == length; });
  }

  ir::Extent extent(int64_t length, const std::vector<FileChunk> &chunks, size_t d) const {
    if (whole(length, chunks, d))
      return {{}, {length}};
    ir::Extent result{{chunkAxis()}, std::vector<int64_t>(static_cast<size_t>(meshRanks()))};
    for (size_t i = 0; i < chunks.size(); ++i)
      result.at[i] = chunks[i].lengths[d];
    return result;
  }

  /// The sharding of dimension d of the param, restricted to each chunk. `padding`: as for cutSharding.
  unsigned cut(unsigned sharding, const std::vector<FileChunk> &chunks, int d, bool padding) {
    if (whole(param_.shape[d].at[0], chunks, d))
      return sharding;
    std::vector<Interval> intervals(static_cast<size_t>(meshRanks()));
    for (size_t i = 0; i < chunks.size(); ++i)
      intervals[i] = {chunks[i].offsets[d], chunks[i].offsets[d] + chunks[i].lengths[d]};
    return cutSharding(context_, sharding, intervals, chunkAxis(), padding);
  }

  /// Adds the cuts of a part of a flat buffer at the ends of chunks.
  void addFlat(const ir::Part &part, const std::vector<FileChunk> &chunks, std::vector<ir::Part> &out) {
    FlatOffsets offsets;
    for (const ir::PartDimension &dimension : part.dimensions)
      if (dimension.param >= 0)
        offsets.push_back(endpoint_.shardings[dimension.sharding].at[0]);
    std::vector<FlatInterval> intervals;
    for (const FileChunk &chunk : chunks)
      intervals.push_back({chunk.offsets[0], chunk.offsets[0] + chunk.lengths[0]});
    addCuts(part, FlatPart(std::move(offsets)), intervals, {chunkAxis()}, static_cast<size_t>(meshRanks()), context_,
            out);
  }

  EndpointContext &context_;
  const ir::Endpoint &endpoint_;
  const ir::Layout &layout_;
  const ir::Param &param_;
  std::vector<int64_t> sizes_; // number of values of each variable
  std::vector<int> kinds_;     // by instance
  std::vector<const std::vector<FileChunk> *> kindChunks_;
};

class ChunkPlacer {
public:
  ChunkPlacer(const ir::Layout &layout, const Tensors &tensors, EndpointContext &context, DeclaredParams declared,
              Diagnostics &diagnostics)
      : layout_(layout), tensors_(tensors), context_(context), endpoint_(context.endpoint()),
        files_(*context.declaration().files), declared_(declared), diagnostics_(diagnostics) {
    for (const FileTensor &tensor : files_.tensors)
      byName_[tensor.name] = &tensor;
  }

  void place() {
    std::vector<std::vector<const FileTensor *>> found; // by param and instance; empty: not stored
    for (size_t p = 0; p < endpoint_.params.size(); ++p)
      found.push_back(find(p));
    for (size_t p = 0; p < found.size(); ++p)
      if (!absent_[p].empty() && !heldByOthers(p, found))
        missing_.emplace_back(p, absent_[p]);
    reportMissing();
    if (failed_)
      return;
    size_t most = 1;
    for (const auto &tensors : found)
      for (const FileTensor *tensor : tensors)
        most = std::max(most, tensor->chunks.size());
    limitCuts(found, most);
    if (failed_)
      return;
    endpoint_.axes.push_back({kAxis, static_cast<int64_t>(most), 1});
    endpoint_.ranks.resize(most);
    std::iota(endpoint_.ranks.begin(), endpoint_.ranks.end(), 0);
    const std::vector<ir::Param> params = std::move(endpoint_.params);
    endpoint_.params.clear();
    std::vector<Location> at;
    std::vector<StorageRule> forms;
    for (size_t p = 0; p < params.size(); ++p) {
      if (found[p].empty())
        continue;
      if (quantized(p))
        endpoint_.params.push_back(whole(params[p]));
      else
        ChunkedParam(context_, layout_, params[p]).split(found[p], endpoint_.params);
      at.resize(endpoint_.params.size(), declared_.at[p]);
      forms.resize(endpoint_.params.size(), declared_.forms[p]);
    }
    declared_.at = std::move(at);
    declared_.forms = std::move(forms);
  }

private:
  /// A param whose stored tensors have one chunk each.
  ir::Param whole(ir::Param param) const {
    if (endpoint_.meshRanks() > 1)
      param.presence.push_back({static_cast<unsigned>(endpoint_.axes.size() - 1), {0}});
    return param;
  }

  /// Refuses flat buffers in so many chunks that their cuts need gigabytes. `most`: chunks of a tensor.
  void limitCuts(const std::vector<std::vector<const FileTensor *>> &found, size_t most) {
    constexpr size_t kMaxCuts = 1 << 21;
    size_t cuts = 0;
    for (size_t p = 0; p < found.size() && !failed_; ++p) {
      const std::vector<ir::Part> &parts = endpoint_.params[p].parts;
      const bool cut = std::any_of(found[p].begin(), found[p].end(),
                                   [](const FileTensor *tensor) { return tensor->chunks.size() > 1; });
      if (!cut || std::none_of(parts.begin(), parts.end(), sumsPositions))
        continue;
      cuts += parts.size() * most;
      if (cuts > kMaxCuts)
        refuse(p, where() + " has tensors in up to " + std::to_string(most) + " chunks, and param '" +
                      endpoint_.params[p].name + "' is a flat buffer of " + std::to_string(parts.size()) +
                      " parts: expected flat buffers in several chunks with parts times chunks of at most " +
                      std::to_string(kMaxCuts) +
                      " together; 'reshard-convert SOURCE NEW --to=safetensors' joins chunks");
    }
  }

  std::string where() const { return "'" + context_.declaration().directory + "'"; }

  void refuse(size_t p, const std::string &message) {
    diagnostics_.error(declared_.at[p], message);
    failed_ = true;
  }

  /// Whether codes and scales are stored in place of the param.
  bool quantized(size_t p) const {
    const auto &quantize = declared_.forms[p].quantize;
    return quantize && quantize->format;
  }

  /// The stored tensors of a param's instances, or of one of its params of codes and scales. If one is not
  /// stored, it is the entry of absent_, and the result is empty; if some are stored and others are not, that is an
  /// error.
  std::vector<const FileTensor *> find(size_t p) {
    absent_.emplace_back();
    if (!quantized(p))
      return find(p, endpoint_.params[p]);
    const QuantizeRule &rule = *declared_.forms[p].quantize;
    std::vector<std::string> patterns{rule.codes, rule.scale};
    if (formatOf(*rule.format).tensorScale())
      patterns.push_back(rule.tensorScale);
    std::vector<const FileTensor *> result;
    for (const std::string &pattern : patterns) {
      ir::Param each = endpoint_.params[p];
      each.name = quantizedName(pattern, each.name);
      const bool others = !result.empty();
      result = find(p, each);
      if (others && !absent_[p].empty())
        missing_.emplace_back(p, std::exchange(absent_[p], {}));
      if (result.empty())
        return {};
    }
    if (!rule.shape.empty() && !checkShapes(p, rule.shape))
      return {};
    return result;
  }

  /// Checks the stored shapes of quantized matrices. They are not read, so that any of them may be missing.
  bool checkShapes(size_t p, const std::string &pattern) {
    ir::Param shapes = endpoint_.params[p];
    shapes.name = quantizedName(pattern, shapes.name);
    for (int64_t i = 0, count = ir::instances(endpoint_, shapes, 0); i < count; ++i)
      if (const auto at = byName_.find(ir::instanceName(layout_, endpoint_, shapes, 0, i));
          at != byName_.end() && !check(p, *at->second))
        return false;
    return true;
  }

  std::vector<const FileTensor *> find(size_t p, const ir::Param &param) {
    const int64_t count = ir::instances(endpoint_, param, 0);
    std::vector<const FileTensor *> result;
    for (int64_t i = 0; i < count; ++i) {
      const std::string name = ir::instanceName(layout_, endpoint_, param, 0, i);
      const auto at = byName_.find(name);
      if (at == byName_.end()) {
        if (absent_[p].empty())
          absent_[p] = name;
        continue;
      }
      if (!check(p, *at->second))
        return {};
      result.push_back(at->second);
    }
    if (absent_[p].empty())
      return result;
    if (!result.empty())
      missing_.emplace_back(p, std::exchange(absent_[p], {}));
    return {};
  }

  /// Whether other params, which are stored, have the tensors of this one. Whether they have the same instances of
  /// these tensors is checked later, for all sources.
  bool heldByOthers(size_t p, const std::vector<std::vector<const FileTensor *>> &found) const {
    const std::vector<ir::Part> &parts = endpoint_.params[p].parts;
    return std::all_of(parts.begin(), parts.end(), [&](const ir::Part &part) {
      for (size_t other = 0; other < found.size(); ++other)
        for (const ir::Part &held : endpoint_.params[other].parts)
          if (!found[other].empty() && part.pattern >= 0 && held.pattern == part.pattern)
            return true;
      return false;
    });
  }

  bool check(size_t p, const FileTensor &tensor) {
    const ir::Param &param = endpoint_.params[p];
    const std::string title = where() + ": tensor '" + tensor.name + "'";
    if (quantized(p)) { // the reader of the files checks dtypes and shapes of codes and scales
      if (tensor.chunks.size() > 1)
        refuse(p, title + " is stored in " + std::to_string(tensor.chunks.size()) + " chunks, but param '" +
                      param.name + "' is quantized as " + formatOf(*declared_.forms[p].quantize->format).name +
                      ": the chunks of its codes and scales may cut a block, expected one chunk of each; "
                      "'reshard-convert SOURCE NEW --to=safetensors' joins them");
      return tensor.chunks.size() <= 1;
    }
    const std::vector<int64_t> shape = ir::localShape(endpoint_, param, 0);
    if (tensor.shape != shape) {
      refuse(p, title + " has shape " + shapeText(tensor.shape) + ", expected " + shapeText(shape) +
                    ", that of param '" + param.name + "'");
      return false;
    }
    if (tensor.dtype != param.dtype) {
      refuse(p, title + " is " + ir::name(tensor.dtype) + ", expected " + ir::name(param.dtype) +
                    "; 'dtype: stored' in the source uses the dtypes of its files");
      return false;
    }
    if (tensor.chunks.size() > 1 && tensors_.opaque(param)) {
      refuse(p, title + " is stored in " + std::to_string(tensor.chunks.size()) + " chunks, but param '" + param.name +
                    "' holds an opaque tensor, expected one chunk");
      return false;
    }
    return true;
  }

  void reportMissing() {
    constexpr size_t kShown = 8;
    for (size_t i = 0; i < std::min(missing_.size(), kShown); ++i) {
      const auto &[p, name] = missing_[i];
      std::vector<std::string> names;
      for (const FileTensor &tensor : files_.tensors)
        names.push_back(tensor.name);
      refuse(p, where() + " (" + titleOf(files_.format) + ") has no tensor '" + name + "'" + suggestion(name, names));
    }
    if (missing_.size() > kShown)
      refuse(missing_[kShown].first, where() + " lacks " + std::to_string(missing_.size() - kShown) +
                                         " other params of layout '" + endpoint_.layout + "'");
  }

  const ir::Layout &layout_;
  const Tensors &tensors_;
  EndpointContext &context_;
  ir::Endpoint &endpoint_;
  const StoredFiles &files_;
  DeclaredParams declared_;
  Diagnostics &diagnostics_;
  std::map<std::string, const FileTensor *> byName_;
  std::vector<std::string> absent_;                     // by param: the first instance that is not stored
  std::vector<std::pair<size_t, std::string>> missing_; // params that must be stored, and an instance that is not
  bool failed_ = false;
};

} // namespace

void placeStoredChunks(const ir::Layout &layout, const Tensors &tensors, EndpointContext &context,
                       DeclaredParams declared, Diagnostics &diagnostics) {
  ChunkPlacer(layout, tensors, context, declared, diagnostics).place();
}

} // namespace reshard
