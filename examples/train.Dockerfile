# Train in a container: docker build -f examples/train.Dockerfile -t clicks-train .
FROM python:3.12-slim
# This build of torch includes CUDA. For a smaller image pass the requirement or wheel of a build without it.
ARG TORCH=torch==2.13.0
RUN pip install --no-cache-dir "$TORCH"
# GNU's OpenMP library, which Numba and LightGBM need.
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
# Only these files are copied, because a checkout also has environments, data sets and runs.
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir "/src[s3]"
RUN useradd --create-home --uid 1000 clicks && mkdir /work /kernels && chown clicks /work /kernels
COPY tools/compile_kernels.py /
# A number, because Kubernetes cannot verify `runAsNonRoot` for a name.
USER 1000
ENV NUMBA_CACHE_DIR=/kernels MPLCONFIGDIR=/tmp/matplotlib PYTHONDONTWRITEBYTECODE=1
RUN python /compile_kernels.py
WORKDIR /work
ENTRYPOINT ["stratarec"]
