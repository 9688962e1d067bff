// What all stand-ins share: settings, the clock, the record, streams and memory of the virtual GPUs of this process.
#pragma once
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "abi.h"
#include "races.h"
#include "times.h"

#pragma GCC visibility push(default)  // the libraries use what is in libcudart

namespace virtual_gpu {

constexpr int kMostDevices = 64;
constexpr double kGiga = 1e9, kMicro = 1e-6, kGiB = 1024.0 * 1024 * 1024, kMiB = 1024.0 * 1024;

// ---- settings: a profile of a GPU (profiles.py), and environment variables that begin with VGPU_

struct Profile {
  const char *key, *name;
  int major, minor, processors;
  double memory_gib, l2_mib, shared_per_processor_kib;
  double memory_gbs, link_gbs, network_gbs, host_gbs;      // one direction
  double bf16_tflops, tf32_tflops, fp32_tflops, fp8_tflops;  // dense
  int link_domain, multicast;
};

double setting(const char *name, double otherwise);

struct Settings {
  const Profile *gpu;
  int devices;
  double memory, context;            // bytes of a device, and those that a CUDA context takes
  double launch, call, allocation;   // seconds of the host
  double shortest_kernel;            // seconds of the device
  double memory_rate, host_rate, link_rate, network_rate, collective_latency;
  double bf16, tf32, fp32, fp8;      // operations in a second that products reach
  double host_scale;                 // virtual seconds for each second of the real host; 0: fixed costs alone
  bool host_processor_time;          // the real host's seconds are those of its processor
  size_t largest_copy, largest_device_copy, largest_mirrored;  // bytes that are really copied
  bool trace, multicast;
  bool shares;  // whether other processes play the other ranks, and memory can be shared with them
  enum class Order { none, at_once, clock, late, adversarial } order;  // when the work of streams is computed (queues.cpp)
  unsigned long seed;                                                  // of the adversary
};
const Settings &settings();
using Order = Settings::Order;

// One lock for all state. It is recursive: stand-ins call each other.
std::recursive_mutex &state_lock();
// Whether this process was forked from one that had given the device work. As with CUDA its streams are of no use here.
bool in_forked_child();
#define LOCKED std::lock_guard<std::recursive_mutex> locked_state(state_lock())

// ---- the clock: the host's virtual time moves by fixed costs, by waits and, on request, with the real one

double host_now();  // at the device's own rates
Times host_times();
void host_spends(double seconds);
void host_waits_until(const Times &time);

// ---- the record

struct Count {
  uint64_t times = 0;
  double amount = 0;  // bytes, or seconds
};

struct Kernel {
  std::string symbol, name;  // mangled; demangled when it is first launched
  uint64_t launches = 0;
  double seconds = 0;
};

struct Record {
  std::map<std::string, uint64_t> calls;       // entries of the runtime
  std::map<std::string, Count> copies;         // by direction
  std::map<std::string, Count> collectives;    // by name: bytes
  std::map<std::string, Count> products;       // by entry of cuBLAS: seconds
  std::map<std::string, uint64_t> host_waits;  // by what waited
  uint64_t launches = 0, replays = 0;
  double operations = 0, seconds_waited = 0;
};
Record &record();
void count_call(const char *name);
#define CALL(name) count_call(#name)

// Records a wait of the host for the device, tells Python who waits (without the lock), and moves the host's clock.
void host_wait(const char *what, const Times &until);
void not_modelled(const char *name);  // says so on stderr, once for each name

// ---- devices, streams, events, captures

int current_device();
int set_error(int status);  // keeps it for cudaGetLastError, and returns it

// ---- work that touches memory: a queue for each stream (queues.cpp)

// One execution of a piece of work. It returns false while it cannot end, because a peer is late; it is called again then, and
// the work behind it waits. It runs without the lock, on any thread.
using Step = std::function<bool()>;
// Makes a step for each execution: a graph executes its work many times.
using Work = std::function<Step()>;
// Work that is done in one go.
template <class Act>
Work in_one_go(Act act) {
  return [act] {
    return [act] {
      act();
      return true;
    };
  };
}

// A place in a stream's queue that others wait for.
struct Mark {
  struct ::Stream *stream;
  bool reached = false;
  Clock clock = {};
  int puts_off = -1;  // under an adversary: so many more questions hear that it is not reached; -1 is not drawn yet
};
using MarkPointer = std::shared_ptr<Mark>;

struct Entry {
  enum class Kind { work, record, wait } kind;
  const char *what;
  Step step;
  MarkPointer mark;
  double end = 0;       // on the virtual clock
  uint64_t number = 0;  // in the order of the host's calls
  NodePointer node = nullptr;
};

bool computes();     // whether VGPU_COMPUTE asks for values
bool queues_work();  // whether copies and messages are work of streams: with values, or where other processes play the other ranks
// Puts work at the end of a stream's queue, or into its capture, and runs what is due. Call it WITHOUT the lock, after the
// work has gone to the clock. If streams have no work (`queues_work`), it does nothing.
// `accesses` are the bytes that it touches, as far as they are known by then.
void enqueue_work(struct ::Stream *stream, const char *what, Work work, Accesses accesses = {});
MarkPointer record_mark(struct ::Stream *stream);          // with the lock
void wait_for_mark(struct ::Stream *stream, MarkPointer mark);  // with the lock: the stream's next work comes after it
void reach(const MarkPointer &mark);                       // without the lock: the host waits
bool reaches(const MarkPointer &mark);                     // without the lock: runs what leads there; false if a peer is late
void reach_end_of(struct ::Stream *stream);                // without the lock
void reach_end_of_all();                                   // without the lock
bool has_given_work();                                     // whether any stream of the process was ever given some
bool has_failed();                                         // whether work has failed; the process's streams are lost then
void fail(const char *what, const char *reason);
// Another process's work may wait for this one's: from now on a thread runs what is due while the host does other things.
void keep_running();

struct Captured {
  const char *what;
  Work work;
  Accesses accesses;
};
// What the clock knows of a piece of captured work.
struct Piece {
  Times seconds;
  bool fills;                  // whether it wants the whole device
  std::vector<size_t> before;  // the pieces that it comes after
  struct ::Stream *lane;       // stands for the stream that it was captured on
};
struct Capture {
  uint64_t number = 0;
  int mode = kGlobal;
  bool broken = false;
  struct ::Stream *origin = nullptr;
  std::vector<Piece> pieces;  // in the order of the host's calls, as `work`
  std::map<struct ::Stream *, struct ::Stream *> lanes;
  std::vector<Kernel *> kernels;
  std::vector<Captured> work;
};

}  // namespace virtual_gpu

