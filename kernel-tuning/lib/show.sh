# shellcheck shell=bash
# Rows for people and for programs. Sourced, not run.

row_id() { REPLY=${ROW_NAME[$1]%%/*}; }

declare -A EXPLAINED=()     # settings whose reason was shown already: once is enough for a hundred CPUs

# name of the setting, indentation
explain() {
    [ -z "${EXPLAINED[$1]+yes}" ] || return 0
    EXPLAINED[$1]=yes
    say "$2${WHY[$1]}"
}

# setting, now, wanted, why
show_change() {
    row_id "$1"
    say "change  ${ROW_NAME[$1]}: ${ROW_NOW[$1]} -> ${ROW_CHANGE[$1]}${ROW_NOTE[$1]:+   (${ROW_NOTE[$1]})}"
    explain "$REPLY" "        "
}

# What was not judged, by reason.
show_skipped() {
    local index note reasons=()
    local -A names=() said=()
    for index in "${!ROW_NAME[@]}"; do
        [ "${ROW_STATUS[index]}" = skip ] || continue
        row_id "$index"
        note=${ROW_NOTE[index]}
        [ -n "${names[$note]+known}" ] || reasons+=("$note")
        [ -n "${said[$REPLY $note]+known}" ] || names[$note]+=", $REPLY"
        said[$REPLY $note]=yes
    done
    for note in "${reasons[@]}"; do say "skip    ${names[$note]#, }: $note"; done
}

# What no program should change: limits of processes, boot parameters.
show_by_hand() {
    local index
    for index in "${!ROW_NAME[@]}"; do
        case "${ROW_STATUS[index]}${ROW_CHANGE[index]}" in hint | warn | fail) ;; *) continue ;; esac
        row_id "$index"
        say "by hand ${ROW_NAME[index]}: ${ROW_NOW[index]} -> ${ROW_WANTED[index]}   ${ROW_NOTE[index]}"
        explain "$REPLY" "        "
    done
}

show_table() {
    local index count status name note key
    local -A total=([ok]=0 [warn]=0 [fail]=0 [hint]=0 [skip]=0) alike=() said=()
    for index in "${!ROW_NAME[@]}"; do
        row_id "$index"
        key="$REPLY ${ROW_STATUS[index]} ${ROW_NOTE[index]}"
        [ "${ROW_STATUS[index]}" != ok ] || key="$REPLY ok"
        alike[$key]=$((${alike[$key]:-0} + 1))
    done
    printf '%-5s %-38s %-26s %s\n' STATE SETTING NOW WANTED
    for index in "${!ROW_NAME[@]}"; do
        status=${ROW_STATUS[index]} name=${ROW_NAME[index]} note=${ROW_NOTE[index]}
        total[$status]=$((${total[$status]} + 1))
        row_id "$index"
        # Of a hundred CPUs that are as wanted, one line.
        if [ "$status" = ok ] || [ "$status" = skip ]; then
            key="$REPLY $status $note"
            [ "$status" != ok ] || key="$REPLY ok"
            count=${alike[$key]}
            [ "$count" != 0 ] || continue
            alike[$key]=0
            if [ "$count" -gt 1 ]; then
                printf '%-5s %-38s %s\n' "$status" "$REPLY" "$count of them"
                if [ "$status" = ok ]; then continue; fi
            else printf '%-5s %-38s %-26s %s\n' "$status" "$name" "${ROW_NOW[index]:--}" "${ROW_WANTED[index]:--}"; fi
        else
            printf '%-5s %-38s %-26s %s\n' "$status" "$name" "${ROW_NOW[index]:--}" "${ROW_WANTED[index]:--}"
            explain "$REPLY" "      " 2>&1
        fi
        if [ -n "$note" ] && [ "${said[$note]-}" != "$status" ]; then printf '      %s\n' "$note"; said[$note]=$status; fi
    done
    printf '%s ok, %s warn, %s fail, %s hints, %s skipped\n' \
        "${total[ok]}" "${total[warn]}" "${total[fail]}" "${total[hint]}" "${total[skip]}"
    if [ "${total[warn]}${total[fail]}" != 00 ]; then printf 'to change them: kernel-tuning/apply with the same flags\n'; fi
}

json_string() {
    local text=$1
    text=${text//\\/\\\\}
    text=${text//\"/\\\"}
    REPLY="\"${text//[[:cntrl:]]/ }\""
}

show_json() {
    local index field text separator=$'[\n '
    for index in "${!ROW_NAME[@]}"; do
        row_id "$index"
        local id=$REPLY instance=${ROW_NAME[index]#"$REPLY"}
        text=
        for field in "id=$id" "instance=${instance#/}" "status=${ROW_STATUS[index]}" "now=${ROW_NOW[index]}" \
            "wanted=${ROW_WANTED[index]}" "change=${ROW_CHANGE[index]}" "why=${WHY[$id]}" "note=${ROW_NOTE[index]}"; do
            json_string "${field#*=}"
            text+=",\"${field%%=*}\":$REPLY"
        done
        printf '%s{%s}' "$separator" "${text#,}"
        separator=$',\n '
    done
    [ ${#ROW_NAME[@]} -gt 0 ] || printf '['
    printf '\n]\n'
}
