# Fake CANN environment: the real variables, and a mark that says that this was sourced.
ASCEND_TOOLKIT_HOME="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/latest"
export ASCEND_TOOLKIT_HOME
export ASCEND_HOME_PATH="${ASCEND_TOOLKIT_HOME}"
export ASCEND_OPP_PATH="${ASCEND_TOOLKIT_HOME}/opp"
export PATH="${ASCEND_TOOLKIT_HOME}/bin:${ASCEND_TOOLKIT_HOME}/compiler/ccec_compiler/bin:${PATH}"
export STRATA_FAKE_CANN=sourced
