#!/usr/bin/env bash
# Sets up what `make image` and `make test` need, and nothing that is there already.
#
#   scripts/bootstrap.sh              Strata's venv and a Docker engine
#   scripts/bootstrap.sh venv         .venv with Strata and the packages of requirements.lock
#   scripts/bootstrap.sh engine       a reachable Docker engine with buildx and compose
#   scripts/bootstrap.sh mmdebstrap   the tool that makes the cpu base's root filesystem
#   scripts/bootstrap.sh mirror SUITE print this machine's Debian mirrors: suite <tab> URI <tab> keyring
#
# As root on Debian, missing pieces come from Debian's packages: the engine from Debian 13, whose packages run on
# Debian 12. That suite is pinned low, so that only the engine and what it depends on comes from it (libc among it, at
# this time). Anywhere else: one error that says what to install. pip and apt are used as the caller has configured
# them; with OFFLINE=1 the venv comes from .strata/wheelhouse.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
ENGINE_SUITE=trixie
ENGINE_LOG=/var/log/strata-dockerd.log
APT_LOG=/var/log/strata-apt.log

say() { printf 'strata: %s\n' "$*" >&2; }

fail() { # code, message, found, next step
    printf '%s: %s\n' "$1" "$2" >&2
    [ -z "$3" ] || printf '  found:    %s\n' "$3" >&2
    printf '  next:     %s\n' "$4" >&2
    exit 2
}

release_value() { # key of /etc/os-release
    local file=${STRATA_OS_RELEASE:-/etc/os-release}
    # shellcheck disable=SC1090
    [ ! -r "$file" ] || (. "$file" && printf '%s' "${!1:-}")
}

is_root_on_debian() { [ "$(id -u)" = 0 ] && [ "$(release_value ID)" = debian ]; }

# The mirror of a suite, from apt's own sources: deb822 stanzas (*.sources) and one-line entries (*.list).
mirror_of() { # suite
    local dir=${STRATA_APT_DIR:-/etc/apt} file
    {
        for file in "$dir"/sources.list.d/*.sources; do
            [ -r "$file" ] || continue
            awk -v suite="$1" '
                function stanza(  n, i, s, u) {
                    if (types ~ /(^| )deb( |$)/ && enabled != "no") {
                        n = split(suites, s, " ")
                        for (i = 1; i <= n; i++) if (s[i] == suite) { split(uris, u, " "); print u[1] "\t" key }
                    }
                    types = uris = suites = key = enabled = field = ""
                }
                /^#/ { next }
                /^[ \t]*$/ { stanza(); next }
                /^[A-Za-z-]+:/ {
                    field = tolower(substr($0, 1, index($0, ":") - 1)); value = substr($0, index($0, ":") + 1)
                    gsub(/^[ \t]+|[ \t]+$/, "", value)
                    if (field == "types") types = value
                    if (field == "uris") uris = value
                    if (field == "suites") suites = value
                    if (field == "enabled") enabled = tolower(value)
                    if (field == "signed-by" && value ~ /^\//) key = value
                    next
                }
                /^[ \t]/ { value = $0; gsub(/^[ \t]+/, "", value)
                    if (field == "uris") uris = uris " " value
                    if (field == "suites") suites = suites " " value }
                END { stanza() }' "$file"
        done
        for file in "$dir"/sources.list "$dir"/sources.list.d/*.list; do
            [ -r "$file" ] || continue
            awk -v suite="$1" '
                $1 == "deb" {
                    key = ""; line = $0; sub(/^deb[ \t]+/, "", line)
                    if (line ~ /^\[/) {
                        options = substr(line, 2, index(line, "]") - 2); sub(/^\[[^]]*\][ \t]*/, "", line)
                        n = split(options, o, /[ \t]+/)
                        for (i = 1; i <= n; i++) if (o[i] ~ /^signed-by=\//) key = substr(o[i], 11)
                    }
                    split(line, part, /[ \t]+/)
                    if (part[2] == suite) print part[1] "\t" key
                }' "$file"
        done
    } | awk 'NR == 1'
}

