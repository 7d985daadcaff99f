# One image for machines with and without GPU; the build argument decides which torch goes in.
#   docker build -t omni-duplex-server .                            CPU
#   docker build -t omni-duplex-server --build-arg DEVICE=gpu .     NVIDIA GPU
FROM python:3.12-slim

# openssl makes the certificate of HTTPS; the compiler is what torch.compile and Triton call.
RUN apt-get update \
    && apt-get install -y --no-install-recommends openssl gcc g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /app
ARG DEVICE=cpu
ENV OMNI_DEVICE=${DEVICE} PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1

# The packages first: a changed source file does not install them again.
COPY pyproject.toml README.md LICENSE ./
COPY constraints constraints
COPY scripts scripts
RUN mkdir shared gateway worker client && bash scripts/bootstrap.sh

COPY . .
# The launcher looks for certificates beside the code.
RUN ln -s /workspace/certs certs

# Configuration, models, recordings, the compile cache and the certificate outlive the container.
VOLUME /workspace
EXPOSE 8006
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=10m \
    CMD [".venv/bin/python", "-m", "scripts.launch", "status"]
ENTRYPOINT [".venv/bin/python", "-m", "scripts.container"]
