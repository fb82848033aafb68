#!/bin/bash
# Fake of csrc/build.sh: takes the arguments of the release's build_aclnn.sh, compiles nothing, and leaves what that
# script looks for: build/cann-ops-transformer-*.run, an installer that takes --install-path=<directory>.
set -euo pipefail
cd "$(dirname "$0")"
rm -rf build && mkdir build

ops="" soc=""
for word in "$@"; do
    case "${word}" in
        --ops=*) ops="${word#--ops=}" ;;
        --soc=*) soc="${word#--soc=}" ;;
        --pkg) ;;
        *) echo "fake build: unexpected argument ${word}" >&2; exit 64 ;;
    esac
done
[ -n "${ops}" ] && [ -n "${soc}" ] || { echo "fake build: --ops and --soc are required" >&2; exit 64; }

fake="${STRATA_FAKE_PACKAGE:-/usr/local/Ascend/fake/fake_package.py}"
python3 "${fake}" "$(pwd)" "${ops}" "${soc}" build/package

run=build/cann-ops-transformer-custom_linux-"$(uname -m)".run
cat > "${run}" <<'INSTALLER'
#!/bin/bash
set -euo pipefail
target=""
for word in "$@"; do
    case "${word}" in --install-path=*) target="${word#--install-path=}" ;; esac
done
[ -n "${target}" ] || { echo "installer: --install-path is required" >&2; exit 64; }
cp -a "$(dirname "$0")/package/." "${target}/"
INSTALLER
chmod 755 "${run}"
