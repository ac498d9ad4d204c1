//! Rules of the shared queue, one by one.

use super::*;

const ONE: Take = Take { max: 1, bytes_max: 1 };
const NOW: Instant = Instant(1);

fn id(serial: u64) -> WaiterId {
    WaiterId { shard: 0, serial }
}

fn shard(number: ShardId) -> Source {
    Source::Shard(number)
}

fn node(number: u64) -> Source {
    Source::Node(NodeId(number))
}

fn parked(sources: &[Source], waiters: u64) -> HomeTopic<u64> {
    let mut home = HomeTopic::new(sources.iter().copied());
    (0..waiters).for_each(|n| home.park(id(n), ONE, n, NOW));
    home
}

fn claims(home: &mut HomeTopic<u64>) -> Vec<Claim> {
    std::iter::from_fn(|| home.next_claim()).collect()
}

/// Which source is asked for which waiter.
fn asked(claims: &[Claim]) -> Vec<(Source, u64)> {
    claims.iter().map(|claim| (claim.source, claim.waiter.serial)).collect()
}

/// The only claim there is to make.
fn claim(home: &mut HomeTopic<u64>) -> Claim {
    let made = claims(home);
    assert_eq!(made.len(), 1, "{made:?}");
    made[0]
}

/// Asks until every source has armed.
fn settle(home: &mut HomeTopic<u64>) {
    loop {
        let made = claims(home);
        if made.is_empty() {
            return;
        }
        made.iter().for_each(|claim| assert_eq!(home.claimed(claim, Brought::Nothing, NOW), None));
    }
}

fn settled(sources: &[Source], waiters: u64) -> HomeTopic<u64> {
    let mut home = parked(sources, waiters);
    settle(&mut home);
    home
}

#[test]
fn c14_one_claim_for_each_waiter_and_shard() {
    let mut home = parked(&[shard(0), shard(1), shard(2)], 2);
    let made = claims(&mut home);
    assert_eq!(asked(&made), [(shard(0), 0), (shard(1), 1)]);
    assert_eq!(home.claimed(&made[0], Brought::Nothing, NOW), None);
    assert_eq!(asked(&claims(&mut home)), [(shard(2), 0)], "the head is tried on the next shard");
}

#[test]
fn c29_one_announcement_wakes_one_waiter() {
    let mut home = settled(&[shard(0), shard(1)], 1000);
    home.available(shard(1));
    let made = claim(&mut home);
    assert_eq!(asked(&[made]), [(shard(1), 0)]);
    assert_eq!(home.claimed(&made, Brought::Short, NOW), Some(0));
    assert_eq!(claims(&mut home), [], "short: the shard has armed again");
    assert_eq!(home.parked(), 999);
}

#[test]
fn c30_a_full_answer_is_followed_by_the_next_waiter() {
    let mut home = settled(&[shard(0)], 3);
    home.available(shard(0));
    for waiter in 0..3 {
        let made = claim(&mut home);
        assert_eq!(asked(&[made]), [(shard(0), waiter)]);
        assert_eq!(home.claimed(&made, Brought::Full, NOW), Some(waiter));
    }
    assert_eq!(claims(&mut home), []);
    home.park(id(9), ONE, 9, NOW);
    assert_eq!(asked(&claims(&mut home)), [(shard(0), 9)], "a new waiter finds the shard still ready");
}

#[test]
fn n33_1_an_announcement_that_overtakes_the_answer_is_not_lost() {
    let mut home = parked(&[shard(0)], 1);
    let made = claim(&mut home);
    home.available(shard(0));
    assert_eq!(home.claimed(&made, Brought::Nothing, NOW), None);
    assert_eq!(asked(&claims(&mut home)), [(shard(0), 0)]);
}

#[test]
fn n33_2_a_wake_that_one_waiter_cannot_use_goes_to_the_next() {
    let mut home = settled(&[shard(0)], 2);
    home.available(shard(0));
    let made = claim(&mut home);
    assert_eq!(asked(&[made]), [(shard(0), 0)]);
    assert_eq!(home.unpark(id(0)), None, "answered when its claim ends");
    assert!(!home.wants(id(0)));
    home.available(shard(0));
    assert_eq!(home.claimed(&made, Brought::Nothing, NOW), Some(0));
    assert_eq!(asked(&claims(&mut home)), [(shard(0), 1)]);
}

