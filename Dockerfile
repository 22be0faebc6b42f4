# Images of ftcli: `gpu` (the default target) and `cpu`.
#
#   docker build --target gpu --tag ftcli .
#   docker build --target cpu --tag ftcli:cpu .
#   docker run --gpus all --shm-size 8g --volume "$PWD:/work" ftcli train recipe.yaml --profile fsdp
#
# Not built and not run yet: the machine of the developers has no Docker. tests/contract/test_project_files.py compares
# the versions with constraints.txt and checks the user, the health check and the targets.
# The wheels of torch for Linux bring CUDA, cuDNN and NCCL with them. The base gives the driver's interface
# (NVIDIA_VISIBLE_DEVICES) and CUDA's runtime; DeepSpeed's operators that are compiled on first use need a -devel base.

ARG CUDA_IMAGE=nvidia/cuda:13.0.1-base-ubuntu24.04
ARG CPU_IMAGE=python:3.12-slim-bookworm

# The GPU base, with the Python of the distribution (3.12).
FROM ${CUDA_IMAGE} AS gpu-base
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/ftcli
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM ${CPU_IMAGE} AS cpu-base
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN python3 -m venv /opt/ftcli

# What both targets share follows twice, because a stage has one base.
FROM cpu-base AS cpu
ARG TORCH_VERSION=2.13.0
ENV PATH=/opt/ftcli/bin:$PATH PYTHONUNBUFFERED=1 HF_HOME=/cache/huggingface FTCLI_CACHE=/cache/ftcli
WORKDIR /src
COPY constraints.txt ./
# Without CUDA's libraries if the builder names PyTorch's index of CPU wheels: --build-arg TORCH_OPTIONS="--index-url URL"
ARG TORCH_OPTIONS=""
# hadolint ignore=DL3013,SC2086
RUN pip install --no-cache-dir ${TORCH_OPTIONS} "torch==${TORCH_VERSION}"
COPY pyproject.toml README.md LICENSE ./
COPY ftcli ftcli
COPY recipes recipes
COPY accelerate_configs accelerate_configs
RUN pip install --no-cache-dir --constraint constraints.txt ".[streaming,tensorboard]" \
    && useradd --create-home --uid 10001 ftcli \
    && mkdir -p /cache /work \
    && chown ftcli:ftcli /cache /work
USER 10001
WORKDIR /work
HEALTHCHECK --interval=5m --timeout=30s --start-period=30s --retries=2 CMD ["ftcli", "doctor"]
ENTRYPOINT ["ftcli"]
CMD ["--help"]

FROM gpu-base AS gpu
ARG TORCH_VERSION=2.13.0
ENV PATH=/opt/ftcli/bin:$PATH PYTHONUNBUFFERED=1 HF_HOME=/cache/huggingface FTCLI_CACHE=/cache/ftcli
WORKDIR /src
COPY constraints.txt ./
RUN pip install --no-cache-dir "torch==${TORCH_VERSION}"
COPY pyproject.toml README.md LICENSE ./
COPY ftcli ftcli
COPY recipes recipes
COPY accelerate_configs accelerate_configs
RUN pip install --no-cache-dir --constraint constraints.txt ".[kernels,quantization,streaming,tensorboard]" \
    && useradd --create-home --uid 10001 ftcli \
    && mkdir -p /cache /work \
    && chown ftcli:ftcli /cache /work
USER 10001
WORKDIR /work
HEALTHCHECK --interval=5m --timeout=30s --start-period=30s --retries=2 CMD ["ftcli", "doctor"]
ENTRYPOINT ["ftcli"]
CMD ["--help"]
