# shellcheck shell=bash
# The settings: name, where it lives, what it is now, what it should be, why. Sourced, not run.
#
# A setting's name is stable. One that exists several times has an instance behind a slash: cpu.governor/cpu2.

SETTING_IDS=(
    sysctl.kernel.io_uring_disabled sysctl.kernel.io_uring_group
    sysctl.net.core.somaxconn sysctl.net.ipv4.tcp_max_syn_backlog
    sysctl.net.core.rmem_max sysctl.net.core.wmem_max sysctl.net.ipv4.tcp_rmem sysctl.net.ipv4.tcp_wmem
    sysctl.vm.swappiness sysctl.vm.dirty_background_bytes sysctl.vm.dirty_bytes
    sysctl.kernel.numa_balancing sysctl.fs.nr_open
    limit.memlock limit.nofile
    thp.enabled thp.defrag
    block.scheduler block.poll_queues
    irq.default_affinity irq.affinity
    cpu.governor cpu.idle
    boot.isolcpus boot.nohz_full boot.rcu_nocbs
)

# shellcheck disable=SC2034  # revert does not show it
declare -A WHY=(
    [sysctl.kernel.io_uring_disabled]="shards do all their I/O through io_uring; without it the broker does not start"
    [sysctl.kernel.io_uring_group]="members of this group may use io_uring while everybody else may not"
    [sysctl.net.core.somaxconn]="a listener asks for a backlog of 4096; a smaller one drops connections in a storm"
    [sysctl.net.ipv4.tcp_max_syn_backlog]="half-open connections of a storm wait here before the listener's backlog"
    [sysctl.net.core.rmem_max]="largest UDP receive buffer that a process may ask for; too small drops datagrams between nodes"
    [sysctl.net.core.wmem_max]="largest UDP send buffer that a process may ask for"
    [sysctl.net.ipv4.tcp_rmem]="a batch body of 16 MiB cannot fill a fast link through a smaller receive window"
    [sysctl.net.ipv4.tcp_wmem]="a consume reply of up to 8 MiB cannot fill a fast link through a smaller send buffer"
    [sysctl.vm.swappiness]="the broker's memory is bounded and hot; paged out, a produce waits for two disk reads"
    [sysctl.vm.dirty_background_bytes]="other programs' buffered writes should trickle to the drive, not come in one burst"
    [sysctl.vm.dirty_bytes]="bounds the burst of buffered writes that a durable write of the broker waits behind"
    [sysctl.kernel.numa_balancing]="it takes pages from pinned shards to learn what they use, and each take is a page fault"
    [sysctl.fs.nr_open]="LimitNOFILE of the unit cannot be above it"
    [limit.memlock]="registered buffers count as locked memory; under 512 KiB the broker does not start"
    [limit.nofile]="each connection and each segment file is a descriptor"
    [thp.enabled]="huge pages for everything grow resident memory, and their making stalls a shard for milliseconds"
    [thp.defrag]="with always, a page fault may compact memory before it returns"
    [block.scheduler]="a drive with queues of its own gains nothing from a scheduler; it costs a lock and reorders the WAL"
    [block.poll_queues]="shards wait for interrupts or spin in user space, never with IOPOLL: polled queues stay empty"
    [irq.default_affinity]="where interrupts of devices that come later go"
    [irq.affinity]="a foreign device's interrupt stops the shard on that CPU for microseconds"
    [cpu.governor]="a clock that has to ramp up first makes the first request after a pause slow"
    [cpu.idle]="waking from a deep idle state takes longer than a durable write of a fast drive"
    [boot.isolcpus]="the scheduler puts no other thread on the shard CPUs"
    [boot.nohz_full]="no timer tick on a CPU that runs a single thread"
    [boot.rcu_nocbs]="clean-up work of the kernel runs on other CPUs"
)

# key, rule, wanted. Rules: exactly; at-least; at-most; third-at-least for "min default max". The `dirty` ones are
# handled on their own, being pairs with a percentage.
SYSCTLS=(
    "net.core.somaxconn at-least 4096"
    "net.ipv4.tcp_max_syn_backlog at-least 4096"
    "net.core.rmem_max at-least 4194304"
    "net.core.wmem_max at-least 4194304"
    "net.ipv4.tcp_rmem third-at-least 16777216"
    "net.ipv4.tcp_wmem third-at-least 16777216"
    "vm.swappiness at-most 1"
    "kernel.numa_balancing exactly 0"
    "fs.nr_open at-least 65536"
)
DIRTY=("background_bytes 67108864" "bytes 268435456")
MEMLOCK_BYTES_MIN=524288        # the broker refuses below
MEMLOCK_BYTES=67108864
MEMLOCK_THREAD_BYTES=16777216   # of each shard and of the control thread: the kernel charges whole huge pages
NOFILE=65536

