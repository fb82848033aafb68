# The cpu base's root filesystem where mmdebstrap cannot run: Debian's own image (named context `debian`) and packages.txt.
FROM debian
ARG PACKAGES
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3008,SC2086
RUN apt-get update && \
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ${PACKAGES} && \
    rm -rf /var/lib/apt/lists/*
