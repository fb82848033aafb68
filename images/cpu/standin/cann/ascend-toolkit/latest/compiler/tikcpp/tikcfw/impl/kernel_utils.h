// Stand-in: the name only, so that an include of kernel_utils.h resolves. Holds no CANN code.
#ifndef STRATA_STANDIN_COMPILER_TIKCPP_TIKCFW_IMPL_KERNEL_UTILS_H
#define STRATA_STANDIN_COMPILER_TIKCPP_TIKCFW_IMPL_KERNEL_UTILS_H
#endif
