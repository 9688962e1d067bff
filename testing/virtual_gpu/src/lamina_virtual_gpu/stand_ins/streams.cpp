// Streams, events and graphs. A stream is the time at which its work ends; an event carries such a time to other streams.
#include <string.h>

#include <algorithm>

#include "machine.h"

using namespace virtual_gpu;

struct Event {
  int device = 0;
  unsigned flags = 0;
  bool recorded = false;
  Times time;
  std::weak_ptr<Capture> capture;
  bool captured = false;
  std::vector<size_t> frontier;
  MarkPointer mark;  // what is reached when it has happened
};

struct Graph {
  std::shared_ptr<Capture> work;
};

namespace virtual_gpu {

static std::vector<Stream *> &created() {
  static auto *all = new std::vector<Stream *>;
  return *all;
}

static std::vector<Stream *> &every() {
  static auto *all = new std::vector<Stream *>;
  return *all;
}
const std::vector<Stream *> &all_streams() { return every(); }

static Stream *default_stream(int device) {
  static Stream *all = [] {
    auto *made = new Stream[kMostDevices];
    for (int i = 0; i < kMostDevices; i++) made[i].device = i, every().push_back(made + i);
    return made;
  }();
  return all + device;
}

// 0 is the legacy default stream, 1 its other name, 2 the thread's: torch uses the first alone.
bool is_default(Stream *handle) { return (uintptr_t)handle <= 2; }

Stream *stream_of(Stream *handle) { return is_default(handle) ? default_stream(current_device()) : handle; }

Stream *stream_on(Stream *handle, int device) { return is_default(handle) ? default_stream(device) : handle; }

void every_stream(void (*act)(Stream *, void *), void *argument) {
  for (int device = 0; device < settings().devices; device++) act(default_stream(device), argument);
  for (Stream *stream : created()) act(stream, argument);
}

Times end_of_device(int device) {
  Times end = default_stream(device)->time;
  for (Stream *stream : created())
    if (stream->device == device) end = later(end, stream->time);
  return end;
}

bool any_capture(int device) {
  for (Stream *stream : created())
    if (stream->device == device && stream->capture) return true;
  return false;
}

// ---- what a capture forbids

// What lives as long as the process, or a thread, is never destroyed: torch's threads call until the very end.
using Captures = std::vector<std::weak_ptr<Capture>>;
static thread_local int thread_mode = kGlobal;
static Captures &begun_here() {
  static thread_local auto *all = new Captures;
  return *all;
}
static Captures &begun_anywhere() {
  static auto *all = new Captures;
  return *all;
}

static bool spoil(Captures &captures, bool global_alone) {
  bool any = false;
  auto gone = [](const std::weak_ptr<Capture> &capture) { return capture.expired(); };
  captures.erase(std::remove_if(captures.begin(), captures.end(), gone), captures.end());
  for (auto &weak : captures)
    if (auto capture = weak.lock())
      if (capture->origin && capture->mode != kRelaxed && (!global_alone || capture->mode == kGlobal)) capture->broken = any = true;
  return any;
}

// A call that may wait or allocate is refused while this thread captures, or while any thread captures in the global mode
// and this one has not asked for another mode.
bool capture_forbids() {
  if (thread_mode == kRelaxed) return false;
  bool here = spoil(begun_here(), false);
  bool anywhere = thread_mode == kGlobal && spoil(begun_anywhere(), true);
  return here || anywhere;
}

// ---- work

static long given = 0;  // pieces of work that any stream was given

// Where two streams fill the device at once, each has half of it until the shorter work is done, so both are late by as long as
// that takes alone. What the other was given before keeps its times, since events have them; what it is given next begins later.
static double shared_with_others(Stream *stream, size_t set, double start, double seconds) {
  double late = 0;
  for (Stream *other : every()) {
    if (other == stream || other->device != stream->device) continue;
    auto &filled = other->filled[set];
    while (!filled.empty() && filled.front().second <= host_times().under[set]) filled.pop_front();
    double both = 0;
    for (auto &[from, to] : filled) both += std::max(0.0, std::min(to, start + seconds) - std::max(from, start));
    if (both == 0) continue;
    late += both;
    other->time.under[set] += both;
    filled.back().second += both;
  }
  return late;
}

// Returns when work ends that begins at `start` and wants the whole device.
static double end_of_filling(Stream *stream, size_t set, double start, double seconds) {
  const double end = start + seconds + shared_with_others(stream, set, start, seconds);
  auto &filled = stream->filled[set];
  if (!filled.empty() && filled.back().second >= start)
    filled.back().second = end;
  else
    filled.push_back({start, end});
  return end;
}

// A replay must not move the streams of the capture, which may have other work by then. So each has a stand-in of the graph's own.
static Stream *lane_of(Capture &capture, Stream *stream) {
  Stream *&lane = capture.lanes[stream];
  if (!lane) {
    lane = new Stream;
    lane->device = stream->device;
    every().push_back(lane);
  }
  return lane;
}

// Returns when work can begin that is given to a stream now.
static Times begin_on(Stream *handle) {
  Stream *stream = stream_of(handle);
  Times start = later(stream->time, host_times());
  if (is_default(handle)) {  // it waits for all streams that were not made non-blocking, and they for it
    for (Stream *other : created())
      if (other->device == stream->device && !(other->flags & kNonBlocking)) start = later(start, other->time);
  } else if (!(stream->flags & kNonBlocking)) {
    start = later(start, default_stream(stream->device)->time);
  }
  return start;
}

static void play(Stream *stream, const Times &start, const Times &seconds, bool fills) {
  stream->time = start + seconds;
  stream->busy += seconds.own();
  if (fills) under_each([&](size_t set) { stream->time.under[set] = end_of_filling(stream, set, start.under[set], seconds.under[set]); });
}

Times enqueue(Stream *handle, const Times &seconds, Kernel *kernel, bool fills) {
  LOCKED;
  Stream *stream = stream_of(handle);
  stream->work++, given++;
  if (stream->capture) {
    Capture &capture = *stream->capture;
    capture.pieces.push_back({seconds, fills, stream->frontier, lane_of(capture, stream)});
    stream->frontier = {capture.pieces.size() - 1};
    if (kernel) capture.kernels.push_back(kernel);
    return {};
  }
  play(stream, begin_on(handle), seconds, fills);
  return stream->time;
}

// Each piece of a graph begins when those that it comes after have ended, and the stream goes on after the last of all.
static void replay(Stream *handle, const Capture &capture) {
  Stream *stream = stream_of(handle);
  stream->work++, given++;
  const Times begin = begin_on(handle);
  std::vector<Times> ends;
  Times last = begin;
  for (const Piece &piece : capture.pieces) {
    Times start = later(piece.lane->time, begin);
    for (size_t before : piece.before) start = later(start, ends[before]);
    play(piece.lane, start, piece.seconds, piece.fills);
    ends.push_back(piece.lane->time);
    last = later(last, ends.back());
    stream->busy += piece.seconds.own();
  }
  stream->time = last;
}

// Some programs poll. The host's clock stands still meanwhile, so a thread that has asked often for one end, with no work given
// to any stream in between, is taken to wait. It may ask for others in turn, as the watchdog of ProcessGroupNCCL does for all
// collectives that have not ended.
static bool still_running(const Times &ends, const char *what) {
  static thread_local double asked_for = -1;
  static thread_local long asked = 0, given_then = 0;
  const double end = ends.own();
  if (end <= host_now()) return false;
  if (asked_for <= host_now() || given_then != given) asked_for = end, asked = 0, given_then = given;
  if (end == asked_for) asked++;
  if (asked <= 100) return true;
  record().host_waits[what]++;
  host_waits_until(ends);
  return false;
}

}  // namespace virtual_gpu

