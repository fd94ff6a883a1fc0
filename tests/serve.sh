#!/bin/sh
# tests/serve.sh: the server, by tests/serve.py. LLM: the program (default ./llm). Also under the
# thread sanitizer, with one engine thread, since libgomp is not instrumented (five minutes):
#   make NVCC= EMULATED= OBSERVED= B=build/tsan LLM=build/tsan/llm OPTIMIZE=-O1 \
#       SANITIZE=-fsanitize=thread build/tsan/llm
#   OMP_NUM_THREADS=1 SERVE_THREADS=1 SERVE_SANITIZED=yes LLM=build/tsan/llm sh tests/serve.sh
set -u
llm=${LLM:-./llm}
case $llm in */*) ;; *) llm=./$llm ;; esac
skip() { echo "SKIPPED: the server: $1"; echo '0 passed, 0 failed, 1 skipped'; exit 0; }
"$llm" serve --help >/dev/null 2>&1 || skip "$llm was built without libmicrohttpd"
[ -f models/tales-q4_0.gguf ] || skip 'models/tales-q4_0.gguf is not there'
python3 -c 'import http.client' 2>/dev/null || skip 'python3 is not installed'
PYTHONDONTWRITEBYTECODE=1 exec python3 tests/serve.py "$llm"
