//! Who on other nodes waits for a topic, as the topic's home here knows it (C43 to C46, C51, C52). Pure.
//!
//! A token is kept for each node, whatever number of consumers it has, until it is told once or its time is up. One node
//! is told at a time: the next one only when the first has asked for records, has passed, or has done neither for a
//! second.

use std::collections::VecDeque;
use std::time::Duration;

use crate::meta::NodeId;
use crate::peer::Token;
use crate::rt::Instant;

/// How long a token is kept (C47). The node that left it renews it as long as somebody waits there.
pub const TOKEN_TTL: Duration = Duration::from_secs(3);
/// How long a node that was told has for its claim or its pass (C52).
pub const HOLD: Duration = Duration::from_secs(1);

/// Names one notification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Told {
    pub token: Token,
    pub serial: u64,
}

#[derive(Default)]
pub struct Tokens {
    waiting: VecDeque<(Token, Instant)>,
    told: Option<Told>,
    serial: u64,
}

impl Tokens {
    /// Keeps the token of a node, in the place of an older one of it if there is one (C45).
    pub fn register(&mut self, token: Token, now: Instant) {
        self.answered(token.node);
        let until = now + TOKEN_TTL;
        match self.waiting.iter_mut().find(|(other, _)| other.node == token.node) {
            Some(place) => *place = (token, until),
            None => self.waiting.push_back((token, until)),
        }
    }

    /// Records may be here, and nobody of this node wants them: whom to tell. Spends the token (C46).
    pub fn tell(&mut self, now: Instant, alive: impl Fn(NodeId) -> bool) -> Option<Told> {
        if self.told.is_some() {
            return None;
        }
        while let Some((token, until)) = self.waiting.pop_front() {
            if until > now && alive(token.node) {
                self.serial += 1;
                self.told = Some(Told { token, serial: self.serial });
                return self.told;
            }
        }
        None
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The node has come for records, or said that nobody waits there any more.
    pub fn answered(&mut self, node: NodeId) {
        self.told = self.told.filter(|told| told.token.node != node);
    }

    /// The time of a notification is up.
    pub fn lapsed(&mut self, serial: u64) {
        self.told = self.told.filter(|told| told.serial != serial);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(node: u64) -> Token {
        Token { node: NodeId(node), boot_id: node * 10 }
    }

    fn told(tokens: &mut Tokens, now: Instant) -> Option<u64> {
        tokens.tell(now, |node| node != NodeId(9)).map(|told| told.token.node.0)
    }

    #[test]
    fn c51_one_node_is_told_at_a_time_and_each_once() {
        let (mut tokens, now) = (Tokens::default(), Instant(5));
        [1, 9, 2].into_iter().for_each(|node| tokens.register(token(node), now));
        assert_eq!(told(&mut tokens, now), Some(1));
        assert_eq!(told(&mut tokens, now), None, "1 has not come yet");
        tokens.answered(NodeId(2));
        assert_eq!(told(&mut tokens, now), None, "that was not 1");
        tokens.answered(NodeId(1));
        assert_eq!(told(&mut tokens, now), Some(2), "9 is dead");
        tokens.answered(NodeId(2));
        assert_eq!(told(&mut tokens, now), None, "all are spent");
    }

    #[test]
    fn c45_a_newer_token_takes_the_place_of_the_older() {
        let (mut tokens, now) = (Tokens::default(), Instant(5));
        [1, 2, 1].into_iter().for_each(|node| tokens.register(token(node), now));
        assert_eq!(told(&mut tokens, now), Some(1));
        tokens.answered(NodeId(1));
        assert_eq!(told(&mut tokens, now), Some(2));
        tokens.answered(NodeId(2));
        assert_eq!(told(&mut tokens, now), None);
    }

    #[test]
    fn c47_c52_tokens_and_notifications_end_by_time() {
        let (mut tokens, now) = (Tokens::default(), Instant(5));
        tokens.register(token(1), now);
        assert_eq!(told(&mut tokens, now + TOKEN_TTL), None);
        [1, 2].into_iter().for_each(|node| tokens.register(token(node), now));
        let first = tokens.tell(now, |_| true).expect("1");
        tokens.lapsed(first.serial + 1);
        assert_eq!(told(&mut tokens, now), None);
        tokens.lapsed(first.serial);
        assert_eq!(told(&mut tokens, now), Some(2));
    }
}