# ---- one value: read, check, write ----

# A CPU instance such as cpu12, an interrupt's number, a device's name: nothing that leaves its directory.
valid_name() {
    case "$1" in
        sysctl.*)
            local known
            for known in "${SETTING_IDS[@]}"; do [ "$known" != "$1" ] || return 0; done
            return 1 ;;
        block.scheduler/*) [[ ${1#*/} =~ ^[A-Za-z0-9][A-Za-z0-9_.!-]*$ ]] ;;
        irq.affinity/*) is_number "${1#*/}" ;;
        cpu.governor/*) [[ ${1#*/} =~ ^cpu[0-9]{1,5}$ ]] ;;
        cpu.idle/*) [[ ${1#*/} =~ ^cpu[0-9]{1,5}/state[0-9]{1,2}$ ]] ;;
        irq.default_affinity | thp.enabled | thp.defrag) return 0 ;;
        *) return 1 ;;
    esac
}

# Could the kernel have said this? Keeps a damaged state file out of kernel files.
valid_value() {
    case "$1" in
        sysctl.vm.dirty_*) [[ $2 =~ ^[0-9]{1,19}%?$ ]] ;;
        sysctl.net.ipv4.tcp_[rw]mem) [[ $2 =~ ^[0-9]{1,10}\ [0-9]{1,10}\ [0-9]{1,10}$ ]] ;;
        sysctl.*) [[ $2 =~ ^-?[0-9]{1,19}$ ]] ;;
        irq.*) [ -n "$2" ] && cpus_parse "$2" ;;
        cpu.idle/*) [[ $2 =~ ^[01]$ ]] ;;
        *) [[ $2 =~ ^[a-z0-9_+-]{1,40}$ ]] ;;
    esac
}

# The file of a setting, in REPLY.
setting_path() {
    local rest=${1#*/}
    case "$1" in
        sysctl.*) rest=${1#sysctl.}; REPLY=/proc/sys/${rest//.//} ;;
        block.scheduler/*) REPLY=/sys/block/$rest/queue/scheduler ;;
        irq.default_affinity) REPLY=/proc/irq/default_smp_affinity ;;
        irq.affinity/*) REPLY=/proc/irq/$rest/smp_affinity_list ;;
        cpu.governor/*) REPLY=/sys/devices/system/cpu/$rest/cpufreq/scaling_governor ;;
        cpu.idle/*) REPLY=/sys/devices/system/cpu/${rest%/*}/cpuidle/${rest#*/}/disable ;;
        thp.*) REPLY=/sys/kernel/mm/transparent_hugepage/${1#thp.} ;;
        *) return 1 ;;
    esac
    REPLY=$ROOT$REPLY
}

