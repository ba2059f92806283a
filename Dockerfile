# SPDX-License-Identifier: Apache-2.0
#
#   docker build -t ghcr.io/cohdi/cohdi-agent:dev --build-arg VERSION=$(git describe --always --dirty --tags) .
#
# Where no registry can be reached, lay the files out first and take them as they are:
#
#   go run ./test/image -root .cache/image/root -version $(git describe --always --dirty --tags)
#   buildah build --build-arg FILES=prepared -t ghcr.io/cohdi/cohdi-agent:dev .
#
# Either way the image is the agent and the parts of Debian's C library that it and a GPU driver's
# libraries load: test/image/images says which.
ARG FILES=compiled

FROM docker.io/library/golang:1.26-bookworm AS compiled
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG VERSION=dev
RUN go run ./test/image -root /root-fs -version "${VERSION}"

FROM scratch AS prepared
COPY .cache/image/root/ /root-fs/

FROM ${FILES} AS files

FROM scratch
COPY --from=files /root-fs/ /
ENV PATH=/usr/bin
LABEL org.opencontainers.image.title=cohdi-agent \
      org.opencontainers.image.source=https://github.com/cohdi/cohdi-agent \
      org.opencontainers.image.licenses=Apache-2.0
ENTRYPOINT ["/usr/bin/cohdi-agent"]
