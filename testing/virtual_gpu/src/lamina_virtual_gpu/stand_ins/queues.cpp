// When the work of streams is done. A stream is a queue of work and marks; nothing obliges a GPU to begin with its head before
// something waits for it. VGPU_COMPUTE chooses:
//   none         kernels compute nothing. With VGPU_SHARE copies, fills and NCCL's messages are work nevertheless, as in at-once
//   at-once      as soon as it is given, as far as peers are there
//   clock        when the virtual clock of the host has reached its end, or something waits for it
//   late         when something waits for it: for a stream, an event, the device, or what was copied to pageable memory
//   adversarial  as eager streams (at once) and lazy ones (late) that VGPU_SEED chooses, and chooses anew now and then;
//                a question (cudaEventQuery, cudaStreamQuery) may hear for long that the work has not been done
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <random>
#include <set>
#include <thread>
#include <utility>

#include "machine.h"

using namespace virtual_gpu;

namespace virtual_gpu {

using Locked = std::unique_lock<std::recursive_mutex>;

static uint64_t numbers = 0;  // of the last entry that was given
static bool failed = false;
static bool any_late_peer = false;
static auto &changed = *new std::condition_variable_any;  // threads of torch outlive `main`

bool computes() { return settings().order != Order::none; }
bool queues_work() { return computes() || settings().shares; }
bool has_given_work() { return numbers != 0; }
bool has_failed() { return failed; }
void fail(const char *what, const char *reason) {
  fprintf(stderr, "virtual GPU: %s failed when its stream came to it: %s\n", what, reason);
  failed = true;
}

// A thread that waits here for another one's work must not keep Python's lock: the work may be Python's.
class WithoutPython {
 public:
  WithoutPython() {
    static auto has = (int (*)())dlsym(RTLD_DEFAULT, "PyGILState_Check");
    static auto save = (void *(*)())dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
    static auto begun = (int (*)())dlsym(RTLD_DEFAULT, "Py_IsInitialized");
    if (has && save && begun && begun() && has()) state_ = save();
  }
  ~WithoutPython() {
    static auto restore = (void (*)(void *))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
    if (state_) restore(state_);
  }

