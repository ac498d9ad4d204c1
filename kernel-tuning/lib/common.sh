# shellcheck shell=bash
# Shared by apply, check and revert: messages, flags, reading kernel files, lists of CPUs. Sourced, not run.
# Functions that compute something leave it in REPLY: a subshell for each of a few thousand files would cost seconds.

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }
usage_error() { say "error: $*"; exit 2; }
# Nothing was changed, and nothing will be until somebody decides.
refuse() { say "refused: $*"; exit 3; }

ROOT=                                       # prefix of /proc, /sys, /run and the data directory; empty on a real machine
STATE=/var/lib/narad-kernel-tuning/state    # old values; not in the data directory, whose owner is not root
CPUS=                                       # shard CPUs, "2 3 4 5"; empty: not given
DATA_DIR=
DEVICE=
SCHEDULER=
ENVIRONMENT=                                # bare-metal, vm, container, unknown
ENVIRONMENT_WHY=
IDLE_US_MAX=20
IO_URING_GROUP=
YES=no
JSON=no
ONLY=()
SKIP=()
FORGET=()

# Reads the first line of a kernel file, blanks folded. Fails when it is missing or unreadable.
read_line() {
    REPLY=
    [ -r "$1" ] || return 1
    { IFS= read -r REPLY || [ -n "$REPLY" ]; } 2>/dev/null <"$1" || return 1
    local words
    read -ra words <<<"$REPLY"
    REPLY="${words[*]}"
}

# The word in brackets: "[none] mq-deadline" is none. A single word stands for itself.
read_choice() {
    read_line "$1" || return 1
    CHOICES=$REPLY
    CHOICES=${CHOICES//[\[\]]/}
    case "$REPLY" in
        *\[*\]*) REPLY=${REPLY#*\[}; REPLY=${REPLY%%\]*} ;;
        *" "*) return 1 ;;
    esac
}

is_number() { [[ $1 =~ ^(0|[1-9][0-9]{0,17})$ ]]; }

# ---- lists of CPUs: as text "2-5,8", as words "2 3 4 5 8" ----

cpus_parse() {
    local text=${1// /} part first last cpu
    local -A seen=()
    REPLY=
    [[ $text =~ ^[0-9,-]*$ ]] || return 1
    local IFS=,
    for part in $text; do
        [ -n "$part" ] || continue
        first=${part%%-*} last=${part#*-}
        [[ $part =~ ^[0-9]{1,5}(-[0-9]{1,5})?$ ]] && [ "$((10#$first))" -le "$((10#$last))" ] || return 1
        for ((cpu = 10#$first; cpu <= 10#$last; cpu++)); do seen[$cpu]=1; done
    done
    IFS=$' \t\n'
    [ ${#seen[@]} = 0 ] && return 0
    REPLY=$(printf '%s\n' "${!seen[@]}" | sort -n)
    REPLY=${REPLY//$'\n'/ }
}

cpus_format() {
    local cpu first='' last='' text=
    for cpu in $1; do
        if [ -n "$last" ] && [ "$cpu" = $((last + 1)) ]; then last=$cpu; continue; fi
        [ -z "$first" ] || { [ "$first" = "$last" ] && text+=",$first" || text+=",$first-$last"; }
        first=$cpu last=$cpu
    done
    [ -z "$first" ] || { [ "$first" = "$last" ] && text+=",$first" || text+=",$first-$last"; }
    REPLY=${text#,}
}

# What is in the first list and not in the second.
cpus_minus() {
    local cpu text=
    for cpu in $1; do [[ " $2 " == *" $cpu "* ]] || text+=" $cpu"; done
    REPLY=${text# }
}

cpus_common() {
    local cpu text=
    for cpu in $1; do [[ " $2 " != *" $cpu "* ]] || text+=" $cpu"; done
    REPLY=${text# }
}

# As the kernel's mask, groups of 32 bits from the highest: "0 33" is 00000002,00000001.
cpus_mask() {
    local cpu top=0 group text=
    local -a groups=()
    for cpu in $1; do
        groups[cpu / 32]=$((${groups[cpu / 32]:-0} | 1 << (cpu % 32)))
        [ $((cpu / 32)) -le "$top" ] || top=$((cpu / 32))
    done
    for ((group = top; group >= 0; group--)); do printf -v REPLY '%08x' "${groups[group]:-0}"; text+=",$REPLY"; done
    REPLY=${text#,}
}

# The mask as words.
mask_cpus() {
    local mask=$1 group index bit value text=
    local -a groups
    [[ $mask =~ ^[0-9a-fA-F]{1,8}(,[0-9a-fA-F]{1,8})*$ ]] || return 1
    IFS=, read -ra groups <<<"$mask"
    for ((index = ${#groups[@]} - 1, group = 0; index >= 0; index--, group++)); do
        value=$((16#${groups[index]}))
        for ((bit = 0; bit < 32; bit++)); do [ $((value >> bit & 1)) = 0 ] || text+=" $((group * 32 + bit))"; done
    done
    REPLY=${text# }
}

# ---- flags ----

# $1 the value that a flag needs, $2 how many arguments are left.
need() { [ "$2" -ge 2 ] || usage_error "$1 needs a value; see $PROGRAM --help"; }

# Parses everything; $1 names the flags of this program beside the common ones.
parse_flags() {
    local own=" $1 " flag
    shift
    while [ $# -gt 0 ]; do
        flag=$1
        case "$flag" in
            --*=*) set -- "${flag%%=*}" "${flag#*=}" "${@:2}"; flag=$1 ;;
        esac
        case "$flag" in
            -h | --help) usage; exit 0 ;;
            --yes | --json | --cpus | --data-dir | --device | --scheduler | --environment | --idle-us-max | \
                --io-uring-group | --forget)
                [[ $own == *" $flag "* ]] || usage_error "$PROGRAM has no option $flag; see $PROGRAM --help" ;;
        esac
        # shellcheck disable=SC2034  # read by the programs that have the flag
        case "$flag" in
            --yes) YES=yes; shift; continue ;;
            --json) JSON=yes; shift; continue ;;
        esac
        case "$flag" in
            --root) need "$flag" $#; ROOT=${2%/} ;;
            --state) need "$flag" $#; STATE=$2 ;;
            --only) need "$flag" $#; ONLY+=("$2") ;;
            --skip) need "$flag" $#; SKIP+=("$2") ;;
            --cpus) need "$flag" $#; CPUS=$2 ;;
            --data-dir) need "$flag" $#; DATA_DIR=$2 ;;
            --device) need "$flag" $#; DEVICE=${2#/dev/} ;;
            --scheduler) need "$flag" $#; SCHEDULER=$2 ;;
            --environment) need "$flag" $#; ENVIRONMENT=$2 ;;
            --idle-us-max) need "$flag" $#; IDLE_US_MAX=$2 ;;
            --io-uring-group) need "$flag" $#; IO_URING_GROUP=$2 ;;
            --forget) need "$flag" $#; FORGET+=("$2") ;;
            *) usage_error "unknown option or argument $flag; see $PROGRAM --help" ;;
        esac
        shift 2
    done
    check_flags
}

