# Sourced by the scripts for GPU machines. `piece NAME SECONDS COMMAND...` runs one command with its own time limit. Its
# output goes to $results/$lane.txt, and one line about it is printed. After a failure the next piece starts. A finished
# piece is recorded in $work and not run again. No piece starts after `budget` seconds.
# Needs: work, results (folders), budget (seconds since the start of the script). `lane`: name of the log, default `log`.
mkdir -p "$work" "$results"

piece() {
    local name=$1 limit=$2 began=$SECONDS left=$((budget - SECONDS)) code log="$results/${lane:-log}.txt"
    shift 2
    [ -e "$work/$name.done" ] && echo "$name: done before" && return 0
    [ "$left" -lt $((limit / 3)) ] && echo "$name: NOT STARTED: no time left" && return 1
    [ "$left" -lt "$limit" ] && limit=$left
    printf '\n==== %s: %s\n' "$name" "$*" >>"$log"
    local before
    before=$(stat -c %s "$log")
    timeout --signal=INT --kill-after=10 "$limit" "$@" >>"$log" 2>&1
    code=$?
    [ $code -eq 0 ] && tail -n 1 "$log" | grep -Eq '^(=+ )?[0-9]+ skipped' && code=5
    if [ $code -eq 5 ]; then # pytest's exit code for it
        echo "$name: no test could run; $(grep -a -i skip "$log" | tail -n 1 | cut -c -160)"
    elif [ $code -eq 0 ]; then
        touch "$work/$name.done"
        echo "$name: ok, $((SECONDS - began)) s; $(tail -n 1 "$log" | cut -c -160)"
    else
        echo "$name: FAILED with $code after $((SECONDS - began)) s; the end of its log:"
        tail -c +$((before + 1)) "$log" | tail -n "${shown:-25}" | cut -c -220 | sed "s/^/    /"
    fi
    return $code
}
