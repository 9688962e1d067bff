// NCCL for one rank of a world of N. No peer is asked: small payloads act as if every rank had sent what this one sends, and
// all of them go to the clock by their bytes.
#include <stdlib.h>
#include <string.h>

#include "machine.h"

using namespace virtual_gpu;

struct Communicator {
  int ranks, rank;
};
struct UniqueId {
  char bytes[128];
};
constexpr int kNoColor = -1, kFirstOwnOperation = 5, kVersion = 23007;

// Bytes of an element, by the number of ncclDataType_t: int8 .. float8e5m2.
static size_t width_of(int type) {
  static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return widths[type];
}

static void mirror(void *to, const void *from, size_t bytes) {
  if (to != from && bytes && bytes <= settings().largest_mirrored) memmove(to, from, bytes);
}

enum Operation { kSum = 0, kProduct = 1 };

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
    case 0: return repeat<int8_t>(to, from, count, operation, ranks);
    case 1: return repeat<uint8_t>(to, from, count, operation, ranks);
    case 2: return repeat<int32_t>(to, from, count, operation, ranks);
    case 3: return repeat<uint32_t>(to, from, count, operation, ranks);
    case 4: return repeat<int64_t>(to, from, count, operation, ranks);
    case 5: return repeat<uint64_t>(to, from, count, operation, ranks);
    case 7: return repeat<float>(to, from, count, operation, ranks);
    case 8: return repeat<double>(to, from, count, operation, ranks);
    case 9:
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

// Ring algorithms: `share` of the bytes crosses this rank's slowest link.
static int run(const char *what, Communicator *group, double bytes, double share, Stream *stream) {
  const double rate = group->ranks > settings().gpu->link_domain ? settings().network_rate : settings().link_rate;
  run_collective(stream, what, bytes, settings().collective_latency + bytes * share / rate);
  return kSuccess;
}
static double all_but_own(Communicator *group) { return (group->ranks - 1.0) / group->ranks; }

// ---- communicators

EXPORT int ncclGetVersion(int *out) {
  *out = kVersion;
  return kSuccess;
}
EXPORT int ncclGetUniqueId(UniqueId *out) {
  memset(out, 7, sizeof *out);
  return kSuccess;
}
EXPORT int ncclCommGetUniqueId(Communicator *, UniqueId *out) { return ncclGetUniqueId(out); }
EXPORT int ncclCommInitRankConfig(Communicator **out, int ranks, UniqueId, int rank, void *) {
  CALL(ncclCommInit);
  *out = new Communicator{ranks, rank};
  return kSuccess;
}
EXPORT int ncclCommInitRank(Communicator **out, int ranks, UniqueId id, int rank) { return ncclCommInitRankConfig(out, ranks, id, rank, nullptr); }
EXPORT int ncclCommInitRankScalable(Communicator **out, int ranks, int rank, int, UniqueId *, void *) {
  return ncclCommInitRankConfig(out, ranks, UniqueId{}, rank, nullptr);
}
EXPORT int ncclCommInitAll(Communicator **out, int ranks, const int *) {
  for (int rank = 0; rank < ranks; rank++) out[rank] = new Communicator{ranks, rank};
  return kSuccess;
}
// Other ranks' colours are unknown here. VGPU_SPLIT says how many ranks a part has; else it is as large as the whole.
EXPORT int ncclCommSplit(Communicator *group, int color, int key, Communicator **out, void *) {
  CALL(ncclCommSplit);
  *out = color == kNoColor ? nullptr : new Communicator{(int)setting("VGPU_SPLIT", group->ranks), key};
  return kSuccess;
}
EXPORT int ncclCommFinalize(Communicator *) { return kSuccess; }
EXPORT int ncclCommDestroy(Communicator *) { return kSuccess; }  // torch's watchdog may still look at it
EXPORT int ncclCommAbort(Communicator *) { return kSuccess; }
EXPORT int ncclCommRevoke(Communicator *, int) { return kSuccess; }
EXPORT int ncclCommGetAsyncError(Communicator *, int *out) {
  *out = kSuccess;
  return kSuccess;
}
EXPORT int ncclCommCount(Communicator *group, int *out) {
  *out = group->ranks;
  return kSuccess;
}
EXPORT int ncclCommUserRank(Communicator *group, int *out) {
  *out = group->rank;
  return kSuccess;
}
EXPORT const char *ncclGetErrorString(int status) { return status ? "not modelled by the virtual GPU" : "no error"; }
EXPORT const char *ncclGetLastError(Communicator *) { return ""; }
EXPORT int ncclGroupStart() { return kSuccess; }
EXPORT int ncclGroupEnd() { return kSuccess; }

