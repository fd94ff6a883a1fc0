#!/bin/sh
# tests/serve_nginx.sh [./llm]: two servers behind Debian's nginx, which runs
# docs/examples/compose/nginx.conf.
# Skipped where nginx cannot be installed.
set -u
cd "$(dirname "$0")/.." || exit 1
llm=${1:-./llm}
skip() { echo "SKIPPED: servers behind nginx: $1"; echo '0 passed, 0 failed, 1 skipped'; exit 0; }
"$llm" serve --help >/dev/null 2>&1 || skip "$llm was built without libmicrohttpd"
[ -f models/tales-q4_0.gguf ] || skip 'models/tales-q4_0.gguf is not there'
python3 -c 'import http.client' 2>/dev/null || skip 'python3 is not installed'
timeout 400 sh tests/need.sh nginx || skip 'nginx is not installed'
PATH=$PATH:/usr/sbin PYTHONDONTWRITEBYTECODE=1 exec python3 tests/serve_nginx.py "$llm"
