#pragma once
/// The part of Python's pickle language (protocol 2: https://github.com/python/cpython/blob/main/Lib/pickletools.py) in
/// which torch.save describes tensors. Classes and functions are names to compare with a list: nothing is called.

#include <algorithm>
#include <bit>
#include <chorus/core/error.hpp>
#include <chorus/core/printable.hpp>
#include <chorus/io/tensor_entry.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace chorus::io::detail {

/// A tensor as a pickle describes it: elements of a storage, which is the file `data/KEY`. Offset and strides count
/// elements.
struct PickledTensor {
  FileDType dtype{};
  std::string key;
  std::uint64_t elements = 0;  ///< of the storage
  std::uint64_t offset = 0;
  std::vector<Index> shape, strides;
};

class Pickle {
 public:
  static constexpr std::size_t most_bytes = std::size_t{64} << 20, most_values = 4'000'000, most_waiting = 1'000'000;

  /// Reads the pickle; `who` begins messages. Throws FileError for anything but plain values and tensors.
  Pickle(std::string_view text, const std::string& who) : text_(text), who_(cat(who, ": data.pkl")) {
    check<FileError>(text.size() <= most_bytes, who_, ": ", text.size(), " bytes; the limit is ", most_bytes);
    while (step()) {
    }
  }

  /// The tensors of the dict `from`, or of the file's, with their names. Other values in it are left out.
  std::vector<std::pair<std::string, PickledTensor>> tensors(const std::string& from) const {
    const Value* dict = &values_[result_];
    check<FileError>(dict->kind == Kind::dict, who_,
                     ": expected a dict of tensors, as of torch.save(model.state_dict(), FILE), got ", name_of(*dict));
    if (!from.empty()) {
      const Value* const found = member(*dict, from);
      check<FileError>(found != nullptr && found->kind == Kind::dict, who_, ": expected a dict of tensors at key ",
                       Quoted{from}, ", got ", found == nullptr ? "nothing" : name_of(*found), "; the keys are ",
                       keys_of(*dict));
      dict = found;
    }
    std::vector<std::pair<std::string, PickledTensor>> out;
    bool dicts = false;
    for (std::size_t i = 0; i + 1 < dict->items.size(); i += 2) {
      const auto &key = values_[dict->items[i]], &value = values_[dict->items[i + 1]];
      dicts = dicts || value.kind == Kind::dict;
      if (value.kind != Kind::tensor) continue;
      check<FileError>(key.kind == Kind::text, who_, ": expected texts as names of tensors, got ", name_of(key));
      out.emplace_back(key.text, tensors_[value.number]);
    }
    check<FileError>(!out.empty() || !dicts, who_, ": the tensors are in a dict within the dict: name its key as ",
                     "{.from = KEY}; the keys are ", keys_of(*dict));
    return out;
  }

 private:
  enum class Kind : std::uint8_t {
    none,
    boolean,
    integer,
    real,
    text,
    tuple,
    list,
    dict,
    name,
    tensor,
    storage,
    other
  };
  /// `items`: of a tuple or list; keys and values by turns of a dict. `number`: an integer's or boolean's value; of a
  /// tensor and a storage its place in `tensors_`.
  struct Value {
    Kind kind{};
    std::uint64_t number = 0;
    std::string text = {};
    std::vector<std::uint32_t> items = {};
  };

  // What is read.
  unsigned byte() { return static_cast<unsigned char>(take(1)[0]); }
  std::string_view take(std::size_t count) {
    check<FileError>(count <= text_.size() - at_, who_, ": cut short");
    at_ += count;
    return text_.substr(at_ - count, count);
  }
  std::uint64_t little(std::size_t width) {
    std::uint64_t out = 0;
    std::memcpy(&out, take(width).data(), width);
    return out;
  }
  std::string_view line() {
    const auto end = text_.find('\n', at_);
    check<FileError>(end != text_.npos, who_, ": cut short");
    const auto out = text_.substr(at_, end - at_);
    at_ = end + 1;
    return out;
  }

