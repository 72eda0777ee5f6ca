# Ropewalk in a container, run as an ordinary user. The model cache is a volume.
#
#   CPU:  docker build -t ropewalk .
#   CUDA: docker build -t ropewalk --build-arg BASE=nvidia/cuda:13.0.2-base-ubuntu24.04 .
#
# EXTRAS=hub,events,otel adds what --kv-events and --otlp-endpoint need.
# torch comes from PyTorch's own indexes, in the build that TORCH_BACKEND names (by default without
# CUDA, or on the CUDA base for CUDA 13.0), or else from pip's: PIP_EXTRA_INDEX_URL may name one.
# The CUDA base holds little: torch brings CUDA itself. It is there to refuse a driver that is too
# old.
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS base
# g++ is needed when serving, too: the CPU kernels are compiled at first use, for the processor
# that runs them, and kept in the model cache. Triton, on CUDA, needs Python's headers besides.
ARG BASE
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        ca-certificates g++ libc6-dev python3 python3-venv tini \
        $(case "${BASE}" in *cuda*) echo python3-dev ;; esac) \
    && rm -rf /var/lib/apt/lists/*

FROM base AS build
ARG BASE
ARG TORCH_BACKEND=""
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 UV_NO_CACHE=1 UV_HTTP_CONNECT_TIMEOUT=5
# uv knows PyTorch's indexes. It is needed here alone, so it has an environment of its own.
RUN python3 -m venv /opt/ropewalk && python3 -m venv /opt/uv \
    && { /opt/uv/bin/pip install "uv>=0.9" || echo "uv cannot be had here; pip installs"; }
WORKDIR /src
COPY pyproject.toml ./
# torch by itself: the largest layer stays cached while the code changes.
RUN torch=$(sed -n 's/^ *"\(torch[><=][^"]*\)",*$/\1/p' pyproject.toml) \
    && backend=${TORCH_BACKEND:-$(case "${BASE}" in *cuda*) echo cu130 ;; *) echo cpu ;; esac)} \
    && { /opt/uv/bin/uv pip install --python /opt/ropewalk/bin/python --compile-bytecode \
            --torch-backend "$backend" "$torch" \
        || /opt/ropewalk/bin/pip install "$torch"; } \
    && du -sh /opt/ropewalk
COPY LICENSE ./
COPY cache cache
COPY model model
COPY server server
COPY load_tests load_tests
COPY ropewalk ropewalk
ARG EXTRAS=hub
RUN /opt/ropewalk/bin/pip install ".[${EXTRAS}]"

FROM base AS runtime
RUN useradd --uid 10001 --gid 0 --home-dir /var/lib/ropewalk --no-create-home ropewalk \
    && install --directory --owner 10001 --group 0 --mode 0775 /var/lib/ropewalk
COPY --from=build /opt/ropewalk /opt/ropewalk
# HOME and USER are set by hand for platforms that choose another user id, in group 0.
ENV PATH=/opt/ropewalk/bin:$PATH \
    HOME=/var/lib/ropewalk \
    USER=ropewalk \
    HF_HOME=/var/lib/ropewalk/huggingface \
    ROPEWALK_HOME=/var/lib/ropewalk \
    ROPEWALK_HOST=0.0.0.0 \
    PYTHONUNBUFFERED=1
VOLUME /var/lib/ropewalk
WORKDIR /var/lib/ropewalk
USER 10001:0
EXPOSE 8000
# Asks at ROPEWALK_HOST and ROPEWALK_PORT: another port is set by the variable, not by a flag.
HEALTHCHECK --start-period=5m --interval=10s --timeout=5s --retries=3 CMD ["ropewalk", "health"]
# As the first process it would ignore SIGTERM while it brings and loads a model.
ENTRYPOINT ["tini", "--", "ropewalk"]
CMD ["serve"]
