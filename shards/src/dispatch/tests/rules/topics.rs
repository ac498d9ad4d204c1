//! Scripts: deleted and recreated topics, discards, records without an incarnation id.

use crate::dispatch::core::Limits;
use crate::dispatch::tests::script::{run, Script};

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
