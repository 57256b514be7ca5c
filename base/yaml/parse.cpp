// SPDX-License-Identifier: Apache-2.0
// Parses YAML text into Nodes. Only this file uses yaml-cpp; its exceptions are caught here. yaml-cpp silently accepts
// duplicate keys, several documents, anchors, unterminated quotes, invalid UTF-8 and unlimited nesting; this file
// reports them as errors.

#include "base/yaml/diagnostics.h"
#include "base/yaml/node.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <istream>
#include <streambuf>
#include <unordered_map>

namespace reshard {

Node *Node::find(std::string_view key) {
  for (auto &[name, value] : entries)
    if (name.text == key)
      return &value;
  return nullptr;
}

const Node *Node::find(std::string_view key) const {
  const auto at =
      std::find_if(entries.begin(), entries.end(), [&](const Entry &entry) { return entry.key.text == key; });
  return at == entries.end() ? nullptr : &at->value;
}

namespace {

constexpr size_t kMaxDepth = 64;
constexpr const char *kBraces = "quote a name with braces in flow style, and everywhere if it begins with a brace";

/// Thrown by the builder through yaml-cpp to stop the parsing after an error that was reported.
struct ParseStopped {};

/// A stream buffer over text that is not copied.
struct TextBuffer : std::streambuf {
  explicit TextBuffer(std::string_view text) {
    char *begin = const_cast<char *>(text.data()); // setg() takes char *, but nothing writes to the text
    setg(begin, begin, begin + text.size());
  }
};

/// Builds the tree from yaml-cpp's events.
class Builder : public YAML::EventHandler {
public:
  Builder(uint32_t file, size_t begin, Diagnostics &diagnostics)
      : file_(file), begin_(begin), text_(diagnostics.text(file)), diagnostics_(diagnostics) {}

  /// The tree, or nullptr if it is incomplete.
  std::unique_ptr<Node> take() { return complete_ ? std::make_unique<Node>(std::move(root_)) : nullptr; }
  Location location(const YAML::Mark &mark) const {
    Location at{file_, static_cast<uint32_t>(mark.line + 1), static_cast<uint32_t>(mark.column + 1)};
    if (mark.line == 0)
      at.column += static_cast<uint32_t>(begin_);
    return at;
  }
  /// Whether a list or map is open.
  bool open() const { return !open_.empty(); }
  /// The innermost open list or map.
  const Node &innermost() const { return open_.back().node; }
  /// Reports a syntax error found by yaml-cpp in the words of this project.
  void explain(const YAML::Exception &exception) const;

  void OnDocumentStart(const YAML::Mark &mark) override {
    if (started_) {
      diagnostics_.error(location(mark), "expected one document, found the start of another");
      throw ParseStopped();
    }
    started_ = true;
  }
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark &mark, YAML::anchor_t) override {
    add({Node::Kind::null, location(mark), false, {}, {}, {}});
  }

  void OnScalar(const YAML::Mark &mark, const std::string &tag, YAML::anchor_t, const std::string &value) override {
    checkTag(mark, tag);
    const bool quoted = tag == "!"; // yaml-cpp gives this tag to every scalar that is not plain
    if (quoted)
      checkQuotes(mark);
    add({Node::Kind::scalar, location(mark), quoted, value, {}, {}});
  }

  void OnAnchor(const YAML::Mark &mark, const std::string &) override {
    diagnostics_.error(location(mark), "anchors are not supported");
  }
  void OnAlias(const YAML::Mark &mark, YAML::anchor_t) override {
    diagnostics_.error(location(mark), "aliases are not supported");
    complete_ = false;
    add({Node::Kind::null, location(mark), false, {}, {}, {}});
  }

