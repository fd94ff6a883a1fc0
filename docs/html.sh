#!/bin/sh
# docs/html.sh write|check: makes docs/index.html, the book as a web page, from the pages that
# docs/README.md links to, in its order, and docs/talk/index.html from docs/talk/slides.md.
# cmark-gfm converts the Markdown; frame.html of each folder is what surrounds it. check: change
# nothing; fail if a file is out of date. Both fail if a link leads nowhere.
set -u
cd "$(dirname "$0")" || exit 1
command -v cmark-gfm >/dev/null ||
    { echo 'docs/index.html needs cmark-gfm: sudo apt-get install cmark-gfm'; exit 1; }
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT

# The files of the book, relative to docs/.
pages="README.md $(grep -o '](\([^):]*\.md\))' README.md | sed 's/^](//; s/)$//' |
    awk '!seen[$0]++' | tr '\n' ' ')"

id() { echo "$1" | sed 's/^\.\.\///; s/\.md$//; s/\//-/g'; } # FILE: its anchor

convert() { # FILE: its HTML, with links that fit the web page
    cmark-gfm --unsafe -e table "$1" | awk -v file="$1" -v id="$(id "$1")" -v pages=" $pages " '
        function escape(s) {
            gsub(/&/, "\\&amp;", s); gsub(/</, "\\&lt;", s); gsub(/>/, "\\&gt;", s)
            return s
        }
        function anchor(s) { # of a heading, as on GitHub
            gsub(/<[^>]*>|&[a-z]*;/, "", s)
            s = tolower(s)
            gsub(/[^a-z0-9 _-]/, "", s)
            gsub(/ /, "-", s)
            return s
        }
        function place(link,   hash) {
            if (link ~ /^[a-z]+:/) return link
            if (match(link, /#.*/)) hash = "--" substr(link, RSTART + 1)
            sub(/#.*/, "", link)
            link = link == "" ? file : folder link
            while (sub(/[^\/.]+\/\.\.\//, "", link)) {}
            sub(/^\.\.\/docs\//, "", link)
            page = link
            if (slides) sub(/^\.\.\//, "", page)
            if (!index(pages, " " page " ")) return link
            gsub(/^\.\.\/|\.md$/, "", page)
            gsub(/\//, "-", page)
            return (slides ? "../index.html#" : "#") page hash
        }
        BEGIN {
            folder = file
            sub(/[^\/]*$/, "", folder)
            slides = file == "slides.md"
        }
        /^<!-- run / {
            sub(/^<!-- run /, "")
            sub(/ -->.*/, "")
            sub(/^llm /, "./llm ")
            print "<pre class=\"run\"><code>$ " escape($0) "</code></pre>"
            next
        }
        /^<!-- quote / { print "<p class=\"from\">" $3 ": <code>" $4 "</code></p>"; next }
        /^<!--/ { next }
        slides && /^<hr/ { print "</section>\n<section>"; next }
        /^<h[2-9]>/ && !slides {
            name = anchor($0)
            if (n[name]++) name = name "-" (n[name] - 1)
            $0 = substr($0, 1, 3) " id=\"" id "--" name "\"" substr($0, 4)
        }
        {
            line = ""
            while (match($0, /(href|src)="[^"]*"/)) {
                at = RSTART + index(substr($0, RSTART), "\"")
                end = RSTART + RLENGTH - 1
                line = line substr($0, 1, at - 1) place(substr($0, at, end - at))
                $0 = substr($0, end)
            }
            line = line $0
            sub(/<img /, "<img loading=\"lazy\" ", line)
            print line
        }'
}

book() {
    for page in $pages; do
        echo "<section id=\"$(id "$page")\">"
        convert "$page" | tee "$work/page"
        echo '</section>'
        number=$(echo "$page" | sed -n 's/^0*\([0-9]*\)-.*/\1/p')
        sed -n 's/^<h1>\(.*\)<\/h1>/\1/p' "$work/page" | head -n 1 |
            sed "s/.*/<li><a href=\"#$(id "$page")\"><span>$number<\/span>&<\/a><\/li>/" \
                >>"$work/contents"
    done >"$work/pages"
    sed -e "/^<!-- contents -->/{r $work/contents" -e 'd;}' \
        -e "/^<!-- pages -->/{r $work/pages" -e 'd;}' frame.html
}

talk() {
    { echo '<section>'; convert slides.md; echo '</section>'; } >"$work/pages"
    sed -e "/^<!-- pages -->/{r $work/pages" -e 'd;}' frame.html
}

dead_links() { # of $work/new, in the current folder
    grep -o '\(href\|src\)="[^"]*"' "$work/new" | sed 's/^[^"]*"//; s/"$//' | sort -u |
        grep -v '^[a-z]*:' | while read -r link; do
        path=${link%%#*}
        [ -e "${path:-.}" ] || echo "$1: the link to $link is dead"
        case $link in *#*) grep -q -F "id=\"${link#*#}\"" "${path:-$work/new}" ||
            echo "$1: there is no place $link" ;; esac
    done
}

make_page() { # KIND FILE
    "$1" >"$work/new"
    dead_links "$2" >"$work/dead"
    cat "$work/dead"
    [ ! -s "$work/dead" ] || wrong=1
    cmp -s "$work/new" index.html && return
    if [ "${mode:-check}" = write ]; then cp "$work/new" index.html
    else echo "$2 is out of date (make quotes)"; wrong=1; fi
}

mode=${1:-check} wrong=0
for page in *.md; do
    case " $pages " in *" $page "*) continue ;; esac
    echo "docs/README.md has no link to $page"
    wrong=1
done
make_page book docs/index.html
cd talk || exit 1
make_page talk docs/talk/index.html
exit $wrong