// ---- registered memory

EXPORT int ncclCommRegister(Communicator *, void *, size_t, void **handle) {
  CALL(ncclCommRegister);
  *handle = (void *)1;
  return kSuccess;
}
EXPORT int ncclCommDeregister(Communicator *, void *) { return kSuccess; }
EXPORT int ncclCommWindowRegister(Communicator *, void *, size_t, void **window, int) {
  CALL(ncclCommWindowRegister);
  *window = (void *)1;
  return kSuccess;
}
EXPORT int ncclCommWindowDeregister(Communicator *, void *) { return kSuccess; }
extern "C" int cudaMalloc(void **, size_t);
extern "C" int cudaFree(void *);
EXPORT int ncclMemAlloc(void **out, size_t bytes) { return cudaMalloc(out, bytes) ? 1 : kSuccess; }
EXPORT int ncclMemFree(void *address) { return cudaFree(address) ? 1 : kSuccess; }

EXPORT int ncclRedOpCreatePreMulSum(int *out, void *, int, int, Communicator *) {
  *out = kFirstOwnOperation;
  return kSuccess;
}
EXPORT int ncclRedOpDestroy(int, Communicator *) { return kSuccess; }

// ---- collectives

EXPORT int ncclAllGather(const void *from, char *to, size_t count, int type, Communicator *group, Stream *stream) {
  const size_t bytes = count * width_of(type);
  for (int rank = 0; rank < group->ranks && bytes <= settings().largest_mirrored; rank++) mirror(to + rank * bytes, from, bytes);
  return run("ncclAllGather", group, (double)bytes * group->ranks, all_but_own(group), stream);
}
EXPORT int ncclReduceScatter(const char *from, void *to, size_t count, int type, int operation, Communicator *group, Stream *stream) {
  const size_t bytes = count * width_of(type);
  reduce(to, from + group->rank * bytes, count, type, operation, group->ranks);
  return run("ncclReduceScatter", group, (double)bytes * group->ranks, all_but_own(group), stream);
}
EXPORT int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, Communicator *group, Stream *stream) {
  const size_t bytes = count * width_of(type);
  reduce(to, from, count, type, operation, group->ranks);
  return run("ncclAllReduce", group, (double)bytes, 2 * all_but_own(group), stream);
}
EXPORT int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Communicator *group, Stream *stream) {
  const size_t bytes = count * width_of(type);
  if (root == group->rank) mirror(to, from, bytes);
  return run("ncclBroadcast", group, (double)bytes, 1, stream);
}
EXPORT int ncclBcast(void *at, size_t count, int type, int root, Communicator *group, Stream *stream) {
  return ncclBroadcast(at, at, count, type, root, group, stream);
}
EXPORT int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root, Communicator *group, Stream *stream) {
  const size_t bytes = count * width_of(type);
  if (root == group->rank) reduce(to, from, count, type, operation, group->ranks);
  return run("ncclReduce", group, (double)bytes, 1, stream);
}
EXPORT int ncclAlltoAll(const void *from, void *to, size_t count, int type, Communicator *group, Stream *stream) {
  const size_t bytes = count * width_of(type) * group->ranks;
  mirror(to, from, bytes);
  return run("ncclAlltoAll", group, (double)bytes, all_but_own(group), stream);
}
EXPORT int ncclGather(const void *from, char *to, size_t count, int type, int root, Communicator *group, Stream *stream) {
  const size_t bytes = count * width_of(type);
  if (root == group->rank)
    for (int rank = 0; rank < group->ranks; rank++) mirror(to + rank * bytes, from, bytes);
  return run("ncclGather", group, (double)bytes * group->ranks, all_but_own(group), stream);
}
EXPORT int ncclSend(const void *, size_t count, int type, int, Communicator *group, Stream *stream) {
  return run("ncclSend", group, (double)(count * width_of(type)), 1, stream);
}
EXPORT int ncclRecv(void *, size_t count, int type, int, Communicator *group, Stream *stream) {
  return run("ncclRecv", group, (double)(count * width_of(type)), 1, stream);
}
