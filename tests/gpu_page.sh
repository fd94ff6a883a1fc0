#!/bin/sh
# tests/gpu_page.sh: keeps docs/gpu.md, whose sections come from different machines.
#
#   section PAGE NAME FILE   replace what is between the markers <!-- NAME --> and
#                            <!-- end NAME --> with FILE; without such markers, append both
#   beside PAGE              in the forecast's table, fill in the last column from the rows of the
#                            measured sections with the same first two columns
set -u
page=$2
new=$(mktemp) || exit 1
trap 'rm -f "$new"' EXIT
case $1 in
section)
    awk -v name="$3" -v file="$4" '
        function insert() { while ((getline line < file) > 0) print line }
        $0 == "<!-- " name " -->" { print; print ""; insert(); print ""; inside = found = 1; next }
        $0 == "<!-- end " name " -->" { inside = 0 }
        !inside
        END {
            if (found) exit
            print "\n<!-- " name " -->\n"; insert(); print "\n<!-- end " name " -->"
        }' "$page" >"$new" ;;
beside)
    awk -F' [|] ' '
        function key() { first = $1; sub(/^[|] /, "", first); return first "|" $2 }
        /^<!-- (end )?measured/ { measured = !/end/ }
        /^<!-- (end )?forecast/ { forecast = !/end/ }
        NR == FNR { if (measured && /^[|] / && NF > 3) figure[key()] = $3; next }
        forecast && /^[|] / && NF > 5 && !/^[|] (kernel|---)/ {
            value = key() in figure ? figure[key()] : "not measured"
            sub(/[^|]*[|]$/, " " value " |")
        }
        { print }' "$page" "$page" >"$new" ;;
*) echo "gpu_page.sh: section or beside" >&2; exit 2 ;;
esac && cat "$new" >"$page"
