//! Scripts: destinations that fail, hang or die, and the way of skipped records back.

use crate::dispatch::core::{Limits, COMMITS_MAX, PROBES_MAX};
use crate::dispatch::tests::script::{run, Script};

#[test]
fn lesson_n23_1_hung_owner_stalls_nobody_else() {
    let mut script = Script::new(Limits::default());
    let addresses = (0..20).map(|p| if p < 17 { "7/0" } else { "0/0" }).collect::<Vec<_>>().join(",");
    script.command(&format!("topic orders 1 20 on {addresses}"));
    let mut sent = Vec::new();
    for partition in 0..19 {
        sent.extend(script.command(&format!("append {} orders/{partition}", partition + 1)));
    }
    assert_eq!(sent.len(), 16, "all slots are taken by the owner that will hang");
    script.check(
        "
        append 20 orders/0
        tick 999ms
        state
        > checkpoint 1 held 20 skipped 0 lanes 19 timer yes
        # a second without an answer: the slots are free again, what queued behind goes back to the WAL
        tick 1ms
        > hung orders/0 1
        > hung orders/1 1
        > hung orders/2 1
        > hung orders/3 1
        > hung orders/4 1
        > hung orders/5 1
        > hung orders/6 1
        > hung orders/7 1
        > hung orders/8 1
        > hung orders/9 1
        > hung orders/10 1
        > hung orders/11 1
        > hung orders/12 1
        > hung orders/13 1
        > hung orders/14 1
        > hung orders/15 1
        > commit orders/16 [17] to 7/0 (30s)
        > commit orders/17 [18] to 0/0 (30s)
        > commit orders/18 [19] to 0/0 (30s)
        state
        > checkpoint 1 held 3 skipped 1 lanes 19 timer yes
        # it takes no new records until it lands
        append 21 orders/0
        ok orders/17
        ok orders/18
        ok orders/0
        > rescan 20
        > checkpoint 2
        ",
    );
    script.check(
        "
        state
        > checkpoint 2 held 3 skipped 0 lanes 19 timer yes
        ok orders/16
        tick 50ms
        > commit orders/0 [20-21] to 7/0 (30s)
        ",
    );
}

#[test]
fn probes_that_hang_leave_half_of_the_slots_to_those_that_are_well() {
    let mut script = Script::new(Limits::default());
    let addresses = (0..60).map(|p| if p < 20 { "7/0" } else { "0/0" }).collect::<Vec<_>>().join(",");
    script.command(&format!("topic orders 1 60 on {addresses}"));
    let commits = |lines: Vec<String>| lines.iter().filter(|line| line.contains("commit orders/")).count();
    for partition in 0..20 {
        script.command(&format!("append {} orders/{partition}", partition + 1));
    }
    (0..20).for_each(|partition| drop(script.command(&format!("fail orders/{partition}"))));
    // Twenty are due to be asked again, and nobody answers.
    assert_eq!(commits(script.command("tick 1s")), PROBES_MAX);
    // Half of the slots are left, whatever hangs.
    let well: usize = (20..40).map(|p| commits(script.command(&format!("append {} orders/{p}", p + 1)))).sum();
    assert_eq!(well, COMMITS_MAX - PROBES_MAX);
    for partition in 20..40 {
        script.command(&format!("ok orders/{partition}"));
    }
    // The first eight are hung and have given their slots back: it is the turn of the next eight.
    assert_eq!(commits(script.command("tick 1s")), PROBES_MAX);
}