#[test]
fn g14_shards_take_turns() {
    let mut home = parked(&[shard(0), shard(1), shard(2)], 0);
    let mut turns = Vec::new();
    for waiter in 0..6 {
        home.park(id(waiter), ONE, waiter, NOW);
        let made = claims(&mut home);
        turns.extend(made.iter().map(|claim| claim.source));
        made.iter().for_each(|claim| assert!(home.claimed(claim, Brought::Full, NOW).is_some()));
    }
    assert_eq!(turns, [0, 1, 2, 0, 1, 2].map(shard));
}

#[test]
fn n36_c37_a_closed_topic_lets_everybody_go() {
    let mut home = parked(&[shard(0)], 3);
    let made = claim(&mut home);
    assert_eq!(home.close(), [1, 2]);
    assert_eq!(home.claimed(&made, Brought::Failed, NOW), Some(0));
    assert_eq!(claims(&mut home), []);
    assert_eq!(home.parked(), 0);
}

#[test]
fn c34_a_shard_that_newly_serves_the_topic_is_asked() {
    let mut home = settled(&[shard(0)], 1);
    home.set_sources([shard(0), shard(4)]);
    assert!(home.is_armed(0));
    let made = claim(&mut home);
    assert_eq!(made.source, shard(4));
    home.set_sources([shard(0)]);
    assert_eq!(home.claimed(&made, Brought::Nothing, NOW), None);
    assert_eq!(claims(&mut home), []);
}

#[test]
fn c41_shards_of_this_node_are_asked_before_other_nodes() {
    let mut home = parked(&[node(7), shard(1), node(3), shard(0)], 1);
    let mut order = Vec::new();
    while let Some(claim) = home.next_claim() {
        order.push(claim.source);
        home.claimed(&claim, Brought::Nothing, NOW);
    }
    assert_eq!(order, [shard(1), shard(0), node(7), node(3)]);
}

#[test]
fn a_node_with_much_is_asked_for_many_waiters_at_once_and_one_without_for_one() {
    let mut home = parked(&[node(1)], 500);
    let mut at_once = Vec::new();
    for _ in 0..7 {
        let made = claims(&mut home);
        at_once.push(made.len());
        made.iter().for_each(|claim| assert!(home.claimed(claim, Brought::Full, NOW).is_some()));
    }
    assert_eq!(at_once, [1, 2, 8, 32, 32, 32, 32]);
    for claim in claims(&mut home) {
        home.claimed(&claim, Brought::Nothing, NOW);
    }
    assert_eq!(claims(&mut home), []);
    home.available(node(1));
    assert_eq!(claims(&mut home).len(), 1, "one announcement, one claim");
}

#[test]
fn n33_1_an_announcement_is_newer_than_every_answer_that_was_under_way() {
    let mut home = parked(&[node(1)], 3);
    let first = claim(&mut home);
    home.claimed(&first, Brought::Full, NOW);
    let made = claims(&mut home);
    assert_eq!(made.len(), 2);
    home.available(node(1));
    assert_eq!(home.claimed(&made[0], Brought::Nothing, NOW), None);
    assert_eq!(claims(&mut home), [], "one at a time again");
    assert_eq!(home.claimed(&made[1], Brought::Nothing, NOW), None);
    assert_eq!(claim(&mut home).source, node(1), "both had left before the announcement");
}

