//! The shared queue of one topic's unpinned waiters on this node (E53, C28-C32, C40): a pure state machine.
//!
//! It lives on the topic's home shard and never looks into a partition. Of every shard that serves partitions of the
//! topic it knows one thing: *ready* shards may have records, *armed* ones had none and will say so once when that
//! changes, *claiming* ones are being asked. A claim is made for one waiter at a time, the first that is not being
//! tried elsewhere, so a record is never reserved without somebody to take it (C14), and a commit costs the same
//! however many consumers are parked (C29).
//!
//! No wake is lost: a shard arms in the same turn in which it finds itself empty, and an announcement that overtakes
//! the answer of a claim is remembered (lesson N33.1).

use std::collections::{BTreeMap, VecDeque};

use super::waiters::Waiters;
use crate::meta::ShardId;
use crate::peer::{Take, WaiterId};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ShardState {
    Ready,
    Armed,
    /// `announced`: an announcement came while the answer was under way; it may be newer than the answer.
    Claiming {
        announced: bool,
    },
}

/// Ask `shard` on behalf of `waiter`, and let it arm if it has less than `take`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    pub shard: ShardId,
    pub waiter: WaiterId,
    pub take: Take,
}

/// What a claim came back with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Brought {
    /// As much as was asked for: the shard may have more, and has not armed.
    Full,
    /// Less than was asked for: the shard has armed.
    Short,
    /// Nothing: the shard has armed.
    Nothing,
    /// No answer, or an error: the shard has not armed.
    Failed,
}

/// `R` is what a waiter is answered through.
pub struct HomeTopic<R> {
    waiters: Waiters<R>,
    shards: BTreeMap<ShardId, ShardState>,
    /// Ready shards in the order in which they are asked: who was asked goes to the end (G14). May hold shards that
    /// are no longer ready.
    ready: VecDeque<ShardId>,
    closed: bool,
}

impl<R> HomeTopic<R> {
    /// Nothing is known of the shards yet, so all count as ready.
    pub fn new(shards: impl IntoIterator<Item = ShardId>) -> HomeTopic<R> {
        let mut home =
            HomeTopic { waiters: Waiters::default(), shards: BTreeMap::new(), ready: VecDeque::new(), closed: false };
        home.set_shards(shards);
        home
    }

    /// Parked waiters, those being tried included.
    pub fn parked(&self) -> usize {
        self.waiters.len()
    }

    /// Follows a new placement (C34).
    pub fn set_shards(&mut self, shards: impl IntoIterator<Item = ShardId>) {
        let mut previous = std::mem::take(&mut self.shards);
        for shard in shards {
            let state = previous.remove(&shard).unwrap_or_else(|| {
                self.ready.push_back(shard);
                ShardState::Ready
            });
            self.shards.insert(shard, state);
        }
    }

    pub fn park(&mut self, waiter: WaiterId, take: Take, reply: R) {
        self.waiters.push(waiter, take, reply);
    }

    /// The waiter has timed out or gone; returned when it is to be answered now.
    pub fn unpark(&mut self, waiter: WaiterId) -> Option<R> {
        self.waiters.leave(waiter)
    }

    /// Whether a claim for this waiter is still worth its while.
    pub fn wants(&self, waiter: WaiterId) -> bool {
        !self.closed && self.waiters.wants(waiter)
    }

    /// Whether the shard has said that it has nothing, and not taken it back.
    pub fn is_armed(&self, shard: ShardId) -> bool {
        self.shards.get(&shard) == Some(&ShardState::Armed)
    }

    /// The shard has spent its token: it may have records.
    pub fn available(&mut self, shard: ShardId) {
        match self.shards.get_mut(&shard) {
            Some(state @ ShardState::Armed) => {
                *state = ShardState::Ready;
                self.ready.push_back(shard);
            }
            Some(ShardState::Claiming { announced }) => *announced = true,
            Some(ShardState::Ready) | None => {}
        }
    }

    /// The next claim to make, if there is a waiter and a shard for it. To be called until it returns `None` after
    /// every other input.
    pub fn next_claim(&mut self) -> Option<Claim> {
        while !self.closed && self.waiters.has_idle() {
            let shard = self.ready.pop_front()?;
            let Some(state @ ShardState::Ready) = self.shards.get_mut(&shard) else { continue };
            let (waiter, take) = self.waiters.pick()?;
            *state = ShardState::Claiming { announced: false };
            return Some(Claim { shard, waiter, take });
        }
        None
    }

    /// A claim has ended. Returns the waiter if it is to be answered with what the claim brought; otherwise it waits
    /// on at its place (C32).
    pub fn claimed(&mut self, claim: &Claim, brought: Brought) -> Option<R> {
        if let Some(state @ ShardState::Claiming { .. }) = self.shards.get_mut(&claim.shard) {
            let announced = *state == ShardState::Claiming { announced: true };
            if announced || matches!(brought, Brought::Full | Brought::Failed) {
                *state = ShardState::Ready;
                self.ready.push_back(claim.shard);
            } else {
                *state = ShardState::Armed;
            }
        }
        match brought {
            Brought::Nothing => self.waiters.put_back(claim.waiter),
            Brought::Full | Brought::Short | Brought::Failed => self.waiters.served(claim.waiter),
        }
    }

