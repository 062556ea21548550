# docker build -t jaxinfer .                            CPU
# docker build -t jaxinfer:cuda --build-arg EXTRA=cuda . NVIDIA GPUs: the wheels bring CUDA, the host its driver
FROM python:3.12-slim
ARG EXTRA=""
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY jaxinfer jaxinfer
COPY pallas_kernels pallas_kernels
COPY sharding sharding
COPY checkpoints checkpoints
RUN pip install --no-cache-dir -c constraints.txt ".${EXTRA:+[$EXTRA]}" && rm -rf /src/*
RUN useradd --create-home jaxinfer && install -d -o jaxinfer /home/jaxinfer/.cache/jaxinfer
USER jaxinfer
WORKDIR /home/jaxinfer
# Models, compiled C++ kernels and compiled steps: a volume here makes later starts quick.
VOLUME /home/jaxinfer/.cache/jaxinfer
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["jaxinfer"]
CMD ["serve", "smollm2-135m", "--host", "0.0.0.0"]
