// Stand-in: the name only, so that an include of log_types.h resolves. Holds no CANN code.
#ifndef STRATA_STANDIN_INCLUDE_TOOLCHAIN_LOG_TYPES_H
#define STRATA_STANDIN_INCLUDE_TOOLCHAIN_LOG_TYPES_H
#endif
