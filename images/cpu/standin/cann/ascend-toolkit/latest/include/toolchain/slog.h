// Stand-in: the name only, so that an include of slog.h resolves. Holds no CANN code.
#ifndef STRATA_STANDIN_INCLUDE_TOOLCHAIN_SLOG_H
#define STRATA_STANDIN_INCLUDE_TOOLCHAIN_SLOG_H
#endif
