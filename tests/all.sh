#!/bin/sh
# tests/all.sh LLM PROGRAM...: build and run all tests: these programs, and the scripts. The longest
# start first, so that no processor idles at the end. Run by `make test`, with DEVICE and SANITIZE
# in the environment if they are set.
set -u
llm=$1 folder=$(dirname "$2")
shift
make --no-print-directory -j"$(nproc 2>/dev/null || echo 2)" build-tests || exit 1
first='kernels speculation engine device cuda_kernels tiles' others=
for program; do
    case " $first " in
    *" ${program##*/test_} "*) ;;
    *) others="$others $program" ;;
    esac
done
# These scripts compile on their own, without the sanitizers.
scripts='tests/lessons.sh tests/embed.sh tests/docs.sh tests/gdb.sh tests/races.sh tests/python.sh'
[ -z "${SANITIZE:-}" ] || { scripts= && export SERVE_SANITIZED=yes; }
[ "${DEVICE:-}" != cuda ] || export LLM_TEST_JOBS=1
export LLM_TEST_DEVICE="${DEVICE:-}" LLM_KERNELS="$folder/libkernels.a"
# shellcheck disable=SC2046,SC2086
exec sh tests/run.sh "$llm" $scripts tests/serve.sh tests/cli_batch.sh tests/cli.sh \
    $(for name in $first; do echo "$folder/test_$name"; done) $others tests/cli_chat.sh
