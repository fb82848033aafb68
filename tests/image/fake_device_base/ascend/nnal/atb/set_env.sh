# Fake ATB environment.
ATB_HOME_PATH="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/latest/atb/cxx_abi_1"
export ATB_HOME_PATH
export STRATA_FAKE_ATB=sourced
