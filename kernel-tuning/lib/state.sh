# shellcheck shell=bash
# What was there before we changed it. Sourced, not run.
#
# A text file: a line that names the format, then one line per changed setting: name, old value, our value, boot id,
# between tabs. It holds names, never paths, and each is checked again when it is read: its reader is root.

STATE_FORMAT="narad-kernel-tuning 1"
STATE_NAMES=()              # in the order in which they were changed
declare -A STATE_OLD STATE_NEW STATE_BOOT

# Everything that we change lasts until the machine restarts, and this tells one running time from another.
read_boot_id() {
    if ! read_line "$ROOT/proc/sys/kernel/random/boot_id" || [[ ! $REPLY =~ ^[0-9a-f-]{8,64}$ ]]; then
        refuse "cannot read $ROOT/proc/sys/kernel/random/boot_id, so old values could not be told from stale ones"
    fi
    BOOT_ID=$REPLY
}

# Only one of us at a time; the lock goes with the process.
lock_state() {
    local directory=${STATE%/*}
    if [ ! -d "${directory:-/}" ]; then
        (umask 077 && mkdir -p "$directory") 2>/dev/null || die "cannot create $directory for the old values: run as root, or name another file by --state"
    fi
    { : >>"$STATE.lock"; } 2>/dev/null || die "cannot write $STATE.lock: run as root, or name another file by --state"
    exec 9<"$STATE.lock"
    flock -n 9 || refuse "another apply or revert is at work (it holds $STATE.lock)"
}

load_state() {
    local line name old new boot fields mode
    if [ -d "${STATE%/*}" ] && [ ! -x "${STATE%/*}" ]; then
        [ "$YES" = no ] || die "cannot look into ${STATE%/*}: run as root"
        say "note    ${STATE%/*} is closed to this user: old values are not taken into account"
        return 0
    fi
    [ -e "$STATE" ] || return 0
    [ -f "$STATE" ] || refuse "$STATE is not a file"
    # Whoever may write it may make root write any value of ours.
    mode=$(stat -c '%u %a' "$STATE") || refuse "cannot look at $STATE"
    case "$mode" in "0 "* | "$EUID "*) ;; *) refuse "$STATE belongs to user ${mode% *}, not to root: look at it, then chown or remove it" ;; esac
    (((8#${mode#* } & 8#022) == 0)) || refuse "$STATE can be written by others (mode ${mode#* }): look at it, then chmod 600"
    exec 8<"$STATE" || die "cannot read $STATE: run as root"
    IFS= read -r line <&8 || line=
    [ "$line" = "$STATE_FORMAT" ] || refuse "$STATE is not a state file of this version (first line: $line)"
    while IFS= read -r line <&8; do
        IFS=$'\t' read -ra fields <<<"$line"
        name=${fields[0]-} old=${fields[1]-} new=${fields[2]-} boot=${fields[3]-}
        if [ ${#fields[@]} -ne 4 ] || ! valid_name "$name" || ! valid_value "$name" "$old" || ! valid_value "$name" "$new"; then
            refuse "$STATE is damaged at: $line"
        fi
        STATE_NAMES+=("$name")
        STATE_OLD[$name]=$old STATE_NEW[$name]=$new STATE_BOOT[$name]=$boot
    done
    exec 8<&-
}

# name, old value, our value
remember() {
    [ -n "${STATE_NEW[$1]+known}" ] || STATE_NAMES+=("$1")
    STATE_OLD[$1]=$2 STATE_NEW[$1]=$3 STATE_BOOT[$1]=$BOOT_ID
}

forget() {
    local name kept=()
    for name in "${STATE_NAMES[@]}"; do [ "$name" = "$1" ] || kept+=("$name"); done
    STATE_NAMES=("${kept[@]}")
    unset "STATE_OLD[$1]" "STATE_NEW[$1]" "STATE_BOOT[$1]"
}

# What an earlier running time of the machine set, its restart undid.
forget_stale() {
    local name
    for name in "${STATE_NAMES[@]}"; do [ "${STATE_BOOT[$name]}" = "$BOOT_ID" ] || forget "$name"; done
}

# As a whole or not at all, and on the disk before the first setting changes.
save_state() {
    local name
    if [ ${#STATE_NAMES[@]} = 0 ]; then rm -f "$STATE"; return; fi
    (
        umask 077
        {
            printf '%s\n' "$STATE_FORMAT"
            for name in "${STATE_NAMES[@]}"; do
                printf '%s\t%s\t%s\t%s\n' "$name" "${STATE_OLD[$name]}" "${STATE_NEW[$name]}" "${STATE_BOOT[$name]}"
            done
        } >"$STATE.new" && sync "$STATE.new" && mv -f "$STATE.new" "$STATE" && sync "${STATE%/*}"
    ) 2>/dev/null || die "cannot write $STATE: nothing more was changed"
}

# Did somebody else change setting $1, which is $2 now, since we did?
changed_by_others() {
    [ -n "${STATE_NEW[$1]+known}" ] && [ "${STATE_BOOT[$1]}" = "$BOOT_ID" ] \
        && [ "$2" != "${STATE_NEW[$1]}" ] && [ "$2" != "${STATE_OLD[$1]}" ]
}