    /// The topic has gone or the shard stops: no more claims. Returns whom to answer now; those being tried are
    /// answered when their claims end (N36, C37).
    pub fn close(&mut self) -> Vec<R> {
        self.closed = true;
        self.waiters.drain_idle()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Take = Take { max: 1, bytes_max: 1 };

    fn id(serial: u64) -> WaiterId {
        WaiterId { shard: 0, serial }
    }

    fn parked(shards: &[ShardId], waiters: u64) -> HomeTopic<u64> {
        let mut home = HomeTopic::new(shards.iter().copied());
        (0..waiters).for_each(|n| home.park(id(n), ONE, n));
        home
    }

    fn claims(home: &mut HomeTopic<u64>) -> Vec<Claim> {
        std::iter::from_fn(|| home.next_claim()).collect()
    }

    fn claim(shard: ShardId, waiter: u64) -> Claim {
        Claim { shard, waiter: id(waiter), take: ONE }
    }

    /// Asks until every shard has armed.
    fn settled(shards: &[ShardId], waiters: u64) -> HomeTopic<u64> {
        let mut home = parked(shards, waiters);
        loop {
            let made = claims(&mut home);
            if made.is_empty() {
                return home;
            }
            made.iter().for_each(|claim| assert_eq!(home.claimed(claim, Brought::Nothing), None));
        }
    }

    #[test]
    fn c14_one_claim_for_each_waiter_and_shard() {
        let mut home = parked(&[0, 1, 2], 2);
        assert_eq!(claims(&mut home), [claim(0, 0), claim(1, 1)]);
        assert_eq!(home.claimed(&claim(0, 0), Brought::Nothing), None);
        assert_eq!(claims(&mut home), [claim(2, 0)], "the head is tried on the next shard");
    }

    #[test]
    fn c29_one_announcement_wakes_one_waiter() {
        let mut home = settled(&[0, 1], 1000);
        home.available(1);
        assert_eq!(claims(&mut home), [claim(1, 0)]);
        assert_eq!(home.claimed(&claim(1, 0), Brought::Short), Some(0));
        assert_eq!(claims(&mut home), [], "short: the shard has armed again");
        assert_eq!(home.parked(), 999);
    }

    #[test]
    fn c30_a_full_answer_is_followed_by_the_next_waiter() {
        let mut home = settled(&[0], 3);
        home.available(0);
        for waiter in 0..3 {
            assert_eq!(claims(&mut home), [claim(0, waiter)]);
            assert_eq!(home.claimed(&claim(0, waiter), Brought::Full), Some(waiter));
        }
        assert_eq!(claims(&mut home), []);
        home.park(id(9), ONE, 9);
        assert_eq!(claims(&mut home), [claim(0, 9)], "a new waiter finds the shard still ready");
    }

    #[test]
    fn n33_1_an_announcement_that_overtakes_the_answer_is_not_lost() {
        let mut home = parked(&[0], 1);
        assert_eq!(claims(&mut home), [claim(0, 0)]);
        home.available(0);
        assert_eq!(home.claimed(&claim(0, 0), Brought::Nothing), None);
        assert_eq!(claims(&mut home), [claim(0, 0)]);
    }

    #[test]
    fn n33_2_a_wake_that_one_waiter_cannot_use_goes_to_the_next() {
        let mut home = settled(&[0], 2);
        home.available(0);
        assert_eq!(claims(&mut home), [claim(0, 0)]);
        assert_eq!(home.unpark(id(0)), None, "answered when its claim ends");
        assert!(!home.wants(id(0)));
        home.available(0);
        assert_eq!(home.claimed(&claim(0, 0), Brought::Nothing), Some(0));
        assert_eq!(claims(&mut home), [claim(0, 1)]);
    }

    #[test]
    fn g14_shards_take_turns() {
        let mut home = parked(&[0, 1, 2], 0);
        let mut asked = Vec::new();
        for waiter in 0..6 {
            home.park(id(waiter), ONE, waiter);
            let made = claims(&mut home);
            asked.extend(made.iter().map(|claim| claim.shard));
            made.iter().for_each(|claim| assert!(home.claimed(claim, Brought::Full).is_some()));
        }
        assert_eq!(asked, [0, 1, 2, 0, 1, 2]);
    }

    #[test]
    fn n36_c37_a_closed_topic_lets_everybody_go() {
        let mut home = parked(&[0], 3);
        assert_eq!(claims(&mut home), [claim(0, 0)]);
        assert_eq!(home.close(), [1, 2]);
        assert_eq!(home.claimed(&claim(0, 0), Brought::Failed), Some(0));
        assert_eq!(claims(&mut home), []);
        assert_eq!(home.parked(), 0);
    }

    #[test]
    fn c34_a_shard_that_newly_serves_the_topic_is_asked() {
        let mut home = settled(&[0], 1);
        home.set_shards([0, 4]);
        assert!(home.is_armed(0));
        assert_eq!(claims(&mut home), [claim(4, 0)]);
        home.set_shards([0]);
        assert_eq!(home.claimed(&claim(4, 0), Brought::Nothing), None);
        assert_eq!(claims(&mut home), []);
    }
}
