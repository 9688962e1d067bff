// cuBLASLt: as cuBLAS; a product's shape comes from the layouts of its matrices.
#include <stdlib.h>
#include <string.h>

#include "products.h"

using namespace virtual_gpu;

struct Layout {
  int type;
  double rows, columns;
  int batch;
};
struct Heuristic {  // cublasLtMatmulHeuristicResult_t
  char algorithm[64];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};
constexpr int kBatchAttribute = 5;
constexpr size_t kDescriptor = 256;  // more than any of its descriptors has

EXPORT size_t cublasLtGetVersion() { return 130101; }
EXPORT int cublasLtMatrixLayoutCreate(Layout **out, int type, uint64_t rows, uint64_t columns, int64_t) {
  *out = new Layout{type, (double)rows, (double)columns, 1};
  return kSuccess;
}
EXPORT int cublasLtMatrixLayoutDestroy(Layout *layout) {
  delete layout;
  return kSuccess;
}
EXPORT int cublasLtMatrixLayoutSetAttribute(Layout *layout, int attribute, const void *value, size_t) {
  if (attribute == kBatchAttribute) layout->batch = *(const int *)value;
  return kSuccess;
}
EXPORT int cublasLtMatmulDescCreate(void **out, int, int) {
  *out = calloc(1, kDescriptor);
  return kSuccess;
}
EXPORT int cublasLtMatmulDescDestroy(void *descriptor) {
  free(descriptor);
  return kSuccess;
}
EXPORT int cublasLtMatmulDescSetAttribute(void *, int, const void *, size_t) { return kSuccess; }
EXPORT int cublasLtMatmulPreferenceCreate(void **out) { return cublasLtMatmulDescCreate(out, 0, 0); }
EXPORT int cublasLtMatmulPreferenceDestroy(void *preference) { return cublasLtMatmulDescDestroy(preference); }
EXPORT int cublasLtMatmulPreferenceSetAttribute(void *, int, const void *, size_t) { return kSuccess; }
EXPORT int cublasLtMatmulAlgoGetHeuristic(void *, void *, Layout *, Layout *, Layout *, Layout *, void *, int, Heuristic *out, int *count) {
  memset(out, 0, sizeof *out);
  *count = 1;
  return kSuccess;
}
EXPORT int cublasLtMatmul(void *, void *, const void *, const void *, Layout *a, const void *, Layout *, const void *, const void *, Layout *, void *,
                          Layout *d, const void *, void *, size_t, Stream *stream) {
  return product(stream, "cublasLtMatmul", d->rows, d->columns, a->rows * a->columns / d->rows, d->batch, a->type, false);
}
