//! How long a node goes by what it knows of the metadata. One that stood still (a stopped process, a frozen container)
//! finds a world that went on: a topic that was deleted and made again meanwhile would be served from its former life, and
//! take records for it (K45). So before it serves anybody again it asks the leader what has changed. A virtual machine
//! whose clock stood still with it cannot be told in this way.

use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use narad_shards::rt::{self, Instant};

/// A node that has not looked around for so long stood still. What one that runs knows may be as old (D10).
const STANDSTILL: Duration = Duration::from_secs(2);
/// The leader is waited for that long. Then the node goes by what it knows, as it does whenever it is cut off: a lost
/// quorum refuses no produce (E51), but for these seconds behind a standstill.
const CONFIRM_WAIT: Duration = Duration::from_secs(3);
/// How often is asked again, because the answer may be from before the next standstill.
const ROUNDS_MAX: u32 = 5;

/// Until when the metadata is trusted, ns on the clock of all threads. Renewed by the control thread, read by shards: who
/// runs first after a standstill finds it out.
#[derive(Debug, Default)]
pub struct Trust(AtomicU64);

impl Trust {
    /// Of a node that decides its metadata alone.
    pub fn without_end() -> Trust {
        Trust(AtomicU64::new(u64::MAX))
    }

    /// Not before this node was caught up with its cluster once (E51).
    pub fn has_begun(&self) -> bool {
        self.0.load(Relaxed) != 0
    }

    /// Asked for every request: a node that decides alone does not look at the clock for it.
    pub fn holds(&self) -> bool {
        let until = self.0.load(Relaxed);
        until == u64::MAX || rt::now().0 <= until
    }

    /// `now`: when this node was caught up.
    pub fn begin(&self, now: Instant) {
        self.extend(now);
    }

    fn extend(&self, now: Instant) {
        self.0.fetch_max((now + STANDSTILL).0, Relaxed);
    }

    /// To be called several times within [`STANDSTILL`]. `confirm` resolves to true when this node has all that had been
    /// decided when it was called; it is called only after a standstill.
    pub async fn renew<C: Future<Output = bool>>(&self, mut confirm: impl FnMut() -> C) {
        let mut now = rt::now();
        let mut confirmed = true;
        let mut rounds = 0;
        while now.0 > self.0.load(Relaxed) && rounds < ROUNDS_MAX {
            rounds += 1;
            let since = Instant(self.0.load(Relaxed));
            tracing::warn!(
                stood_still = ?now.saturating_since(since) + STANDSTILL,
                "this node stood still, or got no CPU; it asks the leader what has changed before it serves again"
            );
            confirmed = rt::timeout(CONFIRM_WAIT, confirm()).await.unwrap_or(false);
            let asked = std::mem::replace(&mut now, rt::now());
            // Beyond that it stood still again, and an answer may be from before.
            let longest = if confirmed { STANDSTILL } else { CONFIRM_WAIT + STANDSTILL };
            if now.saturating_since(asked) <= longest {
                break;
            }
        }
        if !confirmed {
            tracing::warn!("no leader has said what has changed; this node goes by what it knew before");
        }
        self.extend(now);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use narad_shards::rt::{sim, Queue};

    use super::*;

    #[test]
    fn k45_a_node_that_stood_still_serves_nobody_before_the_leader_has_told_it_what_has_changed() {
        sim::run(1, async {
            let trust = Rc::new(Trust::default());
            assert!(!trust.has_begun() && !trust.holds());
            trust.begin(rt::now());
            let asked = Rc::new(Cell::new(0));
            let answer_in = |wait: Duration, is_current: bool| {
                let asked = asked.clone();
                move || {
                    asked.set(asked.get() + 1);
                    async move {
                        rt::sleep(wait).await;
                        is_current
                    }
                }
            };
            // As long as it looks around nobody is asked, however long the answer would take.
            for _ in 0..50 {
                assert!(trust.has_begun() && trust.holds());
                rt::sleep(Duration::from_millis(500)).await;
                trust.renew(answer_in(Duration::from_secs(60), true)).await;
            }
            assert_eq!(asked.get(), 0);
            // Nobody has looked for longer: a shard that runs before the control thread knows it by the clock alone.
            rt::sleep(STANDSTILL + Duration::from_millis(1)).await;
            assert!(trust.has_begun() && !trust.holds());
            let renewing = trust.clone();
            let answer = answer_in(Duration::from_secs(1), true);
            rt::spawn(Queue::Foreground, async move { renewing.renew(answer).await });
            rt::sleep(Duration::from_millis(999)).await;
            assert!(!trust.holds() && asked.get() == 1, "the leader has not answered yet");
            rt::sleep(Duration::from_millis(2)).await;
            assert!(trust.holds());
        });
    }

    #[test]
    fn e51_a_node_that_stood_still_and_finds_no_leader_serves_again_after_three_seconds() {
        sim::run(1, async {
            let trust = Trust::default();
            trust.begin(rt::now());
            rt::sleep(Duration::from_secs(60)).await;
            let before = rt::now();
            trust.renew(std::future::pending).await;
            assert_eq!(rt::now() - before, CONFIRM_WAIT);
            assert!(trust.holds());
            rt::sleep(Duration::from_secs(60)).await;
            trust.renew(|| std::future::ready(false)).await;
            assert!(trust.holds(), "it was told at once that there is none");
        });
    }

    #[test]
    fn k45_an_answer_from_before_the_next_standstill_confirms_nothing() {
        for seconds in [3, 30] {
            stands_still_while_it_asks(Duration::from_secs(seconds));
        }
    }

    fn stands_still_while_it_asks(again: Duration) {
        let simulation = sim::Sim::new(1);
        let node: sim::NodeTag = 7;
        let (stop, asked) = (simulation.clone(), Rc::new(Cell::new(0)));
        simulation.run(async move {
            let trust = Rc::new(Trust::default());
            trust.begin(rt::now());
            rt::sleep(Duration::from_secs(60)).await;
            let (renewing, count) = (trust.clone(), asked.clone());
            let answer = move || {
                count.set(count.get() + 1);
                async {
                    rt::sleep(Duration::from_secs(1)).await;
                    true
                }
            };
            stop.spawn_on(node, async move { renewing.renew(answer).await });
            rt::sleep(Duration::from_millis(500)).await;
            stop.pause(node);
            rt::sleep(again).await;
            stop.resume(node);
            rt::sleep(Duration::from_millis(500)).await;
            assert!(!trust.holds() && asked.get() == 2, "asked {} times", asked.get());
            rt::sleep(Duration::from_millis(501)).await;
            assert!(trust.holds());
        });
    }

    #[test]
    fn a_node_that_decides_alone_never_asks() {
        sim::run(1, async {
            let trust = Trust::without_end();
            rt::sleep(Duration::from_secs(3600)).await;
            assert!(trust.has_begun() && trust.holds());
        });
    }
}
