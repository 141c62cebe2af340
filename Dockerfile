# vLLM with weightcast's receiver.
#
#   docker build -t vllm-weightcast .
#   docker run --gpus all --ipc=host --pid=host --cap-add=SYS_PTRACE -p 127.0.0.1:8000:8000 -v /models:/models vllm-weightcast /models/Qwen3-8B
#   weightcast push B --to http://127.0.0.1:8000 --version 1
#
# Without a key whoever reaches the port can replace the weights, so the example publishes it on this host alone.  For
# other hosts add `-e VLLM_API_KEY=...`, and publish it with `-p 8000:8000`.
#
# `ipc` from a trainer outside of the container needs --ipc=host, --pid=host, the trainer's user and, if that is root,
# --cap-add=SYS_PTRACE.  Without them use broadcast.  See docs/engines/vllm.md for staging, keys and the versions that
# ran.
ARG VLLM_VERSION=v0.25.1
FROM vllm/vllm-openai:${VLLM_VERSION}

WORKDIR /opt/weightcast
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY src ./src
# The image's torch fits, so pip leaves it alone.  The import shows that the plug-in loads beside this vLLM.
RUN python3 -m pip install --no-cache-dir . \
 && python3 -c "import vllm, weightcast.plugins.vllm"

ENTRYPOINT ["vllm", "serve", "--weight-transfer-config", "{\"backend\": \"weightcast\"}"]