# What a setting is now, in REPLY. Fails when this kernel does not have it, or it cannot be read.
setting_read() {
    setting_path "$1" || return 1
    local path=$REPLY
    case "$1" in
        sysctl.vm.dirty_*)
            # Two files for one thing: the one that is not in force reads 0.
            read_line "$path" || return 1
            [ "$REPLY" = 0 ] || return 0
            read_line "${path%bytes}ratio" || return 1
            REPLY+=% ;;
        block.scheduler/* | thp.*) read_choice "$path" ;;
        irq.default_affinity) read_line "$path" && mask_cpus "$REPLY" && cpus_format "$REPLY" ;;
        irq.affinity/*) read_line "$path" && cpus_parse "$REPLY" && cpus_format "$REPLY" ;;
        *) read_line "$path" ;;
    esac
}

# Writes $2 to setting $1. On failure REPLY is the system's word for it.
setting_write() {
    setting_path "$1" || return 1
    local path=$REPLY value=$2 other=
    case "$1" in
        sysctl.vm.dirty_*)
            other=${path%bytes}ratio
            case "$value" in *%) other=$path path=${path%bytes}ratio value=${value%\%} ;; esac ;;
        irq.default_affinity) cpus_parse "$value"; cpus_mask "$REPLY"; value=$REPLY ;;
    esac
    # One write(2), as the kernel wants it. The subshell is there for its error message.
    if ! REPLY=$( { printf '%s\n' "$value" >"$path"; } 2>&1); then
        REPLY=${REPLY##*: }
        return 1
    fi
    # The kernel clears the other of the two by itself; a plain directory of files does not.
    if [ -n "$ROOT" ] && [ -n "$other" ]; then printf '0\n' >"$other"; fi
}

# ---- rows: what was found ----

# Status: ok; warn and fail want a change; hint is worth a thought, and only a person or a restart can do it; skip
# could not or should not be judged. CHANGE holds the value that apply would write.
ROW_NAME=() ROW_STATUS=() ROW_NOW=() ROW_WANTED=() ROW_CHANGE=() ROW_NOTE=()

# name, status, now, wanted, value to write, note
row() {
    wanted_setting "$1" || return 0
    ROW_NAME+=("$1") ROW_STATUS+=("$2") ROW_NOW+=("$3") ROW_WANTED+=("$4") ROW_CHANGE+=("${5-}") ROW_NOTE+=("${6-}")
}

sysctl_rows() {
    local entry key rule wanted now words show good
    io_uring_rows
    for entry in "${SYSCTLS[@]}"; do
        read -r key rule wanted <<<"$entry"
        if ! setting_read "sysctl.$key"; then
            row "sysctl.$key" skip "" "" "" "this kernel has no $key, or hides it from here"
            continue
        fi
        now=$REPLY show=$wanted
        read -ra words <<<"$now"
        if [ "$rule" = third-at-least ]; then
            if [ ${#words[@]} -ne 3 ] || ! is_number "${words[2]}"; then
                row "sysctl.$key" skip "$now" "" "" "three numbers were expected"; continue
            fi
            show="at least $wanted for the third"
            if [ "${words[2]}" -ge "$wanted" ]; then row "sysctl.$key" ok "$now" "$show"
            else row "sysctl.$key" warn "$now" "$show" "${words[0]} ${words[1]} $wanted"; fi
            continue
        fi
        if ! is_number "$now"; then row "sysctl.$key" skip "$now" "" "" "a number was expected"; continue; fi
        case "$rule" in
            at-least) show="at least $wanted"; good=$((now >= wanted)) ;;
            at-most) show="at most $wanted"; good=$((now <= wanted)) ;;
            *) good=$((now == wanted)) ;;
        esac
        if [ "$good" = 1 ]; then row "sysctl.$key" ok "$now" "$show"
        elif [ "$key" = kernel.numa_balancing ] && ! several_memory_nodes; then
            row "sysctl.$key" ok "$now" "" "" "one memory node: it has nothing to move"
        else row "sysctl.$key" warn "$now" "$show" "$wanted"; fi
    done
    dirty_rows
}

# Does more than one memory node have CPUs?
several_memory_nodes() {
    local file count=0
    for file in "$ROOT"/sys/devices/system/node/node*/cpulist; do
        if read_line "$file" && [ -n "$REPLY" ]; then count=$((count + 1)); fi
    done
    [ "$count" -gt 1 ]
}

io_uring_rows() {
    local disabled group name=sysctl.kernel.io_uring_disabled
    if ! setting_read "$name"; then
        row "$name" skip "" 0 "" "kernels before 6.6 have no such switch; whether io_uring works, narad serve tells"
        return
    fi
    disabled=$REPLY
    setting_read sysctl.kernel.io_uring_group || REPLY=-1
    group=$REPLY
    if [ -n "$IO_URING_GROUP" ]; then
        # The group first: in the other order the broker is locked out in between.
        if [ "$group" = "$IO_URING_GROUP" ]; then row sysctl.kernel.io_uring_group ok "$group" "$IO_URING_GROUP"
        else row sysctl.kernel.io_uring_group warn "$group" "$IO_URING_GROUP" "$IO_URING_GROUP"; fi
        if [ "$disabled" = 1 ]; then row "$name" ok 1 1
        else row "$name" warn "$disabled" 1 1 "with --io-uring-group only that group may use io_uring"; fi
    elif [ "$disabled" = 0 ]; then row "$name" ok 0 0
    elif [ "$disabled" = 1 ] && [ "$group" != -1 ]; then
        row "$name" ok "$disabled" "0, or 1 with a group" "" "only group $group may use io_uring: the broker's user must be in it"
    else row "$name" fail "$disabled" 0 0 "or keep it at 1 and name the broker's group: --io-uring-group GID"
    fi
}