check_flags() {
    local prefix known found online
    if [ -n "$ROOT" ]; then
        [ -d "$ROOT" ] || usage_error "--root $ROOT is not a directory"
        ROOT=$(readlink -f "$ROOT")
    fi
    case "$STATE" in /*) ;; *) usage_error "--state $STATE: write an absolute path" ;; esac
    for prefix in "${ONLY[@]}" "${SKIP[@]}"; do
        found=no
        for known in "${SETTING_IDS[@]}"; do
            case "$known" in "${prefix%%/*}" | "${prefix%%/*}".*) found=yes ;; esac
        done
        [ "$found" = yes ] || usage_error "no setting is called $prefix; the README has a table of them"
    done
    case "$ENVIRONMENT" in
        "" | bare-metal | vm | container) ;;
        *) usage_error "--environment $ENVIRONMENT: say bare-metal, vm or container" ;;
    esac
    is_number "$IDLE_US_MAX" || usage_error "--idle-us-max $IDLE_US_MAX: give microseconds, such as 20"
    [ -z "$IO_URING_GROUP" ] || is_number "$IO_URING_GROUP" \
        || usage_error "--io-uring-group $IO_URING_GROUP: give the number of a group (getent group narad)"
    [ -z "$SCHEDULER" ] || [[ $SCHEDULER =~ ^[a-z0-9-]+$ ]] || usage_error "--scheduler $SCHEDULER is no name of a scheduler"
    [ -z "$DEVICE" ] || [[ $DEVICE =~ ^[A-Za-z0-9_.!-]+$ ]] || usage_error "--device $DEVICE is no name of a block device"
    [ -z "$DEVICE" ] || [ -z "$DATA_DIR" ] || usage_error "--device and --data-dir both name the drive: give one of them"
    if [ -n "$CPUS" ]; then
        if ! cpus_parse "$CPUS" || [ -z "$REPLY" ]; then
            usage_error "--cpus $CPUS is not a list of CPUs: write numbers and ranges, such as 2-5,8"
        fi
        prefix=$REPLY
        if ! read_line "$ROOT/sys/devices/system/cpu/online" || ! cpus_parse "$REPLY" || [ -z "$REPLY" ]; then
            refuse "cannot read which CPUs are online from $ROOT/sys/devices/system/cpu/online, so --cpus cannot be checked"
        fi
        online=$REPLY
        cpus_minus "$prefix" "$online"
        if [ -n "$REPLY" ]; then
            cpus_format "$REPLY"; known=$REPLY
            cpus_format "$online"
            usage_error "--cpus names CPU $known, which is not online here; online are $REPLY"
        fi
        CPUS=$prefix
    fi
}

# Is this setting asked for by --only and --skip? $1 is its name with or without its instance.
wanted_setting() {
    local prefix
    for prefix in "${SKIP[@]}"; do case "$1" in "$prefix" | "$prefix".* | "$prefix"/*) return 1 ;; esac; done
    [ ${#ONLY[@]} -gt 0 ] || return 0
    for prefix in "${ONLY[@]}"; do case "$1" in "$prefix" | "$prefix".* | "$prefix"/*) return 0 ;; esac; done
    return 1
}
