// Settings, the clock, the record, and how Python reads it.
#include "durations.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <new>
#include <set>

#include "profiles.inc"  // written by build.py from profiles.py: `static const Profile kProfiles[]`

namespace virtual_gpu {

static bool forked = false;

bool in_forked_child() { return forked; }

std::recursive_mutex &state_lock() {
  static auto *lock = [] {
    // A child has the thread that forked alone. Had another one the lock, nobody would give it back there.
    pthread_atfork([] { state_lock().lock(); }, [] { state_lock().unlock(); }, [] {
      new (&state_lock()) std::recursive_mutex;
      forked = forked || has_given_work();
    });
    return new std::recursive_mutex;  // never destroyed: threads of torch outlive `main`
  }();
  return *lock;
}

double setting(const char *name, double otherwise) {
  const char *text = getenv(name);
  return text && *text ? atof(text) : otherwise;
}

static const Profile *chosen_profile() {
  const char *key = getenv("VGPU_GPU");
  for (const Profile &profile : kProfiles)
    if (!strcmp(profile.key, key && *key ? key : "h100")) return &profile;
  fprintf(stderr, "virtual GPU: VGPU_GPU=%s is no profile; known are", key);
  for (const Profile &profile : kProfiles) fprintf(stderr, " %s", profile.key);
  fprintf(stderr, "\n");
  _exit(2);
}

static Order chosen_order() {
  const char *text = getenv("VGPU_COMPUTE");
  const std::string name = text && *text ? text : "none";
  static const char *const names[] = {"none", "at-once", "clock", "late", "adversarial"};
  for (int i = 0; i < 5; i++)
    if (name == names[i]) return (Order)i;
  fprintf(stderr, "virtual GPU: VGPU_COMPUTE=%s is no order; known are none at-once clock late adversarial\n", name.c_str());
  _exit(2);
}

// A stand-in in the place of a real driver would silently train nothing.
static void refuse_beside_a_real_driver() {
  if (access("/proc/driver/nvidia/version", F_OK) && access("/dev/nvidiactl", F_OK)) return;
  fprintf(stderr,
          "virtual GPU: this machine has a real NVIDIA driver, and the virtual GPU computes nothing.\n"
          "Use an environment with NVIDIA's own libraries here; this one is for machines without a GPU.\n");
  _exit(2);
}

const Settings &settings() {
  static const Settings *made = [] {
    refuse_beside_a_real_driver();
    const Profile *gpu = chosen_profile();
    auto *s = new Settings;
    // What is reached of the data sheet's rates: see durations.h. Links are not measured.
    const double products = setting("VGPU_PRODUCTS", kOtherProducts), links = setting("VGPU_LINKS", 0.82);
    s->gpu = gpu;
    s->devices = std::min(kMostDevices, (int)setting("VGPU_DEVICES", 1));
    s->memory = setting("VGPU_MEMORY_GIB", gpu->memory_gib) * kGiB;
    s->context = setting("VGPU_CONTEXT_GIB", 0.52) * kGiB;
    s->launch = setting("VGPU_LAUNCH_US", 2.5) * kMicro;
    s->call = setting("VGPU_CALL_US", 0.8) * kMicro;
    s->allocation = setting("VGPU_ALLOCATION_US", 300) * kMicro;
    s->shortest_kernel = setting("VGPU_SHORTEST_KERNEL_US", 2.5) * kMicro;
    s->memory_rate = setting("VGPU_MEMORY_GBS", gpu->memory_gbs * kCopies) * kGiga;
    s->host_rate = setting("VGPU_HOST_GBS", gpu->host_gbs) * kGiga;
    s->link_rate = setting("VGPU_LINK_GBS", gpu->link_gbs * links) * kGiga;
    s->network_rate = setting("VGPU_NETWORK_GBS", gpu->network_gbs * 0.9) * kGiga;
    s->collective_latency = setting("VGPU_COLLECTIVE_US", 14) * kMicro;
    s->bf16 = gpu->bf16_tflops * 1e12 * setting("VGPU_PRODUCTS", kProducts);
    s->tf32 = gpu->tf32_tflops * 1e12 * products;
    s->fp32 = gpu->fp32_tflops * 1e12 * products;
    s->fp8 = gpu->fp8_tflops * 1e12 * setting("VGPU_FP8_PRODUCTS", products);
    s->host_scale = setting("VGPU_HOST_SCALE", 0);
    s->host_processor_time = setting("VGPU_HOST_PROCESSOR", 0) != 0;
    s->largest_copy = (size_t)(setting("VGPU_LARGEST_COPY_MIB", 64) * kMiB);
    s->largest_device_copy = (size_t)(setting("VGPU_LARGEST_DEVICE_COPY_MIB", 1) * kMiB);
    s->largest_mirrored = (size_t)(setting("VGPU_LARGEST_MIRRORED_MIB", 1) * kMiB);
    s->trace = setting("VGPU_TRACE", 0) != 0;
    s->multicast = setting("VGPU_MULTICAST", gpu->multicast) != 0;
    s->order = chosen_order();
    s->shares = setting("VGPU_SHARE", s->order != Order::none) != 0;
    s->seed = (unsigned long)setting("VGPU_SEED", 0);
    if (s->order != Order::none || s->shares) s->largest_copy = s->largest_device_copy = SIZE_MAX;
    return s;
  }();
  return *made;
}

// ---- the clock

static double real_seconds() {
  timespec now;
  clock_gettime(settings().host_processor_time ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}

static Times added;  // what fixed costs and waits have added

Times host_times() {
  static const double start = real_seconds();
  const double real = settings().host_scale ? settings().host_scale * (real_seconds() - start) : 0;
  return added + everywhere(real);
}

double host_now() { return host_times().own(); }

void host_spends(double seconds) { added = added + everywhere(seconds); }

void host_waits_until(const Times &time) {
  const Times before = added, now = host_times();
  record().seconds_waited += std::max(0.0, time.own() - now.own());
  under_each([&](size_t set) {
    double &sum = added.under[set];
    const double late = time.under[set] - now.under[set];
    if (late <= 0) return;
    // The sum may be rounded to just before the time, and work that was waited for would still run.
    for (sum += late; sum + (now.under[set] - before.under[set]) < time.under[set];) sum = std::nextafter(sum, INFINITY);
  });
}

// ---- the record

Record &record() {
  static auto *kept = new Record;
  return *kept;
}

void count_call(const char *name) {
  record().calls[name]++;
  if (settings().trace) fprintf(stderr, "[virtual GPU] %s\n", name);
}

static void (*on_host_wait)(const char *) = nullptr;

void host_wait(const char *what, const Times &until) {
  {
    LOCKED;
    record().host_waits[what]++;
    host_waits_until(until);
  }
  if (on_host_wait) on_host_wait(what);
}

static std::set<std::string> &missing() {
  static auto *names = new std::set<std::string>;
  return *names;
}

void not_modelled(const char *name) {
  LOCKED;
  if (!missing().insert(name).second) return;
  fprintf(stderr, "virtual GPU: %s is called and is not modelled; it returns an error\n", name);
}

std::vector<Kernel *> &kernels();  // launches.cpp

static std::string quoted(const std::string &text) {
  std::string out = "\"";
  for (char letter : text) {
    if (letter == '"' || letter == '\\') out += '\\';
    out += letter;
  }
  return out + "\"";
}

static std::string number(double value) {
  char text[40];
  snprintf(text, sizeof text, "%.12g", value);
  return text;
}

static std::string object(const std::map<std::string, uint64_t> &entries) {
  std::string out;
  for (auto &[name, times] : entries) out += (out.empty() ? "" : ", ") + quoted(name) + ": " + std::to_string(times);
  return "{" + out + "}";
}

static std::string object(const std::map<std::string, Count> &entries) {
  std::string out;
  for (auto &[name, count] : entries)
    out += (out.empty() ? "" : ", ") + quoted(name) + ": [" + std::to_string(count.times) + ", " + number(count.amount) + "]";
  return "{" + out + "}";
}

static std::string launched_kernels() {
  std::map<std::string, Count> sums;
  for (Kernel *kernel : kernels())
    if (kernel->launches) {
      Count &sum = sums[kernel->name.substr(0, 200)];  // names of templates can be pages long
      sum.times += kernel->launches;
      sum.amount += kernel->seconds;
    }
  return object(sums);
}

static void add_stream(Stream *stream, void *out) {
  auto &text = *(std::string *)out;
  if (!stream->work) return;
  text += (text.empty() ? "" : ", ") + std::string("[") + std::to_string(stream->device) + ", " + std::to_string(stream->index) + ", " +
          std::to_string(stream->work) + ", " + number(stream->busy) + "]";
}

}  // namespace virtual_gpu

using namespace virtual_gpu;

// ---- what Python calls (recording.py)

EXPORT double vgpu_now() {
  LOCKED;
  return host_now();
}

EXPORT void vgpu_on_host_wait(void (*act)(const char *)) { on_host_wait = act; }

EXPORT void vgpu_not_modelled(const char *name) { not_modelled(name); }

EXPORT void vgpu_reset() {
  LOCKED;
  record() = Record();
  for (Kernel *kernel : kernels()) kernel->launches = 0, kernel->seconds = 0;
  every_stream([](Stream *stream, void *) { stream->work = 0, stream->busy = 0; }, nullptr);
}

// Returns the record as JSON, in memory that stays valid until the next call.
EXPORT const char *vgpu_record() {
  LOCKED;
  static auto &text = *new std::string;
  const Record &r = record();
  std::string streams, unknown;
  every_stream(add_stream, &streams);
  for (auto &name : missing()) unknown += (unknown.empty() ? "" : ", ") + quoted(name);
  text = "{\"launches\": " + std::to_string(r.launches) + ", \"replayed_launches\": " + std::to_string(r.replays) +
         ", \"operations\": " + number(r.operations) + ", \"seconds_waited\": " + number(r.seconds_waited) + ", \"calls\": " + object(r.calls) +
         ", \"copies\": " + object(r.copies) + ", \"collectives\": " + object(r.collectives) + ", \"products\": " + object(r.products) +
         ", \"host_waits\": " + object(r.host_waits) + ", \"not_modelled\": [" + unknown + "], \"streams\": [" + streams +
         "], \"kernels\": " + launched_kernels() + "}";
  return text.c_str();
}