  // The stack.
  void push(std::uint32_t value) {
    check<FileError>(stack_.size() < most_waiting, who_, ": more than ", most_waiting, " values are on its stack");
    stack_.push_back(value);
  }
  void push(Value value) {
    check<FileError>(values_.size() < most_values, who_, ": more than ", most_values, " values");
    values_.push_back(std::move(value));
    push(static_cast<std::uint32_t>(values_.size() - 1));
  }
  void push_integer(std::int64_t number) {
    push({.kind = Kind::integer, .number = static_cast<std::uint64_t>(number)});
  }
  /// The place of the innermost mark; values of before it can't be taken.
  std::size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  std::uint32_t top() const {
    check<FileError>(stack_.size() > floor(), who_, ": damaged: its stack is empty");
    return stack_.back();
  }
  std::uint32_t pop() {
    const auto out = top();
    stack_.pop_back();
    return out;
  }
  std::vector<std::uint32_t> pop_to_mark() {
    check<FileError>(!marks_.empty(), who_, ": damaged: a mark is missing");
    const auto mark = static_cast<std::ptrdiff_t>(marks_.back());
    marks_.pop_back();
    std::vector<std::uint32_t> out(stack_.begin() + mark, stack_.end());
    stack_.resize(static_cast<std::size_t>(mark));
    return out;
  }
  std::vector<std::uint32_t> pop_several(std::size_t count) {
    std::vector<std::uint32_t> out(count);
    for (std::size_t i = count; i-- > 0;) out[i] = pop();
    return out;
  }

  /// One operation; false after the last.
  bool step() {
    const std::size_t begin = at_;
    const unsigned code = byte();
    switch (code) {
      case 0x80: {  // PROTO
        const auto version = byte();
        check<FileError>(begin == 0 && version == 2, who_, ": expected pickle protocol 2, torch.save's default, got ",
                         version);
        return true;
      }
      case '.':  // STOP
        result_ = pop();
        return false;
      case '(':  // MARK
        check<FileError>(marks_.size() < most_waiting, who_, ": more than ", most_waiting, " marks");
        marks_.push_back(stack_.size());
        return true;
      case 'c': {  // GLOBAL
        const auto module = line();
        name(cat(module, ".", line()));
        return true;
      }
      case 'R':  // REDUCE
        reduce();
        return true;
      case 'b':  // BUILD
        build();
        return true;
      case 'Q':  // BINPERSID
        storage();
        return true;
      case ')':  // EMPTY_TUPLE
        push({.kind = Kind::tuple});
        return true;
      case 't':  // TUPLE
        push({.kind = Kind::tuple, .items = pop_to_mark()});
        return true;
      case 0x85:  // TUPLE1, TUPLE2, TUPLE3
      case 0x86:
      case 0x87:
        push({.kind = Kind::tuple, .items = pop_several(code - 0x84)});
        return true;
      case '}':  // EMPTY_DICT
        push({.kind = Kind::dict});
        return true;
      case 's':  // SETITEM
        add_items(Kind::dict, pop_several(2));
        return true;
      case 'u':  // SETITEMS
        add_items(Kind::dict, pop_to_mark());
        return true;
      case ']':  // EMPTY_LIST
        push({.kind = Kind::list});
        return true;
      case 'a':  // APPEND
        add_items(Kind::list, pop_several(1));
        return true;
      case 'e':  // APPENDS
        add_items(Kind::list, pop_to_mark());
        return true;
      case 'X':  // BINUNICODE
        push({.kind = Kind::text, .text = std::string(take(little(4)))});
        return true;
      case 'J':  // BININT
        push_integer(static_cast<std::int32_t>(little(4)));
        return true;
      case 'K':  // BININT1
        push_integer(static_cast<std::int64_t>(little(1)));
        return true;
      case 'M':  // BININT2
        push_integer(static_cast<std::int64_t>(little(2)));
        return true;
      case 0x8A: {  // LONG1
        const auto bytes = take(byte());
        if (bytes.size() > 8) {
          push({.kind = Kind::other, .text = "a long integer"});
          return true;
        }
        std::uint64_t number = !bytes.empty() && (bytes.back() & 0x80) != 0 ? ~std::uint64_t{0} : 0;
        if (!bytes.empty()) std::memcpy(&number, bytes.data(), bytes.size());
        push_integer(static_cast<std::int64_t>(number));
        return true;
      }
      case 'G':  // BINFLOAT
        take(8);
        push({.kind = Kind::real});
        return true;
      case 'N':  // NONE
        push({.kind = Kind::none});
        return true;
      case 0x88:  // NEWTRUE, NEWFALSE
      case 0x89:
        push({.kind = Kind::boolean, .number = code == 0x88 ? 1u : 0u});
        return true;
      case 'q':  // BINPUT
        memo_[little(1)] = top();
        return true;
      case 'r':  // LONG_BINPUT
        memo_[little(4)] = top();
        return true;
      case 'h':  // BINGET
        remembered(little(1));
        return true;
      case 'j':  // LONG_BINGET
        remembered(little(4));
        return true;
      case 0x81:  // NEWOBJ
        refuse_class(pop_several(2).front());
      default:
        fail<FileError>(who_, ": operation ", code, " at byte ", begin,
                        " is not one of those that describe tensors: save model.state_dict() by torch.save");
    }
  }
  void remembered(std::uint64_t number) {
    const auto found = memo_.find(number);
    check<FileError>(found != memo_.end(), who_, ": damaged: value ", number, " of its memo is missing");
    push(found->second);
  }
  void add_items(Kind kind, const std::vector<std::uint32_t>& items) {
    auto& to = values_[top()];
    check<FileError>(to.kind == kind && (kind != Kind::dict || items.size() % 2 == 0), who_, ": damaged: items for ",
                     name_of(to));
    check<FileError>((items_ += items.size()) <= 2 * most_values, who_, ": more than ", 2 * most_values, " items");
    to.items.insert(to.items.end(), items.begin(), items.end());
  }

