//! How many handlers of peers run at a time (E45). First come, first served.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use crate::rt::sync::{oneshot, Sender};

struct Shared {
    free: Cell<usize>,
    waiting: RefCell<VecDeque<Sender<Permit>>>,
}

#[derive(Clone)]
pub(super) struct Permits(Rc<Shared>);

/// Held by a handler while it runs.
pub(super) struct Permit(Permits);

impl Permits {
    pub fn new(count: usize) -> Permits {
        Permits(Rc::new(Shared { free: Cell::new(count), waiting: RefCell::default() }))
    }

    pub async fn take(&self) -> Option<Permit> {
        if self.0.free.get() > 0 {
            self.0.free.set(self.0.free.get() - 1);
            return Some(Permit(self.clone()));
        }
        let (sender, permit) = oneshot();
        self.0.waiting.borrow_mut().push_back(sender);
        permit.await
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let permits = &self.0 .0;
        let next = permits.waiting.borrow_mut().pop_front();
        match next {
            // One that has gone drops it again, which hands it to the next.
            Some(next) => drop(next.send(Permit(self.0.clone()))),
            None => permits.free.set(permits.free.get() + 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rt::{self, sim, Queue};
    use std::time::Duration;

    struct Running(Rc<Cell<usize>>);

    impl Drop for Running {
        fn drop(&mut self) {
            self.0.set(self.0.get() - 1);
        }
    }

    #[test]
    fn e45_no_more_run_than_there_are_permits_and_none_is_lost() {
        sim::run(3, async {
            let (permits, running, most) = (Permits::new(2), Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
            let tasks: Vec<_> = (0..20)
                .map(|n| {
                    let (permits, running, most) = (permits.clone(), running.clone(), most.clone());
                    rt::spawn(Queue::Foreground, async move {
                        let work = async {
                            let _permit = permits.take().await;
                            running.set(running.get() + 1);
                            let _running = Running(running.clone());
                            most.set(most.get().max(running.get()));
                            rt::sleep(Duration::from_millis(1)).await;
                        };
                        // Some give up while they wait.
                        let patience = Duration::from_millis(if n >= 10 { 0 } else { 1000 });
                        let _ = rt::timeout(patience, work).await;
                    })
                })
                .collect();
            for task in tasks {
                task.await;
            }
            assert_eq!((most.get(), permits.0.free.get()), (2, 2));
        });
    }
}
