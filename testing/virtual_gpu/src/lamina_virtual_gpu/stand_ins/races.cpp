// Races: two pieces of work that touch the same bytes, one of which writes, and that no chain of waits orders. Which comes first is then a matter
// of the device's speed. The host's calls decide what waits for what, so a race is seen in every order in which work is done.
#include "races.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <set>

#include "machine.h"

namespace virtual_gpu {

// ---- settings

enum class Watch { no, report, fail };

static Watch watch() {
  static const Watch chosen = [] {
    const char *text = getenv("VGPU_RACES");
    if (text && *text) return !strcmp(text, "fail") ? Watch::fail : !strcmp(text, "0") ? Watch::no : Watch::report;
    return settings().order == Order::adversarial ? Watch::report : Watch::no;
  }();
  return chosen;
}

bool watches_races() { return computes() && watch() != Watch::no; }

// ---- lines of Python

constexpr size_t kMostLines = 12;

// Python's own functions, if this process has them: this library knows nothing of Python else.
struct Python {
  template <class T>
  static T find(const char *name) {
    return (T)dlsym(RTLD_DEFAULT, name);
  }
  int (*is_initialized)() = find<int (*)()>("Py_IsInitialized");
  int (*is_finalizing)() = find<int (*)()>("Py_IsFinalizing") ? find<int (*)()>("Py_IsFinalizing") : find<int (*)()>("_Py_IsFinalizing");
  void *(*own_state)() = find<void *(*)()>("PyGILState_GetThisThreadState");
  int (*take)() = find<int (*)()>("PyGILState_Ensure");
  void (*give_back)(int) = find<void (*)(int)>("PyGILState_Release");
  void *(*frame)() = find<void *(*)()>("PyEval_GetFrame");
  void *(*frame_before)(void *) = find<void *(*)(void *)>("PyFrame_GetBack");
  void *(*code)(void *) = find<void *(*)(void *)>("PyFrame_GetCode");
  int (*line)(void *) = find<int (*)(void *)>("PyFrame_GetLineNumber");
  void *(*attribute)(void *, const char *) = find<void *(*)(void *, const char *)>("PyObject_GetAttrString");
  const char *(*text)(void *) = find<const char *(*)(void *)>("PyUnicode_AsUTF8");
  void (*drop)(void *) = find<void (*)(void *)>("Py_DecRef");
  void (*keep)(void *) = find<void (*)(void *)>("Py_IncRef");
};

static std::string attribute_of(const Python &python, void *object, const char *name) {
  void *value = python.attribute(object, name);
  std::string text = value ? python.text(value) : "?";
  if (value) python.drop(value);
  return text;
}

// A code object that was seen is kept, so that its address stays its own.
static const std::string *place_of(const Python &python, void *code) {
  static auto &known = *new std::map<void *, std::string>;
  auto at = known.find(code);
  if (at == known.end()) {
    python.keep(code);
    at = known.emplace(code, attribute_of(python, code, "co_filename") + "\n" + attribute_of(python, code, "co_qualname")).first;
  }
  return &at->second;
}

Stack python_lines() {
  static const auto &python = *new Python;
  Stack lines;
  if (!python.code || !python.is_initialized() || (python.is_finalizing && python.is_finalizing()) || !python.own_state()) return lines;
  const int state = python.take();
  void *frame = python.frame();
  if (frame) python.keep(frame);
  while (frame && lines.size() < kMostLines) {
    void *code = python.code(frame);
    lines.push_back({place_of(python, code), python.line(frame)});
    python.drop(code);
    void *before = python.frame_before(frame);
    python.drop(frame);
    frame = before;
  }
  if (frame) python.drop(frame);
  python.give_back(state);
  return lines;
}

static std::string described(const Stack &stack) {
  if (stack.empty()) return "    (no line of Python: a thread of autograd's, or of the device)\n";
  std::string text;
  for (const Line &line : stack) {
    const size_t end = line.place->find('\n');
    text += "    " + line.place->substr(0, end) + ":" + std::to_string(line.number) + " in " + line.place->substr(end + 1) + "\n";
  }
  return text;
}

// ---- clocks

static std::vector<Clock> &clocks() {
  static auto *all = new std::vector<Clock>;
  return *all;
}
static Clock &host() {
  static auto *clock = new Clock;
  return *clock;
}

static Clock &own_clock(Stream *stream) {
  if (stream->place < 0) stream->place = (int)clocks().size(), clocks().emplace_back();
  return clocks()[(size_t)stream->place];
}

static void raise_to(Clock &clock, const Clock &other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}

static uint64_t at(const Clock &clock, size_t place) { return place < clock.size() ? clock[place] : 0; }

Clock clock_of(Stream *stream) {
  if (!watches_races()) return {};
  Clock clock = own_clock(stream);
  raise_to(clock, host());
  return clock;
}
void comes_after(Stream *stream, const Clock &clock) {
  if (watches_races()) raise_to(own_clock(stream), clock);
}
void host_comes_after(const Clock &clock) {
  if (watches_races()) raise_to(host(), clock);
}
void host_comes_after_all() {
  for (const Clock &clock : clocks()) raise_to(host(), clock);
}

NodePointer begin_work(Stream *stream, const char *what, Stack stack) {
  Clock &clock = own_clock(stream);
  raise_to(clock, host());
  const auto place = (size_t)stream->place;
  if (clock.size() <= place) clock.resize(place + 1);
  return std::make_shared<Node>(Node{stream, place, ++clock[place], what, clock, std::move(stack)});
}

static bool ordered(const Node &a, const Node &b) { return at(b.clock, a.place) >= a.number || at(a.clock, b.place) >= b.number; }

// ---- who touched which bytes: ranges that do not overlap, by their beginnings

struct Touched {
  uintptr_t end;
  NodePointer writer;
  std::vector<NodePointer> readers;  // since then, one for each stream
};
using Shadow = std::map<uintptr_t, Touched>;
static Shadow &shadow() {
  static auto *all = new Shadow;
  return *all;
}

struct Block {
  uintptr_t end;
  Stack stack;
};
static std::map<uintptr_t, Block> &given_out() {
  static auto *all = new std::map<uintptr_t, Block>;
  return *all;
}

static void cut(Shadow &all, uintptr_t place) {
  auto after = all.upper_bound(place);
  if (after == all.begin()) return;
  auto before = std::prev(after);
  if (before->first >= place || before->second.end <= place) return;
  Touched rest = before->second;
  before->second.end = place;
  all.emplace_hint(after, place, std::move(rest));
}

void forget(const void *at, size_t bytes) {
  if (!watches_races()) return;
  const auto start = (uintptr_t)at, end = start + bytes;
  for (auto place : {start, end}) cut(shadow(), place);
  shadow().erase(shadow().lower_bound(start), shadow().lower_bound(end));
  given_out().erase(given_out().lower_bound(start), given_out().lower_bound(end));
}

void note_given_out(const void *at, size_t bytes, Stack stack) {
  const auto start = (uintptr_t)at, end = start + bytes;
  auto &all = given_out();
  auto first = all.upper_bound(start);
  if (first != all.begin() && std::prev(first)->second.end > start) --first;
  all.erase(first, all.lower_bound(end));
  all[start] = {end, std::move(stack)};
}

// ---- what is said

static std::vector<std::string> &races() {
  static auto *all = new std::vector<std::string>;
  return *all;
}

static std::string described(const Node &node, bool writes) {
  const Stream &stream = *node.stream;
  return std::string("  ") + node.what + (writes ? " writes" : " reads") + " on stream " + std::to_string(stream.index) + " of device " +
         std::to_string(stream.device) + ", its work number " + std::to_string(node.number) + ", which was given at\n" + described(node.stack);
}

static std::string described(uintptr_t from, uintptr_t to) {
  uintptr_t base = 0;
  const Allocation *whole = allocation_at((void *)from, &base);
  char text[200];
  snprintf(text, sizeof text, "  %zu bytes at %#zx, from %zu of the %zu bytes that the device gave at %#zx\n", (size_t)(to - from), (size_t)from,
           (size_t)(from - base), whole ? whole->bytes : 0, (size_t)base);
  auto after = given_out().upper_bound(from);
  if (after == given_out().begin() || std::prev(after)->second.end <= from) return text;
  return text + std::string("  torch's allocator last gave this memory out at\n") + described(std::prev(after)->second.stack);
}

static void tell(const Node &first, bool first_writes, const Node &second, bool second_writes, uintptr_t from, uintptr_t to) {
  auto key = [](const Node &node) {
    std::string text = node.what;
    for (size_t i = 0; i < std::min<size_t>(6, node.stack.size()); i++) text += *node.stack[i].place + std::to_string(node.stack[i].number);
    return text;
  };
  static auto &seen = *new std::set<std::string>;
  if (!seen.insert(key(first) + "\n" + key(second)).second) return;
  std::string text = "virtual GPU: a race. No wait orders\n" + described(first, first_writes) + "and\n" + described(second, second_writes) +
                     "  Both touch\n" + described(from, to) + "  VGPU_SEED=" + std::to_string(settings().seed) + " runs this order again.";
  races().push_back(text);
  fprintf(stderr, "%s\n", text.c_str());
  if (watch() == Watch::fail) fail(second.what, "it races");
}

// ---- an access

static void add(Touched &touched, const NodePointer &node, bool writes, uintptr_t from, uintptr_t to) {
  if (touched.writer && !ordered(*touched.writer, *node)) tell(*touched.writer, true, *node, writes, from, to);
  auto is_newer = [&](const NodePointer &other) { return at(other->clock, node->place) >= node->number && other != node; };
  if (!writes) {
    for (NodePointer &reader : touched.readers)
      if (reader->place == node->place) return (void)(reader = node->number > reader->number ? node : reader);
    touched.readers.push_back(node);
    return;
  }
  for (const NodePointer &reader : touched.readers)
    if (!ordered(*reader, *node)) tell(*reader, false, *node, true, from, to);
  if (touched.writer && is_newer(touched.writer)) return;  // this access was noted late
  touched.writer = node;
  auto &readers = touched.readers;
  readers.erase(std::remove_if(readers.begin(), readers.end(), [&](auto &reader) { return !is_newer(reader); }), readers.end());
}

void touch(const NodePointer &node, const Accesses &accesses) {
  Shadow &all = shadow();
  for (const Access &access : accesses) {
    const auto start = (uintptr_t)access.at, end = start + access.bytes;
    if (!access.bytes || !allocation_at(access.at)) continue;
    for (auto place : {start, end}) cut(all, place);
    auto next = all.lower_bound(start);
    for (uintptr_t place = start; place < end;) {
      if (next == all.end() || next->first > place) {  // bytes that nobody has touched
        const uintptr_t until = next == all.end() ? end : std::min(end, next->first);
        next = all.emplace_hint(next, place, Touched{until, nullptr, {}});
      }
      add(next->second, node, access.writes, place, next->second.end);
      place = next->second.end;
      // Neighbours that one piece of work wrote whole are one range.
      if (access.writes && next != all.begin()) {
        auto before = std::prev(next);
        if (before->first >= start && before->second.end == next->first && before->second.writer == node && next->second.writer == node &&
            before->second.readers.empty() && next->second.readers.empty()) {
          before->second.end = next->second.end;
          next = all.erase(next);
          continue;
        }
      }
      ++next;
    }
  }
}

}  // namespace virtual_gpu

using namespace virtual_gpu;

// ---- what Python calls

// Returns all races since the last `vgpu_forget_races`, each ended by the character 1; valid until the next call.
EXPORT const char *vgpu_races() {
  LOCKED;
  static auto &text = *new std::string;
  text.clear();
  for (const std::string &race : races()) text += race + '\1';
  return text.c_str();
}

EXPORT void vgpu_forget_races() {
  LOCKED;
  races().clear();
}
