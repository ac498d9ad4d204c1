//! One script for each rule of the seed's dispatch stage and each lesson of group 2.

use super::script::{run, Script};
use crate::dispatch::core::{Limits, COMMITS_MAX};

#[test]
fn batching_comes_from_queueing() {
    run("
        topic orders 1 1 on 0/0
        append 1 orders/0
        > commit orders/0 [1] to 0/0 (30s)
        # one commit in flight per destination: what comes meanwhile is the next batch
        append 2-4 orders/0
        append 5-70 orders/0
        ok orders/0
        > commit orders/0 [2-70] to 0/0 (30s)
        > checkpoint 2
        ok orders/0
        > checkpoint 71
        state
        > checkpoint 71 held 0 skipped 0 lanes 1 timer no
    ");
}

#[test]
fn the_checkpoint_never_passes_a_record_that_is_not_committed() {
    run("
        topic orders 1 2 on 0/0,0/1
        append 1 orders/0
        > commit orders/0 [1] to 0/0 (30s)
        append 2 orders/1
        > commit orders/1 [2] to 0/1 (30s)
        ok orders/1
        state
        > checkpoint 1 held 1 skipped 0 lanes 2 timer yes
        ok orders/0
        > checkpoint 3
    ");
}

#[test]
fn e19_an_idle_dispatcher_has_no_timer() {
    run("
        state
        > checkpoint 1 held 0 skipped 0 lanes 0 timer no
        topic orders 1 1 on 0/0
        append 1-3 orders/0
        > commit orders/0 [1-3] to 0/0 (30s)
        ok orders/0
        > checkpoint 4
        state
        > checkpoint 4 held 0 skipped 0 lanes 1 timer no
    ");
}

#[test]
fn a_small_batch_lingers_twice_its_owners_latency_while_others_are_in_flight() {
    run("
        topic orders 1 3 on 0/0,0/1,0/0
        # the first commit to an owner measures its latency: 4 ms for 0/0
        append 1 orders/0
        > commit orders/0 [1] to 0/0 (30s)
        tick 4ms
        ok orders/0
        > checkpoint 2
        # nobody has measured 0/1: at once
        append 2 orders/1
        > commit orders/1 [2] to 0/1 (30s)
        # 0/0 waits for more, from its oldest record on, because orders/1 is in flight
        append 3 orders/0
        tick 6ms
        append 4 orders/0
        tick 1ms
        tick 1ms
        > commit orders/0 [3-4] to 0/0 (30s)
        # 64 records do not wait
        append 5-67 orders/2
        append 68 orders/2
        > commit orders/2 [5-68] to 0/0 (30s)
    ");
}

#[test]
fn lingering_ends_when_nothing_else_is_in_flight() {
    run("
        topic orders 1 3 on 0/0,0/0,0/0
        append 1 orders/0
        > commit orders/0 [1] to 0/0 (30s)
        tick 20ms
        append 2 orders/1
        > commit orders/1 [2] to 0/0 (30s)
        ok orders/0
        > checkpoint 2
        append 3 orders/0
        append 4 orders/2
        ok orders/1
        > commit orders/0 [3] to 0/0 (30s)
        > commit orders/2 [4] to 0/0 (30s)
        > checkpoint 3
    ");
}

#[test]
fn lingering_is_capped_at_50_ms() {
    run("
        topic orders 1 2 on 0/0,0/1
        append 1 orders/0
        > commit orders/0 [1] to 0/0 (30s)
        tick 400ms
        ok orders/0
        > checkpoint 2
        append 2 orders/1
        > commit orders/1 [2] to 0/1 (30s)
        append 3 orders/0
        tick 49ms
        tick 1ms
        > commit orders/0 [3] to 0/0 (30s)
    ");
}

#[test]
fn e19_latency_is_averaged_per_address_so_a_slow_owner_does_not_lengthen_local_lingering() {
    run("
        topic orders 1 3 on 0/0,7/0,7/1
        append 1 orders/0
        > commit orders/0 [1] to 0/0 (30s)
        tick 1ms
        ok orders/0
        > checkpoint 2
        append 2 orders/1
        > commit orders/1 [2] to 7/0 (30s)
        tick 300ms
        ok orders/1
        > checkpoint 3
        append 3 orders/2
        > commit orders/2 [3] to 7/1 (30s)
        append 4 orders/0
        append 5 orders/1
        tick 2ms
        > commit orders/0 [4] to 0/0 (30s)
        tick 48ms
        > commit orders/1 [5] to 7/0 (30s)
    ");
}

#[test]
fn sixteen_commits_run_at_once() {
    let mut script = Script::new(Limits::default());
    let addresses = ["0/0"; 20].join(",");
    script.command(&format!("topic orders 1 20 on {addresses}"));
    let mut sent = Vec::new();
    for partition in 0..20 {
        sent.extend(script.command(&format!("append {} orders/{partition}", partition + 1)));
    }
    assert_eq!(sent.len(), COMMITS_MAX, "{sent:?}");
    script.check(
        "
        ok orders/3
        > commit orders/16 [17] to 0/0 (30s)
        ok orders/2
        > commit orders/17 [18] to 0/0 (30s)
        ",
    );
}

#[test]
fn lesson_n24_oversized_commit_is_split() {
    let mut script = Script::new(Limits { held_bytes_max: 256 << 20 });
    script.check(
        "
        topic orders 1 1 on 0/0
        append 1 orders/0
        > commit orders/0 [1] to 0/0 (30s)
        append 2-6 orders/0 bytes=3000000
        append 7 orders/0 bytes=9000000
        append 8 orders/0
        ok orders/0
        > commit orders/0 [2-3] to 0/0 (30s)
        > checkpoint 2
        ok orders/0
        > commit orders/0 [4-5] to 0/0 (30s)
        > checkpoint 4
        ok orders/0
        > commit orders/0 [6] to 0/0 (30s)
        > checkpoint 6
        # one record always goes, however large
        ok orders/0
        > commit orders/0 [7] to 0/0 (30s)
        > checkpoint 7
        ok orders/0
        > commit orders/0 [8] to 0/0 (30s)
        > checkpoint 8
    ",
    );
}

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
        > commit orders/0 [20-21] to 7/0 (30s)
        ",
    );
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
fn a_full_queue_skips_and_takes_back_when_it_drains() {
    let mut script = Script::new(Limits::default());
    script.quietly(
        "topic orders 1 2 on 0/0,0/1
         append 1 orders/0
         append 2-6000 orders/0",
    );
    script.check(
        "
        # 4,096 records in the queue behind the one in flight; the others wait in the WAL
        state
        > checkpoint 1 held 4097 skipped 1903 lanes 1 timer yes
        # and hold nobody else up
        append 6001 orders/1
        > commit orders/1 [6001] to 0/1 (30s)
        tick 2ms
        ok orders/0
        > commit orders/0 [2-4097] to 0/0 (30s)
        > rescan 4098
        > checkpoint 2
        state
        > checkpoint 2 held 6000 skipped 0 lanes 2 timer yes
        ",
    );
}

#[test]
fn a_rescan_stops_when_every_partition_it_could_place_for_is_blocked_again() {
    let mut script = Script::new(Limits::default());
    script.quietly("topic orders 1 1 on 0/0\nappend 1 orders/0\nappend 2-20000 orders/0");
    let rescans = |script: &mut Script| script.command("ok orders/0").iter().filter(|l| l.contains("rescan")).count();
    // Each drain reads one queue's worth and a bit, not the whole backlog: 4,096 records in reads of 2,048.
    assert_eq!(rescans(&mut script), 3);
    assert_eq!(script.core.metrics().rescans, 1);
    script.check("state\n> checkpoint 2 held 8192 skipped 11807 lanes 1 timer yes");
    assert_eq!(rescans(&mut script), 3);
    script.check("state\n> checkpoint 4098 held 8192 skipped 7711 lanes 1 timer yes");
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
fn lesson_n13_old_records_never_reach_a_new_topic() {
    run("
        topic orders 1 1 on 0/0
        append 1 orders/0
        > commit orders/0 [1] to 0/0 (30s)
        append 2-3 orders/0
        # deleted and created again while they wait: nothing of the old incarnation is sent any more
        topic orders 2 1 on 0/0
        > ask orders 1
        append 4 orders/0
        > commit orders/0 [4] to 0/0 (30s)
        append 5 orders/0 id=1
        ok #1/0
        > checkpoint 2
        gone orders 1
        > discarded orders 1/0 queue of 2
        > rescan 5
        > checkpoint 4
        > discarded orders 1/0 seq 5 replaced
        ok orders/0
        > checkpoint 6
        # the confirmed id is remembered
        append 6 orders/0 id=1
        > discarded orders 1/0 seq 6 replaced
        > checkpoint 7
    ");
}

#[test]
fn lesson_n11_unconfirmed_absence_discards_nothing() {
    run("
        # the replica is behind: it has never heard of the topic
        append 1-2 orders/0 id=1
        > ask orders 1
        not-gone orders 1
        state
        > checkpoint 1 held 0 skipped 2 lanes 1 timer yes
        # remembered for a second, then asked again
        tick 1s
        > rescan 1
        > ask orders 1
        not-gone orders 1
        topic orders 1 1 on 0/0
        > rescan 1
        > commit orders/0 [1-2] to 0/0 (30s)
    ");
}

#[test]
fn lesson_n25_one_question_for_a_topic_with_a_backlog() {
    run("
        append 1-500 orders/0 id=1
        > ask orders 1
        append 501-600 orders/1 id=1
        append 601 other/0 id=2
        > ask other 2
        tick 5s
        not-gone orders 1
        not-gone other 2
        tick 1s
        > rescan 1
        > ask orders 1
        > ask other 2
        not-gone orders 1
    ");
}

#[test]
fn a_topic_that_goes_while_its_records_queue_is_asked_about_before_they_are_discarded() {
    run("
        topic orders 1 1 on 0/0
        append 1 orders/0
        > commit orders/0 [1] to 0/0 (30s)
        append 2-4 orders/0
        drop orders
        > ask orders 1
        # unconfirmed: back to the WAL
        not-gone orders 1
        state
        > checkpoint 1 held 1 skipped 3 lanes 1 timer yes
        tick 1s
        > hung #1/0 1
        > rescan 2
        > ask orders 1
        gone orders 1
        > rescan 2
        > discarded orders 1/0 seq 2 deleted
        > discarded orders 1/0 seq 3 deleted
        > discarded orders 1/0 seq 4 deleted
        ok #1/0
        > checkpoint 5
        state
        > checkpoint 5 held 0 skipped 0 lanes 0 timer no
    ");
}

#[test]
fn a_failed_commit_to_a_deleted_topic_is_asked_about_not_probed() {
    run("
        topic orders 1 1 on 0/0
        append 1-2 orders/0
        > commit orders/0 [1-2] to 0/0 (30s)
        drop orders
        fail #1/0
        > ask orders 1
        gone orders 1
        > rescan 1
        > discarded orders 1/0 seq 1 deleted after: no space
        > discarded orders 1/0 seq 2 deleted after: no space
        > checkpoint 3
        topic orders 2 1 on 0/0
        append 3 orders/0
        > commit orders/0 [3] to 0/0 (30s)
        drop orders
        append 4 orders/0 id=2
        > ask orders 2
        gone orders 2
        > rescan 4
        > discarded orders 2/0 seq 4 deleted
        # confirmed already
        fail #2/0
        > discarded orders 2/0 seq 3 deleted after: no space
        > checkpoint 5
    ");
}

#[test]
fn format_1_records_resolve_by_name() {
    run("
        append 1 orders/0 v1
        > ask orders -
        not-gone orders -
        topic orders 5 1 on 0/0
        > rescan 1
        > commit orders/0 [1] to 0/0 (30s) by name
        append 2 orders/0
        append 3 orders/0 v1
        ok orders/0
        > commit orders/0 [2] to 0/0 (30s)
        > checkpoint 2
        ok orders/0
        > commit orders/0 [3] to 0/0 (30s) by name
        > checkpoint 3
        ok orders/0
        > checkpoint 4
        drop orders
        tick 1s
        append 4 orders/0 v1
        > ask orders -
        gone orders -
        > rescan 4
        > discarded orders -/0 seq 4 deleted
        > checkpoint 5
        # a name may come back: its absence is believed for a second only
        tick 1s
        append 5 orders/0 v1
        > ask orders -
    ");
}

#[test]
fn an_unresolved_owner_is_looked_up_every_10_ms_and_only_while_there_is_one() {
    let script = run("
        topic orders 1 2 on 0/0
        append 1 orders/1
        state
        > checkpoint 1 held 1 skipped 0 lanes 1 timer yes
        append 2 orders/0
        > commit orders/0 [2] to 0/0 (30s)
        ok orders/0
        tick 25ms
        topic orders 1 2 on 0/0,0/1
        > commit orders/1 [1] to 0/1 (30s)
        ok orders/1
        > checkpoint 3
        state
        > checkpoint 3 held 0 skipped 0 lanes 2 timer no
    ");
    assert_eq!(script.core.next_timer(), None);
}

#[test]
fn e20_staging_pressure_lets_go_of_what_cannot_leave() {
    run("
        topic orders 1 3 on 0/0,0/1,0/2
        append 1 orders/0
        > commit orders/0 [1] to 0/0 (30s)
        append 2-9 orders/0
        append 10 orders/1
        > commit orders/1 [10] to 0/1 (30s)
        append 11 orders/1
        staging-low
        state
        > checkpoint 1 held 3 skipped 8 lanes 2 timer yes
        staging-low
        state
        > checkpoint 1 held 2 skipped 9 lanes 2 timer yes
        # read back in order when the destination drains, now from disk
        ok orders/0
        > rescan 2
        > checkpoint 2
        > commit orders/0 [2-9] to 0/0 (30s)
        append 12-13 orders/0
        ok orders/1
        > rescan 11
        > commit orders/1 [11] to 0/1 (30s)
        staging-low
        ok orders/0
        > rescan 12
        > checkpoint 11
        > commit orders/0 [12-13] to 0/0 (30s)
    ");
}

#[test]
fn e20_bytes_bound_what_is_held() {
    let mut script = Script::new(Limits { held_bytes_max: 4 << 20 });
    script.quietly("topic orders 1 4 on 0/0,0/1,0/2,0/3\nappend 1 orders/0");
    script.quietly("append 2-100 orders/0 bytes=100000");
    let metrics = script.core.metrics();
    assert!(metrics.held_bytes <= (1 << 20) + 200_000, "a quarter for one destination: {}", metrics.held_bytes);
    assert!(metrics.held_records >= 10, "{}", metrics.held_records);
    for (n, partition) in [1, 2, 3].into_iter().enumerate() {
        let first = 101 + n * 100;
        script.quietly(&format!("append {first}-{} orders/{partition} bytes=100000", first + 99));
    }
    let metrics = script.core.metrics();
    assert!(metrics.held_bytes <= (4 << 20) + 200_000, "{}", metrics.held_bytes);
}

#[test]
fn one_hot_partition_takes_at_most_half_of_the_window() {
    let mut script = Script::new(Limits::default());
    script.quietly("topic orders 1 2 on 0/0,0/1\nappend 1-4096 orders/0\nappend 4097-30000 orders/0");
    let metrics = script.core.metrics();
    assert!(metrics.held_records <= 8192, "{}", metrics.held_records);
    script.check(
        "append 30001 orders/1
         > commit orders/1 [30001] to 0/1 (30s)",
    );
}

#[test]
fn the_window_grows_with_the_fan_out() {
    let mut script = Script::new(Limits::default());
    let addresses = ["0/0"; 300].join(",");
    script.quietly(&format!("topic orders 1 300 on {addresses}"));
    for partition in 0..300 {
        script.quietly(&format!("append {} orders/{partition}", partition + 1));
    }
    assert_eq!(script.core.metrics().window_records, 300 * 64);
}

#[test]
fn reading_stops_sixteen_windows_past_the_checkpoint() {
    let mut script = Script::new(Limits::default());
    script.quietly("topic orders 1 2 on 0/0,0/1\nappend 1 orders/0\nappend 2-80000 orders/0");
    script.check("append 80001 orders/1\nstate\n> checkpoint 1 held 4097 skipped 61439 lanes 1 timer yes");
    script.check(
        "
        ok orders/0
        > commit orders/0 [2-4097] to 0/0 (30s)
        > rescan 4098
        > checkpoint 2
        > rescan 6146
        > rescan 8194
        state
        > checkpoint 2 held 8192 skipped 57344 lanes 1 timer yes
        ",
    );
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
fn lesson_n27_a_deleted_topics_lanes_go_with_it() {
    let mut script = Script::new(Limits::default());
    let mut seq = 1;
    for id in 1..=1500 {
        script.quietly(&format!("topic t{id} {id} 2 on 0/0,0/1"));
        for partition in 0..2 {
            script.quietly(&format!("append {seq} t{id}/{partition}\nok t{id}/{partition}"));
            seq += 1;
        }
        // Some go with records behind them, which are discarded.
        if id % 3 == 0 {
            script.quietly(&format!("append {seq} t{id}/0\nappend {} t{id}/0\ndrop t{id}", seq + 1));
            script.quietly(&format!("gone t{id} {id}\nok #{id}/0"));
            seq += 2;
        } else {
            script.quietly(&format!("drop t{id}"));
        }
        let metrics = script.core.metrics();
        assert_eq!((metrics.destinations, metrics.checkpoint), (0, seq), "after topic {id}");
    }
    assert_eq!(script.core.metrics().records_discarded, 500);
    assert_eq!(script.core.next_timer(), None);
}

#[test]
fn a_stopping_dispatcher_sends_nothing_more_and_settles_what_is_in_flight() {
    let mut script = run("
        topic orders 1 2 on 0/0,0/1
        append 1 orders/0
        > commit orders/0 [1] to 0/0 (30s)
        append 2 orders/0
        append 3 orders/1
        > commit orders/1 [3] to 0/1 (30s)
        stop
        ok orders/0
        > checkpoint 2
        append 4 orders/1
    ");
    assert!(script.core.settling());
    // A commit that hangs is not waited for.
    script.check("tick 1s\n> hung orders/1 1");
    assert!(!script.core.settling());
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

#[test]
fn format_1_records_do_not_go_with_the_incarnation_they_were_queued_for() {
    run("
        topic orders 1 1 on 0/0
        append 1 orders/0
        > commit orders/0 [1] to 0/0 (30s)
        append 2 orders/0
        append 3 orders/0 v1
        topic orders 2 1 on 0/0
        > ask orders 1
        gone orders 1
        > discarded orders 1/0 queue of 1
        tick 1s
        > hung #1/0 1
        > rescan 3
        > commit orders/0 [3] to 0/0 (30s) by name
    ");
}
