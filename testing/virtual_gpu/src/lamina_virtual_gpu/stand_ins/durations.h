// How long a kernel takes: what it moves and computes, at the rates that a GPU was seen to reach.
#pragma once
#include "machine.h"

namespace virtual_gpu {

// Shares of a data sheet's rate, and work of a processor in a cycle. Source, where nothing else is said: the profile of a training
// step of benchmarks/real_gpu.py, its 1b rows (H200, torch 2.11, 2026-11-26, docs/records/hardware.md). They hold for every
// profile, model and engine.
constexpr double kProducts = 0.856;       // of bf16: all products of a step
constexpr double kOtherProducts = 0.66;   // of other types: not measured
constexpr double kCopies = 0.87;          // of memory: a copy of 256 MiB (benchmarks/kernels.py, same day), and contiguous elementwise kernels
constexpr double kFusedAdam = 0.6;        // of memory: of the 8b rows, as that of 1b is none of the forty kernels that were kept
constexpr double kListCopies = 0.69;      // of memory: torch's other kernels over lists of tensors, of the 8b rows too
constexpr double kChunkCat = 0.435;       // of memory: FSDP2's copy into a reduction
constexpr double kClock = 1.98e9;         // cycles in a second: what an H200's processors run at
constexpr double kOperands = 3.3;         // addresses that a processor works out in a cycle, where operands have strides
constexpr double kCastOperands = 2.43;    // the same where types are only known on the device
constexpr double kScores = 14;            // scores of attention that a processor takes through its softmax in a cycle, forward
constexpr double kScoresBackward = 5.3;   // the same backward, with the sums of dq

struct Shape {
  Dim3 grid, block;
  void **arguments;
  double blocks() const { return (double)grid.x * grid.y * grid.z; }
  double threads() const { return blocks() * block.x * block.y * block.z; }
};

double seconds_of(const std::string &name, const Shape &shape);

}  // namespace virtual_gpu
