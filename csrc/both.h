// A function for the host and, where nvcc compiles it, for kernels.
#pragma once

#ifdef __CUDACC__
#define FASTATTN_BOTH __host__ __device__ __forceinline__
#else
#define FASTATTN_BOTH inline
#endif
