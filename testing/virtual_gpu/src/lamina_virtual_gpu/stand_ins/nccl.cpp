// NCCL. A program that plays one rank of a world of N alone asks no peer: small payloads act as if every rank had sent what this one sends. Where
// other processes or threads play the other ranks (VGPU_SHARE), ranks meet and bytes move (nccl_peers.cpp). Both go to the clock by their bytes.
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <utility>

#include "nccl_peers.h"

using namespace virtual_gpu;

struct Communicator {
  int ranks, rank;
  std::shared_ptr<Peers> peers;                   // null: this rank is alone
  std::map<int, std::shared_ptr<Factor>> factors;  // of its premultiplied sums
};
constexpr int kNoColor = -1, kVersion = 23007;
// Numbers of ncclResult_t.
constexpr int kSystemError = 2, kInvalidUsage = 5, kInProgress = 7;

// ---- alone: what a rank sends is what it gets

static void mirror(void *to, const void *from, size_t bytes) {
  if (to != from && bytes && bytes <= settings().largest_mirrored) memmove(to, from, bytes);
}

static float widened(uint16_t half_of_a_float) {  // bfloat16
  const uint32_t bits = (uint32_t)half_of_a_float << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
static void repeat(void *to, const void *from, size_t count, int operation, int ranks) {
  const T *source = (const T *)from;
  T *target = (T *)to;
  for (size_t i = 0; i < count; i++) {
    T value = source[i];
    if (operation == kSum) value = (T)(value * (T)ranks);
    for (int rank = 1; operation == kProduct && rank < ranks; rank++) value = (T)(value * source[i]);
    target[i] = value;
  }
}

// What a reduction of equal contributions gives: N times the value for a sum; minimum, maximum and mean are the value.
static void reduce(void *to, const void *from, size_t count, int type, int operation, int ranks) {
  if (count * width_of(type) > settings().largest_mirrored) return;
  if (operation != kSum && operation != kProduct) return mirror(to, from, count * width_of(type));
  switch (type) {
    case kInt8: return repeat<int8_t>(to, from, count, operation, ranks);
    case kUint8: return repeat<uint8_t>(to, from, count, operation, ranks);
    case kInt32: return repeat<int32_t>(to, from, count, operation, ranks);
    case kUint32: return repeat<uint32_t>(to, from, count, operation, ranks);
    case kInt64: return repeat<int64_t>(to, from, count, operation, ranks);
    case kUint64: return repeat<uint64_t>(to, from, count, operation, ranks);
    case kFloat32: return repeat<float>(to, from, count, operation, ranks);
    case kFloat64: return repeat<double>(to, from, count, operation, ranks);
    case kBfloat16:
      for (size_t i = 0; i < count; i++) {
        float value = widened(((const uint16_t *)from)[i]), result;
        repeat<float>(&result, &value, 1, operation, ranks);
        uint32_t bits;
        memcpy(&bits, &result, sizeof bits);
        ((uint16_t *)to)[i] = (uint16_t)(bits >> 16);
      }
      return;
    default: return mirror(to, from, count * width_of(type));  // halves and eighths stay as they are
  }
}

static void answer_alone(const Call &call, int ranks, int rank) {
  const size_t bytes = call.count * width_of(call.type);
  const char *from = (const char *)call.from;
  char *to = (char *)call.to;
  switch (call.kind) {
    case Call::gather:
      if (rank != call.peer) return;
      [[fallthrough]];
    case Call::all_gather:
      for (int other = 0; other < ranks && bytes <= settings().largest_mirrored; other++) mirror(to + other * bytes, from, bytes);
      return;
    case Call::reduce_scatter: return reduce(to, from + rank * bytes, call.count, call.type, call.operation, ranks);
    case Call::reduce:
      if (rank != call.peer) return;
      [[fallthrough]];
    case Call::all_reduce: return reduce(to, from, call.count, call.type, call.operation, ranks);
    case Call::broadcast: return rank == call.peer ? mirror(to, from, bytes) : void();
    case Call::all_to_all: return mirror(to, from, bytes * ranks);
    case Call::send: case Call::receive: return;
  }
}

// ---- calls, and groups of them

struct Grouped {
  Communicator *on;
  Stream *stream;
  const char *what;
  std::vector<Call> calls;
};
struct Group {
  int depth = 0;
  std::vector<Grouped> calls;
  std::vector<Communicator *> made;
};
static Group &group_of_thread() {  // never destroyed: threads of torch outlive `main`
  static thread_local auto *group = new Group;
  return *group;
}

// The bytes that a rank's calls touch.
static Accesses accesses_of(const std::vector<Call> &calls, int ranks, int rank) {
  Accesses all;
  for (const Call &call : calls) {
    const size_t once = call.count * width_of(call.type), each = once * (size_t)ranks;
    const bool root = rank == call.peer;
    switch (call.kind) {
      case Call::all_gather: all.insert(all.end(), {{call.from, once, false}, {call.to, each, true}}); break;
      case Call::reduce_scatter: all.insert(all.end(), {{call.from, each, false}, {call.to, once, true}}); break;
      case Call::all_to_all: all.insert(all.end(), {{call.from, each, false}, {call.to, each, true}}); break;
      case Call::all_reduce: all.insert(all.end(), {{call.from, once, false}, {call.to, once, true}}); break;
      case Call::broadcast: if (root) all.push_back({call.from, once, false});
        if (!root || call.from != call.to) all.push_back({call.to, once, true});
        break;
      case Call::send: all.push_back({call.from, once, false}); break;
      case Call::receive: all.push_back({call.to, once, true}); break;
      case Call::reduce:
      case Call::gather:
        all.push_back({call.from, once, false});
        if (root) all.push_back({call.to, call.kind == Call::gather ? each : once, true});
    }
    if (call.factor && call.factor->on_device) all.push_back({call.factor->on_device, width_of(call.type), false});
  }
  return all;
}

static int begin(Grouped &together) {
  Accesses accesses = accesses_of(together.calls, together.on->ranks, together.on->rank);
  enqueue_work(together.stream, together.what, together.on->peers->work(std::move(together.calls)), std::move(accesses));
  return kSuccess;
}

// Ring algorithms: `share` of the bytes crosses this rank's slowest link.
static int run(const char *what, Communicator *on, Call call, double bytes, double share, Stream *stream) {
  const bool leaves = on->ranks > settings().gpu->link_domain;  // the GPUs that links join
  Times seconds;
  under_each([&](size_t set) {
    const double rate = leaves ? rates()[set].network : rates()[set].link;
    seconds.under[set] = settings().collective_latency + bytes * share / rate;
  });
  run_collective(stream, what, bytes, seconds);
  if (auto own = on->factors.find(call.operation); own != on->factors.end()) call.factor = own->second;
  if (!on->peers) {
    if (!queues_work()) answer_alone(call, on->ranks, on->rank);
    else enqueue_work(stream, what, in_one_go([=, ranks = on->ranks, rank = on->rank] { answer_alone(call, ranks, rank); }), accesses_of({call}, on->ranks, on->rank));
    return kSuccess;
  }
  stream = stream_of(stream);  // while its device is the current one: a group may be of ranks on several
  Group &group = group_of_thread();
  Grouped alone{on, stream, what, {call}};
  if (!group.depth) return begin(alone);
  for (Grouped &other : group.calls) {
    if (other.on != on) continue;
    if (other.stream != stream) return not_modelled("a group of NCCL over several streams of one communicator"), kInvalidUsage;
    other.calls.push_back(call), other.what = "a group of NCCL's calls";
    return kSuccess;
  }
  group.calls.push_back(alone);
  return kSuccess;
}
static double all_but_own(Communicator *on) { return (on->ranks - 1.0) / on->ranks; }

EXPORT int ncclGroupStart() {
  group_of_thread().depth++;
  return kSuccess;
}
EXPORT int ncclGroupEnd() {
  Group &group = group_of_thread();
  if (!group.depth || --group.depth) return kSuccess;
  const Group ended = std::exchange(group, Group());
  for (Communicator *made : ended.made) made->peers->wait_for_all();
  for (Grouped together : ended.calls) begin(together);
  return kSuccess;
}

// ---- communicators

static thread_local const char *last_error = "";

EXPORT int ncclGetVersion(int *out) {
  *out = kVersion;
  return kSuccess;
}
EXPORT int ncclGetUniqueId(UniqueId *out) {
  memset(out, 7, sizeof *out);
  return !settings().shares || Peers::make_id(out) ? kSuccess : kSystemError;
}
EXPORT int ncclCommGetUniqueId(Communicator *, UniqueId *out) { return ncclGetUniqueId(out); }

// Of ncclConfig_t only `blocking` matters here: a communicator that does not block is asked with ncclCommGetAsyncError.
static bool blocks(const void *config) {
  int blocking = INT_MIN;
  if (config) memcpy(&blocking, (const char *)config + 16, sizeof blocking);
  return blocking != 0;
}

EXPORT int ncclCommInitRankConfig(Communicator **out, int ranks, UniqueId id, int rank, void *config) {
  CALL(ncclCommInit);
  *out = nullptr;
  auto peers = settings().shares ? Peers::join(id, ranks, rank) : nullptr;
  if (settings().shares && !peers) return last_error = "the process that made the unique id is gone, or there are more ranks than 64", kSystemError;
  *out = new Communicator{ranks, rank, peers, {}};
  if (!peers) return kSuccess;
  Group &group = group_of_thread();
  if (group.depth) group.made.push_back(*out);  // one thread may make several ranks in a group, which wait for each other
  else if (blocks(config)) peers->wait_for_all();
  else return peers->are_there() ? kSuccess : kInProgress;
  return kSuccess;
}
EXPORT int ncclCommInitRank(Communicator **out, int ranks, UniqueId id, int rank) { return ncclCommInitRankConfig(out, ranks, id, rank, nullptr); }
EXPORT int ncclCommInitRankScalable(Communicator **out, int ranks, int rank, int, UniqueId *ids, void *config) {
  return ncclCommInitRankConfig(out, ranks, ids[0], rank, config);
}
EXPORT int ncclCommInitAll(Communicator **out, int ranks, const int *) {
  UniqueId id;
  if (int status = ncclGetUniqueId(&id)) return status;
  ncclGroupStart();
  for (int rank = 0; rank < ranks; rank++) ncclCommInitRank(out + rank, ranks, id, rank);
  return ncclGroupEnd();
}

static int divided(Communicator *on, const std::vector<int> &members, int color, int key, Communicator **out) {
  *out = nullptr;
  auto peers = on->peers->divide(members, color, key);
  if (peers) *out = new Communicator{peers->ranks, peers->rank, peers, {}};
  return peers || color == kNoColor ? kSuccess : kSystemError;
}
static std::vector<int> ranks_without(Communicator *on, const int *excluded, int count) {
  std::vector<int> members;
  for (int rank = 0; rank < on->ranks; rank++)
    if (std::find(excluded, excluded + count, rank) == excluded + count) members.push_back(rank);
  return members;
}
// Alone, other ranks' colours are unknown. VGPU_SPLIT says how many ranks a part has; else it is as large as the whole.
EXPORT int ncclCommSplit(Communicator *on, int color, int key, Communicator **out, void *) {
  CALL(ncclCommSplit);
  if (on->peers) return divided(on, ranks_without(on, nullptr, 0), color, key, out);
  *out = color == kNoColor ? nullptr : new Communicator{(int)setting("VGPU_SPLIT", on->ranks), key, nullptr, {}};
  return kSuccess;
}
EXPORT int ncclCommShrink(Communicator *on, int *excluded, int count, Communicator **out, void *, int flags) {
  CALL(ncclCommShrink);
  if (!on->peers) return not_modelled("ncclCommShrink of a rank that is alone"), kInvalidUsage;
  if (flags) on->peers->abort();
  return divided(on, ranks_without(on, excluded, count), 0, on->rank, out);
}
EXPORT int ncclCommFinalize(Communicator *on) {
  if (on->peers) on->peers->finish();
  return kSuccess;
}
EXPORT int ncclCommDestroy(Communicator *on) { return ncclCommFinalize(on); }  // torch's watchdog may still look at it
EXPORT int ncclCommAbort(Communicator *on) {
  if (on->peers) on->peers->abort();
  return kSuccess;
}
EXPORT int ncclCommRevoke(Communicator *on, int) { return ncclCommAbort(on); }
EXPORT int ncclCommGetAsyncError(Communicator *on, int *out) {
  *out = !on->peers || on->peers->are_there() ? kSuccess : kInProgress;
  return kSuccess;
}
EXPORT int ncclCommCount(Communicator *on, int *out) {
  *out = on->ranks;
  return kSuccess;
}
EXPORT int ncclCommUserRank(Communicator *on, int *out) {
  *out = on->rank;
  return kSuccess;
}
EXPORT const char *ncclGetErrorString(int status) {
  return status == kSystemError ? "system error" : status == kInProgress ? "in progress" : status ? "not modelled by the virtual GPU" : "no error";
}
EXPORT const char *ncclGetLastError(Communicator *) { return last_error; }

// ---- registered memory: collective where it is symmetric

EXPORT int ncclCommRegister(Communicator *, void *, size_t, void **handle) {
  CALL(ncclCommRegister);
  *handle = (void *)1;
  return kSuccess;
}
EXPORT int ncclCommDeregister(Communicator *, void *) { return kSuccess; }
EXPORT int ncclCommWindowRegister(Communicator *on, void *, size_t, void **window, int) {
  CALL(ncclCommWindowRegister);
  *window = (void *)1;
  if (on->peers) on->peers->meet();
  return kSuccess;
}
EXPORT int ncclCommWindowDeregister(Communicator *, void *) { return kSuccess; }
extern "C" int cudaMalloc(void **, size_t);
extern "C" int cudaFree(void *);
EXPORT int ncclMemAlloc(void **out, size_t bytes) { return cudaMalloc(out, bytes) ? 1 : kSuccess; }
EXPORT int ncclMemFree(void *address) { return cudaFree(address) ? 1 : kSuccess; }

EXPORT int ncclRedOpCreatePreMulSum(int *out, void *number, int type, int at_once, Communicator *on) {
  auto factor = std::make_shared<Factor>();
  if (at_once) memcpy(factor->value, number, width_of(type));
  else factor->on_device = number;
  *out = on->factors.empty() ? kFirstOwnOperation : on->factors.rbegin()->first + 1;
  on->factors[*out] = factor;
  return kSuccess;
}
EXPORT int ncclRedOpDestroy(int operation, Communicator *on) {
  on->factors.erase(operation);
  return kSuccess;
}

// ---- collectives and messages

EXPORT int ncclAllGather(const void *from, void *to, size_t count, int type, Communicator *on, Stream *stream) {
  const double bytes = (double)count * width_of(type) * on->ranks;
  return run("ncclAllGather", on, {Call::all_gather, from, to, count, type}, bytes, all_but_own(on), stream);
}
EXPORT int ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation, Communicator *on, Stream *stream) {
  const double bytes = (double)count * width_of(type) * on->ranks;
  return run("ncclReduceScatter", on, {Call::reduce_scatter, from, to, count, type, operation}, bytes, all_but_own(on), stream);
}
EXPORT int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, Communicator *on, Stream *stream) {
  const double bytes = (double)count * width_of(type);
  return run("ncclAllReduce", on, {Call::all_reduce, from, to, count, type, operation}, bytes, 2 * all_but_own(on), stream);
}
EXPORT int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Communicator *on, Stream *stream) {
  return run("ncclBroadcast", on, {Call::broadcast, from, to, count, type, 0, root}, (double)count * width_of(type), 1, stream);
}
EXPORT int ncclBcast(void *at, size_t count, int type, int root, Communicator *on, Stream *stream) {
  return ncclBroadcast(at, at, count, type, root, on, stream);
}
EXPORT int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root, Communicator *on, Stream *stream) {
  return run("ncclReduce", on, {Call::reduce, from, to, count, type, operation, root}, (double)count * width_of(type), 1, stream);
}
EXPORT int ncclAlltoAll(const void *from, void *to, size_t count, int type, Communicator *on, Stream *stream) {
  const double bytes = (double)count * width_of(type) * on->ranks;
  return run("ncclAlltoAll", on, {Call::all_to_all, from, to, count, type}, bytes, all_but_own(on), stream);
}
EXPORT int ncclGather(const void *from, void *to, size_t count, int type, int root, Communicator *on, Stream *stream) {
  const double bytes = (double)count * width_of(type) * on->ranks;
  return run("ncclGather", on, {Call::gather, from, to, count, type, 0, root}, bytes, all_but_own(on), stream);
}
EXPORT int ncclSend(const void *from, size_t count, int type, int peer, Communicator *on, Stream *stream) {
  return run("ncclSend", on, {Call::send, from, nullptr, count, type, 0, peer}, (double)count * width_of(type), 1, stream);
}
EXPORT int ncclRecv(void *to, size_t count, int type, int peer, Communicator *on, Stream *stream) {
  return run("ncclRecv", on, {Call::receive, nullptr, to, count, type, 0, peer}, (double)count * width_of(type), 1, stream);
}
