# Serve an export in a container: docker build -f examples/serve.Dockerfile -t clicks-serve .
#     docker run --read-only --tmpfs /tmp -p 8000:8000 -v "$PWD/exported":/exported clicks-serve
FROM python:3.12-slim
RUN useradd --create-home --uid 1000 clicks && mkdir /kernels && chown clicks /kernels
COPY . /src
ARG TORCH=torch==2.13.0
RUN pip install --no-cache-dir "$TORCH" \
    && pip install --no-cache-dir "/src[onnx,s3]" fastapi uvicorn && cp /src/tools/compile_kernels.py / \
    && mkdir /app && cp /src/examples/service.py /app && rm -r /src
USER clicks
ENV NUMBA_CACHE_DIR=/kernels PYTHONDONTWRITEBYTECODE=1 EXPORTED=/exported
RUN python /compile_kernels.py
EXPOSE 8000
CMD ["uvicorn", "--app-dir", "/app", "--host", "0.0.0.0", "--port", "8000", "service:app"]