 private:
  void *state_ = nullptr;
};

// ---- what comes after what

static Entry &push(Stream *stream, Entry::Kind kind, const char *what) {
  stream->queue.push_back({kind, what, nullptr, nullptr, stream->time.own(), ++numbers});
  return stream->queue.back();
}

MarkPointer record_mark(Stream *handle) {
  if (!queues_work()) return nullptr;
  Stream *stream = stream_of(handle);
  auto mark = std::make_shared<Mark>(Mark{stream, false, clock_of(stream)});
  if (stream->queue.empty() && !stream->running)
    mark->reached = true;
  else
    push(stream, Entry::Kind::record, "an event").mark = mark;
  return mark;
}

void wait_for_mark(Stream *handle, MarkPointer mark) {
  if (mark) comes_after(stream_of(handle), mark->clock);
  if (mark && !mark->reached) push(stream_of(handle), Entry::Kind::wait, "a wait").mark = std::move(mark);
}

// The legacy default stream and the streams that were not made non-blocking wait for each other.
static void wait_for_default(Stream *stream) {
  for (Stream *other : all_streams()) {
    if (other == stream || other->device != stream->device) continue;
    const bool pair = stream->index == 0 ? !(other->flags & kNonBlocking) : other->index == 0 && !(stream->flags & kNonBlocking);
    if (pair) wait_for_mark(stream, record_mark(other));
  }
}

// ---- one entry

enum class Progress { none, some };

static bool can_begin(const Stream *stream) {
  if (stream->queue.empty() || stream->running) return false;
  const Entry &first = stream->queue.front();
  return first.kind != Entry::Kind::wait || first.mark->reached;
}

static thread_local NodePointer at_work;  // whose step this thread runs

// Does the first entry of a stream that can begin; the lock is given up meanwhile.
static Progress advance(Locked &lock, Stream *stream) {
  Entry &first = stream->queue.front();
  if (first.kind == Entry::Kind::record) first.mark->reached = true;
  bool ended = true;
  if (first.kind == Entry::Kind::work) {
    stream->running = true;
    Step &step = first.step;  // what is pushed behind it does not move it
    NodePointer before = std::exchange(at_work, first.node);
    lock.unlock();
    ended = step();
    lock.lock();
    at_work = std::move(before);
    stream->running = false;
  }
  if (ended) {
    Entry done = std::move(stream->queue.front());
    stream->queue.pop_front();
    changed.notify_all();
    if (done.step) lock.unlock(), done.step = nullptr, lock.lock();  // what it holds may be Python's
  } else {
    any_late_peer = true;
  }
  return ended ? Progress::some : Progress::none;
}

// ---- the adversary

static std::mt19937_64 &dice() {
  static auto *made = new std::mt19937_64(settings().seed);
  return *made;
}

// One in sixteen pieces of work changes its stream's mind, so that a stream is seen early and late.
static void think_again(Stream *stream) {
  if (stream->queue.size() == 1 ? dice()() % 2 : dice()() % 16 == 0) stream->eager = dice()() % 2;
}

// ---- what is due without a wait

static bool is_due(const Stream *stream) {
  switch (settings().order) {
    case Order::none: case Order::at_once: return true;
    case Order::clock: return stream->queue.front().end <= host_now();
    case Order::adversarial: return stream->eager;
    default: return false;
  }
}

static Stream *first_that(bool (*may)(const Stream *), const std::vector<Stream *> &but) {
  Stream *best = nullptr;
  for (Stream *stream : all_streams())
    if (can_begin(stream) && may(stream) && std::find(but.begin(), but.end(), stream) == but.end() &&
        (!best || stream->queue.front().number < best->queue.front().number))
      best = stream;
  return best;
}

// Runs all that may run, the oldest first. A stream that waits for a peer is left.
static bool run_all(Locked &lock, bool (*may)(const Stream *)) {
  if (in_forked_child()) return false;  // the work is the parent's: done here too, it would take the peers' messages from it
  std::vector<Stream *> stuck;
  bool any = false;
  while (Stream *stream = first_that(may, stuck)) {
    if (advance(lock, stream) == Progress::none)
      stuck.push_back(stream);
    else
      any = true;
  }
  return any;
}

void enqueue_work(Stream *handle, const char *what, Work work, Accesses accesses) {
  if (!queues_work()) return;
  Stack lines = watches_races() ? python_lines() : Stack();
  Locked lock(state_lock());
  Stream *stream = stream_of(handle);
  if (stream->capture) {
    stream->capture->work.push_back({what, std::move(work), std::move(accesses)});
    return;
  }
  wait_for_default(stream);
  lock.unlock();
  Step step = work();  // it may be Python's
  lock.lock();
  Entry &entry = push(stream, Entry::Kind::work, what);
  entry.step = std::move(step);
  if (watches_races()) touch(entry.node = begin_work(stream, what, std::move(lines)), accesses);
  if (settings().order == Order::adversarial) think_again(stream);
  run_all(lock, is_due);
}

// ---- waits of the host

// The stream whose first entry the mark waits for, and null if another thread is at it.
static Stream *leads_to(const Mark &mark) {
  Stream *stream = mark.stream;
  while (!stream->running) {
    if (stream->queue.empty()) return nullptr;
    const Entry &first = stream->queue.front();
    if (first.kind != Entry::Kind::wait || first.mark->reached) return stream;
    stream = first.mark->stream;
  }
  return nullptr;
}

// While the host waits for one stream, others do work in between: eager ones all that they can, lazy ones some.
static void meddle(Locked &lock) {
  run_all(lock, is_due);
  while (dice()() % 2) {
    std::vector<Stream *> ready;
    for (Stream *stream : all_streams())
      if (can_begin(stream)) ready.push_back(stream);
    if (ready.empty() || advance(lock, ready[dice()() % ready.size()]) == Progress::none) return;
  }
}

// A question is no wait: half of the marks are not reached for it. A host that asks again and again hears so in the end.
static bool puts_off(Mark &mark) {
  constexpr int kQuestions = 500;
  if (mark.puts_off < 0) mark.puts_off = dice()() % 2 ? kQuestions : 0;
  if (mark.reached || mark.puts_off == 0) return false;
  --mark.puts_off;
  return true;
}

static bool go_to(const MarkPointer &mark, bool to_the_end) {
  if (!mark) return true;
  if (in_forked_child()) {
    if (to_the_end) fail("a wait", "this process was forked from the one that uses the device");
    return to_the_end;
  }
  WithoutPython release;
  Locked lock(state_lock());
  const bool adversarial = settings().order == Order::adversarial;
  if (adversarial && !to_the_end && puts_off(*mark)) return false;
  while (!mark->reached) {
    if (adversarial) meddle(lock);
    if (mark->reached) break;
    Stream *stream = leads_to(*mark);
    if (stream && advance(lock, stream) == Progress::some) continue;
    // Another thread is at it, or a peer is late: what the peer waits for may be in any stream.
    if (stream && run_all(lock, [](const Stream *) { return true; })) continue;
    if (!to_the_end) return false;
    changed.wait_for(lock, std::chrono::microseconds(stream ? 50 : 2000));
  }
  host_comes_after(mark->clock);
  return true;
}

void reach(const MarkPointer &mark) { go_to(mark, true); }
bool reaches(const MarkPointer &mark) { return go_to(mark, false); }

static MarkPointer end_of(Stream *stream) {
  LOCKED;
  return record_mark(stream);
}

void reach_end_of(Stream *stream) {
  if (queues_work()) reach(end_of(stream));
}

void reach_end_of_all() {
  if (!queues_work()) return;
  std::vector<MarkPointer> ends;
  {
    LOCKED;
    for (Stream *stream : all_streams())
      if (!stream->queue.empty()) ends.push_back(record_mark(stream));
  }
  for (auto &end : ends) reach(end);
  LOCKED;
  host_comes_after_all();
}

// ---- work that other processes wait for

static void run_on() {
  uint64_t before = 0;
  for (;;) {
    // A host that does nothing for a while waits for something, if only for a peer that waits for our streams.
    usleep(any_late_peer ? 200 : 5000);
    Locked lock(state_lock());
    const bool idle = before == numbers;
    before = numbers;
    if (idle || settings().order <= Order::at_once) any_late_peer = false, run_all(lock, [](const Stream *) { return true; });
  }
}

void keep_running() {
  if (!queues_work()) return;
  static std::once_flag once;
  std::call_once(once, [] { std::thread(run_on).detach(); });
}

}  // namespace virtual_gpu

