# JupyterLab with nbdist on the official PyTorch image.
#
#   docker build -t nbdist .
#   docker run --rm -it --gpus all --ipc=host -p 127.0.0.1:8888:8888 nbdist
#
# --ipc=host (or --shm-size=8g): the 64 MB of /dev/shm that Docker gives break NCCL and DataLoader workers.
# Other CUDA builds of the same image: 2.9.1-cuda12.6-cudnn9-runtime, 2.9.1-cuda13.0-cudnn9-runtime.
ARG TORCH_IMAGE=pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime
FROM ${TORCH_IMAGE}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# tini hands signals on and reaps what ended: without it JupyterLab would be process 1.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/*

# Some tags of the image have conda's Python, some the distribution's, which refuses pip without the second variable.
ENV PIP_NO_CACHE_DIR=1 \
    PIP_BREAK_SYSTEM_PACKAGES=1 \
    PYTHONUNBUFFERED=1

# The image's own torch stays: pip may neither replace nor upgrade it.
COPY pyproject.toml README.md LICENSE /opt/nbdist/
COPY nbdist /opt/nbdist/nbdist
COPY notebooks /opt/nbdist/notebooks
RUN python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > /opt/nbdist/constraints.txt \
    && python -m pip install --constraint /opt/nbdist/constraints.txt '/opt/nbdist[lab]'

# uid 1000 is what a bind mount from a desktop usually belongs to; --non-unique: some base images have one already.
ARG UID=1000
RUN useradd --create-home --non-unique --uid "${UID}" --shell /bin/bash trainer \
    && install -d -o trainer /home/trainer/work
ENV HOME=/home/trainer
USER ${UID}
WORKDIR /home/trainer/work

# What the doctor says without a GPU, for comparison with what it says at run time.
RUN nbdist doctor --json > /home/trainer/doctor-at-build.json || [ -s /home/trainer/doctor-at-build.json ]

EXPOSE 8888
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8888/api', timeout=4)"]

ENTRYPOINT ["tini", "-g", "--"]
# JupyterLab prints the address with its token.
CMD ["nbdist", "lab", "--folder=/home/trainer/work", "--no-browser", "--ip=0.0.0.0", "--port=8888"]
