# Environment of the stand-in ATB: ATB_HOME_PATH and the library path, as the real set_env.sh sets them.
ATB_HOME_PATH=/usr/local/Ascend/nnal/atb/latest/atb/cxx_abi_1
if [ -n "${BASH_SOURCE:-}" ]; then
    ATB_HOME_PATH="$(cd "$(dirname "${BASH_SOURCE}")" && pwd)/latest/atb/cxx_abi_1"
fi
export ATB_HOME_PATH
export LD_LIBRARY_PATH="${ATB_HOME_PATH}/lib${LD_LIBRARY_PATH:+:${LD_LIBRARY_PATH}}"
export PATH="${ATB_HOME_PATH}/bin:${PATH}"
