// Stand-in: the name only, so that an include of tiling.h resolves. Holds no CANN code.
#ifndef STRATA_STANDIN_COMPILER_TIKCPP_TIKCFW_LIB_MATRIX_MATMUL_TILING_H
#define STRATA_STANDIN_COMPILER_TIKCPP_TIKCFW_LIB_MATRIX_MATMUL_TILING_H
#endif