  // Classes and functions.
  struct Named {
    std::string_view name;
    FileDType dtype;
  };
  static std::optional<FileDType> dtype_named(std::string_view name) {
    using enum FileDType;
    static constexpr Named types[] = {{"torch.FloatStorage", f32},   {"torch.DoubleStorage", f64},
                                      {"torch.HalfStorage", f16},    {"torch.BFloat16Storage", bf16},
                                      {"torch.LongStorage", i64},    {"torch.IntStorage", i32},
                                      {"torch.ShortStorage", i16},   {"torch.CharStorage", i8},
                                      {"torch.ByteStorage", u8},     {"torch.BoolStorage", boolean},
                                      {"torch.float32", f32},        {"torch.float64", f64},
                                      {"torch.float16", f16},        {"torch.bfloat16", bf16},
                                      {"torch.int64", i64},          {"torch.int32", i32},
                                      {"torch.int16", i16},          {"torch.int8", i8},
                                      {"torch.uint8", u8},           {"torch.bool", boolean},
                                      {"torch.uint16", u16},         {"torch.uint32", u32},
                                      {"torch.uint64", u64},         {"torch.float8_e4m3fn", f8_e4m3},
                                      {"torch.float8_e5m2", f8_e5m2}};
    for (const Named& type : types)
      if (type.name == name) return type.dtype;
    return std::nullopt;
  }
  static constexpr std::string_view untyped = "torch.storage.UntypedStorage", dict_class = "collections.OrderedDict",
                                    rebuild_v2 = "torch._utils._rebuild_tensor_v2",
                                    rebuild_v3 = "torch._utils._rebuild_tensor_v3",
                                    rebuild_parameter = "torch._utils._rebuild_parameter", size_class = "torch.Size",
                                    device_class = "torch.device";

