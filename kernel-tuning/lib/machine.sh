# shellcheck shell=bash
# What this machine is: bare metal, virtual or a container; which CPUs, interrupts, drives. Sourced, not run.

# Sets ENVIRONMENT and ENVIRONMENT_WHY, unless a flag said what it is.
detect_environment() {
    if [ -n "$ENVIRONMENT" ]; then ENVIRONMENT_WHY="--environment says so"; return; fi
    local file line
    for file in /.dockerenv /run/.containerenv /run/systemd/container; do
        if [ -e "$ROOT$file" ]; then ENVIRONMENT=container ENVIRONMENT_WHY="$file exists"; return; fi
    done
    if [ -r "$ROOT/proc/1/cgroup" ]; then
        while IFS= read -r line; do
            case "$line" in
                *docker* | *kubepods* | *libpod* | *lxc* | *containerd*)
                    ENVIRONMENT=container ENVIRONMENT_WHY="the control group of process 1 is ${line##*:}"; return ;;
            esac
        done <"$ROOT/proc/1/cgroup"
    fi
    if read_line "$ROOT/sys/hypervisor/type"; then ENVIRONMENT=vm ENVIRONMENT_WHY="hypervisor $REPLY"; return; fi
    # On x86 every hypervisor that does not hide sets this bit, and no real machine has it.
    if [ -r "$ROOT/proc/cpuinfo" ]; then
        while IFS= read -r line; do
            case "$line" in
                flags*" hypervisor"*) ENVIRONMENT=vm ENVIRONMENT_WHY="the CPU has the hypervisor flag"; return ;;
                flags*) ENVIRONMENT=bare-metal ENVIRONMENT_WHY="the CPU has no hypervisor flag"; return ;;
            esac
        done <"$ROOT/proc/cpuinfo"
    fi
    # Elsewhere the firmware's word, when it names a hypervisor; its silence proves nothing.
    for file in sys_vendor product_name; do
        read_line "$ROOT/sys/class/dmi/id/$file" || continue
        case "$REPLY" in
            *QEMU* | *KVM* | *VMware* | *VirtualBox* | *Xen* | *"Virtual Machine"* | *"Google Compute Engine"* | *OpenStack*)
                ENVIRONMENT=vm ENVIRONMENT_WHY="the firmware says $REPLY"; return ;;
        esac
    done
    ENVIRONMENT=unknown ENVIRONMENT_WHY="neither CPU flags nor firmware tell: say --environment bare-metal or vm"
}

# The CPUs that are left for everything else, in HOUSEKEEPING.
find_housekeeping() {
    HOUSEKEEPING=
    if ! read_line "$ROOT/sys/devices/system/cpu/online" || ! cpus_parse "$REPLY"; then return; fi
    cpus_minus "$REPLY" "$CPUS"
    HOUSEKEEPING=$REPLY
}

# Process ids whose name is $1, in REPLY.
processes_named() {
    local comm text=
    for comm in "$ROOT"/proc/[0-9]*/comm; do
        if ! read_line "$comm" || [ "$REPLY" != "$1" ]; then continue; fi
        comm=${comm%/comm}
        text+=" ${comm##*/}"
    done
    REPLY=${text# }
}

# Is process $1 a broker, not a client command?
is_broker() {
    local words=()
    { mapfile -d '' -t words <"$ROOT/proc/$1/cmdline"; } 2>/dev/null || return 1
    local word
    for word in "${words[@]:1}"; do case "$word" in serve | server) return 0 ;; esac; done
    return 1
}

# ---- drives ----

# Device number and file system type of the file system that holds $1, in MOUNT_NUMBER and MOUNT_TYPE. From
# mountinfo, because stat(2) of btrfs and overlay names devices that do not exist.
find_mount() {
    local path=$1 line fields at best=-1 index
    MOUNT_NUMBER='' MOUNT_TYPE=''
    [ -r "$ROOT/proc/self/mountinfo" ] || return 1
    while IFS= read -r line; do
        read -ra fields <<<"$line"
        printf -v at '%b' "${fields[4]}"    # blanks are written \040
        at=${at%/}
        case "$path/" in
            "$at"/*) ;;
            *) continue ;;
        esac
        # Of mounts on one place the last one is what is seen.
        [ ${#at} -ge "$best" ] || continue
        best=${#at} MOUNT_NUMBER=${fields[2]}
        for ((index = 6; index < ${#fields[@]}; index++)); do
            if [ "${fields[index]}" = - ]; then MOUNT_TYPE=${fields[index + 1]}; break; fi
        done
    done <"$ROOT/proc/self/mountinfo"
    [ -n "$MOUNT_NUMBER" ]
}

# Drives (whole disks) under device $1 of /sys/class/block, appended to DRIVES: a partition is on its disk, a mapped
# or striped device on its members.
find_drives() {
    local node member found=no
    node=$(readlink -f "$ROOT/sys/class/block/$1") || return 1
    [ -d "$node" ] || return 1
    [ ! -e "$node/partition" ] || node=${node%/*}
    for member in "$node"/slaves/*; do
        [ -e "$member" ] || continue
        find_drives "${member##*/}" && found=yes
    done
    [ "$found" = yes ] || DRIVES+=("${node##*/}")
}

# From --device or --data-dir to DRIVES, or a sentence in DRIVES_WHY_NOT.
choose_drives() {
    local node
    DRIVES=() DRIVES_WHY_NOT=
    if [ -n "$DEVICE" ]; then
        find_drives "$DEVICE" || usage_error "there is no block device $DEVICE; see lsblk"
        return
    fi
    if [ -z "$DATA_DIR" ]; then DRIVES_WHY_NOT="give --data-dir DIR or --device NAME"; return; fi
    case "$DATA_DIR" in /*) ;; *) usage_error "--data-dir $DATA_DIR: write an absolute path" ;; esac
    [ -d "$ROOT$DATA_DIR" ] || usage_error "--data-dir $DATA_DIR does not exist: mount its file system and create it first"
    node=$(readlink -f "$ROOT$DATA_DIR")
    node=${node#"$ROOT"}
    find_mount "${node:-/}" || { DRIVES_WHY_NOT="cannot tell which file system holds $DATA_DIR"; return; }
    case "$MOUNT_NUMBER" in
        0:*) DRIVES_WHY_NOT="$DATA_DIR is on $MOUNT_TYPE, which has no block device of its own; name the drive by --device"; return ;;
    esac
    node=$(readlink -f "$ROOT/sys/dev/block/$MOUNT_NUMBER")
    if [ ! -d "$node" ] || ! find_drives "${node##*/}"; then
        DRIVES_WHY_NOT="the kernel shows no block device $MOUNT_NUMBER for $DATA_DIR"
    fi
}