dirty_rows() {
    local entry key wanted now bytes total=
    # A percentage is of available memory, which is at most all of it.
    if [ -r "$ROOT/proc/meminfo" ]; then
        while read -r key bytes _; do
            if [ "$key" = MemTotal: ]; then total=$bytes; break; fi
        done <"$ROOT/proc/meminfo"
    fi
    for entry in "${DIRTY[@]}"; do
        read -r key wanted <<<"$entry"
        key=sysctl.vm.dirty_$key
        if ! setting_read "$key"; then row "$key" skip "" "" "" "this kernel hides it from here"; continue; fi
        now=$REPLY
        case "$now" in
            *%)
                if ! is_number "$total"; then row "$key" skip "$now" "" "" "/proc/meminfo is not there to tell what $now is"; continue; fi
                bytes=$((total * 1024 * ${now%\%} / 100)) ;;
            *) bytes=$now ;;
        esac
        if [ "$bytes" -le "$wanted" ]; then row "$key" ok "$now" "at most $wanted bytes"
        else row "$key" warn "$now" "at most $wanted bytes" "$wanted"; fi
    done
}

# Limits belong to a process, so they are looked up where the broker runs; who starts it has to set them.
limit_rows() {
    local pid pids=()
    processes_named narad
    for pid in $REPLY; do is_broker "$pid" && pids+=("$pid"); done
    if [ ${#pids[@]} = 0 ]; then
        limit_row limit.memlock self "Max locked memory" hint
        limit_row limit.nofile self "Max open files" hint
        return
    fi
    for pid in "${pids[@]}"; do
        limit_row "limit.memlock/$pid" "$pid" "Max locked memory" warn
        limit_row "limit.nofile/$pid" "$pid" "Max open files" warn
    done
}

# name, process, title in /proc/*/limits, status when too low
limit_row() {
    local name=$1 id=${1%/*} line words now wanted=$NOFILE low=$4 found=no whose="this shell's; no broker is running"
    [ "$2" = self ] || whose="of broker process $2"
    local fix="set LimitNOFILE= in narad.service, or copy limits/narad.conf"
    if [ "$id" = limit.memlock ]; then
        wanted=$MEMLOCK_BYTES fix=${fix/NOFILE/MEMLOCK}
        read -ra words <<<"$CPUS"
        now=$(((${#words[@]} + 1) * MEMLOCK_THREAD_BYTES))
        [ "$now" -le "$wanted" ] || wanted=$now
    fi
    if [ -r "$ROOT/proc/$2/limits" ]; then
        while IFS= read -r line; do
            case "$line" in "$3"*) found=yes; break ;; esac
        done <"$ROOT/proc/$2/limits"
    fi
    if [ "$found" = no ]; then row "$name" skip "" "" "" "cannot read $ROOT/proc/$2/limits"; return; fi
    line=${line#"$3"}
    read -ra words <<<"$line"
    now=${words[1]}   # the hard limit: the broker raises its own soft one
    if [ "$now" = unlimited ] || { is_number "$now" && [ "$now" -ge "$wanted" ]; }; then
        row "$name" ok "$now" "at least $wanted" "" "$whose"
    else
        if [ "$id" = limit.memlock ] && [ "$low" = warn ] && is_number "$now" && [ "$now" -lt "$MEMLOCK_BYTES_MIN" ]; then low=fail; fi
        row "$name" "$low" "$now" "at least $wanted" "" "$whose: $fix"
    fi
}

thp_rows() {
    local name
    for name in thp.enabled thp.defrag; do
        if ! setting_read "$name"; then row "$name" skip "" "" "" "this kernel has no transparent huge pages"; continue; fi
        if [ "$REPLY" = always ]; then row "$name" warn always "anything but always" madvise
        else row "$name" ok "$REPLY" "anything but always"; fi
    done
}

block_rows() {
    local drive name now wanted
    if [ -n "$DRIVES_WHY_NOT" ]; then row block.scheduler skip "" none "" "$DRIVES_WHY_NOT"; fi
    for drive in "${DRIVES[@]}"; do
        name=block.scheduler/$drive wanted=none
        if ! setting_read "$name"; then row "$name" skip "" "" "" "$drive has no scheduler to choose"; continue; fi
        now=$REPLY
        if [ -n "$SCHEDULER" ]; then
            wanted=$SCHEDULER
            if [[ " $CHOICES " != *" $wanted "* ]]; then
                row "$name" skip "$now" "$wanted" "" "the kernel offers $CHOICES for $drive"; continue
            fi
        elif [[ $drive != nvme* ]]; then
            row "$name" skip "$now" "" "" "$drive is not an NVMe drive: measure both with narad-bench device, then say --scheduler NAME"
            continue
        fi
        if [ "$now" = "$wanted" ]; then row "$name" ok "$now" "$wanted"; else row "$name" warn "$now" "$wanted" "$wanted"; fi
    done
    if read_line "$ROOT/sys/module/nvme/parameters/poll_queues"; then
        if [ "$REPLY" = 0 ]; then row block.poll_queues ok 0 0
        else row block.poll_queues hint "$REPLY" 0 "" "remove nvme.poll_queues from the boot parameters, unless another program polls"; fi
    else row block.poll_queues skip "" 0 "" "no NVMe driver is loaded"; fi
}

irq_rows() {
    local why='' directory number wanted names entry
    find_housekeeping
    if [ -z "$CPUS" ]; then why="give --cpus"
    elif [ "$ENVIRONMENT" != bare-metal ]; then why=$NOT_BARE_METAL
    elif [ -z "$HOUSEKEEPING" ]; then why="--cpus takes every CPU that is online: leave at least one for interrupts"
    else
        processes_named irqbalance
        [ -z "$REPLY" ] || why="irqbalance (process $REPLY) would move them back: stop it, or give it IRQBALANCE_BANNED_CPULIST"
    fi
    if [ -n "$why" ]; then
        row irq.default_affinity skip "" "" "" "$why"
        row irq.affinity skip "" "" "" "$why"
        return
    fi
    if setting_read irq.default_affinity; then off_shards irq.default_affinity "$REPLY" ""
    else row irq.default_affinity skip "" "" "" "the kernel does not show it here"; fi
    # An interrupt that the kernel places itself: newer kernels make its file read-only, for root too; on others the
    # name of an NVMe queue tells, or the refused write.
    local -A fixed=()
    while read -r entry names; do
        (((8#$entry & 8#200) != 0)) || fixed[$names]=yes
    done < <(stat -c '%a %n' "$ROOT"/proc/irq/[0-9]*/smp_affinity_list 2>/dev/null)
    for directory in "$ROOT"/proc/irq/[0-9]*; do
        number=${directory##*/} names=
        for entry in "$directory"/*/; do
            [ -d "$entry" ] || continue
            entry=${entry%/}
            names+=" ${entry##*/}"
        done
        # Nobody's interrupt never comes.
        [ -n "$names" ] || continue
        names=${names# }
        if [ -n "${fixed[$directory/smp_affinity_list]-}" ] || [[ " $names " =~ \ nvme[0-9]+q[1-9][0-9]*\  ]]; then
            # One queue a CPU; completions arrive where the write was submitted, which is what a shard wants.
            row "irq.affinity/$number" ok "" "" "" "$names: placed by the kernel"
        elif setting_read "irq.affinity/$number"; then off_shards "irq.affinity/$number" "$REPLY" "$names"
        else row "irq.affinity/$number" skip "" "" "" "$names: cannot be read"; fi
    done
}

# name, CPUs now, devices: an interrupt keeps those of its CPUs that are not a shard's, or gets all of the others.
off_shards() {
    local now wanted
    cpus_parse "$2"; now=$REPLY
    cpus_common "$now" "$CPUS"
    if [ -z "$REPLY" ]; then row "$1" ok "$2" "off the shard CPUs" "" "$3"; return; fi
    cpus_common "$now" "$HOUSEKEEPING"
    [ -n "$REPLY" ] || REPLY=$HOUSEKEEPING
    cpus_format "$REPLY"; wanted=$REPLY
    row "$1" warn "$2" "$wanted" "$wanted" "$3"
}

cpu_rows() {
    local cpu directory state latency name label
    if [ -z "$CPUS" ] || [ "$ENVIRONMENT" != bare-metal ]; then
        label=${CPUS:+$NOT_BARE_METAL}
        row cpu.governor skip "" performance "" "${label:-give --cpus}"
        row cpu.idle skip "" "" "" "${label:-give --cpus}"
        return
    fi
    for cpu in $CPUS; do
        directory=$ROOT/sys/devices/system/cpu/cpu$cpu
        name=cpu.governor/cpu$cpu
        if ! setting_read "$name"; then
            row "$name" skip "" performance "" "no frequency driver: the firmware governs the clock"
        elif [ "$REPLY" = performance ]; then row "$name" ok "$REPLY" performance
        else
            label=$REPLY
            read_line "$directory/cpufreq/scaling_available_governors" || REPLY=
            if [[ " $REPLY " == *" performance "* ]]; then row "$name" warn "$label" performance performance
            else row "$name" skip "$label" performance "" "the driver offers ${REPLY:-nothing}"; fi
        fi
        if [ ! -d "$directory/cpuidle" ]; then
            row "cpu.idle/cpu$cpu" skip "" "" "" "no idle driver: the firmware or boot parameters decide"; continue
        fi
        for state in "$directory"/cpuidle/state*; do
            name=cpu.idle/cpu$cpu/${state##*/}
            read_line "$state/name" || REPLY="?"
            label=$REPLY
            if ! read_line "$state/latency" || ! is_number "$REPLY"; then
                row "$name" skip "" "" "" "$label does not say how long it takes to wake from it"; continue
            fi
            latency=$REPLY
            setting_read "$name" || { row "$name" skip "" "" "" "$label cannot be read"; continue; }
            if [ "$latency" -le "$IDLE_US_MAX" ] || [ "$REPLY" = 1 ]; then row "$name" ok "$REPLY" "" "" "$label, $latency us"
            elif [ "$REPLY" = 0 ]; then row "$name" warn 0 1 1 "$label takes $latency us to wake from, over --idle-us-max $IDLE_US_MAX"
            else row "$name" skip "$REPLY" "" "" "0 or 1 was expected"; fi
        done
    done
}

# Never changed here: a wrong boot parameter is found out at the next start, by a person at the console.
boot_rows() {
    local name word value text=no flags
    if [ -z "$CPUS" ] || [ "$ENVIRONMENT" != bare-metal ]; then
        value=${CPUS:+$NOT_BARE_METAL}
        for name in isolcpus nohz_full rcu_nocbs; do row "boot.$name" skip "" "" "" "${value:-give --cpus}"; done
        return
    fi
    read_line "$ROOT/proc/cmdline" && text=$REPLY
    cpus_format "$CPUS"; local wanted=$REPLY
    for name in isolcpus nohz_full rcu_nocbs; do
        if [ "$text" = no ]; then row "boot.$name" skip "" "$wanted" "" "cannot read /proc/cmdline"; continue; fi
        value=
        for word in $text; do case "$word" in "$name"=*) value=${word#*=} ;; esac; done
        # isolcpus may begin with words, and then isolates from the scheduler only if one of them is domain.
        flags=$value
        case "$name,$flags," in isolcpus,[a-z]*) [[ ,$flags == *,domain,* ]] || flags= ;; esac
        while [[ $flags =~ ^[a-z_]+, ]]; do flags=${flags#*,}; done
        if [ -n "$flags" ] && cpus_parse "$flags"; then
            cpus_minus "$CPUS" "$REPLY"
            if [ -z "$REPLY" ]; then row "boot.$name" ok "$value" "$wanted"; continue; fi
        fi
        flags=
        [ "$name" != isolcpus ] || flags=domain,
        row "boot.$name" hint "${value:-absent}" "$wanted" "" "add to the boot parameters: $name=$flags$wanted"
    done
}

# Everything that was found.
find_rows() {
    NOT_BARE_METAL="this is a virtual machine ($ENVIRONMENT_WHY): tune the host, or say --environment bare-metal if each CPU here is a core of your own"
    [ "$ENVIRONMENT" != container ] || NOT_BARE_METAL="this is a container ($ENVIRONMENT_WHY): look on the host"
    [ "$ENVIRONMENT" != unknown ] || NOT_BARE_METAL="cannot tell whether this is a virtual machine: $ENVIRONMENT_WHY"
    choose_drives
    sysctl_rows
    limit_rows
    thp_rows
    block_rows
    irq_rows
    cpu_rows
    boot_rows
}
