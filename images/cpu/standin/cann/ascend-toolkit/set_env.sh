# Environment of the stand-in toolkit: the variables that the real set_env.sh sets, pointing into this tree.
# Meant to be sourced by bash or sh; safe under `set -u`.
ASCEND_TOOLKIT_HOME=/usr/local/Ascend/ascend-toolkit/latest
# sourced from elsewhere (tests, a moved copy): bash knows where this file lies
if [ -n "${BASH_SOURCE:-}" ]; then
    ASCEND_TOOLKIT_HOME="$(cd "$(dirname "${BASH_SOURCE}")" && pwd)/latest"
fi
export ASCEND_TOOLKIT_HOME
export ASCEND_HOME_PATH="${ASCEND_TOOLKIT_HOME}"
export ASCEND_AICPU_PATH="${ASCEND_TOOLKIT_HOME}"
export ASCEND_OPP_PATH="${ASCEND_TOOLKIT_HOME}/opp"
export TOOLCHAIN_HOME="${ASCEND_TOOLKIT_HOME}/toolkit"
export LD_LIBRARY_PATH="${ASCEND_TOOLKIT_HOME}/lib64${LD_LIBRARY_PATH:+:${LD_LIBRARY_PATH}}"
export PYTHONPATH="${ASCEND_TOOLKIT_HOME}/python/site-packages${PYTHONPATH:+:${PYTHONPATH}}"
export PATH="${ASCEND_TOOLKIT_HOME}/bin:${ASCEND_TOOLKIT_HOME}/compiler/ccec_compiler/bin:${PATH}"
