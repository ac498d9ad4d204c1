//! Commits wait for room at their owner (E41).

use crate::dispatch::core::{Limits, PROBES_MAX};
use crate::dispatch::tests::script::{run, Script};

#[test]
fn e41_a_batch_without_room_at_its_owner_is_queued_and_neither_holds_a_slot_nor_hangs() {
    run("
        topic orders 1 3 on 7/65534,7/65534,0/0
        append 1 orders/0
        > commit orders/0 [1] to 7/65534 (30s)
        full 7/65534
        append 2 orders/1
        append 3 orders/1
        append 4 orders/2
        > commit orders/2 [4] to 0/0 (30s)
        ok orders/2
        state
        > checkpoint 1 held 3 skipped 0 lanes 3 timer yes
        # the one that left hangs; what waits for room does not, however long
        tick 2s
        > hung orders/0 1
        tick 20s
        append 5 orders/1
        state
        > checkpoint 1 held 3 skipped 0 lanes 3 timer yes
        # room comes back: all that has queued leaves at once, with its whole budget
        room 7/65534
        > commit orders/1 [2-3 5] to 7/65534 (30s)
        tick 2s
        > hung orders/1 3
        ok orders/0
        > checkpoint 2
        ok orders/1
        > checkpoint 6
        state
        > checkpoint 6 held 0 skipped 0 lanes 3 timer no
    ");
}

#[test]
fn e41_whoever_has_waited_longest_for_room_asks_first() {
    let script = run("
        topic orders 1 4 on 7/65534,7/65534,7/65534,7/65534
        full 7/65534
        append 1 orders/2
        append 2 orders/0
        append 3 orders/3
        # each waits once, however often the owner has too little for it
        freed 7/65534
        freed 7/65534
        room 7/65534
        > commit orders/2 [1] to 7/65534 (30s)
        > commit orders/0 [2] to 7/65534 (30s)
        > commit orders/3 [3] to 7/65534 (30s)
    ");
    assert_eq!(script.core.metrics().commits_starved, 3);
}

#[test]
fn e41_what_fits_does_not_pass_what_waits_for_room() {
    run("
        topic orders 1 3 on 7/65534,7/65534,0/0
        full 7/65534
        append 1 orders/0
        fits 7/65534
        append 2 orders/1
        append 3 orders/2
        > commit orders/2 [3] to 0/0 (30s)
        room 7/65534
        > commit orders/0 [1] to 7/65534 (30s)
        > commit orders/1 [2] to 7/65534 (30s)
    ");
}

#[test]
fn e41_the_reroute_grace_begins_when_a_batch_leaves_not_while_it_waits_for_room() {
    run("
        topic orders 1 2 on 7/65534,0/0
        full 7/65534
        append 1 orders/0
        tick 4s
        room 7/65534
        > commit orders/0 [1] to 7/65534 (30s)
        tick 500ms
        unreachable orders/0
        > failing orders/0 no answer from the owner: connection lost
        tick 1s
        > commit orders/0 [1] to 7/65534 (5s)
        unreachable orders/0
        append 2 orders/0
        # three seconds after the first attempt began
        tick 1499ms
        > commit orders/0 [1] to 7/65534 (5s)
        unreachable orders/0
        tick 1ms
        > rerouting orders/0
        > rescan 2
        > commit orders/1 [2] to 0/0 (30s)
    ");
}

#[test]
fn e41_a_death_ends_the_wait_for_room() {
    run("
        topic orders 1 2 on 7/65534,0/0
        full 7/65534
        append 1 orders/0
        dead 7
        > rescan 1
        > commit orders/1 [1] to 0/0 (30s)
        ok orders/1
        > checkpoint 2
        # what comes for it later has waited for nothing yet
        alive 7
        room 7/65534
        append 2 orders/0
        > commit orders/0 [2] to 7/65534 (30s)
    ");
}

#[test]
fn e41_what_was_taken_back_has_lost_its_place_in_the_line() {
    let script = run("
        topic orders 1 3 on 7/65534,7/65534,0/0
        append 1 orders/1
        > commit orders/1 [1] to 7/65534 (30s)
        ok orders/1
        > checkpoint 2
        full 7/65534
        append 2 orders/0
        append 3 orders/1
        # the WAL has it back for a while
        staging-low
        tick 1s
        > rescan 2
        room 7/65534
        > commit orders/1 [3] to 7/65534 (30s)
        > commit orders/0 [2] to 7/65534 (30s)
    ");
    assert_eq!(script.core.metrics().commits_starved, 3);
}

/// Partition 8, at 7/0, is a probe that waits for room, and all slots of probes are taken by those at 8/0.
fn a_probe_without_room_and_without_a_slot() -> Script {
    assert_eq!(PROBES_MAX, 8);
    let mut script = Script::new(Limits::default());
    script.quietly(
        "topic orders 1 11 on 8/0,8/0,8/0,8/0,8/0,8/0,8/0,8/0,7/0,7/0,7/0
        append 1 orders/8
        fail orders/8
        full 7/0
        tick 1s",
    );
    for partition in 0..8 {
        script.quietly(&format!("append {} orders/{partition}\nfail orders/{partition}", partition + 2));
    }
    script.quietly("tick 1s");
    assert_eq!(script.core.metrics().commits_in_flight, 8);
    script
}

#[test]
fn e41_a_probe_without_a_slot_keeps_its_place_in_the_line_for_room() {
    a_probe_without_room_and_without_a_slot().check(
        "
        append 10 orders/9
        freed 7/0
        ok orders/0
        > recovered orders/0
        room 7/0
        > commit orders/8 [1] to 7/0 (5s)
        > commit orders/9 [10] to 7/0 (30s)
        ",
    );
}

#[test]
fn e41_a_probe_without_a_slot_holds_up_nobody_who_has_room_and_leaves_with_the_first_slot() {
    a_probe_without_room_and_without_a_slot().check(
        "
        append 10 orders/9
        room 7/0
        > commit orders/9 [10] to 7/0 (30s)
        append 11 orders/10
        > commit orders/10 [11] to 7/0 (30s)
        ok orders/0
        > recovered orders/0
        > commit orders/8 [1] to 7/0 (5s)
        ",
    );
}

#[test]
fn e41_who_is_behind_one_that_leaves_the_line_unsent_asks_at_once() {
    run("
        topic orders 1 3 on 7/0,7/0,0/0
        full 7/0
        append 1 orders/0
        append 2 orders/1
        # it would have fitted, but for the one before it
        fits 7/0
        topic orders 1 3 on 8/0,7/0,0/0
        > commit orders/1 [2] to 7/0 (30s)
        > commit orders/0 [1] to 8/0 (30s)
    ");
}
