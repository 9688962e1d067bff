// Numbers as NCCL has them: their widths, and sums, products, means, minima and maxima over the rows of several ranks.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace virtual_gpu {

// Numbers of ncclDataType_t and ncclRedOp_t. Operations from kFirstOwnOperation on are premultiplied sums that the program has made.
enum NumberType { kInt8, kUint8, kInt32, kUint32, kInt64, kUint64, kFloat16, kFloat32, kFloat64, kBfloat16, kFloat8e4m3, kFloat8e5m2 };
enum Operation { kSum, kProduct, kMaximum, kMinimum, kMean, kFirstOwnOperation };

size_t width_of(int type);
// Combines the rows in their order: 16 and 8 bit floats in fp32, rounded once; all others in their own type.
void reduce_rows(void *to, const std::vector<const void *> &rows, size_t count, int type, int operation);
// Multiplies a row by one number of its type.
void multiply_row(void *to, const void *from, size_t count, int type, const void *factor);

}  // namespace virtual_gpu