// ---- streams

EXPORT int cudaStreamCreateWithPriority(Stream **out, unsigned flags, int priority) {
  LOCKED;
  CALL(cudaStreamCreate);
  auto *stream = new Stream;
  stream->device = current_device(), stream->flags = flags, stream->priority = std::max(-5, std::min(0, priority));
  created().push_back(stream);
  every().push_back(stream);
  stream->index = (int)created().size();
  *out = stream;
  return kSuccess;
}
EXPORT int cudaStreamCreateWithFlags(Stream **out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
EXPORT int cudaStreamCreate(Stream **out) { return cudaStreamCreateWithPriority(out, 0, 0); }
EXPORT int cudaStreamDestroy(Stream *stream) {
  LOCKED;
  auto &all = created();
  auto at = std::find(all.begin(), all.end(), stream);
  if (at == all.end()) return set_error(kInvalidHandle);
  all.erase(at);  // the object stays: events may have been recorded on it
  return kSuccess;
}
EXPORT int cudaStreamGetPriority(Stream *stream, int *priority) {
  LOCKED;
  *priority = stream_of(stream)->priority;
  return kSuccess;
}
EXPORT int cudaDeviceGetStreamPriorityRange(int *lowest, int *highest) {
  *lowest = 0, *highest = -5;
  return kSuccess;
}

EXPORT int cudaStreamSynchronize(Stream *stream) {
  Times end;
  {
    LOCKED;
    CALL(cudaStreamSynchronize);
    if (stream_of(stream)->capture || capture_forbids()) return set_error(kCaptureUnsupported);
    end = stream_of(stream)->time;
  }
  host_wait("cudaStreamSynchronize", end);
  reach_end_of(stream);
  return has_failed() ? set_error(kLaunchFailure) : kSuccess;
}

EXPORT int cudaStreamQuery(Stream *stream) {
  MarkPointer end;
  {
    LOCKED;
    CALL(cudaStreamQuery);
    if (stream_of(stream)->capture || capture_forbids()) return set_error(kCaptureUnsupported);
    if (still_running(stream_of(stream)->time, "polled cudaStreamQuery")) return kNotReady;
    end = record_mark(stream);
  }
  return reaches(end) ? kSuccess : kNotReady;
}

EXPORT int cudaStreamWaitEvent(Stream *handle, Event *event, unsigned) {
  LOCKED;
  CALL(cudaStreamWaitEvent);
  host_spends(settings().call);
  Stream *stream = stream_of(handle);
  if (!event->recorded) return kSuccess;
  if (!event->captured) {
    if (stream->capture) return set_error(kCaptureIsolation);  // what was recorded outside is not known within
    stream->time = later(stream->time, event->time);
    wait_for_mark(stream, event->mark);
    return kSuccess;
  }
  auto capture = event->capture.lock();
  if (!capture || !capture->origin) return set_error(kCapturedEvent);
  if (stream->capture && stream->capture != capture) return set_error(kCaptureIsolation);
  if (!stream->capture) stream->capture = capture, stream->frontier.clear();  // the stream joins the capture
  stream->frontier.insert(stream->frontier.end(), event->frontier.begin(), event->frontier.end());
  return kSuccess;
}

// Where streams have no work host functions run at once: what they look at has not been computed anyway.
static int call_on_host(Stream *stream, const char *name, std::function<void()> act) {
  if (queues_work())
    enqueue_work(stream, name, in_one_go(act));
  else
    act();
  return kSuccess;
}
EXPORT int cudaStreamAddCallback(Stream *stream, void (*act)(Stream *, int, void *), void *data, unsigned) {
  CALL(cudaStreamAddCallback);
  return call_on_host(stream, "cudaStreamAddCallback", [=] { act(stream, kSuccess, data); });
}
EXPORT int cudaLaunchHostFunc(Stream *stream, void (*act)(void *), void *data) {
  CALL(cudaLaunchHostFunc);
  return call_on_host(stream, "cudaLaunchHostFunc", [=] { act(data); });
}

// ---- events

EXPORT int cudaEventCreateWithFlags(Event **out, unsigned flags) {
  LOCKED;
  CALL(cudaEventCreate);
  *out = new Event;
  (*out)->flags = flags, (*out)->device = current_device();
  return kSuccess;
}
EXPORT int cudaEventCreate(Event **out) { return cudaEventCreateWithFlags(out, 0); }
EXPORT int cudaEventDestroy(Event *event) {
  LOCKED;
  CALL(cudaEventDestroy);
  delete event;
  return kSuccess;
}
EXPORT int cudaEventRecord(Event *event, Stream *handle) {
  LOCKED;
  CALL(cudaEventRecord);
  host_spends(settings().call);
  Stream *stream = stream_of(handle);
  event->recorded = true;
  event->captured = stream->capture != nullptr;
  event->capture = stream->capture;
  event->frontier = stream->frontier;
  event->time = later(stream->time, host_times());
  event->mark = stream->capture ? nullptr : record_mark(stream);
  return kSuccess;
}
EXPORT int cudaEventRecordWithFlags(Event *event, Stream *stream, unsigned) { return cudaEventRecord(event, stream); }
EXPORT int cudaEventQuery(Event *event) {
  MarkPointer mark;
  {
    LOCKED;
    CALL(cudaEventQuery);
    if (event->captured) return set_error(kCapturedEvent);
    if (capture_forbids()) return set_error(kCaptureUnsupported);
    if (event->recorded && still_running(event->time, "polled cudaEventQuery")) return kNotReady;
    mark = event->mark;
  }
  return reaches(mark) ? kSuccess : kNotReady;
}
EXPORT int cudaEventSynchronize(Event *event) {
  Times end;
  MarkPointer mark;
  {
    LOCKED;
    CALL(cudaEventSynchronize);
    if (event->captured) return set_error(kCapturedEvent);
    if (capture_forbids()) return set_error(kCaptureUnsupported);
    end = event->time, mark = event->mark;
  }
  host_wait("cudaEventSynchronize", end);
  reach(mark);
  return has_failed() ? set_error(kLaunchFailure) : kSuccess;
}
EXPORT int cudaEventElapsedTime(float *milliseconds, Event *first, Event *last) {
  LOCKED;
  if (!first->recorded || !last->recorded || ((first->flags | last->flags) & kDisableTiming)) return set_error(kInvalidHandle);
  if (std::max(first->time.own(), last->time.own()) > host_now()) return set_error(kNotReady);
  *milliseconds = (float)((last->time.own() - first->time.own()) * 1e3);
  return kSuccess;
}
EXPORT int cudaIpcGetEventHandle(IpcHandle *out, Event *event) {
  const double time = event->time.own();  // a handle has room for one
  memset(out, 0, sizeof *out);
  memcpy(out, &time, sizeof time);
  return kSuccess;
}
EXPORT int cudaIpcOpenEventHandle(Event **out, IpcHandle handle) {
  int status = cudaEventCreateWithFlags(out, kDisableTiming);
  double time;
  memcpy(&time, &handle, sizeof time);
  (*out)->time = everywhere(time);
  (*out)->recorded = true;
  return status;
}

// ---- graphs

static uint64_t captures = 0;

static int begin_capture(Stream *handle, int mode) {
  CALL(cudaStreamBeginCapture);
  if (is_default(handle)) return set_error(kCaptureUnsupported);
  if (handle->capture) return set_error(kIllegalState);
  auto capture = std::make_shared<Capture>();
  capture->number = ++captures, capture->mode = mode, capture->origin = handle;
  handle->capture = capture, handle->frontier.clear();
  begun_here().push_back(capture);
  begun_anywhere().push_back(capture);
  return kSuccess;
}
EXPORT int cudaStreamBeginCapture(Stream *stream, int mode) {
  LOCKED;
  return begin_capture(stream, mode);
}
EXPORT int cudaStreamBeginCaptureToGraph(Stream *stream, Graph *graph, const void *, const void *, size_t, int mode) {
  LOCKED;
  int status = begin_capture(stream, mode);
  if (!status) graph->work = stream->capture;
  return status;
}

// Whether all work comes before the end of the stream that began: what was forked off must have been joined again.
static bool joined(const Capture &capture, const std::vector<size_t> &last) {
  std::vector<bool> seen(capture.pieces.size());
  std::vector<size_t> open = last;
  size_t reached = 0;
  while (!open.empty()) {
    size_t work = open.back();
    open.pop_back();
    if (seen[work]) continue;
    seen[work] = true, reached++;
    const std::vector<size_t> &before = capture.pieces[work].before;
    open.insert(open.end(), before.begin(), before.end());
  }
  return reached == seen.size();
}

EXPORT int cudaStreamEndCapture(Stream *stream, Graph **out) {
  LOCKED;
  CALL(cudaStreamEndCapture);
  *out = nullptr;
  auto capture = stream_of(stream)->capture;
  if (!capture) return set_error(kIllegalState);
  if (capture->origin != stream) return set_error(kCaptureUnjoined);
  bool whole = joined(*capture, stream->frontier);
  capture->origin = nullptr;  // it has ended
  for (Stream *other : created())
    if (other->capture == capture) other->capture.reset(), other->frontier.clear();
  if (capture->broken) return set_error(kCaptureInvalidated);
  if (!whole) return set_error(kCaptureUnjoined);
  *out = new Graph{capture};
  return kSuccess;
}

static int capture_status(Stream *stream) { return !stream->capture ? kNotCapturing : stream->capture->broken ? kCaptureBroken : kCapturing; }

EXPORT int cudaStreamIsCapturing(Stream *stream, int *out) {
  LOCKED;
  *out = capture_status(stream_of(stream));
  return kSuccess;
}
EXPORT int cuStreamIsCapturing(Stream *stream, int *out) { return cudaStreamIsCapturing(stream, out); }

EXPORT int cudaStreamGetCaptureInfo(Stream *handle, int *status, unsigned long long *number, Graph **graph, const void **nodes, const void **edges,
                                    size_t *count) {
  LOCKED;
  static auto *kept = new std::map<uint64_t, Graph *>;  // callers look at a capture's graph, they do not own it
  Stream *stream = stream_of(handle);
  *status = capture_status(stream);
  if (number) *number = stream->capture ? stream->capture->number : 0;
  if (graph) {
    *graph = nullptr;
    if (stream->capture) {
      Graph *&entry = (*kept)[stream->capture->number];
      if (!entry) entry = new Graph{stream->capture};
      *graph = entry;
    }
  }
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return kSuccess;
}
EXPORT int cudaStreamUpdateCaptureDependencies(Stream *, void *, const void *, size_t, unsigned) { return kSuccess; }
EXPORT int cudaThreadExchangeStreamCaptureMode(int *mode) {
  std::swap(*mode, thread_mode);
  return kSuccess;
}
EXPORT int cuThreadExchangeStreamCaptureMode(int *mode) { return cudaThreadExchangeStreamCaptureMode(mode); }

EXPORT int cudaGraphInstantiateWithFlags(Graph **out, Graph *graph, unsigned long long) {
  LOCKED;
  CALL(cudaGraphInstantiate);
  *out = new Graph(*graph);
  return kSuccess;
}
EXPORT int cudaGraphLaunch(Graph *graph, Stream *stream) {
  auto capture = graph->work;
  {
    LOCKED;
    CALL(cudaGraphLaunch);
    if (stream_of(stream)->capture) {
      not_modelled("cudaGraphLaunch within a capture");
      return set_error(kCaptureUnsupported);
    }
    host_spends(2 * settings().launch);
    record().replays += capture->pieces.size();
    for (Kernel *kernel : capture->kernels) kernel->launches++;
    replay(stream, *capture);
  }
  for (auto &[what, work, accesses] : capture->work) enqueue_work(stream, what, work, accesses);
  return kSuccess;
}
EXPORT int cudaGraphDestroy(Graph *graph) {
  delete graph;
  return kSuccess;
}
EXPORT int cudaGraphExecDestroy(Graph *graph) { return cudaGraphDestroy(graph); }
EXPORT int cudaGraphGetNodes(Graph *graph, void **nodes, size_t *count) {
  LOCKED;
  if (!nodes) *count = graph->work->pieces.size();
  else
    for (size_t i = 0; i < *count; i++) nodes[i] = (void *)(i + 1);
  return kSuccess;
}
EXPORT int cudaGraphNodeGetDependencies(void *, void **, void *, size_t *count) {
  *count = 0;
  return kSuccess;
}
EXPORT int cudaGraphAddNode(void **, Graph *, const void *, const void *, size_t, void *) {
  not_modelled("cudaGraphAddNode");
  return set_error(kNotSupported);
}
EXPORT int cudaGraphConditionalHandleCreate(void *, Graph *, unsigned, unsigned) {
  not_modelled("cudaGraphConditionalHandleCreate");
  return set_error(kNotSupported);
}

// An object that a graph holds until it is destroyed; here it lives on.
EXPORT int cudaUserObjectCreate(void **out, void *object, void (*)(void *), unsigned, unsigned) {
  *out = object;
  return kSuccess;
}
EXPORT int cudaUserObjectRelease(void *, unsigned) { return kSuccess; }
EXPORT int cudaGraphRetainUserObject(Graph *, void *, unsigned, unsigned) { return kSuccess; }

// ---- the driver's entries for streams

EXPORT int cuStreamWriteValue32_v2(Stream *stream, uint32_t *address, uint32_t value, unsigned) {
  enqueue(stream, of_kernel(settings().shortest_kernel));
  if (queues_work())
    enqueue_work(stream, "cuStreamWriteValue32", in_one_go([=] { *address = value; }), {{address, sizeof value, true}});
  else
    *address = value;
  return kSuccess;
}