  void name(std::string text) {
    const bool known = dtype_named(text).has_value() || text == untyped || text == dict_class || text == rebuild_v2 ||
                       text == rebuild_v3 || text == rebuild_parameter || text == size_class || text == device_class;
    push({.kind = Kind::name, .text = std::move(text)});
    if (!known) refuse_class(stack_.back());
  }
  [[noreturn]] void refuse_class(std::uint32_t value) const {
    const auto& text = values_[value].kind == Kind::name ? values_[value].text : std::string("an object");
    if (text.starts_with("torch.nn.") || text.starts_with("__main__"))
      fail<FileError>(who_, ": the file has a whole module (", printable(text),
                      "), whose code is not in it: save its weights by torch.save(model.state_dict(), FILE)");
    fail<FileError>(who_, ": the file needs ", printable(text),
                    ", and chorus reads dicts of tensors alone: save model.state_dict() by torch.save");
  }
  /// `Values` of a call or of a storage, with their kinds; the last ones may be missing from `least` on.
  bool are(const std::vector<std::uint32_t>& items, std::initializer_list<std::optional<Kind>> kinds,
           std::size_t least) const {
    if (items.size() < least || items.size() > kinds.size()) return false;
    for (std::size_t i = 0; i < items.size(); ++i)
      if (const auto kind = kinds.begin()[i]; kind && values_[items[i]].kind != *kind) return false;
    return true;
  }

  /// ('storage', class, key, device, elements)
  void storage() {
    const auto& id = values_[pop()];
    const bool fits = id.kind == Kind::tuple &&
                      are(id.items, {Kind::text, Kind::name, Kind::text, Kind::text, Kind::integer}, 5) &&
                      values_[id.items[0]].text == "storage";
    check<FileError>(fits, who_, ": damaged: a storage has other facts than torch.save writes");
    PickledTensor made;
    const auto& type = values_[id.items[1]].text;
    const auto dtype = type == untyped ? FileDType::u8 : dtype_named(type);
    check<FileError>(dtype && (type == untyped || type.ends_with("Storage")), who_, ": a storage of ", printable(type),
                     " is not supported");
    made.dtype = *dtype;
    made.key = values_[id.items[2]].text;
    made.elements = size_of(id.items[4]);
    check<FileError>(!made.key.empty() && made.key.find_first_not_of("0123456789") == made.key.npos, who_,
                     ": expected a number as the name of a storage, got ", Quoted{made.key});
    tensors_.push_back(std::move(made));
    push({.kind = Kind::storage, .number = tensors_.size() - 1, .text = type});
  }
  std::uint64_t size_of(std::uint32_t value) const {
    const auto number = static_cast<std::int64_t>(values_[value].number);
    check<FileError>(values_[value].kind == Kind::integer && number >= 0, who_,
                     ": expected a size that is not negative, got ",
                     values_[value].kind == Kind::integer ? cat(number) : name_of(values_[value]));
    return values_[value].number;
  }
  std::vector<Index> sizes_of(std::uint32_t value) const {
    const auto& tuple = values_[value];
    check<FileError>(tuple.items.size() <= ReaderLimits{}.rank, who_, ": a tensor of ", tuple.items.size(),
                     " axes; the limit is ", ReaderLimits{}.rank);
    std::vector<Index> out;
    for (const auto item : tuple.items) out.push_back(static_cast<Index>(size_of(item)));
    return out;
  }

