// What all stand-ins share: settings, the clock, the record, streams and memory of the virtual GPUs of this process.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "abi.h"

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
};
const Settings &settings();

// One lock for all state. It is recursive: stand-ins call each other.
std::recursive_mutex &state_lock();
#define LOCKED std::lock_guard<std::recursive_mutex> locked_state(state_lock())

// ---- the clock: the host's virtual time moves by fixed costs, by waits and, on request, with the real one

double host_now();
void host_spends(double seconds);
void host_waits_until(double time);

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
void host_wait(const char *what, double until);
void not_modelled(const char *name);  // says so on stderr, once for each name

// ---- devices, streams, events, captures

int current_device();
int set_error(int status);  // keeps it for cudaGetLastError, and returns it

struct Capture {
  uint64_t number = 0;
  int mode = kGlobal;
  bool broken = false;
  struct ::Stream *origin = nullptr;
  std::vector<std::vector<size_t>> before;  // for each piece of work, what it comes after
  std::vector<Kernel *> kernels;
  double seconds = 0;
};

}  // namespace virtual_gpu

struct Stream {
  int device = 0, priority = 0, index = 0;
  unsigned flags = 0;
  double time = 0, busy = 0;  // when its work ends; seconds of work
  uint64_t work = 0;
  std::shared_ptr<virtual_gpu::Capture> capture;
  std::vector<size_t> frontier;  // in a capture: the work that the next piece comes after
};

namespace virtual_gpu {

Stream *stream_of(Stream *handle);              // resolves the default streams
double end_of_device(int device);               // when all its streams are idle
void every_stream(void (*act)(Stream *, void *), void *argument);
bool any_capture(int device);
bool capture_forbids();                         // whether a call is refused, and has spoilt a capture, because a stream captures
// Adds work of `seconds` to a stream and returns when it ends; within a capture it is noted and takes no time.
double enqueue(Stream *handle, double seconds, Kernel *kernel = nullptr);

// A library's product of `operations` over `bytes`; `rate` is one of the settings' rates.
void run_product(Stream *stream, const char *what, double operations, double bytes, double rate);
void run_collective(Stream *stream, const char *what, double bytes, double seconds);

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

#pragma GCC visibility pop