#[test]
fn lesson_n23_2_failing_destination_waits_alone() {
    run("
        topic orders 1 2 on 0/0,0/1
        append 1-3 orders/0
        > commit orders/0 [1-3] to 0/0 (30s)
        append 4-5 orders/0
        fail orders/0
        > failing orders/0 no space
        # one record is kept as the probe, the rest is left in the WAL
        state
        > checkpoint 1 held 1 skipped 4 lanes 1 timer yes
        append 6 orders/1
        > commit orders/1 [6] to 0/1 (30s)
        ok orders/1
        tick 999ms
        # alone, with a small budget, once a second
        tick 1ms
        > commit orders/0 [1] to 0/0 (5s)
        fail orders/0
        tick 1s
        > commit orders/0 [1] to 0/0 (5s)
        ok orders/0
        > recovered orders/0
        > rescan 2
        > checkpoint 2
        > commit orders/0 [2-5] to 0/0 (30s)
        ok orders/0
        > checkpoint 7
        state
        > checkpoint 7 held 0 skipped 0 lanes 2 timer no
    ");
}

#[test]
fn a_failing_destination_is_rerouted_3_s_after_its_first_failed_attempt_began() {
    run("
        topic orders 1 3 on 0/0,0/1,0/2
        append 1-2 orders/0
        > commit orders/0 [1-2] to 0/0 (30s)
        tick 900ms
        fail orders/0
        > failing orders/0 no space
        tick 1s
        > commit orders/0 [1] to 0/0 (5s)
        fail orders/0
        tick 1s
        > commit orders/0 [1] to 0/0 (5s)
        # the grace is over while the probe is in flight: a record in flight is neither sent again nor rerouted
        tick 99ms
        tick 1ms
        > rerouting orders/0
        > rescan 2
        > commit orders/1 [2] to 0/1 (30s)
        append 3 orders/0
        ok orders/1
        > commit orders/1 [3] to 0/1 (30s)
        # a probe that fails now follows the others; the next record probes
        fail orders/0
        ok orders/1
        > commit orders/1 [1] to 0/1 (30s)
        append 4 orders/0
        ok orders/1
        > commit orders/1 [4] to 0/1 (30s)
        > checkpoint 4
        ok orders/1
        > checkpoint 5
        tick 1s
        append 5-6 orders/0
        > commit orders/0 [5] to 0/0 (5s)
        > commit orders/1 [6] to 0/1 (30s)
        # and brings the records back the moment the original recovers
        ok orders/0
        > recovered orders/0
        > checkpoint 6
        append 7 orders/0
        > commit orders/0 [7] to 0/0 (30s)
        ok orders/1
        > checkpoint 7
    ");
}

#[test]
fn a_probe_that_hangs_is_not_reported_again() {
    run("
        topic orders 1 1 on 7/0
        append 1 orders/0
        > commit orders/0 [1] to 7/0 (30s)
        tick 1s
        > hung orders/0 1
        fail orders/0
        > failing orders/0 no space
        tick 1s
        > commit orders/0 [1] to 7/0 (5s)
        tick 1s
        > rerouting orders/0
        fail orders/0
        tick 1s
        > commit orders/0 [1] to 7/0 (5s)
        tick 1s
    ");
}

#[test]
fn a_sibling_that_fails_or_hangs_is_passed_over() {
    run("
        topic orders 1 4 on 0/0,0/1,0/2,0/3
        append 1 orders/3
        > commit orders/3 [1] to 0/3 (30s)
        append 2 orders/0
        > commit orders/0 [2] to 0/0 (30s)
        append 3 orders/1
        > commit orders/1 [3] to 0/1 (30s)
        # 1 fails, 3 fails, 0 hangs: the records of 3 wrap around to 2
        fail orders/1
        > failing orders/1 no space
        fail orders/3
        > failing orders/3 no space
        append 4 orders/3
        tick 1s
        > hung orders/0 1
        > commit orders/3 [1] to 0/3 (5s)
        > commit orders/1 [3] to 0/1 (5s)
        fail orders/3
        fail orders/1
        tick 1s
        > commit orders/3 [1] to 0/3 (5s)
        > commit orders/1 [3] to 0/1 (5s)
        fail orders/3
        fail orders/1
        tick 999ms
        tick 1ms
        > rerouting orders/3
        > rerouting orders/1
        > commit orders/3 [1] to 0/3 (5s)
        > commit orders/1 [3] to 0/1 (5s)
        > rescan 4
        > commit orders/2 [4] to 0/2 (30s)
    ");
}

#[test]
fn a_dead_owner_is_rerouted_at_once_and_gets_its_records_back_when_it_lives() {
    run("
        topic orders 1 3 on 7/0,7/1,0/2
        append 1 orders/0
        > commit orders/0 [1] to 7/0 (30s)
        append 2 orders/0
        dead 7
        > rescan 2
        > commit orders/2 [2] to 0/2 (30s)
        append 3 orders/1
        ok orders/2
        > commit orders/2 [3] to 0/2 (30s)
        # the commit in flight ends when its connection does; its records go the same way
        unreachable orders/0
        > failing orders/0 no answer from the owner: connection lost
        > rerouting orders/0
        append 4 orders/0
        ok orders/2
        > commit orders/2 [1 4] to 0/2 (30s)
        alive 7
        append 5-6 orders/0
        > commit orders/0 [5] to 7/0 (5s)
        ok orders/0
        > recovered orders/0
        > rescan 6
        > commit orders/0 [6] to 7/0 (30s)
    ");
}

#[test]
fn a_dead_owner_without_a_living_sibling_is_tried_all_the_same() {
    run("
        topic orders 1 2 on 7/0,7/1
        dead 7
        append 1 orders/0
        > commit orders/0 [1] to 7/0 (30s)
        fail orders/0
        > failing orders/0 no space
        > rerouting orders/0
    ");
}

#[test]
fn a_hung_commit_fails_when_its_budget_is_spent_and_a_late_answer_is_believed() {
    run("
        topic orders 1 2 on 7/0,7/1
        append 1-3 orders/0
        > commit orders/0 [1-3] to 7/0 (30s)
        tick 1s
        > hung orders/0 3
        append 4 orders/0
        tick 28s
        # nothing is rerouted while the outcome is open; at the end of the budget the grace has long passed
        tick 1s
        > failing orders/0 no answer within 30 s
        > rerouting orders/0
        > commit orders/1 [1] to 7/1 (30s)
        > rescan 2
        state
        > checkpoint 1 held 4 skipped 0 lanes 2 timer yes
        # E21: the answer ends the loan and spares what has not been sent again
        ok orders/0 late
        > recovered orders/0
        > checkpoint 4
        ok orders/1
        > commit orders/1 [4] to 7/1 (30s)
    ");
}

#[test]
fn skipped_records_come_back_in_wal_order() {
    run("
        topic orders 1 1 on 0/0
        append 1-2 orders/0
        > commit orders/0 [1-2] to 0/0 (30s)
        fail orders/0
        > failing orders/0 no space
        # behind a skipped record of its partition, every later one is skipped
        append 3-4 orders/0
        state
        > checkpoint 1 held 1 skipped 3 lanes 1 timer yes
        tick 1s
        > commit orders/0 [1] to 0/0 (5s)
        ok orders/0
        > recovered orders/0
        > rescan 2
        > checkpoint 2
        > commit orders/0 [2-4] to 0/0 (30s)
    ");
}

#[test]
fn records_left_in_the_wal_are_read_at_least_once_a_second() {
    run("
        topic orders 1 1 on 0/0
        append 1-2 orders/0
        > commit orders/0 [1-2] to 0/0 (30s)
        mismatch orders/0
        > refused orders/0 2
        # not failing, and no failure backoff: the next rescan places them again
        state
        > checkpoint 1 held 0 skipped 2 lanes 1 timer yes
        append 3 orders/0
        tick 999ms
        tick 1ms
        > rescan 1
        > commit orders/0 [1-3] to 0/0 (30s)
        ok orders/0
        > checkpoint 4
        state
        > checkpoint 4 held 0 skipped 0 lanes 1 timer no
    ");
}

#[test]
fn a_refused_batch_goes_back_with_what_queued_behind_it() {
    run("
        topic orders 1 2 on 0/0,0/1
        append 1-2 orders/0
        > commit orders/0 [1-2] to 0/0 (30s)
        append 3-4 orders/0
        mismatch orders/0
        > refused orders/0 4
        # the local replica catches up: another incarnation has the name
        topic orders 2 2 on 0/0,0/1
        > rescan 1
        > ask orders 1
        gone orders 1
        > rescan 1
        > discarded orders 1/0 seq 1 replaced
        > discarded orders 1/0 seq 2 replaced
        > discarded orders 1/0 seq 3 replaced
        > discarded orders 1/0 seq 4 replaced
        > checkpoint 5
        state
        > checkpoint 5 held 0 skipped 0 lanes 0 timer no
    ");
}

#[test]
fn the_dispatcher_rests_for_a_second_when_the_wal_cannot_be_read() {
    run("
        topic orders 1 1 on 0/0
        disk
        read-error
        append 1-2 orders/0
        > disk 1
        append 3 orders/0
        tick 999ms
        tick 1ms
        > disk 1
        > commit orders/0 [1-3] to 0/0 (30s)
        ok orders/0
        > checkpoint 4
        # it never steps over a durable record that is not handed over
        hole
        append 4-5 orders/0
        > disk 4
        > missing 4
        state
        > checkpoint 4 held 0 skipped 0 lanes 1 timer yes
        tick 1s
        > disk 4
        > commit orders/0 [4-5] to 0/0 (30s)
    ");
}

#[test]
fn a_failed_rescan_is_tried_again() {
    run("
        topic orders 1 1 on 0/0
        append 1-2 orders/0
        > commit orders/0 [1-2] to 0/0 (30s)
        mismatch orders/0
        > refused orders/0 2
        read-error
        tick 1s
        > rescan 1
        tick 1s
        > rescan 1
        > commit orders/0 [1-2] to 0/0 (30s)
    ");
}

#[test]
fn a_commit_of_fewer_records_than_were_sent_is_no_success() {
    let mut script = run("
        topic orders 1 1 on 0/0
        append 1-2 orders/0
        > commit orders/0 [1-2] to 0/0 (30s)
    ");
    script.miscount();
    script.check(
        "
        ok orders/0
        > failing orders/0 the owner committed 1 of 2 records
        ",
    );
}
