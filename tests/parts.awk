# awk -v part=PART -f tests/parts.awk llm.h: prints a part of llm.h on which objects depend.
#
#   api      the public API, as a header that everything else reads
#   kernels  what the kernels are compiled from: llm.h without Part I (but for the arguments of
#            kernels, in chapter 6), chapters 8 and 9, and the executor. The public functions that
#            remain become weak symbols: all objects define them, the linker takes the engine's.
part == "api" { print; if (/^#endif .* LLM_H /) exit; next }
/^\/\* =====/ {
    opening = $0
    getline
    if (/^ \* (PART I|\[)/) skip = / (PART I:|\[[1-589]\]) /
    if (!skip) print opening
}
/^\/\* ---- The (reference loops|planned executor)/ { skip = 1 }
/^#ifndef LLM__IMPLEMENTED$/ { definitions = 1 }
/^#endif .* LLM__IMPLEMENTED/ { skip = 0 }
!skip && definitions && /^[a-z].*[ *]llm_[a-z][a-z0-9_]*\(/ && !/^static / {
    match($0, /llm_[a-z][a-z0-9_]*\(/)
    print "#pragma weak " substr($0, RSTART, RLENGTH - 1)
}
!skip
