# The environment of CANN, ATB and jemalloc, which upstream's image leaves in ~/.bashrc. Run by the entrypoint, and by
# every bash in the container through BASH_ENV. Once per process tree: STRATA_ENV marks that it is done.
if [ -z "${STRATA_ENV:-}" ]; then
    export STRATA_ENV=1
    strata_nounset=$(case $- in *u*) echo on ;; esac)
    set +u
    for strata_file in /usr/local/Ascend/ascend-toolkit/set_env.sh /usr/local/Ascend/nnal/atb/set_env.sh; do
        if [ -r "$strata_file" ]; then
            # a script that ends with a failed test is not a failed script: the condition keeps errexit shells alive
            if ! . "$strata_file"; then :; fi
        fi
    done
    export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/lib"
    for strata_file in "/usr/lib/$(uname -m)-linux-gnu/libjemalloc.so.2" /usr/lib64/libjemalloc.so.2; do
        if [ -r "$strata_file" ]; then
            export LD_PRELOAD="$strata_file${LD_PRELOAD:+:$LD_PRELOAD}"
            break
        fi
    done
    if [ -n "$strata_nounset" ]; then set -u; fi
    unset strata_file strata_nounset
fi