  void reduce() {
    const auto items = values_[checked(pop(), Kind::tuple, "arguments")].items;
    const auto function = values_[checked(pop(), Kind::name, "a function")].text;
    if (function == dict_class && items.empty()) {
      push({.kind = Kind::dict});
    } else if (function == rebuild_v2 &&
               are(items, {Kind::storage, Kind::integer, Kind::tuple, Kind::tuple, Kind::boolean, {}, {}}, 6)) {
      tensor(items, std::nullopt);
    } else if (function == rebuild_v3 &&
               are(items, {Kind::storage, Kind::integer, Kind::tuple, Kind::tuple, Kind::boolean, {}, Kind::name, {}},
                   7)) {
      tensor(items, dtype_named(values_[items[6]].text));
    } else if (function == rebuild_parameter && are(items, {Kind::tensor, Kind::boolean, {}}, 3)) {
      push(items[0]);
    } else if (function == size_class && are(items, {Kind::tuple}, 1)) {
      push(items[0]);
    } else if (function == device_class && are(items, {Kind::text, Kind::integer}, 1)) {
      push({.kind = Kind::other, .text = "a device"});
    } else {
      fail<FileError>(who_, ": damaged: ", printable(function), " with arguments that torch.save does not write");
    }
  }
  std::uint32_t checked(std::uint32_t value, Kind kind, std::string_view what) const {
    check<FileError>(values_[value].kind == kind, who_, ": damaged: expected ", what, ", got ",
                     name_of(values_[value]));
    return value;
  }
  /// storage, offset, size, stride; `dtype` if the storage is of bytes.
  void tensor(const std::vector<std::uint32_t>& items, std::optional<FileDType> dtype) {
    const auto& from = values_[items[0]];
    PickledTensor made = tensors_[from.number];
    check<FileError>(dtype.has_value() == (from.text == untyped), who_, ": damaged: a tensor of another dtype than ",
                     printable(from.text));
    if (dtype) {
      made.dtype = *dtype;
      made.elements /= bits_of(*dtype) / 8;
    }
    made.offset = size_of(items[1]);
    made.shape = sizes_of(items[2]);
    made.strides = sizes_of(items[3]);
    check<FileError>(made.shape.size() == made.strides.size(), who_, ": damaged: ", made.shape.size(), " sizes and ",
                     made.strides.size(), " strides");
    tensors_.push_back(std::move(made));
    push({.kind = Kind::tensor, .number = tensors_.size() - 1});
  }
  /// The attributes of a state_dict, its `_metadata`, have no use here.
  void build() {
    const auto& state = values_[pop()];
    const bool fits = values_[top()].kind == Kind::dict && state.kind == Kind::dict && state.items.size() == 2 &&
                      values_[state.items[0]].text == "_metadata";
    if (!fits) refuse_class(top());
  }

  // Messages.
  static std::string name_of(const Value& value) {
    static constexpr const char* names[] = {"None",   "a bool", "an integer", "a float",  "a text",    "a tuple",
                                            "a list", "a dict", "a name",     "a tensor", "a storage", ""};
    return value.kind == Kind::other ? value.text : names[static_cast<std::size_t>(value.kind)];
  }
  const Value* member(const Value& dict, std::string_view key) const {
    const Value* out = nullptr;  // the last one counts
    for (std::size_t i = 0; i + 1 < dict.items.size(); i += 2)
      if (const auto& name = values_[dict.items[i]]; name.kind == Kind::text && name.text == key)
        out = &values_[dict.items[i + 1]];
    return out;
  }
  std::string keys_of(const Value& dict) const {
    std::string out;
    constexpr std::size_t most = 12;
    for (std::size_t i = 0; i + 1 < dict.items.size() && i < 2 * most; i += 2) {
      const auto& key = values_[dict.items[i]];
      out += cat(i == 0 ? "" : ", ", key.kind == Kind::text ? cat(Quoted{key.text}) : name_of(key), " (",
                 name_of(values_[dict.items[i + 1]]), ")");
    }
    return dict.items.size() > 2 * most ? out + ", ..." : out.empty() ? "none" : out;
  }

  std::string_view text_;
  std::string who_;
  std::size_t at_ = 0, items_ = 0;
  std::vector<Value> values_;
  std::vector<PickledTensor> tensors_;
  std::vector<std::uint32_t> stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<std::uint64_t, std::uint32_t> memo_;
  std::uint32_t result_ = 0;
};

}  // namespace chorus::io::detail
