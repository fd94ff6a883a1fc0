#!/bin/sh
# tests/pages.sh TEST [./llm]: tests/TEST.py drives web pages in headless Chromium and in Firefox:
# serve_page the server's page, book_page the book and its slides. Skipped where they are not
# installed. SHOTS=FOLDER: also leave screenshots there.
set -u
cd "$(dirname "$0")/.." || exit 1
test=$1 llm=${2:-./llm}
skip() { echo "SKIPPED: $test: $1"; echo '0 passed, 0 failed, 1 skipped'; exit 0; }
[ "$test" = book_page ] || "$llm" serve --help >/dev/null 2>&1 || skip "$llm has no server"
python3 -c 'import json' 2>/dev/null || skip 'python3 is not installed'
chromium=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
firefox=$(command -v firefox-esr || command -v firefox)
[ "$chromium$firefox" ] || skip 'neither Chromium nor Firefox is installed'
for browser in "$chromium" "$firefox"; do
    [ "$browser" ] || continue
    PYTHONDONTWRITEBYTECODE=1 SHOTS=${SHOTS:+$SHOTS/$(basename "$browser")} \
        python3 "tests/$test.py" "$llm" "$browser"
done | awk -v none="${chromium:+$firefox}" -v test="$test" '
    / passed, / { passed += $1; failed += $3; n++; next } { print }
    END {
        if (!none) print "SKIPPED: " test " in a second browser: it is not installed"
        printf "%d passed, %d failed%s\n", passed, failed, none ? "" : ", 1 skipped"
        exit failed || !n
    }'
