// Stand-in: the name only, so that an include of acl.h resolves. Holds no CANN code.
#ifndef STRATA_STANDIN_INCLUDE_ACL_ACL_H
#define STRATA_STANDIN_INCLUDE_ACL_ACL_H
#endif