struct Stream {
  int device = 0, priority = 0, index = 0;
  unsigned flags = 0;
  virtual_gpu::Times time;  // when its work ends
  double busy = 0;          // seconds of work, at the device's own rates
  // From when to when its work wants the whole device, of what may still run; under each set of rates.
  std::array<std::deque<std::pair<double, double>>, virtual_gpu::kMostRates> filled;
  uint64_t work = 0;
  std::shared_ptr<virtual_gpu::Capture> capture;
  std::vector<size_t> frontier;  // in a capture: the work that the next piece comes after
  std::deque<virtual_gpu::Entry> queue;
  int place = -1;                      // in vector clocks
  bool running = false, eager = true;  // whether a thread runs its first entry; what the adversary thinks of it
};

namespace virtual_gpu {

Stream *stream_of(Stream *handle);              // resolves the default streams
bool is_default(Stream *handle);
Stream *stream_on(Stream *handle, int device);  // the same, for a device that need not be the current one
const std::vector<Stream *> &all_streams();     // those that were destroyed too: they may have work left
Times end_of_device(int device);                // when all its streams are idle
void every_stream(void (*act)(Stream *, void *), void *argument);
bool any_capture(int device);
bool capture_forbids();                         // whether a call is refused, and has spoilt a capture, because a stream captures
// Adds work that takes `seconds` to a stream and returns when it ends; within a capture it is noted and takes no time. Work that fills
// the device shares it with what fills it on other streams.
Times enqueue(Stream *handle, const Times &seconds, Kernel *kernel = nullptr, bool fills = false);

// A library's product of `operations` over `bytes`; `rate` is one of the settings' rates.
// A product outside any operator of torch would leave garbage where values are computed: it is refused.
constexpr int kProductNotSupported = 15;  // of cublasStatus_t
int run_product(Stream *stream, const char *what, double operations, double bytes, double rate);
void run_collective(Stream *stream, const char *what, double bytes, const Times &seconds);

// ---- memory

enum class Kind { device, pinned, registered, reserved };
struct Allocation {
  size_t bytes;
  int device;
  Kind kind;
};
Allocation *allocation_at(const void *address, uintptr_t *base = nullptr);

}  // namespace virtual_gpu

// Says once on stderr that an entry is called which is not modelled; generated stubs call it too.
EXPORT void vgpu_not_modelled(const char *name);

// While this thread is within an operator that is computed as a whole (arithmetic.cpp), what its kernel launches, and what it
// copies and fills on the device, are only recorded.
EXPORT void vgpu_cover(int more);
EXPORT int vgpu_covered();
// The adversary overwrites memory that a stream is given with NaN, before the stream's next work: who still reads what was
// there, or reads what was never written, notices.
EXPORT void vgpu_spoil(struct Stream *stream, void *at, size_t bytes);
// Work that was done as soon as it was given, because the host waited for it.
EXPORT void vgpu_touched_at_once(struct Stream *stream, const char *what, const virtual_gpu::Accesses &accesses);

#pragma GCC visibility pop
