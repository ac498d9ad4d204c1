//! Scripts: queues, batches, lingering, windows and other bounds.

use crate::dispatch::core::{Limits, COMMITS_MAX};
use crate::dispatch::tests::script::{run, Script};

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
        # 64 records of a kilobyte do not wait
        append 5-67 orders/2 bytes=1024
        append 68 orders/2 bytes=1024
        > commit orders/2 [5-68] to 0/0 (30s)
    ");
}

#[test]
fn a_batch_that_lingers_goes_on_to_when_the_others_have_landed() {
    run("
        topic orders 1 1 on 0/0
        append 1 orders/0
        > commit orders/0 [1] to 0/0 (30s)
        tick 3ms
        append 2 orders/0
        tick 1ms
        ok orders/0
        > checkpoint 2
        # it came while a commit was in flight: under a steady load there is always a moment without one
        append 3 orders/0
        tick 6ms
        append 4 orders/0
        tick 1ms
        > commit orders/0 [2-4] to 0/0 (30s)
    ");
}

#[test]
fn many_small_records_linger_for_a_batch_worth_its_padding() {
    run("
        topic orders 1 2 on 0/0,0/1
        append 1 orders/0
        > commit orders/0 [1] to 0/0 (30s)
        tick 40ms
        ok orders/0
        > checkpoint 2
        append 2 orders/1
        > commit orders/1 [2] to 0/1 (30s)
        # 72 bytes each, with what the owner adds
        append 3-900 orders/0
        append 901-912 orders/0
        append 913 orders/0
        > commit orders/0 [3-913] to 0/0 (30s)
    ");
}

#[test]
fn a_full_window_ends_all_lingering() {
    let mut script = Script::new(Limits { held_bytes_max: 64 << 10 });
    let addresses = ["0/0"; 9].join(",");
    script.check(&format!(
        "
        topic orders 1 9 on {addresses}
        append 1 orders/0
        > commit orders/0 [1] to 0/0 (30s)
        tick 40ms
        ok orders/0
        > checkpoint 2
        append 2-14 orders/1 bytes=1000
        append 15-27 orders/2 bytes=1000
        append 28-40 orders/3 bytes=1000
        append 41-53 orders/4 bytes=1000
        # the limit is 61 of them: nothing that the others wait for can be read before one has been committed
        append 54-66 orders/5 bytes=1000
        > commit orders/1 [2-14] to 0/0 (30s)
        > commit orders/2 [15-27] to 0/0 (30s)
        > commit orders/3 [28-40] to 0/0 (30s)
        > commit orders/4 [41-53] to 0/0 (30s)
        > commit orders/5 [54-63] to 0/0 (30s)
        "
    ));
}

#[test]
fn a_record_that_finds_the_dispatcher_idle_is_committed_at_once() {
    run("
        topic orders 1 2 on 0/0,0/0
        append 1 orders/0
        > commit orders/0 [1] to 0/0 (30s)
        tick 4ms
        ok orders/0
        > checkpoint 2
        tick 1us
        append 2 orders/1
        > commit orders/1 [2] to 0/0 (30s)
    ");
}

#[test]
fn what_lingers_for_one_node_leaves_together() {
    run("
        topic orders 1 5 on 0/0,0/1,7/0,0/0,7/1
        append 1 orders/0
        > commit orders/0 [1] to 0/0 (30s)
        append 2 orders/1
        > commit orders/1 [2] to 0/1 (30s)
        append 3 orders/2
        > commit orders/2 [3] to 7/0 (30s)
        append 4 orders/4
        > commit orders/4 [4] to 7/1 (30s)
        tick 4ms
        ok orders/0
        > checkpoint 2
        ok orders/1
        > checkpoint 3
        append 5 orders/0
        tick 2ms
        append 6 orders/3
        append 7 orders/1
        tick 1ms
        ok orders/2
        > checkpoint 4
        append 8 orders/2
        # the time of orders/0 is up; the drive that it goes to is that of orders/1 and orders/3 as well
        tick 5ms
        > commit orders/0 [5] to 0/0 (30s)
        > commit orders/1 [7] to 0/1 (30s)
        > commit orders/3 [6] to 0/0 (30s)
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
fn e19_e44_latency_is_that_of_the_shard_which_answers_not_of_its_whole_node() {
    run("
        topic orders 1 4 on 7/65534,7/65534,7/65534,0/0
        served orders/0 7/0
        served orders/1 7/1
        served orders/2 7/1
        # shard 0 of the node takes 20 ms, shard 1 takes 1 ms
        append 1 orders/0
        > commit orders/0 [1] to 7/65534 (30s)
        append 2 orders/1
        > commit orders/1 [2] to 7/65534 (30s)
        tick 1ms
        ok orders/1
        append 3 orders/2
        > commit orders/2 [3] to 7/65534 (30s)
        tick 1ms
        ok orders/2
        tick 18ms
        ok orders/0
        > checkpoint 4
        # something is in flight, so small batches linger: twice what their own shard takes
        append 4 orders/3
        > commit orders/3 [4] to 0/0 (30s)
        append 5 orders/0
        tick 39ms
        tick 1ms
        > commit orders/0 [5] to 7/65534 (30s)
        append 6 orders/1
        tick 1ms
        tick 1ms
        > commit orders/1 [6] to 7/65534 (30s)
    ");
}
