# awk -f tests/kernels.awk llm.h: what the kernels are compiled from. That is llm.h without chapters 1
# to 5, 8 and 9, the reference loops and the executor, so a change there does not compile them again.
/^\/\* =====/ {
    opening = $0
    getline
    if (/^ \* \[/) skip = / \[[1-589]\] /
    if (!skip) print opening
}
/^\/\* ---- The (reference loops|planned executor)/ { skip = 1 }
/^#endif .* LLM__IMPLEMENTED/ { skip = 0 }
!skip
