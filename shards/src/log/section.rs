//! The commit section of a log: a lock between tasks of one thread, handed over in order of arrival, so that a busy
//! combiner cannot keep a close waiting for ever (S82).

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use crate::rt::sync::{oneshot, Sender};

#[derive(Default)]
struct State {
    busy: Cell<bool>,
    waiting: RefCell<VecDeque<Sender<Held>>>,
}

#[derive(Clone, Default)]
pub struct Section {
    state: Rc<State>,
}

/// Possession of the section; dropping it hands the section on.
pub struct Held {
    state: Rc<State>,
}

impl Section {
    /// Whether anybody holds it, waits for it, or has another clone of it.
    pub fn in_use(&self) -> bool {
        Rc::strong_count(&self.state) > 1
    }

    pub async fn enter(&self) -> Held {
        loop {
            if !self.state.busy.replace(true) {
                return Held { state: self.state.clone() };
            }
            let (sender, receiver) = oneshot();
            self.state.waiting.borrow_mut().push_back(sender);
            // The possession itself travels: a waiter that was dropped meanwhile drops it, which hands it on.
            if let Some(held) = receiver.await {
                return held;
            }
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let next = self.state.waiting.borrow_mut().pop_front();
        match next {
            Some(waiter) => {
                let refused = waiter.send(Held { state: self.state.clone() });
                drop(refused); // its waiter has gone: the next one's turn
            }
            None => self.state.busy.set(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rt::{self, sim, Queue};
    use std::time::Duration;

    #[test]
    fn the_section_is_exclusive_and_handed_over_in_order() {
        for seed in 0..20 {
            sim::run(seed, async {
                let section = Section::default();
                let inside: Rc<Cell<bool>> = Rc::default();
                let order: Rc<RefCell<Vec<u32>>> = Rc::default();
                let first = section.enter().await;
                let mut tasks = Vec::new();
                for name in 0..5 {
                    let (section, inside, order) = (section.clone(), inside.clone(), order.clone());
                    tasks.push(rt::spawn(Queue::Foreground, async move {
                        let _held = section.enter().await;
                        assert!(!inside.replace(true));
                        rt::sleep(Duration::from_millis(1)).await;
                        inside.set(false);
                        order.borrow_mut().push(name);
                    }));
                    rt::sleep(Duration::from_millis(1)).await;
                }
                drop(first);
                for task in tasks {
                    task.await;
                }
                assert_eq!(*order.borrow(), [0, 1, 2, 3, 4]);
            });
        }
    }

    #[test]
    fn a_waiter_that_gave_up_does_not_keep_the_section() {
        sim::run(1, async {
            let section = Section::default();
            let held = section.enter().await;
            let gave_up = rt::timeout(Duration::from_millis(1), section.enter()).await;
            assert!(gave_up.is_err());
            drop(held);
            drop(section.enter().await);
            // Handed over, but dropped before it was polled again.
            let held = section.enter().await;
            let mut waiting = Box::pin(section.enter());
            let polled = rt::timeout(Duration::ZERO, &mut waiting).await;
            assert!(polled.is_err());
            drop(held);
            drop(waiting);
            drop(section.enter().await);
        });
    }
}
