# Train in a container: docker build -f examples/train.Dockerfile -t clicks-train .
FROM python:3.12-slim
RUN useradd --create-home --uid 1000 clicks && mkdir /work /kernels && chown clicks /work /kernels
COPY . /src
# This build of torch includes CUDA. For a smaller image pass the requirement or wheel of a build without it.
ARG TORCH=torch==2.13.0
RUN pip install --no-cache-dir "$TORCH" \
    && pip install --no-cache-dir "/src[s3]" && cp /src/tools/compile_kernels.py / && rm -r /src
USER clicks
ENV NUMBA_CACHE_DIR=/kernels MPLCONFIGDIR=/tmp/matplotlib PYTHONDONTWRITEBYTECODE=1
RUN python /compile_kernels.py
WORKDIR /work
ENTRYPOINT ["stratarec"]
