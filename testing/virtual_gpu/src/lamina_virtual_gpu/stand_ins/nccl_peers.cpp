// How ranks meet: the process that makes a unique id makes a file in memory, and the id names the process and the file. So nothing is left when the
// processes end, however they end. Each pair of ranks has a channel in it, of two slots; a message passes through in chunks. A chunk carries what
// its sender is about. If that is not what the receiver is about, the receiver waits for ever, as the ranks of NCCL do: that is for
// watchdogs to find. NCCL_DEBUG=WARN names the difference.
#include "nccl_peers.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>

namespace virtual_gpu {

constexpr int kMostRanks = 64, kSlots = 2;
constexpr size_t kSlotBytes = 256 << 10;

// What a chunk belongs to; equal at both ends, or they do not meet.
struct Tag {
  int kind, type, operation, root;
  size_t bytes, chunk;
  bool operator==(const Tag &other) const { return !memcmp(this, &other, sizeof *this); }
};

struct Channel {
  std::atomic<uint64_t> published, consumed;  // chunks
  Tag tags[kSlots];
};

// What a rank says when all ranks meet without a stream. Two of each, since a rank may be at the next meeting while others still read.
struct Answer {
  std::atomic<uint64_t> meeting, child_meeting;
  int colour, key;
  UniqueId child;
};

struct Segment {
  uint64_t number;  // tells this file from another one that has its descriptor later
  std::atomic<int> joined;
  Answer answers[2][kMostRanks];
  Channel channels[kMostRanks * kMostRanks];
  char *slots() { return (char *)this + (sizeof *this + 4095) / 4096 * 4096; }
  static size_t bytes(int ranks) { return sizeof(Segment) + 4096 + (size_t)ranks * ranks * kSlots * kSlotBytes; }
};

struct Name {  // what an id says
  pid_t process;
  int file;
  uint64_t number;
};

static void rest() { usleep(100); }

// ---- coming together

static std::mutex &files_lock() {
  static auto *made = new std::mutex;
  return *made;
}
static std::map<uint64_t, int> &files() {  // of ids that this process has made, until all ranks have come
  static auto *made = new std::map<uint64_t, int>;
  return *made;
}

bool Peers::make_id(UniqueId *out) {
  Name name{getpid(), memfd_create("virtual-nccl", MFD_CLOEXEC), 0};
  if (name.file < 0 || ftruncate(name.file, (off_t)Segment::bytes(kMostRanks))) return false;  // no page is taken before it is touched
  FILE *dice = fopen("/dev/urandom", "r");
  if (!dice || fread(&name.number, sizeof name.number, 1, dice) != 1) return false;
  fclose(dice);
  if (pwrite(name.file, &name.number, sizeof name.number, 0) != sizeof name.number) return false;
  memset(out, 0, sizeof *out);
  memcpy(out, &name, sizeof name);
  std::lock_guard<std::mutex> locked(files_lock());
  files()[name.number] = name.file;
  return true;
}

std::shared_ptr<Peers> Peers::join(const UniqueId &id, int ranks, int rank) {
  Name name;
  memcpy(&name, &id, sizeof name);
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", name.process, name.file);
  const int file = ranks <= kMostRanks ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (file < 0) return nullptr;
  void *at = mmap(nullptr, Segment::bytes(ranks), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  auto *segment = (Segment *)at;
  if (at == MAP_FAILED || segment->number != name.number) return nullptr;
  segment->joined++;
  keep_running();  // the others wait for this process even while its host is elsewhere
  return std::shared_ptr<Peers>(new Peers(segment, ranks, rank));
}

Peers::~Peers() { munmap(segment_, Segment::bytes(ranks)); }

bool Peers::are_there() const {
  if (segment_->joined < ranks) return false;
  std::lock_guard<std::mutex> locked(files_lock());
  if (auto own = files().find(segment_->number); own != files().end()) close(own->second), files().erase(own);
  return true;
}

void Peers::wait_for_all() const {
  while (!are_there()) rest();
}

std::shared_ptr<Peers> Peers::divide(const std::vector<int> &members, int colour, int key) {
  const uint64_t meeting = ++meetings_;
  auto &answers = segment_->answers[meeting % 2];
  Answer &own = answers[rank];
  own.colour = colour, own.key = key;
  own.meeting = meeting;
  for (int member : members)
    while (answers[member].meeting < meeting) rest();
  if (colour < 0) return nullptr;
  std::vector<int> together;
  for (int member : members)
    if (answers[member].colour == colour) together.push_back(member);
  std::stable_sort(together.begin(), together.end(), [&](int a, int b) { return answers[a].key < answers[b].key; });
  Answer &first = answers[together[0]];
  if (together[0] == rank) {
    if (!make_id(&first.child)) return nullptr;
    first.child_meeting = meeting;
  }
  while (first.child_meeting < meeting) rest();
  const int place = (int)(std::find(together.begin(), together.end(), rank) - together.begin());
  auto child = join(first.child, (int)together.size(), place);
  if (child) child->wait_for_all();
  return child;
}

void Peers::meet() {
  std::vector<int> all;
  for (int member = 0; member < ranks; member++) all.push_back(member);
  divide(all, -1, 0);
}

// ---- what a call asks of its rank

struct Transfer {
  int peer;
  char *at;  // null: a reduction reads it
  size_t bytes, chunks, next = 0;
  Tag tag;
};

struct Part {
  std::vector<Transfer> out, in;
  char *own_to = nullptr;  // this rank's piece, which no other rank has to do with
  const char *own_from = nullptr;
  size_t own_bytes = 0;
  bool begun = false;
  // A reduction: each rank's row comes in `in`, this rank's lies in `own_from`.
  bool reduces = false;
  Call call;
  size_t next = 0;  // chunk
};

struct Exchange {
  std::vector<Part> parts;  // one after the other
};

static size_t chunks_of(size_t bytes) { return std::max<size_t>(1, (bytes + kSlotBytes - 1) / kSlotBytes); }

static Part part_of(const Call &call, int ranks, int rank) {
  Part part;
  part.call = call;
  const size_t bytes = call.count * width_of(call.type);
  const char *from = (const char *)call.from;
  char *to = (char *)call.to;
  const bool message = call.kind >= Call::send, has_root = call.kind == Call::broadcast || call.kind == Call::reduce || call.kind == Call::gather;
  Tag tag;
  memset(&tag, 0, sizeof tag);  // its padding is compared too
  tag.kind = message ? Call::send : call.kind, tag.type = call.type, tag.bytes = bytes;
  tag.operation = std::min<int>(call.operation, kFirstOwnOperation), tag.root = has_root ? call.peer : 0;
  auto out = [&](int peer, const char *at) { part.out.push_back({peer, (char *)at, bytes, chunks_of(bytes), 0, tag}); };
  auto in = [&](int peer, char *at) { part.in.push_back({peer, at, bytes, chunks_of(bytes), 0, tag}); };
  auto own = [&](char *own_to, const char *own_from) { part.own_to = own_to, part.own_from = own_from, part.own_bytes = bytes; };
  auto each_peer = [&](auto act) {
    for (int step = 1; step < ranks; step++) act((rank + step) % ranks);  // so that not all begin with the same one
  };
  const bool is_root = rank == call.peer;
  switch (call.kind) {
    case Call::send: out(call.peer, from); break;
    case Call::receive: in(call.peer, to); break;
    case Call::all_gather:
      each_peer([&](int peer) { out(peer, from), in(peer, to + peer * bytes); });
      own(to + rank * bytes, from);
      break;
    case Call::all_to_all:
      each_peer([&](int peer) { out(peer, from + peer * bytes), in(peer, to + peer * bytes); });
      own(to + rank * bytes, from + rank * bytes);
      break;
    case Call::gather:
      if (!is_root) out(call.peer, from);
      else each_peer([&](int peer) { in(peer, to + peer * bytes); }), own(to + rank * bytes, from);
      break;
    case Call::broadcast:
      if (!is_root) in(call.peer, to);
      else each_peer([&](int peer) { out(peer, from); }), own(to, from);
      break;
    case Call::reduce:
      if (!is_root) out(call.peer, from);
      else each_peer([&](int peer) { in(peer, nullptr); }), own(to, from);
      part.reduces = is_root;
      break;
    case Call::all_reduce:
      each_peer([&](int peer) { out(peer, from), in(peer, nullptr); });
      own(to, from);
      part.reduces = true;
      break;
    case Call::reduce_scatter:
      each_peer([&](int peer) { out(peer, from + peer * bytes), in(peer, nullptr); });
      own(to, from + rank * bytes);
      part.reduces = true;
      break;
  }
  return part;
}

Work Peers::work(std::vector<Call> calls) {
  return [self = shared_from_this(), calls = std::move(calls)]() -> Step {
    auto exchange = std::make_shared<Exchange>();
    // Messages of a group go at the same time, whatever their order; collectives one after the other.
    Part messages;
    for (const Call &call : calls) {
      Part part = part_of(call, self->ranks, self->rank);
      if (call.kind < Call::send) {
        if (call.count) exchange->parts.push_back(std::move(part));
        continue;
      }
      messages.out.insert(messages.out.end(), part.out.begin(), part.out.end());
      messages.in.insert(messages.in.end(), part.in.begin(), part.in.end());
    }
    exchange->parts.push_back(std::move(messages));
    std::lock_guard<std::mutex> locked(self->mutex_);
    self->waiting_.push_back(exchange);
    return [self, exchange] { return self->advance(exchange); };
  };
}

// ---- moving

Channel &Peers::channel(int from, int to) const { return segment_->channels[from * ranks + to]; }

static char *slot(Segment *segment, const Channel &channel, uint64_t chunk) {
  return segment->slots() + ((&channel - segment->channels) * kSlots + chunk % kSlots) * kSlotBytes;
}

static const void *factor_of(const Call &call) { return call.factor->on_device ? call.factor->on_device : call.factor->value; }

// Only the first of several transfers with one peer may go on.
template <class Act>
static bool each_first(std::vector<Transfer> &transfers, int ranks, Act act) {
  std::vector<char> busy(ranks, 0);
  bool moved = false;
  for (Transfer &transfer : transfers) {
    if (busy[transfer.peer]) continue;
    while (transfer.next < transfer.chunks && act(transfer)) moved = true, transfer.next++;
    busy[transfer.peer] = transfer.next < transfer.chunks;
  }
  return moved;
}

static size_t chunk_bytes(const Transfer &transfer) { return std::min(kSlotBytes, transfer.bytes - transfer.next * kSlotBytes); }

bool Peers::send(Part &part) {
  return each_first(part.out, ranks, [&](Transfer &transfer) {
    Channel &way = channel(rank, transfer.peer);
    const uint64_t chunk = way.published;
    if (chunk - way.consumed >= kSlots) return false;
    char *to = slot(segment_, way, chunk);
    const char *from = transfer.at + transfer.next * kSlotBytes;
    const size_t bytes = chunk_bytes(transfer);
    if (part.call.factor) multiply_row(to, from, bytes / width_of(part.call.type), part.call.type, factor_of(part.call));
    else memcpy(to, from, bytes);
    Tag &tag = way.tags[chunk % kSlots] = transfer.tag;
    tag.chunk = transfer.next;
    way.published = chunk + 1;
    return true;
  });
}

// Whether the next chunk from there has come, and is one of what this rank is about.
static bool has_come(const Channel &way, const Transfer &transfer) {
  const uint64_t chunk = way.consumed;
  if (chunk == way.published) return false;
  Tag wanted = transfer.tag;
  wanted.chunk = transfer.next;
  const Tag &sent = way.tags[chunk % kSlots];
  if (sent == wanted) return true;
  static const bool says = getenv("NCCL_DEBUG") != nullptr;
  static std::atomic<bool> said = false;
  if (says && !said.exchange(true))
    fprintf(stderr, "virtual NCCL WARN this rank's call %d (type %d, root %d, %zu bytes) waits for call %d (type %d, root %d, %zu bytes) of rank %d\n",
            wanted.kind, wanted.type, wanted.root, wanted.bytes, sent.kind, sent.type, sent.root, sent.bytes, transfer.peer);
  return false;
}

bool Peers::receive(Part &part) {
  return each_first(part.in, ranks, [&](Transfer &transfer) {
    Channel &way = channel(transfer.peer, rank);
    if (!has_come(way, transfer)) return false;
    memcpy(transfer.at + transfer.next * kSlotBytes, slot(segment_, way, way.consumed), chunk_bytes(transfer));
    way.consumed++;
    return true;
  });
}

bool Peers::reduce(Part &part) {
  const size_t start = part.next * kSlotBytes, bytes = std::min(kSlotBytes, part.own_bytes - start), width = width_of(part.call.type);
  if (part.next == chunks_of(part.own_bytes)) return false;
  std::vector<const void *> rows(ranks);
  for (Transfer &transfer : part.in) {
    Channel &way = channel(transfer.peer, rank);
    if (!has_come(way, transfer)) return false;
    rows[transfer.peer] = slot(segment_, way, way.consumed);
  }
  // The result may lie over what is still to be sent.
  for (Transfer &transfer : part.out)
    if (transfer.next <= part.next) return false;
  rows[rank] = part.own_from + start;
  if (part.call.factor) {
    scratch_.resize(kSlotBytes);
    multiply_row(scratch_.data(), rows[rank], bytes / width, part.call.type, factor_of(part.call));
    rows[rank] = scratch_.data();
  }
  reduce_rows(part.own_to + start, rows, bytes / width, part.call.type, part.call.operation);
  for (Transfer &transfer : part.in) channel(transfer.peer, rank).consumed++, transfer.next++;
  part.next++;
  return true;
}

// Goes on as far as the others allow. A message has ended at its sender when its receiver has taken it: NCCL may end it earlier, and programs may not
// count on that.
bool Peers::advance_part(Part &part) {
  if (!part.begun && !part.reduces && part.own_to != part.own_from) memmove(part.own_to, part.own_from, part.own_bytes);
  part.begun = true;
  while (send(part) | (part.reduces ? reduce(part) : receive(part)))
    ;
  auto left = [](const Transfer &transfer) { return transfer.next < transfer.chunks; };
  auto not_taken = [&](const Transfer &transfer) {
    const Channel &way = channel(rank, transfer.peer);
    return left(transfer) || way.consumed < way.published;
  };
  return std::none_of(part.out.begin(), part.out.end(), not_taken) && std::none_of(part.in.begin(), part.in.end(), left) &&
         (!part.reduces || part.next == chunks_of(part.own_bytes));
}

bool Peers::advance(const std::shared_ptr<Exchange> &exchange) {
  std::lock_guard<std::mutex> locked(mutex_);
  if (aborted_) return true;
  if (waiting_.front() != exchange) return false;  // calls on another stream come first
  while (!exchange->parts.empty()) {
    if (!advance_part(exchange->parts.front())) return false;
    exchange->parts.erase(exchange->parts.begin());
  }
  waiting_.pop_front();
  return true;
}

void Peers::finish() {
  for (;; rest()) {
    std::lock_guard<std::mutex> locked(mutex_);
    if (aborted_ || waiting_.empty()) return;
  }
}

void Peers::abort() {
  std::lock_guard<std::mutex> locked(mutex_);
  aborted_ = true;
}

}  // namespace virtual_gpu
