# shellcheck shell=bash
# What the scripts of all peers have in common. Sourced, not run. A peer's script sets
#   title     its name for people
#   packages  Debian packages that hold it
#   units     services that the packages bring, which are not wanted
#   user      who runs it when the caller is root; empty: root may
#   missing   function: prints what is not there, a line each
#   setup     function: makes the data directory fit to start (called before each start)
#   launch    function: becomes the server (exec), in the foreground
#   ready     function: succeeds once the server answers
#   halt      signal that makes it stop in good order
# and calls peer_main "$@".
#
# A server runs in a session of its own; DIR/pid holds the id of its first process and when that was started, so that no
# other process is ever taken for it. DIR/log is what it said.

me=$(basename "$0")
home='' port=''

say() { printf '%s: %s\n' "$me" "$*" >&2; }
die() { say "$*"; exit 1; }

usage() {
    cat >&2 <<END
usage: $me start|stop|kill|status|pids DIR PORT
       $me check
       $me install [--yes]

start   starts $title on 127.0.0.1:PORT with everything it stores in DIR, and waits until it answers
stop    stops it in good order; DIR stays
kill    kill -9 of all its processes at once; DIR stays
status  "running PID" or "stopped" (exit status 3)
pids    its processes
check   says what is missing to run it
install says what it would install, and does so with --yes
END
    exit 2
}

# When a process was started, in clock ticks since boot. Fails when it is gone, or dead and not collected.
start_time() {
    local line
    line=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
    # The name before the last parenthesis may hold anything.
    # shellcheck disable=SC2086  # a list of words
    set -- ${line##*)}
    [ "$1" != Z ] && printf '%s\n' "${20}"
}

# The first process, if it is the one that was started here.
first_process() {
    local pid began
    read -r pid began 2>/dev/null <"$home/pid" || return 1
    [ "$(start_time "$pid")" = "$began" ] && printf '%s\n' "$pid"
}

# The first process and all that descend from it.
processes() {
    local first
    first=$(first_process) || return 1
    ps -e -o pid= -o ppid= | awk -v first="$first" '
        { parent[$1] = $2 }
        END {
            for (pid in parent) {
                at = pid
                for (steps = 0; steps < 64 && at != first && at in parent; steps++) at = parent[at]
                if (at == first) print pid
            }
        }'
}

# Waits until all of the given processes are gone.
wait_gone() {
    local tenths=$1 pid
    shift
    for pid in "$@"; do
        while start_time "$pid" >/dev/null; do
            [ "$tenths" -gt 0 ] || return 1
            tenths=$((tenths - 1))
            sleep 0.1
        done
    done
}

# Runs a command as $user, if the caller is root and there is such a wish.
as_user() {
    if [ "$(id -u)" = 0 ] && [ -n "$user" ]; then
        HOME=$home exec setpriv --reuid="$user" --regid="$user" --init-groups "$@"
    fi
    exec "$@"
}

# Succeeds when something listens on the port.
listening() { (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; }

last_words() {
    if [ -s "$home/log" ]; then
        tail -n 8 "$home/log" | sed 's/^/    /' >&2
    else
        say "    nothing; is it the right program?"
    fi
}

do_check() {
    local lines
    lines=$(
        missing
        command -v ps >/dev/null || echo "ps (Debian package procps)"
        command -v setsid >/dev/null || echo "setsid (Debian package util-linux)"
        if [ "$(id -u)" = 0 ] && [ -n "$user" ]; then
            command -v setpriv >/dev/null || echo "setpriv (Debian package util-linux)"
            id "$user" >/dev/null 2>&1 || echo "the user $user, whom the Debian package creates"
        fi
    )
    [ -z "$lines" ] && return 0
    say "cannot run $title; missing: $(printf '%s' "$lines" | sed ':a;N;$!ba;s/\n/; /g')"
    [ -z "$packages" ] || say "to install it: $0 install"
    return 1
}

do_install() {
    [ -n "$packages" ] || die "there is no package of $title"
    say "would run: apt-get install --no-install-recommends $packages"
    [ -z "$units" ] || say "and switch the services off that come with it: systemctl disable --now $units"
    [ "${1:-}" = --yes ] || { say "nothing was done; to do it: $0 install --yes"; return 0; }
    [ "$(id -u)" = 0 ] || die "only root can install packages: sudo $0 install --yes"
    apt-get update -q >&2
    # shellcheck disable=SC2086  # lists of words
    DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends $packages >&2
    for unit in $units; do
        # Without systemd there is nothing that would start it.
        systemctl disable --now "$unit" >&2 2>/dev/null || true
    done
    do_check
}

do_start() {
    local pid step
    do_check || exit 1
    first_process >/dev/null && die "$title runs already in $home"
    listening && die "port $port is taken: choose another"
    mkdir -p "$home"
    : >"$home/log"
    if [ "$(id -u)" = 0 ] && [ -n "$user" ]; then chown "$user:" "$home" "$home/log"; fi
    # Everything a server writes is in DIR, the place it is started from included.
    cd "$home" || die "cannot enter $home"
    (setup) >>"$home/log" 2>&1 || { say "$title could not be set up in $home:"; last_words; exit 1; }
    (trap '' HUP; launch) </dev/null >>"$home/log" 2>&1 &
    pid=$!
    printf '%s %s\n' "$pid" "$(start_time "$pid")" >"$home/pid"
    for ((step = 0; step < 600; step++)); do
        start_time "$pid" >/dev/null || { say "$title ended at once; it said:"; last_words; exit 1; }
        if ready >/dev/null 2>&1; then return 0; fi
        sleep 0.1
    done
    say "$title did not answer within 60 s; it said:"
    last_words
    do_kill
    exit 1
}

do_stop() {
    local all
    all=$(processes) || return 0
    # shellcheck disable=SC2046,SC2086  # lists of process ids
    kill -s "$halt" $(first_process) 2>/dev/null
    # shellcheck disable=SC2086
    wait_gone 600 $all && return 0
    say "$title did not stop within 60 s: killing it"
    # shellcheck disable=SC2086
    kill -s KILL $all 2>/dev/null
    # shellcheck disable=SC2086
    wait_gone 50 $all
}

do_kill() {
    local all
    all=$(processes) || return 0
    # shellcheck disable=SC2086
    kill -s KILL $all 2>/dev/null
    # shellcheck disable=SC2086
    wait_gone 100 $all || die "processes of $title are still there after kill -9: $all"
}

peer_main() {
    local command=${1:-}
    case "$command" in
    check) do_check; exit ;;
    install) do_install "${2:-}"; exit ;;
    start | stop | kill | status | pids) ;;
    *) usage ;;
    esac
    [ $# = 3 ] || usage
    case "$3" in
    '' | *[!0-9]*) die "PORT must be a number, not '$3'" ;;
    esac
    [ "$command" = start ] || [ -d "$2" ] || die "$2: there is no such directory"
    home=$(realpath -m "$2")
    port=$3
    case "$command" in
    start) do_start ;;
    stop) do_stop ;;
    kill) do_kill ;;
    pids) processes || exit 3 ;;
    status) if first_process >/dev/null; then echo "running $(first_process)"; else echo stopped; exit 3; fi ;;
    esac
}