EXPORT void vgpu_spoil(Stream *stream, void *at, size_t bytes) {
  if (!bytes) return;
  if (watches_races()) {
    Stack lines = python_lines();
    LOCKED;
    note_given_out(at, bytes, std::move(lines));
  }
  if (settings().order == Order::adversarial) enqueue_work(stream, "fresh memory", in_one_go([=] { memset(at, 0xff, bytes); }), {{at, bytes, true}});
}

EXPORT int vgpu_watches_races() { return watches_races(); }

// Within a piece of work: bytes that it turns out to touch.
EXPORT void vgpu_touch(const void *at, size_t bytes, int writes) {
  if (!at_work) return;
  LOCKED;
  touch(at_work, {{at, bytes, writes != 0}});
}

EXPORT void vgpu_touched_at_once(Stream *stream, const char *what, const Accesses &accesses) {
  if (!watches_races()) return;
  Stack lines = python_lines();
  LOCKED;
  touch(begin_work(stream, what, std::move(lines)), accesses);
}

static thread_local int covers = 0;
EXPORT void vgpu_cover(int more) { covers += more; }
EXPORT int vgpu_covered() { return covers > 0; }

// ---- work of Python (arithmetic/work.py): it is a number, and Python knows what it stands for

static int (*run_in_python)(long) = nullptr;
EXPORT void vgpu_on_work(int (*act)(long)) { run_in_python = act; }

EXPORT void vgpu_enqueue_work(Stream *stream, int device, const char *what, long number) {
  static auto &names = *new std::set<std::string>;
  const char *kept;
  {
    LOCKED;
    kept = names.insert(what).first->c_str();
  }
  enqueue_work(stream_on(stream, device), kept, in_one_go([=] {
                 if (!run_in_python(number)) failed = true;
               }));
}