  void OnSequenceStart(const YAML::Mark &mark, const std::string &tag, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {
    enter(mark, tag, Node::Kind::sequence);
  }
  void OnMapStart(const YAML::Mark &mark, const std::string &tag, YAML::anchor_t, YAML::EmitterStyle::value) override {
    enter(mark, tag, Node::Kind::map);
  }
  void OnSequenceEnd() override { leave(); }
  void OnMapEnd() override { leave(); }

private:
  /// A list or map whose end was not read yet.
  struct Open {
    Node node, key;
    bool atKey = true; // for a map: whether the next node is a key
    std::unordered_map<std::string, Location> keys;
  };

  char character(const YAML::Mark &mark) const {
    const size_t at = begin_ + static_cast<size_t>(mark.pos);
    return at < text_.size() ? text_[at] : '\0';
  }

  /// Reports a tag. yaml-cpp gives "?" or "!" if there is no tag, but a "!" may also be written in the text.
  void checkTag(const YAML::Mark &mark, const std::string &tag) {
    if ((tag != "?" && tag != "!" && !tag.empty()) || character(mark) == '!')
      diagnostics_.error(location(mark), "tags are not supported");
  }

  /// Reports a quote that is not closed before the end of the file.
  void checkQuotes(const YAML::Mark &mark) {
    size_t at = begin_ + static_cast<size_t>(mark.pos);
    const char quote = character(mark);
    if (quote != '"' && quote != '\'')
      return;
    for (++at; at < text_.size(); ++at) {
      if (quote == '"' && text_[at] == '\\') {
        ++at;
      } else if (text_[at] == quote) {
        if (quote == '"' || at + 1 == text_.size() || text_[at + 1] != quote)
          return;
        ++at;
      }
    }
    diagnostics_.error(location(mark), "quoted text without a closing " + std::string(quote == '"' ? "'\"'" : "\"'\""));
    throw ParseStopped();
  }

  void enter(const YAML::Mark &mark, const std::string &tag, Node::Kind kind) {
    checkTag(mark, tag);
    if (open_.size() == kMaxDepth) {
      diagnostics_.error(location(mark), "lists and maps nested more than " + std::to_string(kMaxDepth) + " deep");
      throw ParseStopped();
    }
    open_.push_back({{kind, location(mark), false, {}, {}, {}}, {}, true, {}});
  }

  void leave() {
    Node node = std::move(open_.back().node);
    open_.pop_back();
    add(std::move(node));
  }

  void add(Node node) {
    if (open_.empty()) {
      root_ = std::move(node);
      return;
    }
    Open &parent = open_.back();
    if (parent.node.kind == Node::Kind::sequence) {
      parent.node.items.push_back(std::move(node));
    } else if (parent.atKey) {
      parent.atKey = false;
      parent.key = std::move(node);
    } else {
      parent.atKey = true;
      addEntry(parent, std::move(node));
    }
  }

  void addEntry(Open &map, Node value) {
    const Node &key = map.key;
    if (key.kind != Node::Kind::scalar) {
      const char *kind = key.kind == Node::Kind::null ? "nothing" : key.kind == Node::Kind::map ? "a map" : "a list";
      diagnostics_.error(key.at, std::string("expected text as a key, found ") + kind +
                                     (key.kind == Node::Kind::map ? std::string("; ") + kBraces : ""));
      return;
    }
    const auto [known, added] = map.keys.try_emplace(key.text, key.at);
    if (!added) {
      diagnostics_.error(key.at, "duplicate key '" + key.text + "'");
      diagnostics_.note(known->second, "first defined here");
      return;
    }
    map.node.entries.push_back({std::move(map.key), std::move(value)});
  }

  uint32_t file_;
  size_t begin_; // offset of the YAML in the file's first line
  std::string_view text_;
  Diagnostics &diagnostics_;
  std::vector<Open> open_;
  Node root_;
  bool started_ = false;
  bool complete_ = true;
};

/// Replaces an error text of yaml-cpp by one that states the expected text.
struct MessageRule {
  std::string_view theirs, ours;
};
const MessageRule kMessageRules[] = {
    {YAML::ErrorMsg::END_OF_MAP, "expected another key of this map or its end; check the indentation"},
    {YAML::ErrorMsg::END_OF_SEQ, "expected another '- ' of this list or its end; check the indentation"},
    {YAML::ErrorMsg::END_OF_MAP_FLOW, "expected ',' or '}' in a map"},
    {YAML::ErrorMsg::END_OF_SEQ_FLOW, "expected ',' or ']' in a list"},
    {YAML::ErrorMsg::FLOW_END, "closing bracket without an opening bracket"},
    {YAML::ErrorMsg::MAP_VALUE,
     "unexpected ':', because a key is not allowed here; check the indentation or quote the text"},
    {YAML::ErrorMsg::MAP_KEY, "unexpected key; check the indentation"},
    {YAML::ErrorMsg::BLOCK_ENTRY, "unexpected '- ', because a list cannot begin here; check the indentation"},
    {YAML::ErrorMsg::EOF_IN_SCALAR, "quoted text without a closing quote"},
    {YAML::ErrorMsg::DOC_IN_SCALAR, "the document ends inside quoted text"},
    {YAML::ErrorMsg::TAB_IN_INDENTATION, "a tab in the indentation, expected spaces"},
    {YAML::ErrorMsg::UNKNOWN_TOKEN, "text cannot begin with this character unless it is quoted"},
    {YAML::ErrorMsg::UNKNOWN_ANCHOR, "aliases are not supported"},
    {YAML::ErrorMsg::MULTIPLE_ANCHORS, "anchors are not supported"},
    {YAML::ErrorMsg::MULTIPLE_TAGS, "tags are not supported"},
};

void Builder::explain(const YAML::Exception &exception) const {
  std::string message = exception.msg;
  bool flow = false;
  for (const MessageRule &rule : kMessageRules)
    if (exception.msg == rule.theirs)
      message = rule.ours;
  for (const char *unfinished :
       {YAML::ErrorMsg::END_OF_MAP_FLOW, YAML::ErrorMsg::END_OF_SEQ_FLOW, YAML::ErrorMsg::END_OF_MAP})
    flow = flow || exception.msg == unfinished;
  const Location at = location(exception.mark);
  const size_t offset = std::min(begin_ + static_cast<size_t>(std::max(exception.mark.pos, 0)), text_.size());
  const size_t line = offset - (at.column - 1),
               indentation = std::min(text_.find_first_not_of(" \t", line), text_.size());
  if (const size_t tab = text_.substr(0, indentation).find('\t', line); tab != std::string_view::npos) {
    diagnostics_.error({at.file, at.line, static_cast<uint32_t>(tab - line + 1)},
                       "a tab in the indentation, expected spaces");
    return;
  }
  if (flow && offset < text_.size() && (text_[offset] == '{' || (offset > 0 && text_[offset - 1] == '}'))) {
    diagnostics_.error(at, message + "; " + kBraces);
  } else {
    diagnostics_.error(at, message);
    if (flow && open())
      diagnostics_.note(innermost().at,
                        std::string("the ") + (innermost().kind == Node::Kind::map ? "map" : "list") + " begins here");
  }
}

/// The location of a byte, for errors that are found before yaml-cpp runs.
Location locate(uint32_t file, std::string_view text, size_t offset) {
  Location at{file, 1, 0};
  size_t line = 0;
  for (size_t end = text.find('\n'); end != std::string_view::npos && end < offset; end = text.find('\n', line)) {
    ++at.line;
    line = end + 1;
  }
  at.column = static_cast<uint32_t>(offset - line + 1);
  return at;
}

/// Checks the size of a file, and that it is UTF-8 without control characters.
bool checkText(uint32_t file, std::string_view text, Diagnostics &diagnostics) {
  if (text.size() > static_cast<size_t>(kMaxFileBytes)) {
    diagnostics.error({file, 1, 1}, "the file has " + std::to_string(text.size()) + " bytes, expected at most " +
                                        std::to_string(kMaxFileBytes));
    return false;
  }
  for (size_t i = 0; i < text.size();) {
    const size_t bytes = utf8Bytes(text, i);
    if (bytes == 0) {
      diagnostics.error(locate(file, text, i), "invalid UTF-8");
      return false;
    }
    i += bytes;
  }
  for (size_t i = 0; i < text.size(); ++i) {
    const unsigned char c = static_cast<unsigned char>(text[i]);
    const bool lineEnd = c == '\n' || (c == '\r' && i + 1 < text.size() && text[i + 1] == '\n');
    if ((c < 0x20 && c != '\t' && !lineEnd) || c == 0x7f) {
      diagnostics.error(locate(file, text, i), "control character " + std::to_string(c) + ", expected text");
      return false;
    }
  }
  return true;
}

} // namespace

std::unique_ptr<Node> parseYaml(uint32_t file, Diagnostics &diagnostics, size_t begin) {
  const std::string &text = diagnostics.text(file);
  if (!checkText(file, text, diagnostics))
    return nullptr;
  constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";
  if (begin == 0 && text.starts_with(kByteOrderMark))
    begin = kByteOrderMark.size();

  Builder builder(file, begin, diagnostics);
  TextBuffer buffer(std::string_view(text).substr(begin));
  std::istream stream(&buffer);
  try {
    YAML::Parser parser(stream);
    while (parser.HandleNextDocument(builder)) {
    }
  } catch (const ParseStopped &) {
    return nullptr;
  } catch (const YAML::Exception &exception) {
    builder.explain(exception);
    return nullptr;
  }
  auto root = builder.take();
  if (root && root->at.line == 0)
    root->at = {file, 1, static_cast<uint32_t>(begin + 1)};
  return root;
}

} // namespace reshard
