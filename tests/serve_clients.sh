#!/bin/sh
# tests/serve_clients.sh [./llm]: the server with clients from PyPI (openai, huggingface_hub) and
# Prometheus' parser, in a virtual environment under build/. Skipped where PyPI cannot be reached.
set -u
cd "$(dirname "$0")/.." || exit 1
llm=${1:-./llm} folder=build/clients
skip() { echo "SKIPPED: clients of the server: $1"; echo '0 passed, 0 failed, 1 skipped'; exit 0; }
[ -d models ] && "$llm" serve --help >/dev/null 2>&1 || skip "$llm has no server"
python3 -c 'import venv, ensurepip' 2>/dev/null || skip 'python3 has no venv'
if ! "$folder/bin/python" -c 'import openai, huggingface_hub, prometheus_client' 2>/dev/null; then
    rm -rf "$folder"
    python3 -m venv "$folder" 2>/dev/null || skip 'no virtual environment can be made'
    timeout 300 "$folder/bin/pip" install -q --disable-pip-version-check --retries 1 --timeout 15 \
        openai huggingface_hub prometheus_client >"$folder/log" 2>&1 ||
        skip "pip: $(tail -n 1 "$folder/log" | cut -c1-200)"
fi
PYTHONDONTWRITEBYTECODE=1 "$folder/bin/python" tests/serve_clients.py "$llm"
