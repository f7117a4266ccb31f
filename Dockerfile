# An image with Quire and what it compiled beforehand; building it takes no GPU.
#
#   docker build -t quire:cpu .
#   docker build -t quire:cuda --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 \
#     --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 --build-arg WARMUP="--preset llama --arch 9.0a" .
#   docker run --rm quire:cpu                     # quire doctor
#   docker run --rm --gpus all quire:cuda
#
# BASE needs Python 3.10 or newer by apt, and for GPUs nvcc. WARMUP are arguments of `quire warmup`.
ARG BASE=ubuntu:24.04
FROM ${BASE} AS wheel
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /build && /build/bin/pip install --no-cache-dir build "hatchling>=1.25"
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
COPY templates templates
RUN /build/bin/python -m build --no-isolation --wheel --outdir /dist .

FROM ${BASE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG WARMUP="--backend cpu --cpu x86-64-v3,x86-64-v4"
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv g++ && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv && /opt/venv/bin/pip install --no-cache-dir --index-url ${TORCH_INDEX} torch
COPY --from=wheel /dist /dist
RUN /opt/venv/bin/pip install --no-cache-dir "$(echo /dist/*.whl)[signing,fleet]" && rm -r /dist
ENV PATH=/opt/venv/bin:$PATH QUIRE_CACHE_DIR=/opt/quire
RUN quire warmup ${WARMUP} && quire cache verify
RUN useradd --create-home quire
USER quire
CMD ["quire", "doctor"]
