#!/bin/sh
# docs/make.sh MODE [PAGE]: updates what the pages (or one page, such as 15-cpu) quote. Run it in
# the repository's root.
#
#   quotes    copy the code after each <!-- quote FILE NAME --> from FILE, and renew the web pages
#             (html.sh)
#   all       also renew the output after each <!-- run ... --> with ./llm, and the pictures
#   check     change nothing; fail if a quote differs from FILE, if a page (or another text of the
#             repository) names a command, option or symbol that does not exist, if a link is
#             dead, or if a web page is out of date
set -u
mode=${1:-check}
pages=${2:-[0-9]*}
llm=${LLM:-./llm}
case $llm in */*) ;; *) llm=./$llm ;; esac
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
wrong=0
complain() { echo "$*"; wrong=$((wrong + 1)); }

extract() { # FILE NAME: the definition of a function, struct or enum, with the comment before it
    awk -v name="$2" '
        function defines(line) {
            if (line !~ /^[A-Za-z_]/) return 0
            return match(line, "(^|[^A-Za-z0-9_])" name "(\\(|\\)\\(| \\{|;| =|\\[)") ||
                index(line, "LLM__K(" name ")(")
        }
        state == 0 && /^\/\*/ { comment = "" ; in_comment = 1 }
        state == 0 && in_comment {
            comment = comment $0 "\n"
            if (/\*\/[ ]*$/) in_comment = 0
            next
        }
        state == 0 && defines($0) { state = 1; body = comment }
        state == 0 && !/^LLM__NOINLINE|^template/ { comment = "" }
        state == 1 {
            body = body $0 "\n"
            if (/\{/) {
                state = 2
                if (/\}[^;]*;?$/ && /^[^{]*\{.*\}/) { printf "%s", body; exit }
            } else if (/;[ ]*(\/\*.*)?$/) { state = 0; comment = "" }
            next
        }
        state == 2 { body = body $0 "\n"; if (/^\}/) { printf "%s", body; exit } }' "$1"
}

fill() { # PAGE: print it with its quotes renewed (in mode all, also its runs)
    awk -v mode="$mode" -v work="$work" -v llm="$llm" '
        function emit(command, kind,   line) {
            print "```" kind
            while ((command | getline line) > 0) { sub(/[ ]+$/, "", line); print line }
            close(command)
            print "```"
        }
        skipping == 1 { if (/^```/) { skipping = 2; next } skipping = 0 }
        skipping == 2 { if (/^```/) skipping = 0; next }
        { print }
        /^<!-- quote / {
            emit("sh docs/make.sh extract " $3 " " $4, $3 ~ /cu$/ ? "cuda" : "c")
            skipping = 1
        }
        /^<!-- run / && mode == "all" {
            command = $0
            sub(/^<!-- run /, "", command)
            sub(/ -->.*/, "", command)
            done = "cat \"" work "/" command "\""
            sub(/^llm /, llm " ", command)
            emit(done " 2>/dev/null || " command " 2>/dev/null", "")
            skipping = 1
        }' "$1"
}

if [ "$mode" = extract ]; then extract "$2" "$3"; exit; fi
if [ "$mode" = all ]; then
    for lesson in docs/$pages.c; do
        what=$(basename "$lesson" .c)
        case $what in
        11-ladder) command=ladder ;;
        17-product) command='lesson kernel --ladder' ;;
        *) command="lesson ${what#*-}" ;;
        esac
        # shellcheck disable=SC2086
        $llm $command --svg "docs/$what.svg" >"$work/out" 2>/dev/null || wrong=$((wrong + 1))
        # the page shows the output of the run that made the picture
        grep -v '^The picture is in ' "$work/out" >"$work/llm $command"
    done
