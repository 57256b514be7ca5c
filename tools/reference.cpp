#include "tools/reference.h"

#include "tools/deadline.h"
#include "tools/new_folder.h"
#include "tools/values.h"
#include "tools/vectors.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <sys/mman.h>

namespace reshard::tools {

using namespace schema;

namespace {
constexpr size_t kMapped = 1 << 20; // from here on pages that are never touched save more than two system calls cost
}

Reserved::~Reserved() {
  if (bytes_ >= kMapped)
    ::munmap(data_, bytes_);
  else
    std::free(data_);
}

void Reserved::grow(size_t bytes) {
  if (bytes <= bytes_)
    return;
  if (bytes < kMapped) {
    auto *small = static_cast<std::byte *>(std::realloc(data_, bytes));
    if (!small)
      throw std::bad_alloc();
    std::memset(small + bytes_, 0, bytes - bytes_);
    data_ = small;
    bytes_ = bytes;
    return;
  }
  void *grown = bytes_ >= kMapped ? ::mremap(data_, bytes_, bytes, MREMAP_MAYMOVE)
                                  : ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (grown == MAP_FAILED)
    throw Failure{kFailure, "cannot put a tensor together from what the source holds: no addresses for " +
                                humanBytes(static_cast<double>(bytes)) + ": " + std::strerror(errno)};
  if (data_ && bytes_ < kMapped) {
    std::memcpy(grown, data_, bytes_);
    std::free(data_);
  }
  data_ = static_cast<std::byte *>(grown);
  bytes_ = bytes;
}

void TensorValues::grow(int64_t end, int64_t item) {
  if (room_ >= end)
    return;
  const int64_t room = std::max(end, room_ + room_ / 2);
  known_.grow(static_cast<size_t>(room / 8 + 1));
  bytes_.grow(static_cast<size_t>(room) * static_cast<size_t>(item));
  room_ = room;
}

void TensorValues::put(int64_t element, const std::byte *from, int64_t item) {
  grow(element + 1, item);
  set(element, from, item);
}

void TensorValues::set(int64_t element, const std::byte *from, int64_t item) {
  std::memcpy(&bytes_[element * item], from, static_cast<size_t>(item));
  size_ += known(element) ? 0 : static_cast<size_t>(item);
  known_[element / 8] |= std::byte{1} << (element % 8);
}

void TensorValues::put(const ElementRun &run, const std::byte *memory, int64_t item, bool agree) {
  grow(std::max(run.logical, run.logical + (run.count - 1) * run.logicalStep) + 1, item);
  for (int64_t k = 0; k < run.count; ++k) {
    const int64_t element = run.logical + k * run.logicalStep;
    const std::byte *from = memory + (run.local + k * run.localStep) * item;
    if (agree && known(element) && std::memcmp(at(element, item), from, static_cast<size_t>(item)) != 0 &&
        conflict_ < 0)
      conflict_ = element;
    set(element, from, item);
  }
}

Reference::Reference(const Plan &plan, uint64_t seed)
    : plan_(plan), endpoint_(*plan.manifest().endpoints()->Get(0)), seed_(seed) {
  for (uint32_t place = 0; place < endpoint_.ranks()->size(); ++place) {
    places_.push_back({0, place, {}});
    for (const Param *param : all(endpoint_.params()))
      places_.back().params.emplace_back(instanceCount(endpoint_, *param, place), nullptr);
  }
  find(places_);
}

Reference::Reference(const Plan &plan, const Memory &source)
    : plan_(plan), endpoint_(*plan.manifest().endpoints()->Get(0)), source_(&source) {
  find(source.places());
}

void Reference::find(const std::vector<PlaceMemory> &places) {
  shownBy_ = shownAsElements(endpoint_);
  for (uint32_t p = 0; p < shownBy_.size(); ++p)
    for (const Part *part : all(endpoint_.params()->Get(p)->parts()))
      if (part->family() >= 0 && (shownBy_[p] || endpoint_.params()->Get(p)->face()))
        families_.insert(part->family());
  // Largest magnitudes are not asked for as tensors, but tensors for theirs.
  for (const Param *param : all(endpoint_.params()))
    if (const Face *face = param->face(); face && face->kind() == FaceKind::amax && all(param->parts()).size() > 0) {
      const int family = endpoint_.params()->Get(face->codes())->parts()->Get(face->part())->family();
      largestOf_[param->parts()->Get(0)->family()] = {family, face->over() == 0 ? 3 : face->over()};
    }
  // Of places that hold the same, one says what the source shows; without faces, each is read as it is.
  std::set<std::vector<int64_t>> seen;
  holders_ = occurrences(plan_, places, [&](const PlaceMemory &place, uint32_t p, uint32_t instance) {
    if (const Face *face = endpoint_.params()->Get(p)->face(); face && face->kind() == FaceKind::amax)
      return false;
    bool shows = false;
    for (const Part *part : all(endpoint_.params()->Get(p)->parts()))
      shows = shows || shown(part->family());
    if (!shows && !source_ && !sendsLargest(place, p))
      return false;
    std::vector<int64_t> like = likeness(endpoint_, p, place.place);
    like.push_back(instance);
    return has(place, p, instance) && (source_ && !shows ? true : seen.insert(std::move(like)).second);
  });
}

bool Reference::has(const PlaceMemory &place, uint32_t p, uint32_t instance) const {
  if (!source_)
    return true;
  const Face *face = endpoint_.params()->Get(p)->face();
  if (!face)
    return place.params[p][instance] != nullptr;
  const std::vector<uint32_t> shown = shownParams(*face);
  return std::all_of(shown.begin(), shown.end(), [&](uint32_t each) { return has(place, each, instance); });
}

std::shared_ptr<const std::byte> Reference::bytes(const PlaceMemory &place, const ParamInstance &instance) {
  const Face *face = endpoint_.params()->Get(instance.param)->face();
  if (!face && source_)
    return {std::shared_ptr<const std::byte>(), place.params[instance.param][instance.instance]};
  if (const auto &by = shownBy_[instance.param]; !face && by) {
    const auto all = made(place, sibling(endpoint_, instance, by->face, place.place));
    return {all, (*all)[by->number].data()};
  }
  const auto result = instances_.get(
      {place.place, instance.param, instance.instance},
      [&] {
        auto own = std::make_shared<Bytes>();
        if (face) {
          std::vector<std::shared_ptr<const std::byte>> shown;
          std::vector<const std::byte *> memory;
          for (uint32_t each : shownParams(*face)) {
            shown.push_back(bytes(place, sibling(endpoint_, instance, each, place.place)));
            memory.push_back(shown.back().get());
          }
          *own = show(endpoint_, instance.param, place.place, memory);
        } else {
          own->resize(static_cast<size_t>(instance.bytes));
          synthesizeInstance(plan_.manifest(), endpoint_, place.place, instance, seed_, own->data());
        }
        return own;
      },
      [](const Bytes &bytes) { return bytes.size(); });
  return {result, result->data()};
}

/// What synthesised elements are quantised to.
std::shared_ptr<const std::vector<Bytes>> Reference::made(const PlaceMemory &place, const ParamInstance &elements) {
  return made_.get(
      {place.place, elements.param, elements.instance},
      [&] {
        Bytes wide(static_cast<size_t>(elements.bytes));
        synthesizeInstance(plan_.manifest(), endpoint_, place.place, elements, seed_, wide.data());
        const std::vector<float> tensorScales = synthesisedTensorScales(endpoint_, elements, place.place);
        return std::make_shared<std::vector<Bytes>>(
            make(endpoint_, elements.param, place.place, wide.data(), tensorScales));
      },
      [](const std::vector<Bytes> &list) {
        size_t sum = 0;
        for (const Bytes &bytes : list)
          sum += bytes.size();
        return sum;
      });
}

TensorValues Reference::gather(const std::string &name) {
  TensorValues tensor;
  if (const auto found = holders_.find(name); !name.empty() && found != holders_.end())
    for (const auto &holder : found->second) {
      const std::shared_ptr<const std::byte> memory = bytes(*holder->place, holder->instance);
      const int64_t item = itemBytes(endpoint_.params()->Get(holder->instance.param)->dtype());
      forEachRun(plan_.manifest(), endpoint_, holder->instance.param, holder->place->place, holder->instance,
                 [&](const ElementRun &run) {
                   if (run.tensor && *run.tensor == name)
                     tensor.put(run, memory.get(), item, shown(run.family));
                 });
    }
  return tensor;
}

std::shared_ptr<const TensorValues> Reference::tensor(const std::string &name) {
  return tensors_.get(
      name, [&] { return std::make_shared<const TensorValues>(gather(name)); },
      [](const TensorValues &tensor) { return tensor.size(); });
}

std::optional<float> Reference::largest(const ElementRun &run, const Values &values) {
  const auto of = largestOf_.find(run.family);
  if (of == largestOf_.end())
    return std::nullopt;
  const auto &families = *plan_.manifest().families();
  const Family &family = *families.Get(static_cast<uint32_t>(of->second.family)),
               &numbers = *families.Get(static_cast<uint32_t>(run.family));
  // The names are those of the patterns, of which one goes on where the other ends.
  const std::string name = run.tensor->substr(0, run.tensor->size() - (numbers.name()->size() - family.name()->size()));
  const auto list = largest_.get(
      *run.tensor, [&] { return std::make_shared<std::vector<float>>(largest(name, of->second, values)); },
      [](const std::vector<float> &list) { return list.size() * sizeof(float); });
  const auto shards = static_cast<int64_t>(numbers.shape()->Get(numbers.shape()->size() - 1));
  const auto number = static_cast<size_t>(run.logical / std::max<int64_t>(shards, 1));
  return number < list->size() ? std::optional((*list)[number]) : std::nullopt;
}

/// Over all that the source holds of a tensor, for each position along the dimensions that they are not over.
std::vector<float> Reference::largest(const std::string &name, const Over &of, const Values &values) {
  constexpr int64_t kAtOnce = 4096;
  const auto &shape = all(plan_.manifest().families()->Get(static_cast<uint32_t>(of.family))->shape());
  const auto isOver = [&](uint32_t d) { return (of.dimensions >> (shape.size() - 1 - d) & 1) != 0; };
  uint32_t inner = shape.size(); // from here on, all dimensions are such
  while (inner > 0 && isOver(inner - 1))
    --inner;
  int64_t together = 1, count = 1; // elements in a row that have one number; numbers
  for (uint32_t d = 0; d < shape.size(); ++d)
    (d >= inner ? together : count) *= d >= inner || !isOver(d) ? static_cast<int64_t>(shape.Get(d)) : 1;
  const auto numberOf = [&](int64_t row) { // of such a row
    int64_t number = 0, stride = 1;
    for (uint32_t d = inner; d-- > 0;) {
      const auto length = static_cast<int64_t>(shape.Get(d));
      if (!isOver(d)) {
        number += row % length * stride;
        stride *= length;
      }
      row /= length;
    }
    return static_cast<size_t>(number);
  };
  const int64_t item = itemBytes(values.comes);
  const uint64_t key = tensorKey(name, seed_);
  const bool made = synthesised() && !shown(of.family);
  Bytes some(static_cast<size_t>(kAtOnce * item));
  std::vector<float> list(static_cast<size_t>(count));
  const auto found = holders_.find(name);
  for (const auto &holder :
       found == holders_.end() ? std::vector<std::shared_ptr<const Occurrence>>() : found->second) {
    if (!sendsLargest(*holder->place, holder->instance.param))
      continue;
    const std::shared_ptr<const std::byte> memory = made ? nullptr : bytes(*holder->place, holder->instance);
    forEachRun(plan_.manifest(), endpoint_, holder->instance.param, holder->place->place, holder->instance,
               [&](const ElementRun &run) {
                 if (!run.tensor || *run.tensor != name)
                   return;
                 for (int64_t k = 0, taken = 0; k < run.count; k += taken) {
                   ElementRun part;
                   part.logical = run.logical + k * run.logicalStep;
                   part.logicalStep = run.logicalStep;
                   const int64_t row = part.logical / together;
                   const int64_t most =
                       run.logicalStep > 0 ? ((row + 1) * together - 1 - part.logical) / run.logicalStep + 1 : 1;
                   part.count = taken = std::min({kAtOnce, run.count - k, most});
                   Deadline::spend(part.count);
                   if (made)
                     fill(some.data(), part, key, values);
                   for (int64_t i = 0; !made && i < part.count; ++i)
                     std::memcpy(some.data() + i * item, memory.get() + (run.local + (k + i) * run.localStep) * item,
                                 static_cast<size_t>(item));
                   float &magnitude = list[numberOf(row)];
                   magnitude = largerOf(largestOf(values.comes, some.data(), part.count), magnitude);
                 }
               });
  }
  return list;
}

/// Whether largest magnitudes of what a param holds on a place are sent: those of places that may not be read are not.
bool Reference::sendsLargest(const PlaceMemory &place, uint32_t number) const {
  for (const Param *param : all(endpoint_.params()))
    if (const Face *face = param->face(); face && face->kind() == FaceKind::amax && face->codes() == number)
      for (const Part *part : all(param->parts())) {
        const PartDimension &shard = *part->dimensions()->Get(part->dimensions()->size() - 1);
        const Runs list = runs(endpoint_, *endpoint_.shares()->Get(shard.share()), place.place);
        if (list.begin != list.end)
          return true;
      }
  return false;
}

} // namespace reshard::tools
