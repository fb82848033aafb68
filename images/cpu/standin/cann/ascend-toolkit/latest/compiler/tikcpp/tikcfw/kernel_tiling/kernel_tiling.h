// Stand-in: the name only, so that an include of kernel_tiling.h resolves. Holds no CANN code.
#ifndef STRATA_STANDIN_COMPILER_TIKCPP_TIKCFW_KERNEL_TILING_KERNEL_TILING_H
#define STRATA_STANDIN_COMPILER_TIKCPP_TIKCFW_KERNEL_TILING_KERNEL_TILING_H
#endif
