// Stand-in: the name only, so that an include of matmul_intf.h resolves. Holds no CANN code.
#ifndef STRATA_STANDIN_COMPILER_TIKCPP_TIKCFW_LIB_MATMUL_INTF_H
#define STRATA_STANDIN_COMPILER_TIKCPP_TIKCFW_LIB_MATMUL_INTF_H
#endif
