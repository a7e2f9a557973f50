# sonicmoe-hf with PyTorch and the kernels' own pins, for NVIDIA GPUs (driver 580 or newer).
#   docker build -t sonicmoe-hf .
#   docker run --rm --gpus all -v "$HOME/.cache/huggingface:/home/user/.cache/huggingface" -v "$PWD:/work" sonicmoe-hf \
#       sonicmoe-hf doctor Qwen/Qwen3-30B-A3B
# PyTorch's wheels bring CUDA's libraries, and Triton and the CuTe DSL their compilers; a C compiler is for Triton's launchers.
FROM docker.io/nvidia/cuda:13.0.2-base-ubuntu24.04@sha256:2ab6381d970b211fb93853796dc6707eb8a72575a375c422b17cf4d8b2641701

ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-dev python3-venv gcc git \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1001 --create-home --shell /bin/bash user \
    && install --directory --owner=user --group=user /opt/sonicmoe /work

USER 1001
ENV VIRTUAL_ENV=/opt/sonicmoe/venv PATH=/opt/sonicmoe/venv/bin:$PATH
WORKDIR /opt/sonicmoe
COPY --chown=1001:1001 constraints.txt ./
# the pinned packages first: a change of the sources installs none of them again
RUN python3 -m venv venv \
    && pip install --constraint constraints.txt torch triton transformers accelerate peft datasets matplotlib \
        nvidia-cutlass-dsl apache-tvm-ffi bitsandbytes liger-kernel trl
COPY --chown=1001:1001 . sources
RUN pip install --constraint constraints.txt './sources[all]' && rm -rf sources

# Kernels are compiled at first use and kept in ~/.cache/sonicmoe_hf: a volume there keeps them beyond the container. They
# are compiled ahead, without a GPU, for what WARM asks of `sonicmoe-hf warmup` (docker build --build-arg WARM="--shape 2048,768").
ARG WARM=""
# hadolint ignore=SC2086
RUN [ -z "$WARM" ] || CUTE_DSL_ARCH=sm_90a sonicmoe-hf warmup $WARM

WORKDIR /work
CMD ["sonicmoe-hf", "doctor"]