#[test]
fn a_node_that_does_not_answer_rests_until_it_answers_a_registration() {
    let mut home = parked(&[shard(0), node(1)], 2);
    let made = claims(&mut home);
    assert_eq!(asked(&made), [(shard(0), 0), (node(1), 1)]);
    assert_eq!(home.claimed(&made[1], Brought::Failed, NOW), None, "the waiter waits on");
    assert_eq!(home.claimed(&made[0], Brought::Nothing, NOW), None);
    assert_eq!(claims(&mut home), []);
    assert!(home.start_keeping() && !home.start_keeping());
    assert_eq!(home.due_registrations(NOW), [NodeId(1)]);
    assert_eq!(home.due_registrations(NOW), [], "it is being asked");
    home.registered(NodeId(1), None, 0, NOW);
    assert_eq!((home.due_registrations(NOW), claims(&mut home)), (vec![NodeId(1)], vec![]));
    home.registered(NodeId(1), Some(true), 0, NOW);
    assert_eq!(asked(&claims(&mut home)), [(node(1), 0)]);
}

#[test]
fn c50_tokens_are_renewed_in_time_and_asked_for_anew_when_nobody_did() {
    let mut home = settled(&[node(1)], 1);
    let soon = NOW + (TOKEN_TTL - RENEW_BEFORE);
    assert_eq!(home.due_registrations(Instant(soon.0 - 1)), []);
    assert_eq!(home.due_registrations(soon), [NodeId(1)]);
    home.available(node(1));
    let made = claim(&mut home);
    home.registered(NodeId(1), Some(false), 0, soon);
    assert_eq!(home.claimed(&made, Brought::Short, soon), Some(0));
    assert!(!home.go_on_keeping(), "nobody waits");
    home.park(id(5), ONE, 5, soon);
    assert_eq!(claims(&mut home), [], "the token still stands");
    home.park(id(6), ONE, 6, soon + TOKEN_TTL);
    assert_eq!(asked(&claims(&mut home)), [(node(1), 5)]);
}

#[test]
fn a_registration_that_an_announcement_overtook_is_not_believed() {
    let mut home = settled(&[node(1)], 1);
    let later = NOW + TOKEN_TTL;
    assert_eq!(home.due_registrations(later), [NodeId(1)]);
    let seen = home.announcements(NodeId(1));
    home.unpark(id(0));
    home.available(node(1));
    home.registered(NodeId(1), Some(false), seen, later);
    home.park(id(1), ONE, 1, later);
    assert_eq!(asked(&claims(&mut home)), [(node(1), 1)]);
}

#[test]
fn c44_a_probe_is_tried_on_shards_only_and_let_go_when_all_have_armed() {
    let mut home = parked(&[shard(0), shard(1), node(2)], 0);
    let no_one: [u64; 0] = [];
    home.park_probe(id(8), ONE, 8);
    let first = claim(&mut home);
    assert_eq!(first.source, shard(0));
    assert_eq!(home.claimed(&first, Brought::Nothing, NOW), None);
    assert_eq!(home.spent_probes(), no_one, "shard 1 has not been asked");
    let second = claim(&mut home);
    assert_eq!(home.spent_probes(), no_one);
    assert_eq!(home.claimed(&second, Brought::Nothing, NOW), None);
    assert_eq!((claims(&mut home), home.parked()), (vec![], 0));
    assert_eq!(home.spent_probes(), [8]);
    assert_eq!(home.spent_probes(), no_one);
    home.park(id(9), ONE, 9, NOW);
    assert_eq!(asked(&claims(&mut home)), [(node(2), 9)], "a waiter of this node is");
}

#[test]
fn g13_other_nodes_are_told_only_of_what_nobody_here_wants() {
    let token = |node| Token { node: NodeId(node), boot_id: 1 };
    let mut home = settled(&[shard(0)], 1);
    home.register(token(4), NOW);
    home.register(token(5), NOW);
    assert_eq!(home.tell(NOW, |_| true), None, "there is nothing to tell");
    home.available(shard(0));
    let made = claim(&mut home);
    assert_eq!(home.tell(NOW, |_| true), None, "it is being claimed");
    assert_eq!(home.claimed(&made, Brought::Full, NOW), Some(0));
    assert_eq!(home.tell(NOW, |_| true).map(|told| told.token), Some(token(4)));
    assert_eq!(home.tell(NOW, |_| true), None);
    home.told_node_answered(NodeId(4));
    assert_eq!(home.tell(NOW, |_| true).map(|told| told.token), Some(token(5)), "4 passed, or took its share");
}
