#!/bin/sh
# tests/need.sh THING...: check that each thing is installed; if not, install it with apt. Things:
# make, cc, cmocka, microhttpd, c++, clang, fuzzer, arm64, qemu, python, gdb, chromium, nginx, cmark. Run
# by the Makefile, by .ci/run and by tests/serve_nginx.sh.
set -u
CC=${CC:-cc}

compiles() { # program on standard input, compiler and flags as arguments
    "$@" -x c - -o /dev/null >/dev/null 2>&1
}

has() {
    case $1 in
    make) command -v make >/dev/null 2>&1 ;;
    python) python3 -c 'import json' >/dev/null 2>&1 ;;
    cc) printf '#include <math.h>\n#include <stdio.h>\nint main(void) { return puts("") < 0; }\n' |
        compiles "$CC" ;;
    cmocka) has cc && printf '#include <%s.h>\n' setjmp stdarg stddef stdint cmocka |
        compiles "$CC" -fsyntax-only ;;
    microhttpd) printf '#include <microhttpd.h>\nint main(void) { return 0; }\n' |
        compiles "$CC" -lmicrohttpd ;;
    c++) printf '#include <cstdio>\nint main() { return 0; }\n' |
        g++ -x c++ - -o /dev/null >/dev/null 2>&1 ;;
    clang) printf 'int main(void) { return 0; }\n' | compiles clang ;;
    fuzzer) printf '%s\n' '#include <stddef.h>' '#include <stdint.h>' \
        'int LLVMFuzzerTestOneInput(const uint8_t *d, size_t n) { (void)d; (void)n; return 0; }' |
        compiles clang -fsanitize=fuzzer,address,undefined ;;
    arm64) printf '#include <stdio.h>\nint main(void) { return 0; }\n' |
        compiles aarch64-linux-gnu-gcc ;;
    qemu) command -v qemu-aarch64 >/dev/null 2>&1 ;;
    gdb) command -v gdb >/dev/null 2>&1 ;;
    chromium) command -v chromium >/dev/null 2>&1 || command -v chromium-browser >/dev/null 2>&1 ||
        command -v google-chrome >/dev/null 2>&1 ;;
    cmark) command -v cmark-gfm >/dev/null 2>&1 ;;
    nginx) command -v nginx >/dev/null 2>&1 || [ -x /usr/sbin/nginx ] ;;
    *) echo "need.sh: unknown thing $1" >&2; exit 2 ;;
    esac
}

packages() {
    case $1 in
    make) echo make ;;
    python) echo python3 ;;
    cc) echo gcc libc6-dev ;;
    cmocka) has cc || packages cc
        echo libcmocka-dev ;;
    microhttpd) echo libmicrohttpd-dev ;;
    c++) echo g++ ;;
    clang) echo clang libomp-dev ;;
    # on some releases the runtime is a separate package with clang's version in its name
    fuzzer)
        version=$(apt-cache depends clang 2>/dev/null |
            sed -n 's/.*Depends: clang-\([0-9]*\)$/\1/p' | head -n 1)
        echo clang
        [ -n "$version" ] && apt-cache show "libclang-rt-$version-dev" >/dev/null 2>&1 &&
            echo "libclang-rt-$version-dev" ;;
    arm64) echo gcc-aarch64-linux-gnu libc6-dev-arm64-cross ;;
    qemu) echo qemu-user ;;
    chromium | gdb) echo "$1" ;;
    nginx) echo nginx ;;
    cmark) echo cmark-gfm ;;
    esac
}

for thing in "$@"; do
    has "$thing" && continue
    if [ "$(id -u)" = 0 ]; then root=
    elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then root='sudo -n'
    else root=none
    fi
    list=$(echo $(packages "$thing"))
    if command -v apt-get >/dev/null 2>&1 && [ "$root" != none ]; then
        $root apt-get update -qq >/dev/null 2>&1
        list=$(echo $(packages "$thing")) # may depend on the updated package list
        echo "installing $list..." >&2
        # shellcheck disable=SC2086
        output=$($root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
            --no-install-recommends -o DPkg::Lock::Timeout=300 $list 2>&1) || echo "$output" >&2
        has "$thing" && continue
    fi
    echo "Missing: $thing. Install it (package names for Debian and Ubuntu), then try again:" >&2
    echo "    sudo apt-get install -y $list" >&2
    exit 1
done