# One line per archive of a suite: the suite itself, -updates and -security as far as apt's sources name them. The main
# archive of another suite serves too: all suites lie on the same mirror.
debian_mirrors() { # suite
    local suite other found uri key
    for suite in "$1" "$1-updates" "$1-security"; do
        found=$(mirror_of "$suite")
        if [ -z "$found" ] && [ "$suite" = "$1" ]; then
            for other in "$(release_value VERSION_CODENAME)" bookworm trixie forky stable sid; do
                [ -n "$found" ] || found=$(mirror_of "$other")
            done
            [ -n "$found" ] || fail E-MIRROR "apt's sources name no Debian mirror" \
                "/etc/apt/sources.list and sources.list.d" "add Debian's main archive to apt's sources"
        fi
        [ -n "$found" ] || continue
        uri=${found%%$'\t'*} key=${found#*$'\t'}
        if [ -z "$key" ] && [ -r /usr/share/keyrings/debian-archive-keyring.gpg ]; then
            key=/usr/share/keyrings/debian-archive-keyring.gpg
        fi
        printf '%s\t%s\t%s\n' "$suite" "$uri" "$key"
    done
}

apt() { # arguments of apt-get; the output goes to a log, the error to the user
    if ! DEBIAN_FRONTEND=noninteractive apt-get -q -y -o Dpkg::Use-Pty=0 "$@" >>"$APT_LOG" 2>&1; then
        tail -n 5 "$APT_LOG" >&2
        fail E-APT "apt-get $1 failed" "see $APT_LOG" "repair apt's sources or the network, then run the same command again"
    fi
}

updated=
apt_install() {
    [ -n "$updated" ] || { apt update; updated=yes; }
    apt install --no-install-recommends "$@"
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11 /usr/bin/python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s' "$candidate"
            return
        fi
    done
}

venv() {
    local stamp=$ROOT/.venv/.strata wanted python
    wanted=$(cat "$ROOT/requirements.lock" "$ROOT/pyproject.toml" | sha256sum)
    if [ -x "$ROOT/.venv/bin/strata" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    python=$(find_python)
    if [ -z "$python" ] || ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        is_root_on_debian || fail E-PYTHON "Python 3.11 or newer with its venv module is needed" \
            "${python:-no such Python} on $(release_value PRETTY_NAME)" \
            "install it (Debian, Ubuntu: apt-get install python3 python3-venv), or name one: PYTHON=/path/to/python3 make"
        say "installing python3-venv from Debian"
        apt_install python3 python3-venv
        python=/usr/bin/python3
    fi
    say "setting up Strata in .venv (once)"
    [ -x "$ROOT/.venv/bin/python" ] || "$python" -m venv "$ROOT/.venv"
    local from=()
    if [ -n "${OFFLINE:-}" ]; then
        from=(--no-index "--find-links=$ROOT/.strata/wheelhouse/strata-$("$ROOT/.venv/bin/python" -c '
import platform, sys
print("cp%d%d-%s" % (*sys.version_info[:2], platform.machine()))')")
    fi
    "$ROOT/.venv/bin/python" -m pip --disable-pip-version-check --quiet install "${from[@]}" -r "$ROOT/requirements.lock" \
        2> >(grep -v '^WARNING: Location' >&2) &&
        "$ROOT/.venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-deps --no-build-isolation \
            --no-index -e "$ROOT" ||
        fail E-PIP "pip could not install Strata's dependencies" "" \
            "check the network and pip's configuration (pip config list); offline: make wheelhouse on a host with a network"
    printf '%s' "$wanted" >"$stamp"
}

engine_answers() { docker info >/dev/null 2>&1; }

missing_plugins() {
    docker buildx version >/dev/null 2>&1 || printf 'docker-buildx '
    docker compose version >/dev/null 2>&1 || printf 'docker-compose '
}

install_engine_packages() { # package names of Debian 13
    local mirrors uri key
    if [ -z "$(mirror_of "$ENGINE_SUITE")" ]; then
        mirrors=$(debian_mirrors "$ENGINE_SUITE")
        uri=$(cut -f 2 <<<"$mirrors" | head -n 1) key=$(cut -f 3 <<<"$mirrors" | head -n 1)
        {
            printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\n' "$uri" "$ENGINE_SUITE"
            [ -z "$key" ] || printf 'Signed-By: %s\n' "$key"
        } >/etc/apt/sources.list.d/strata-$ENGINE_SUITE.sources
        printf 'Package: *\nPin: release n=%s\nPin-Priority: 100\n' "$ENGINE_SUITE" \
            >/etc/apt/preferences.d/strata-$ENGINE_SUITE
    fi
    apt update
    apt install --no-install-recommends -t "$ENGINE_SUITE" "$@"
}

start_engine() {
    local pid=
    if [ -d /run/systemd/system ]; then
        systemctl start docker || fail E-ENGINE "the Docker service does not start" "" "journalctl -u docker"
    else
        say "starting dockerd in the background (log: $ENGINE_LOG)"
        setsid nohup dockerd >>"$ENGINE_LOG" 2>&1 </dev/null &
        pid=$!
    fi
    for _ in $(seq 120); do
        ! engine_answers || return 0
        [ -z "$pid" ] || kill -0 "$pid" 2>/dev/null || break
        sleep 0.5
    done
    fail E-ENGINE "the Docker engine did not come up" "$(tail -n 2 "$ENGINE_LOG" 2>/dev/null)" "see $ENGINE_LOG"
}

engine() {
    local plugins
    if command -v docker >/dev/null && engine_answers; then
        plugins=$(missing_plugins)
        [ -n "$plugins" ] || return 0
        is_root_on_debian || fail E-ENGINE "the Docker client lacks $plugins" "" "install $plugins, then run the same command again"
        say "installing $plugins"
        # shellcheck disable=SC2086
        install_engine_packages $plugins
        return
    fi
    local why="no docker command"
    ! command -v docker >/dev/null || why=$(set +o pipefail; docker info 2>&1 >/dev/null | tail -n 1)
    [ -z "${DOCKER_HOST:-}" ] || fail E-ENGINE "the Docker engine at DOCKER_HOST does not answer" "$why" \
        "start it, or unset DOCKER_HOST"
    is_root_on_debian || fail E-ENGINE "a running Docker engine with buildx and compose is needed" "$why" \
        "install and start Docker Engine 26 or newer (and join its group), then run the same command again"
    if ! command -v dockerd >/dev/null; then
        say "no Docker engine here: installing Debian 13's docker.io, docker-buildx, docker-compose and what they depend on"
        say "(takes a minute; log: $APT_LOG)"
        install_engine_packages docker.io docker-cli docker-buildx docker-compose iptables
    fi
    start_engine
    plugins=$(missing_plugins)
    # shellcheck disable=SC2086
    [ -z "$plugins" ] || install_engine_packages $plugins
}

mmdebstrap_tool() {
    ! command -v mmdebstrap >/dev/null || return 0
    is_root_on_debian || fail E-MMDEBSTRAP "mmdebstrap makes the cpu base's root filesystem" "no mmdebstrap command" \
        "install mmdebstrap, or take a device base: make image BASE=a3"
    say "installing mmdebstrap"
    apt_install mmdebstrap
}

case ${1:-all} in
    all) venv && engine ;;
    venv) venv ;;
    engine) engine ;;
    mmdebstrap) mmdebstrap_tool ;;
    mirror) debian_mirrors "${2:?a Debian suite}" ;;
    *) fail E-USAGE "unknown step '$1'" "" "one of: venv, engine, mmdebstrap, mirror" ;;
esac
