# Serve an export in a container: docker build -f examples/serve.Dockerfile -t clicks-serve .
#     docker run --read-only --tmpfs /tmp -p 8000:8000 -v "$PWD/exported":/exported clicks-serve
# The first lines are those of train.Dockerfile, so both images share the layers that are large.
FROM python:3.12-slim
ARG TORCH=torch==2.13.0
RUN pip install --no-cache-dir "$TORCH"
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir "/src[onnx,s3]" fastapi uvicorn
RUN useradd --create-home --uid 1000 clicks && mkdir /kernels && chown clicks /kernels
COPY tools/compile_kernels.py /
COPY examples/service.py /app/
USER 1000
ENV NUMBA_CACHE_DIR=/kernels PYTHONDONTWRITEBYTECODE=1 EXPORTED=/exported
RUN python /compile_kernels.py
EXPOSE 8000
CMD ["uvicorn", "--app-dir", "/app", "--host", "0.0.0.0", "--port", "8000", "service:app"]
