// cuBLAS: the shapes of products go to the clock, and nothing is computed.
#include "products.h"

using namespace virtual_gpu;

struct Handle {
  Stream *stream;
  int math, pointers;
};

EXPORT int cublasCreate_v2(Handle **out) {
  *out = new Handle{};
  return kSuccess;
}
EXPORT int cublasDestroy_v2(Handle *handle) {
  delete handle;
  return kSuccess;
}
EXPORT int cublasSetStream_v2(Handle *handle, Stream *stream) {
  handle->stream = stream;
  return kSuccess;
}
EXPORT int cublasSetWorkspace_v2(Handle *, void *, size_t) { return kSuccess; }
EXPORT int cublasSetSmCountTarget(Handle *, int) { return kSuccess; }
EXPORT int cublasSetMathMode(Handle *handle, int mode) {
  handle->math = mode;
  return kSuccess;
}
EXPORT int cublasGetMathMode(Handle *handle, int *out) {
  *out = handle->math;
  return kSuccess;
}
EXPORT int cublasSetPointerMode_v2(Handle *handle, int mode) {
  handle->pointers = mode;
  return kSuccess;
}
EXPORT int cublasGetPointerMode_v2(Handle *handle, int *out) {
  *out = handle->pointers;
  return kSuccess;
}
EXPORT int cublasGemmEx(Handle *h, int, int, int m, int n, int k, const void *, const void *, int type, int, const void *, int, int, const void *,
                        void *, int, int, int, int) {
  return product(h->stream, "cublasGemmEx", m, n, k, 1, type, false);
}
EXPORT int cublasGemmStridedBatchedEx(Handle *h, int, int, int m, int n, int k, const void *, const void *, int type, int, long long, const void *,
                                      int, int, long long, const void *, void *, int, int, long long, int batch, int, int) {
  return product(h->stream, "cublasGemmStridedBatchedEx", m, n, k, batch, type, false);
}
EXPORT int cublasSgemm_v2(Handle *h, int, int, int m, int n, int k, const float *, const float *, int, const float *, int, const float *, float *,
                          int) {
  return product(h->stream, "cublasSgemm", m, n, k, 1, kFloat32, h->math == kTf32Mode);
}
EXPORT int cublasSgemmStridedBatched(Handle *h, int, int, int m, int n, int k, const float *, const float *, int, long long, const float *, int,
                                     long long, const float *, float *, int, long long, int batch) {
  return product(h->stream, "cublasSgemmStridedBatched", m, n, k, batch, kFloat32, h->math == kTf32Mode);
}
EXPORT int cublasDgemm_v2(Handle *h, int, int, int m, int n, int k, const double *, const double *, int, const double *, int, const double *,
                          double *, int) {
  return run_product(h->stream, "cublasDgemm", 2.0 * m * n * k, 8.0 * ((double)m * k + (double)n * k + (double)m * n), settings().fp32 / 2);
}
EXPORT int cublasDgemmStridedBatched(Handle *h, int, int, int m, int n, int k, const double *, const double *, int, long long, const double *, int,
                                     long long, const double *, double *, int, long long, int batch) {
  return run_product(h->stream, "cublasDgemmStridedBatched", 2.0 * m * n * k * batch, 8.0 * batch * ((double)m * k + (double)n * k + (double)m * n),
              settings().fp32 / 2);
}

// Triangular systems: half the operations of a product with the matrix, which stands on the left (side 0) or on the right.
static int triangular(Handle *h, const char *what, int side, int m, int n, int batch, int width) {
  const double rows = side == 0 ? m : n, columns = side == 0 ? n : m;
  return run_product(h->stream, what, rows * rows * columns * batch, width * batch * (rows * rows / 2 + 2.0 * m * n), settings().fp32 * 4 / width);
}
#define TRIANGULAR(letter, T)                                                                                                                       \
  EXPORT int cublas##letter##trsm_v2(Handle *h, int side, int, int, int, int m, int n, const T *, const T *, int, T *, int) {                       \
    return triangular(h, "cublas" #letter "trsm", side, m, n, 1, sizeof(T));                                                                        \
  }                                                                                                                                                 \
  EXPORT int cublas##letter##trsmBatched(Handle *h, int side, int, int, int, int m, int n, const T *, const T *const *, int, T *const *, int,       \
                                         int batch) {                                                                                               \
    return triangular(h, "cublas" #letter "trsmBatched", side, m, n, batch, sizeof(T));                                                             \
  }
TRIANGULAR(S, float)
TRIANGULAR(D, double)

// Products of a matrix with a vector, and of two vectors: `elements` are read once.
static int reduction(Handle *h, const char *what, double elements, int width) {
  return run_product(h->stream, what, 2 * elements, elements * width, settings().fp32);
}
#define VECTORS(letter, T)                                                                                                                        \
  EXPORT int cublas##letter##gemv_v2(Handle *h, int, int m, int n, const T *, const T *, int, const T *, int, const T *, T *, int) {              \
    return reduction(h, "cublas" #letter "gemv", (double)m * n, sizeof(T));                                                                       \
  }                                                                                                                                               \
  EXPORT int cublas##letter##dot_v2(Handle *h, int n, const T *, int, const T *, int, T *) {                                                      \
    return reduction(h, "cublas" #letter "dot", 2.0 * n, sizeof(T));                                                                              \
  }
VECTORS(S, float)
VECTORS(D, double)
EXPORT int cublasDotEx(Handle *h, int n, const void *, int type, int, const void *, int, int, void *, int, int) {
  return product(h->stream, "cublasDotEx", 1, 1, n, 1, type, false);
}