fi
all="docs/$pages.md docs/README.md"
[ "$mode" = check ] && [ $# -lt 2 ] && all='docs/*.md docs/talk/*.md README.md models/README.md'
for page in $all; do
    fill "$page" >"$work/page"
    if [ "$mode" = check ]; then
        ! grep -q "^<!-- quote" "$page" || cmp -s "$page" "$work/page" ||
            {
                complain "$page: a quote differs from the source (make quotes)"
                diff "$page" "$work/page" | head -5
            }
    else
        cmp -s "$page" "$work/page" || cp "$work/page" "$page"
        continue
    fi
    grep -o '^<!-- quote [^>]*-->' "$page" | while read -r _ _ file name _; do
        [ -n "$(extract "$file" "$name")" ] || echo "$page: $file defines no $name"
    done >"$work/log"
    [ ! -s "$work/log" ] || { cat "$work/log"; wrong=$((wrong + 1)); }
    # links to files, relative to the page's folder, except in code
    sed '/^```/,/^```/d' "$page" | grep -o '](\([^)#]*\))' | sed 's/^](//; s/\( "[a-z]*"\)*)$//' |
        grep -v '^https\?:' | sort -u | while read -r link; do
        [ -e "$(dirname "$page")/$link" ] || echo "$page: the link to $link is dead"
    done >"$work/log"
    [ ! -s "$work/log" ] || { cat "$work/log"; wrong=$((wrong + 1)); }
    # symbols in the text: `llm_name`, `llm__name`, `LLM_NAME`
    grep -o '`\(llm_\|llm__\|LLM_\)[A-Za-z0-9_]*`' "$page" | tr -d '`' | sort -u |
        while read -r symbol; do
        grep -q "\<$symbol\>" llm.h llm.cu main.c models/*.[ch] docs/*.c docs/*.h 2>/dev/null ||
            echo "$page: there is no $symbol"
    done >"$work/log"
    [ ! -s "$work/log" ] || { cat "$work/log"; wrong=$((wrong + 1)); }
    # other names in the text, such as `tokens_by_hand`, and code that an exercise refers to with
    # "instead of `...`", "delete `...`" or "after `...`"
    case $page in docs/[0-9]*)
        sed '/^```/,/^```/d' "$page" | grep -o '`[A-Za-z][A-Za-z0-9]*_[A-Za-z0-9_]*`' | tr -d '`' |
            sort -u | while read -r symbol; do
            grep -q -w -e "$symbol" llm.h llm.cu main.c models/*.[ch] docs/*.c docs/*.h docs/*.cu \
                2>/dev/null || echo "$page: there is no $symbol"
        done
        awk '/^[0-9]*\. |^$/ { print "" } { sub(/^ +/, ""); printf "%s ", $0 }' "$page" | # unwrap
            sed -n '/^[0-9]*\. A line:/p' | grep -o '\(instead of\|[Dd]elete\|after\) `[^`]*`' |
            sed 's/^[^`]*`//; s/`$//' | while read -r code; do
            grep -q -F -e "$code" llm.h llm.cu models/*.c docs/*.c docs/*.h docs/*.cu 2>/dev/null ||
                echo "$page: there is no line with $code"
        done ;;
    esac >"$work/log"
    [ ! -s "$work/log" ] || { cat "$work/log"; wrong=$((wrong + 1)); }
    # the options of the commands that a page shows: llm lesson NAME --option, also in indented code
    {
        grep -o '\(`\|<!-- run \)llm [a-z][^`]*' "$page" | sed 's/ -->.*//; s/^`//; s/^<!-- run //'
        sed -n 's/  *#.*//; s/^    \(\$ \)*\(\.\/\)*llm \([a-z].*\)/llm \3/p' "$page"
        sed -n 's/^\.\/llm \([a-z].*\)/llm \1/p' "$page"
    } | sort -u | while read -r line; do
        # shellcheck disable=SC2086
        set -- $line
        shift
        command=$1
        shift
        if [ "$command" = lesson ] || [ "$command" = bench ]; then
            case ${1:-} in [a-z]*) command="$command $1"; shift ;; esac
        fi
        # shellcheck disable=SC2086
        $llm $command --help >"$work/help" 2>&1 || echo "$page: there is no llm $command"
        for word in "$@"; do
            case $word in --[a-z]*) word=${word%%=*}; word=${word%%[.,;:)]*}
                grep -q -e "$word\>" "$work/help" || echo "$page: llm $command has no $word" ;; esac
        done
    done >"$work/log"
    [ ! -s "$work/log" ] || { cat "$work/log"; wrong=$((wrong + 1)); }
done
has_converter() { command -v cmark-gfm >/dev/null; }
# Without the converter, check skips the web pages; quotes and all say what to install.
case $mode$# in
check1 | check0) ! has_converter || sh docs/html.sh check || wrong=$((wrong + 1)) ;;
check2) ;;
*) sh docs/html.sh write || { [ "$mode" = quotes ] && ! has_converter; } || wrong=$((wrong + 1)) ;;
esac
[ "$wrong" -eq 0 ]
